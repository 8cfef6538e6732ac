//! Models to be served: loaded side by side within the memory ceiling.

use std::path::Path;

use anyhow::Result;
use mantissa_model::KvPolicy;
use mantissa_quant::model_config;
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::footprint::{Footprint, SessionFootprint};
use mantissa_runtime::{FastModel, RuntimeOptions};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::args::Args;
use crate::commands::adapter;
use crate::commands::model::{self, load_tokenizer};
use crate::commands::run::fast::{plain, same_vocabulary, stored};
use crate::context::Context;
use crate::error::BadInput;
use crate::output::bytes;

/// Longest sequence unless the command line names one.
const CONTEXT: usize = 8192;

/// Most memory for grammars unless the command line names it.
const GRAMMARS: u64 = 256 << 20;

/// Loaded models.
pub(super) struct Loaded {
    pub(super) models: Vec<mantissa_serve::Loaded>,
    /// Predicted peak of anonymous memory in bytes, and its parts.
    pub(super) predicted: u64,
    pub(super) memory: String,
    /// Most memory of the processes that hold grammars in bytes.
    pub(super) grammar_memory: u64,
}

/// A model whose files are open.
struct Opened {
    name: String,
    files: ModelFiles,
    sizes: RuntimeOptions,
}

/// Predicted memory in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Needs {
    weights: u64,
    /// Tensors as stored, at the peak of loading.
    loading: u64,
    cache: u64,
    buffers: u64,
}

impl Needs {
    /// Bytes at the peak.
    fn peak(&self) -> u64 {
        let session = self.cache.saturating_add(self.buffers);
        self.weights.saturating_add(self.loading.max(session)).saturating_add(model::BASE)
    }

    fn add(&mut self, footprint: Footprint, session: SessionFootprint) {
        self.weights = self.weights.saturating_add(footprint.weights);
        self.loading = self.loading.max(footprint.loading);
        self.cache = self.cache.saturating_add(session.cache);
        self.buffers = self.buffers.saturating_add(session.buffers);
    }
}

/// Opens and loads all models, if memory holds them and their sessions.
pub(super) fn load(args: &Args, context: &Context) -> Result<Loaded> {
    let opened = open_all(args, context)?;
    let adapter = args.adapter.open()?;
    let draft = args.draft.as_ref().map(|draft| model::open(draft, context)).transpose()?;
    // Before weights are read for the prediction.
    let all = opened.iter().map(|opened| &opened.files).chain(&draft);
    context
        .require_more_memory("serve: weights", all.map(|files| files.checkpoint().total_bytes() / 2).sum())?;
    let needs = needs(args, &opened, draft.as_ref(), adapter.as_ref(), context)?;
    let told = format!(
        "weights {}, keys and values {}, buffers {}",
        bytes(needs.weights),
        bytes(needs.cache),
        bytes(needs.buffers)
    );
    let what = format!("serve: {told}");
    let predicted = context.require_more_memory(&what, needs.peak())?;
    let left = context.memory_left().saturating_sub(needs.peak());
    let grammar_memory = args.grammar_memory.unwrap_or(left.min(GRAMMARS));
    if grammar_memory > left {
        let more = needs.peak().saturating_add(grammar_memory);
        context.require_more_memory(&format!("{what}, grammars {}", bytes(grammar_memory)), more)?;
    }
    let mut models = Vec::with_capacity(opened.len());
    for (i, Opened { name, files, sizes }) in opened.into_iter().enumerate() {
        let tokenizer = load_tokenizer(&files, context)?;
        let first = i == 0;
        let tokenizer = if first { args.adapter.templates(tokenizer)? } else { tokenizer };
        let draft = draft.as_ref().filter(|_| first).map(|files| {
            same_vocabulary(files, &tokenizer, model::vocabulary(files)?, context)?;
            Ok::<_, anyhow::Error>(FastModel::load(files, context.threads)?)
        });
        let draft = draft.transpose()?;
        let mut model = adapter::fast(&files, adapter.as_ref().filter(|_| first), context.threads)?;
        if let Some(policy) = given(args, &files) {
            model.set_kv(policy)?;
        }
        let kv = args.kv.as_ref().map(KvPolicy::to_string).or_else(|| files.kv_policy().map(str::to_owned));
        let kv = kv.unwrap_or_else(|| "f16".to_owned());
        models.push(mantissa_serve::Loaded { name, tokenizer, model, draft, kv, runtime: sizes });
    }
    let grammars = match grammar_memory {
        0 => "no memory for grammars".to_owned(),
        most => format!("up to {} more for grammars", bytes(most)),
    };
    let memory = format!("memory: {} predicted ({told}), {grammars}", bytes(predicted));
    Ok(Loaded { models, predicted, memory, grammar_memory })
}

