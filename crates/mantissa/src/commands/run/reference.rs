//! Generation with the reference decoder.

use std::ops::ControlFlow;

use anyhow::Result;
use mantissa_model::{Decoder, GenerateOptions, Tokenizer, generate};

use super::answer::{Answer, Writer};
use super::args::Args;
use crate::commands::loaded_models::{self, Model, Use};
use crate::context::Context;

/// Loads the model for a prompt of `prompt` tokens in a context of `limit`.
pub(super) fn load(args: &Args, prompt: usize, limit: usize, context: &Context) -> Result<Model> {
    let adapter = args.adapter.open()?;
    let used = Use {
        pass: prompt.min(mantissa_model::PREFILL),
        longest: prompt.saturating_add(args.n).min(limit),
        threads: 1,
        cached: true,
        logits: 1,
        kv: args.kv.as_ref(),
        calibration: Some(&args.calibration),
        adapter: adapter.as_ref(),
    };
    let [model] = loaded_models::load_all([&*args.model], used, context)?;
    Ok(model)
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
    let generated = generate(decoder, prompt, options, |token| match writer.push(token) {
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
