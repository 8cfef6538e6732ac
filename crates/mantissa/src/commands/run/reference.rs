//! Generation with the reference decoder.

use std::ops::ControlFlow;

use anyhow::Result;
use mantissa_jobs::model::open;
use mantissa_jobs::{LoadNeeds, ModelUse, adapter};
use mantissa_model::{Decoder, GenerateOptions, Tokenizer, generate};
use mantissa_store::convention::ModelFiles;

use super::answer::{Answer, Writer};
use super::args::Args;
use crate::context::Context;
use crate::interrupt;

/// Calls `run` with the use of the model for a prompt of `prompt` tokens in a context of `limit`.
fn with_usage<R>(
    args: &Args,
    (prompt, limit): (usize, usize),
    context: &Context,
    run: impl FnOnce(ModelUse<'_>) -> Result<R>,
) -> Result<R> {
    let adapter = adapter::open(args.adapter.named())?;
    let calibration = args.calibration.value();
    run(ModelUse {
        pass: prompt.min(mantissa_model::PREFILL),
        longest: prompt.saturating_add(args.new_tokens().most()).min(limit),
        threads: 1,
        cached: true,
        logits: 1,
        kv: args.kv.as_ref(),
        calibration: Some((&calibration, context.seed)),
        adapter: adapter.as_ref(),
    })
}

/// Loads the model for a prompt of `prompt` tokens in a context of `limit`.
pub(super) fn load(args: &Args, prompt: usize, limit: usize, context: &Context) -> Result<Decoder> {
    let files = open(&args.model, context)?;
    with_usage(args, (prompt, limit), context, |used| Ok(used.load(files, None, context)?.0.decoder))
}

/// Predicts what [`load`] would load of `files`.
pub(super) fn preview(
    args: &Args,
    files: &ModelFiles,
    sizes: (usize, usize),
    context: &Context,
) -> Result<LoadNeeds> {
    with_usage(args, sizes, context, |used| {
        used.require(&[files], context)?;
        Ok(used.needs(&[files])?)
    })
}

/// Continues `prompt`.
pub(super) fn answer(
    decoder: &Decoder,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: &GenerateOptions,
    context: &Context,
) -> Result<Answer> {
    let mut writer = Writer::new(tokenizer, prompt, context)?;
    let mut failed = None;
    let answering = interrupt::answering();
    let generated = generate(decoder, prompt, options, |token| match writer.push(token) {
        Ok(()) if answering.is_cut() => ControlFlow::Break(()),
        Ok(()) => ControlFlow::Continue(()),
        Err(error) => {
            failed = Some(error);
            ControlFlow::Break(())
        }
    })?;
    match failed {
        Some(error) => Err(error),
        None => writer.finish(prompt.len(), generated.stopped),
    }
}
