//! Generation with the reference decoder.

use std::ops::ControlFlow;

use anyhow::Result;
use mantissa_jobs::model::open;
use mantissa_jobs::{ModelUse, adapter};
use mantissa_model::{Decoder, GenerateOptions, Tokenizer, generate};

use super::answer::{Answer, Writer};
use super::args::Args;
use crate::context::Context;

/// Loads the model for a prompt of `prompt` tokens in a context of `limit`.
pub(super) fn load(args: &Args, prompt: usize, limit: usize, context: &Context) -> Result<Decoder> {
    let adapter = adapter::open(args.adapter.named())?;
    let calibration = args.calibration.value();
    let used = ModelUse {
        pass: prompt.min(mantissa_model::PREFILL),
        longest: prompt.saturating_add(args.n).min(limit),
        threads: 1,
        cached: true,
        logits: 1,
        kv: args.kv.as_ref(),
        calibration: Some((&calibration, context.seed)),
        adapter: adapter.as_ref(),
    };
    Ok(used.load(open(&args.model, context)?, None, context)?.0.decoder)
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
