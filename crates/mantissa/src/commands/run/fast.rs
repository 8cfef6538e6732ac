//! Generation with the fast engine.

use std::fmt;

use anyhow::Result;
use mantissa_model::{GenerateOptions, KvPolicy, ModelConfig, StopReason, Tokenizer};
use mantissa_quant::model_config;
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::footprint::{Footprint, SessionFootprint};
use mantissa_runtime::{EventKind, FastModel, Request, Runtime, RuntimeOptions};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::answer::{Answer, Drafted, Writer};
use super::args::Args;
use crate::commands::adapter;
use crate::commands::model::{self, load_tokenizer};
use crate::context::Context;
use crate::error::BadInput;
use crate::output::bytes;

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
pub fn stored(policy: &KvPolicy, files: &ModelFiles) -> bool {
    policy.is_calibrated() && files.kv_policy() == Some(&policy.to_string())
}

/// Loaded models.
pub(super) struct Loaded {
    model: FastModel,
    draft: Option<FastModel>,
    sizes: RuntimeOptions,
    needs: Needs,
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

/// Predicted memory of models and session, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Needs {
    /// Weights of all models, repacked.
    weights: u64,
    /// Tensors as stored, at the peak of loading.
    loading: u64,
    /// Keys and values, and those of the draft model.
    cache: u64,
    tokens: usize,
    buffers: u64,
}

impl Needs {
    /// Predicts the memory of a session of these sizes.
    fn of(
        args: &Args,
        files: &ModelFiles,
        draft: Option<&ModelFiles>,
        sizes: &RuntimeOptions,
        (adapter, threads): (Option<&AdapterFiles>, usize),
    ) -> Result<Self> {
        let config = model_config(files)?;
        let policy = args.kv.as_ref().filter(|policy| !stored(policy, files));
        let held = |text: &str| text.parse::<KvPolicy>().ok();
        let policy = policy.cloned().or_else(|| files.kv_policy().and_then(held));
        // What the checkpoint may state without a policy takes less than f16.
        let kv = policy.and_then(|policy| KvPlan::of_policy(&config, &policy).ok());
        let kv = kv.map_or_else(|| plain(&config), Ok)?;
        let (own, session) =
            (Footprint::of(files, &config, threads), SessionFootprint::of(sizes, &config, &kv));
        let mut needs = Needs {
            weights: own.weights.saturating_add(adapter::bytes_needed(files, adapter)?),
            loading: own.loading,
            cache: session.cache,
            tokens: sizes.context,
            buffers: session.buffers,
        };
        if let Some(files) = draft {
            let config = model_config(files)?;
            let (model, session) = (
                Footprint::of(files, &config, threads),
                SessionFootprint::of_draft(sizes, &config, &plain(&config)?),
            );
            needs.weights = needs.weights.saturating_add(model.weights);
            needs.loading = needs.loading.max(model.loading);
            needs.cache = needs.cache.saturating_add(session.cache);
            needs.buffers = needs.buffers.saturating_add(session.buffers);
        }
        Ok(needs)
    }

    /// Bytes at the peak.
    fn peak(&self) -> u64 {
        let session = self.cache.saturating_add(self.buffers);
        let all = self.weights.saturating_add(self.loading.max(session));
        all.saturating_add(model::BASE)
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Needs { weights, loading, cache, tokens, buffers } = *self;
        if loading > cache.saturating_add(buffers) {
            return write!(f, "weights {} and {} while they load", bytes(weights), bytes(loading));
        }
        let each = bytes(cache / tokens.max(1) as u64);
        let (weights, cache, buffers) = (bytes(weights), bytes(cache), bytes(buffers));
        write!(f, "weights {weights}, keys and values {cache} ({tokens} tokens of {each}), buffers {buffers}")
    }
}

/// Plan of keys and values in f16.
pub fn plain(config: &ModelConfig) -> Result<KvPlan> {
    Ok(KvPlan::new(config, (0..config.num_hidden_layers).map(|_| None))?)
}

impl Loaded {
    /// Loads the model and, if there is one, the draft model, if memory holds them and a session for prompts of up to
    /// `prompt` tokens at a time.
    pub(super) fn load(
        args: &Args,
        files: &ModelFiles,
        tokenizer: &Tokenizer,
        (prompt, options): (usize, &GenerateOptions),
        context: &Context,
    ) -> Result<Self> {
        let others: Vec<_> =
            args.draft.iter().map(|draft| model::open(draft, context)).collect::<Result<_, _>>()?;
        // Before weights are read for the prediction.
        let stored = others.iter().chain([files]).map(|files| files.checkpoint().total_bytes() / 2).sum();
        context.require_more_memory("run: weights", stored)?;
        let sizes = sizes(args, prompt, options);
        let adapter = args.adapter.open()?;
        let with = (adapter.as_ref(), context.threads);
        let needs = Needs::of(args, files, others.first(), &sizes, with)?;
        let predicted = context.require_more_memory(&format!("run: {needs}"), needs.peak())?;
        let vocabulary = model_config(files)?.vocab_size;
        let draft = others.first().map(|files| {
            same_vocabulary(files, tokenizer, vocabulary, context)?;
            Ok::<_, anyhow::Error>(FastModel::load(files, context.threads)?)
        });
        let draft = draft.transpose()?;
        let mut model = adapter::fast(files, adapter.as_ref(), context.threads)?;
        if let Some(policy) = args.kv.as_ref().filter(|policy| !self::stored(policy, files)) {
            model.set_kv(policy)?;
        }
        Ok(Loaded { draft, model, sizes, needs, predicted })
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
        format!("memory: {} predicted ({})", bytes(self.predicted), self.needs)
    }

    /// Bytes of a token in the cache.
    pub(super) fn kv_bytes_per_token(&self) -> f64 {
        self.model.kv_bytes_per_token()
    }
}

/// Checks that a draft model's tokens are those of the model.
pub fn same_vocabulary(
    files: &ModelFiles,
    ours: &Tokenizer,
    vocabulary: usize,
    context: &Context,
) -> Result<()> {
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
            ..Request::default()
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
