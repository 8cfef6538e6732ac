//! Generation with the fast engine.

use anyhow::Result;
use mantissa_jobs::load_needs::kv_name;
use mantissa_jobs::sessions::{SessionNeeds, policy_to_set, same_vocabulary};
use mantissa_jobs::{LoadNeeds, adapter};
use mantissa_model::{GenerateOptions, KvPolicy, StopReason, Tokenizer, load_config};
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::{EventKind, FastModel, Request, Runtime, RuntimeOptions};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::answer::{Answer, Drafted, Writer};
use super::args::Args;
use crate::commands::model;
use crate::context::Context;
use crate::interrupt;
use crate::output::bytes;

/// Names what the fast engine cannot run, if there is anything.
///
/// # Errors
/// A config that cannot be read.
pub(super) fn unsupported(args: &Args, files: &ModelFiles) -> Result<Option<String>> {
    let config = load_config(files)?;
    let given = policy_to_set(args.kv.as_ref(), files);
    let refused =
        given.filter(|policy| policy.is_calibrated() || KvPlan::of_policy(&config, policy).is_err());
    Ok(refused.map(|policy| format!("the KV cache {policy}")))
}

/// Loaded models.
pub(super) struct Loaded {
    model: FastModel,
    draft: Option<FastModel>,
    sizes: RuntimeOptions,
    /// Parts of the predicted memory.
    parts: String,
    predicted: u64,
}

/// Sizes of a session for prompts of up to `prompt` tokens at a time.
fn sizes(args: &Args, prompt: usize, options: &GenerateOptions) -> RuntimeOptions {
    let longest = prompt.saturating_add(options.max_new_tokens);
    RuntimeOptions {
        speculation: args.speculate.into(),
        step_tokens: prompt.min(mantissa_model::PREFILL),
        kept: usize::from(args.interactive),
        ..RuntimeOptions::single(longest)
    }
}

/// Describes the parts of `needs`.
fn parts(needs: &SessionNeeds) -> String {
    let SessionNeeds { weights, loading, cache, buffers, room, token } = *needs;
    if loading > cache.saturating_add(buffers) {
        return format!("weights {} and {} while they load", bytes(weights), bytes(loading));
    }
    let each = bytes(token.round() as u64);
    let (weights, cache, buffers) = (bytes(weights), bytes(cache), bytes(buffers));
    format!(
        "weights {weights}, keys and values {cache} (blocks for {room} tokens of {each}), buffers {buffers}"
    )
}

/// Files that are open, with the memory that they are predicted to take.
struct Opened<'a> {
    draft: Option<ModelFiles>,
    adapter: Option<AdapterFiles>,
    policy: Option<&'a KvPolicy>,
    sizes: RuntimeOptions,
    needs: SessionNeeds,
    predicted: u64,
}

impl<'a> Opened<'a> {
    /// Opens the model and, if there is one, the draft model, if memory holds them and a session for prompts of up to
    /// `prompt` tokens at a time.
    fn new(
        args: &'a Args,
        files: &'a ModelFiles,
        (prompt, options): (usize, &GenerateOptions),
        context: &Context,
    ) -> Result<Self> {
        let draft = args.draft.as_ref().map(|draft| model::open(draft, context)).transpose()?;
        // Before weights are read for the prediction.
        let stored = draft.iter().chain([files]).map(|files| files.checkpoint().total_bytes() / 2).sum();
        context.require_more_memory("run: weights", stored)?;
        let sizes = sizes(args, prompt, options);
        let adapter = adapter::open(args.adapter.named())?;
        let mut needs = SessionNeeds::default();
        let policy = policy_to_set(args.kv.as_ref(), files);
        needs.add_model(files, (policy, adapter.as_ref()), &sizes, context.threads)?;
        draft.iter().try_for_each(|draft| needs.add_draft(draft, &sizes, context.threads))?;
        let predicted = context.require_more_memory(&format!("run: {}", parts(&needs)), needs.peak())?;
        Ok(Opened { draft, adapter, policy, sizes, needs, predicted })
    }
}

/// Predicts what [`Loaded::load`] would load.
pub(super) fn preview(
    args: &Args,
    files: &ModelFiles,
    sizes: (usize, &GenerateOptions),
    context: &Context,
) -> Result<LoadNeeds> {
    let opened = Opened::new(args, files, sizes, context)?;
    let kv = kv_name(args.kv.as_ref(), files, "f16");
    Ok(opened.needs.described(1, opened.sizes.context, kv, opened.predicted))
}

impl Loaded {
    /// Loads the model and, if there is one, the draft model, if memory holds them and a session for prompts of up to
    /// `prompt` tokens at a time.
    pub(super) fn load(
        args: &Args,
        files: &ModelFiles,
        tokenizer: &Tokenizer,
        sizes: (usize, &GenerateOptions),
        context: &Context,
    ) -> Result<Self> {
        let Opened { draft, adapter, policy, sizes, needs, predicted } =
            Opened::new(args, files, sizes, context)?;
        let vocabulary = load_config(files)?.vocab_size;
        let draft = draft.map(|files| {
            same_vocabulary(&files, tokenizer, vocabulary, context)?;
            Ok::<_, anyhow::Error>(FastModel::load(&files, context.threads)?)
        });
        let draft = draft.transpose()?;
        let mut model = adapter::fast(files, adapter.as_ref(), context.threads)?;
        if let Some(policy) = policy {
            model.set_kv(policy)?;
        }
        let rest = predicted.saturating_sub(needs.weights).saturating_sub(needs.beside_weights());
        let parts = format!("{}, tokenizer and program {}", parts(&needs), bytes(rest));
        Ok(Loaded { draft, model, sizes, parts, predicted })
    }

    /// Plans the session.
    pub(super) fn session(&self) -> Result<Session<'_>> {
        let runtime = Runtime::new(&self.model, self.sizes)?;
        let runtime = match &self.draft {
            Some(draft) => runtime.with_draft(draft)?,
            None => runtime,
        };
        Ok(Session { runtime })
    }

    /// Predicted peak of anonymous memory, in bytes.
    pub(super) fn predicted(&self) -> u64 {
        self.predicted
    }

    /// Describes the predicted memory.
    pub(super) fn memory(&self) -> String {
        format!("memory: {} predicted ({})", bytes(self.predicted), self.parts)
    }

    /// Bytes of a token in the cache.
    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        self.model.kv_bytes_per_token()
    }
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
            ..Request::default()
        };
        let mut writer = Writer::new(tokenizer, prompt, context)?;
        let before = self.runtime.shared_tokens();
        let id = self.runtime.add(request)?;
        let mut stopped = StopReason::Length;
        let answering = interrupt::answering();
        while !self.runtime.is_idle() {
            if answering.is_cut() {
                self.runtime.cancel(id);
                stopped = StopReason::Caller;
                break;
            }
            for event in self.runtime.step()?.iter().filter(|event| event.sequence == id) {
                match event.kind {
                    EventKind::Token { token, .. } => writer.push(token)?,
                    EventKind::Finished(reason) => stopped = reason,
                    EventKind::Broken => {
                        let position = prompt.len() + writer.tokens.len() - 1;
                        return Err(mantissa_model::ForwardError::NoLogits { position }.into());
                    }
                    _ => {}
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