/// Opens the files of all models and plans their sessions.
fn open_all(args: &Args, context: &Context) -> Result<Vec<Opened>> {
    let name = args.alias.clone().unwrap_or_else(|| file_name(args.model.typed()));
    let named = std::iter::once((name, &args.model));
    let others = args.also.iter().map(|also| (also.name.clone(), &also.model));
    let mut all: Vec<Opened> = Vec::new();
    for (name, path) in named.chain(others) {
        if all.iter().any(|other| other.name == name) {
            let allowed = "names that differ from each other and from that of MODEL";
            return Err(BadInput::new("--also", format!("{name} twice"), allowed).into());
        }
        let files = model::open(path, context)?;
        check_kv(args, &files)?;
        let limit = model::context_length(&files)?;
        let longest = args.context.unwrap_or(CONTEXT.min(limit));
        if longest == 0 || longest > limit {
            let allowed = format!("1 to {limit}, the context of {}", path.named().display());
            return Err(BadInput::new("--context", longest.to_string(), allowed).into());
        }
        let sizes = RuntimeOptions {
            speculation: args.speculate.into(),
            step_tokens: args.step_tokens as usize,
            ..RuntimeOptions::batch(usize::from(args.parallel), longest)
        };
        all.push(Opened { name, files, sizes });
    }
    check_shadow(args, &all)?;
    Ok(all)
}

/// Checks that the reference of the shadow comparison is one of several models, and that contexts are alike.
fn check_shadow(args: &Args, opened: &[Opened]) -> Result<()> {
    let Some((reference, _)) = &args.shadow else { return Ok(()) };
    if !opened.iter().any(|model| model.name == *reference) || opened.len() < 2 {
        let names: Vec<_> = opened.iter().map(|model| model.name.as_str()).collect();
        let allowed = format!("one of several models: {}; fix: add --also NAME=MODEL", names.join(", "));
        return Err(BadInput::new("--shadow", reference.clone(), allowed).into());
    }
    let longest = opened.iter().map(|model| model.sizes.context).max();
    match opened.iter().find(|model| Some(model.sizes.context) < longest) {
        Some(model) => {
            let found = format!("{} tokens for {}", model.sizes.context, model.name);
            let fix = format!("--context {}", model.sizes.context);
            Err(BadInput::new("--shadow", found, "models of the same context").with_fix(fix).into())
        }
        None => Ok(()),
    }
}

/// Last part of a path, as the name of a model.
fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Policy of the KV cache on the command line, unless the checkpoint stores its levels.
fn given<'a>(args: &'a Args, files: &ModelFiles) -> Option<&'a KvPolicy> {
    args.kv.as_ref().filter(|policy| !stored(policy, files))
}

/// Refuses a KV cache that the fast engine does not run.
fn check_kv(args: &Args, files: &ModelFiles) -> Result<()> {
    let config = model_config(files)?;
    let Some(policy) = given(args, files) else { return Ok(()) };
    if policy.is_calibrated() {
        let allowed = "a scheme whose levels need no calibration, or a model that stores them";
        return Err(BadInput::new("--kv", policy.to_string(), allowed).into());
    }
    KvPlan::of_policy(&config, policy)?;
    Ok(())
}

/// Predicts the memory of all models and their sessions.
fn needs(
    args: &Args,
    opened: &[Opened],
    draft: Option<&ModelFiles>,
    adapter: Option<&AdapterFiles>,
    context: &Context,
) -> Result<Needs> {
    let mut needs = Needs::default();
    for Opened { files, sizes, .. } in opened {
        let config = model_config(files)?;
        let held = || files.kv_policy().and_then(|text| text.parse::<KvPolicy>().ok());
        let policy = given(args, files).cloned().or_else(held);
        // What the checkpoint may state without a policy takes less than f16.
        let kv = policy.and_then(|policy| KvPlan::of_policy(&config, &policy).ok());
        let kv = kv.map_or_else(|| plain(&config), Ok)?;
        let footprint = Footprint::of(files, &config, context.threads);
        needs.add(footprint, SessionFootprint::of(sizes, &config, &kv));
    }
    if args.shadow.is_some() {
        // A sequence of its own for each model.
        let context = opened.iter().map(|opened| opened.sizes.context).max().unwrap_or(1);
        for Opened { files, .. } in opened {
            let config = model_config(files)?;
            let session = SessionFootprint::of(&RuntimeOptions::single(context), &config, &plain(&config)?);
            needs.add(Footprint::default(), session);
        }
    }
    if let (Some(first), Some(_)) = (opened.first(), adapter) {
        needs.weights = needs.weights.saturating_add(adapter::bytes_needed(&first.files, adapter)?);
    }
    if let (Some(first), Some(files)) = (opened.first(), draft) {
        let config = model_config(files)?;
        let footprint = Footprint::of(files, &config, context.threads);
        needs.add(footprint, SessionFootprint::of_draft(&first.sizes, &config, &plain(&config)?));
    }
    Ok(needs)
}
