//! Generation with the fast engine.

use anyhow::Result;
use mantissa_model::{GenerateOptions, KvPolicy, StopReason, Tokenizer};
use mantissa_quant::model_config;
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::{EventKind, FastModel, Request, Runtime, RuntimeOptions, Speculation};
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::{Answer, Args, Speculate, Writer};
use crate::commands::model::{self, load_tokenizer};
use crate::commands::running::{self, Use};
use crate::context::Context;
use crate::error::BadInput;

/// Counts of proposed tokens.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Drafted {
    pub(super) proposed: u64,
    pub(super) accepted: u64,
}

/// Names what the fast engine cannot run, if there is anything.
///
/// # Errors
/// A config that cannot be read.
pub(super) fn unsupported(args: &Args, files: &ModelFiles) -> Result<Option<String>> {
    let config = model_config(files)?;
    let given = args.kv.as_ref().filter(|policy| !stored(policy, files));
    let refused =
        given.filter(|policy| policy.is_calibrated() || KvPlan::of_policy(&config, policy).is_err());
    Ok(refused.map(|policy| format!("the KV cache {policy}")))
}

/// True if the checkpoint stores the levels of this policy.
fn stored(policy: &KvPolicy, files: &ModelFiles) -> bool {
    policy.is_calibrated() && files.kv_policy() == Some(&policy.to_string())
}

/// Loaded models.
pub(super) struct Loaded {
    model: FastModel,
    draft: Option<FastModel>,
}

impl Loaded {
    /// Loads the model and, if there is one, the draft model.
    pub(super) fn load(
        args: &Args,
        files: &ModelFiles,
        tokenizer: &Tokenizer,
        context: &Context,
    ) -> Result<Self> {
        let used =
            Use { pass: 0, longest: 0, threads: 1, cached: false, logits: 0, kv: None, calibration: None };
        let others: Vec<_> =
            args.draft.iter().map(|draft| model::open(draft, context)).collect::<Result<_>>()?;
        let paths: Vec<_> = std::iter::once(&*args.model).chain(args.draft.as_deref()).collect();
        context.require_memory("run: weights", running::bytes_of(&paths, used)?)?;
        let vocabulary = model_config(files)?.vocab_size;
        let draft = others.first().map(|files| {
            same_vocabulary(files, tokenizer, vocabulary, context)?;
            Ok::<_, anyhow::Error>(FastModel::load(files, context.threads)?)
        });
        let mut model = FastModel::load(files, context.threads)?;
        if let Some(policy) = args.kv.as_ref().filter(|policy| !stored(policy, files)) {
            model.set_kv(policy)?;
        }
        Ok(Loaded { draft: draft.transpose()?, model })
    }

    /// Plans a session for prompts of up to `prompt` tokens at a time.
    pub(super) fn session<'l>(
        &'l self,
        args: &Args,
        prompt: usize,
        options: &GenerateOptions,
        context: &Context,
    ) -> Result<Session<'l>> {
        let longest = prompt.saturating_add(options.max_new_tokens);
        let options = RuntimeOptions {
            speculation: match args.speculate {
                Speculate::Lookup => Speculation::Lookup,
                Speculate::Off => Speculation::Off,
            },
            step_tokens: prompt.min(mantissa_model::PREFILL),
            kept: usize::from(args.interactive),
            ..RuntimeOptions::single(longest)
        };
        context.require_more_memory("run: buffers and cache", self.model.session_bytes(&options))?;
        let runtime = Runtime::new(&self.model, options)?;
        let runtime = match &self.draft {
            Some(draft) => runtime.with_draft(draft)?,
            None => runtime,
        };
        Ok(Session { runtime })
    }

    /// Bytes of a token in the cache.
    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        self.model.kv_bytes_per_token()
    }
}

/// Checks that a draft model's tokens are those of the model.
fn same_vocabulary(files: &ModelFiles, ours: &Tokenizer, vocabulary: usize, context: &Context) -> Result<()> {
    let theirs = load_tokenizer(files, context)?;
    let Some((id, [own, other])) = ours.first_difference(&theirs, vocabulary) else { return Ok(()) };
    let found = format!("token {id} is {other:?}");
    let expected = format!("the vocabulary of the model, where it is {own:?}");
    Err(BadInput::new(format!("--draft {}", files.dir().display()), found, expected).into())
}

/// One sequence after another over the same cache.
pub(super) struct Session<'l> {
    runtime: Runtime<'l>,
}

impl Session<'_> {
    /// Continues `prompt`.
    pub(super) fn answer(
        &mut self,
        tokenizer: &Tokenizer,
        prompt: &[u32],
        options: &GenerateOptions,
        context: &Context,
    ) -> Result<Answer> {
        let request = Request {
            prompt: prompt.to_vec(),
            max_new_tokens: options.max_new_tokens,
            sampling: options.sampling,
            stop: options.stop.clone(),
            ignore_eos: options.ignore_eos,
            logprobs: None,
        };
        let mut writer = Writer::new(tokenizer, prompt, context)?;
        let before = self.runtime.shared_tokens();
        let id = self.runtime.add(request)?;
        let mut stopped = StopReason::Length;
        while !self.runtime.is_idle() {
            for event in self.runtime.step()?.iter().filter(|event| event.sequence == id) {
                match event.kind {
                    EventKind::Token { token, .. } => writer.push(token)?,
                    EventKind::Finished(reason) => stopped = reason,
                    EventKind::Broken => {
                        let position = prompt.len() + writer.tokens.len() - 1;
                        return Err(mantissa_model::ForwardError::NoLogits { position }.into());
                    }
                }
            }
        }
        let shared = (self.runtime.shared_tokens() - before) as usize;
        writer.finish(prompt.len() - shared, stopped)
    }

    /// Proposals so far.
    pub(super) fn drafted(&self) -> Option<Drafted> {
        let counts = self.runtime.proposals();
        Some(Drafted { proposed: counts.proposed, accepted: counts.accepted })
    }
}
