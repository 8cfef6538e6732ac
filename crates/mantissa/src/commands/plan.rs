//! `mantissa plan`: which precision to choose, what it takes and how fast it can be, before anything is quantized.

mod args;
mod asked;
mod at_hand;
mod device;
mod hardware_list;
mod page;
mod subject;
mod text;
mod train;
mod training_text;

use anyhow::Result;
use mantissa_plan::recommend::{self, Load, USUAL_CONTEXT, Wish, answer_of, prompt_of};
use mantissa_store::{Kind, Paths};

pub use self::args::Args;
pub use self::device::{THIS, device, units_of};
pub use self::subject::{Subject, context_of};

use self::asked::{Asked, Report};
use self::at_hand::AtHand;
use super::execute::Execute;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;

impl Execute for Args {
    const GROUP: Group = Group::Start;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.subject.paths(paths);
        self.html.iter().for_each(|file| paths.write("--html", file, Kind::File));
        Ok(())
    }

    /// # Errors
    /// A model, a size or hardware that cannot be used; I/O.
    fn run(&self, context: &Context) -> Result<()> {
        if self.subject.hardware() == hardware_list::NAME {
            return hardware_list::run(context);
        }
        let shape = self.subject.shape(context)?;
        let device = device(self.subject.hardware(), context)?;
        if !self.max_kl.is_finite() || self.max_kl < 0.0 {
            return Err(BadInput::new("--max-kl", self.max_kl.to_string(), "a number of at least 0").into());
        }
        let asked = Asked {
            args: self,
            shape: &shape,
            device: &device,
            given: context.memory.map(|memory| memory as f64),
        };
        if asked.given.is_some() && self.subject.hardware() == THIS {
            context.note("planned for this CPU with the memory of --memory; --hardware NAME plans for a GPU (mantissa plan --hardware list)");
        }
        match self.train {
            Some(what) => train::run(&asked, what, context),
            None => inference(&asked, context),
        }
    }
}

fn inference(asked: &Asked<'_>, context: &Context) -> Result<()> {
    let load = load(asked)?;
    let wish = Wish { engine: asked.args.engine, bits: asked.args.bits };
    let answer = recommend::answer_to(asked.shape, asked.device, &load, &wish);
    let at_hand = AtHand::of(asked, &load);
    if let Some(file) = &asked.args.html {
        page::inference(asked, &load, &answer).write(&context.output(file)?)?;
    }
    let report = Report {
        model: asked.shape,
        parameters: asked.shape.parameters(),
        active_parameters: asked.shape.active_parameters(),
        hardware: asked.device,
        predicted: true,
        at_hand: at_hand.as_ref(),
        load: Some(load),
        inference: Some(&answer),
        training: None,
        page: asked.args.html.as_ref(),
    };
    context.report(&report, |out| text::inference(asked, &load, (&answer, at_hand.as_ref()), out))
}

/// Completes the load from the flags and the model.
fn load(asked: &Asked<'_>) -> Result<Load> {
    let args = asked.args;
    let context = context_of(args.context, USUAL_CONTEXT, asked.shape)?;
    let prefill = args.prefill.unwrap_or_else(|| prompt_of(context)).max(1);
    let decode = args.decode.unwrap_or_else(|| answer_of(context, prefill));
    if prefill + decode > context && (args.prefill.is_some() || args.decode.is_some()) {
        let found = format!("{prefill} + {decode}");
        return Err(BadInput::new(
            "--prefill, --decode",
            found,
            format!("at most --context {context} together"),
        )
        .with_fix(format!("--context {}", prefill + decode))
        .into());
    }
    if !args.parallel.suits(asked.shape) {
        let found = format!("{}, which has no routed experts", asked.shape.name);
        return Err(BadInput::new("--parallel expert", found, "a mixture of experts")
            .with_fix("--parallel data")
            .into());
    }
    Ok(Load {
        context,
        batch: args.batch,
        prefill,
        decode,
        devices: args.devices,
        parallel: args.parallel,
        reduce_bits: f64::from(args.reduce_bits),
        kv: args.kv,
        max_kl: args.max_kl,
        memory: asked.memory(),
        host: args.host.unwrap_or_default(),
    })
}
