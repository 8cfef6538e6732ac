//! Plans of training.

use anyhow::Result;
use mantissa_plan::recommend::train;
use mantissa_plan::training::{Recompute, Run, Zero};

use super::args::What;
use super::asked::{Asked, Report};
use super::subject::context_of;
use super::{page, training_text};
use crate::context::Context;

/// Runs the command for training.
///
/// # Errors
/// I/O.
pub fn run(asked: &Asked<'_>, what: What, context: &Context) -> Result<()> {
    let args = asked.args;
    let run = Run {
        sequence: context_of(args.context, 2048, asked.shape)?,
        batch: args.batch,
        devices: args.devices,
        zero: Zero::stage(args.training.zero).unwrap_or_default(),
        recompute: if args.training.store_scores { Recompute::Nothing } else { Recompute::Scores },
    };
    let answer = train(asked.shape, asked.device, &run, args.training.rank, what.adapter(), asked.memory());
    let answer = match args.training.link {
        Some(link) => answer.with_link(asked.shape, &run, args.training.rank, link),
        None => answer,
    };
    if let Some(file) = &args.html {
        page::training(asked, &run, &answer).write(&context.output(file)?)?;
    }
    let report = Report {
        model: asked.shape,
        parameters: asked.shape.parameters(),
        active_parameters: asked.shape.active_parameters(),
        hardware: asked.device,
        predicted: true,
        at_hand: None,
        load: None,
        inference: None,
        training: Some(&answer),
        page: args.html.as_ref(),
    };
    context.report(&report, |out| training_text::print(asked, &run, &answer, out))
}
