//! Models to be served: loaded side by side within the memory ceiling.

use mantissa_model::{Recommended, load_config};
use mantissa_quant::recipe::FILE_TYPES;
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::{FastModel, RuntimeOptions, Speculation};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::job::{Serve, ServedModel};
use crate::adapter;
use crate::chat;
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;
use crate::load_needs::{LoadNeeds, kv_name};
use crate::model::{context_length, load_tokenizer, open, vocabulary};
use crate::sessions::{SessionNeeds, policy_to_set, same_vocabulary};
use crate::text::bytes;

/// Longest sequence unless the job names one.
const CONTEXT: usize = 8192;

/// Most memory for grammars unless the job names it.
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

/// Models whose files are open, with the memory that they need.
struct Opened {
    models: Vec<OpenedModel>,
    adapter: Option<AdapterFiles>,
    draft: Option<ModelFiles>,
    needs: SessionNeeds,
}

/// A model whose files are open.
struct OpenedModel {
    name: String,
    files: ModelFiles,
    sizes: RuntimeOptions,
}

/// Predicts the memory of all models and their sessions in bytes.
pub(super) fn memory(job: &Serve, host: &Host) -> Result<u64> {
    Ok(Opened::new(job, host)?.needs.peak())
}

/// Predicts what [`load`] would load, and the most memory of the processes that hold grammars in bytes.
pub(super) fn preview(job: &Serve, host: &Host) -> Result<(LoadNeeds, u64)> {
    let opened = Opened::new(job, host)?;
    let needs = opened.needs;
    let predicted = host.require_more_memory("serve", needs.peak())?;
    let left = host.memory_left().saturating_sub(needs.peak());
    let context = opened.models.iter().map(|model| model.sizes.context).max().unwrap_or(0);
    let given = job.kv.as_deref();
    let kv = opened.models.first().map_or_else(String::new, |model| kv_name(given, &model.files, "f16"));
    let described = needs.described(usize::from(job.parallel), context, kv, predicted);
    Ok((described, job.grammar_memory.unwrap_or(left.min(GRAMMARS))))
}

/// Says for how many sequences of how many tokens the caches have room.
fn sequences(job: &Serve, opened: &[OpenedModel]) -> String {
    let longest = opened.iter().map(|model| model.sizes.context).max().unwrap_or(0);
    let sequences = if job.parallel == 1 { "sequence" } else { "sequences" };
    format!("{} {sequences} of {longest} tokens", job.parallel)
}

/// Opens and loads all models, if memory holds them and their sessions.
pub(super) fn load(job: &Serve, host: &Host) -> Result<Loaded> {
    let Opened { models: opened, adapter, draft, needs } = Opened::new(job, host)?;
    let told = format!(
        "weights {}, keys and values {} ({}: --parallel, --context), buffers {}",
        bytes(needs.weights),
        bytes(needs.cache),
        sequences(job, &opened),
        bytes(needs.buffers)
    );
    let what = format!("serve: {told}");
    let predicted = host.require_more_memory(&what, needs.peak())?;
    let left = host.memory_left().saturating_sub(needs.peak());
    let grammar_memory = job.grammar_memory.unwrap_or(left.min(GRAMMARS));
    if grammar_memory > left {
        let more = needs.peak().saturating_add(grammar_memory);
        host.require_more_memory(&format!("{what}, grammars {}", bytes(grammar_memory)), more)?;
    }
    let mut models = Vec::with_capacity(opened.len());
    for (i, OpenedModel { name, files, sizes }) in opened.into_iter().enumerate() {
        let tokenizer = load_tokenizer(&files, host)?;
        let first = i == 0;
        let templates = job.adapter.as_deref().filter(|_| first);
        let tokenizer = adapter::templates(tokenizer, templates)?;
        let given = job.chat_template.as_deref().filter(|_| first);
        let tokenizer = chat::with_template(tokenizer, given)?;
        let draft = draft.as_ref().filter(|_| first).map(|files| {
            same_vocabulary(files, &tokenizer, vocabulary(files)?, host)?;
            Ok::<_, JobError>(FastModel::load(files, host.threads)?)
        });
        let draft = draft.transpose()?;
        let mut model = adapter::fast(&files, adapter.as_ref().filter(|_| first), host.threads)?;
        if let Some(policy) = policy_to_set(job.kv.as_deref(), &files) {
            model.set_kv(policy)?;
        }
        let kv = kv_name(job.kv.as_deref(), &files, "f16");
        let Recommended { defaults: sampling, refused } = Recommended::of(&files);
        refused.iter().for_each(|what| host.note(what));
        if !sampling.is_empty() {
            let shown = sampling.shown();
            host.note(&format!("{name}: the model's sampling where a request sets none: {shown}"));
        }
        // A GGUF model is a file; others are folders.
        let format = if files.dir().is_file() { "gguf" } else { "safetensors" };
        models.push(mantissa_serve::Loaded {
            name,
            tokenizer,
            model,
            format,
            file_type: file_type(&files),
            draft,
            kv,
            sampling,
            runtime: sizes,
        });
    }
    let grammars = match grammar_memory {
        0 => "no memory for grammars".to_owned(),
        most => format!("up to {} more for grammars", bytes(most)),
    };
    let memory = format!("memory: {} predicted ({told}), {grammars}", bytes(predicted));
    Ok(Loaded { models, predicted, memory, grammar_memory })
}

/// Returns the file type that the metadata of a GGUF file state, as llama.cpp names it.
fn file_type(files: &ModelFiles) -> Option<String> {
    /// Types that are no recipe.
    const OTHERS: [(u64, &str); 5] = [(0, "F32"), (1, "F16"), (32, "BF16"), (38, "MXFP4"), (39, "NVFP4")];
    let number = files.gguf()?.metadata().get("general.file_type")?.as_u64()?;
    let recipe = FILE_TYPES.into_iter().find(|ty| u64::from(ty.number) == number);
    let other = || OTHERS.iter().find(|(other, _)| *other == number).map(|(_, name)| (*name).to_owned());
    recipe.map(|ty| ty.name.to_uppercase()).or_else(other)
}

impl Opened {
    /// Opens the files of all models, plans their sessions, and predicts their memory.
    fn new(job: &Serve, host: &Host) -> Result<Self> {
        let models = open_models(job, host)?;
        let adapter = adapter::open(job.adapter.as_deref())?;
        let draft = job.draft.as_ref().map(|draft| open(draft, host)).transpose()?;
        // Before weights are read for the prediction.
        let all = models.iter().map(|opened| &opened.files).chain(&draft);
        let half = all.map(|files| files.checkpoint().total_bytes() / 2).sum();
        host.require_more_memory("serve: weights", half)?;
        let mut needs = SessionNeeds::default();
        for (i, OpenedModel { files, sizes, .. }) in models.iter().enumerate() {
            let adapter = adapter.as_ref().filter(|_| i == 0);
            let kv = policy_to_set(job.kv.as_deref(), files);
            needs.add_model(files, (kv, adapter), sizes, host.threads)?;
        }
        if job.shadow.is_some() {
            // A sequence of its own for each model.
            let context = models.iter().map(|opened| opened.sizes.context).max().unwrap_or(1);
            let sizes = RuntimeOptions::single(context);
            models.iter().try_for_each(|opened| needs.add_session(&opened.files, &sizes))?;
        }
        if let (Some(first), Some(files)) = (models.first(), &draft) {
            needs.add_draft(files, &first.sizes, host.threads)?;
        }
        Ok(Opened { models, adapter, draft, needs })
    }
}

/// Opens the files of all models and plans their sessions.
fn open_models(job: &Serve, host: &Host) -> Result<Vec<OpenedModel>> {
    let mut all: Vec<OpenedModel> = Vec::new();
    for ServedModel { name, model } in &job.models {
        if all.iter().any(|other| other.name == *name) {
            let allowed = "names that differ from each other and from that of MODEL";
            return Err(BadInput::new("--also", format!("{name} twice"), allowed).into());
        }
        let files = open(model, host)?;
        check_kv(job, &files)?;
        let limit = context_length(&files)?;
        let longest = job.context.unwrap_or(CONTEXT.min(limit));
        if longest == 0 || longest > limit {
            let allowed = format!("1 to {limit}, the context of {}", model.named().display());
            return Err(BadInput::new("--context", longest.to_string(), allowed).into());
        }
        let sizes = RuntimeOptions {
            speculation: if job.lookup { Speculation::Lookup } else { Speculation::Off },
            step_tokens: job.step_tokens as usize,
            ..RuntimeOptions::batch(usize::from(job.parallel), longest)
        };
        all.push(OpenedModel { name: name.clone(), files, sizes });
    }
    check_shadow(job, &all)?;
    Ok(all)
}

/// Checks that the reference of the shadow comparison is one of several models, and that contexts are alike.
fn check_shadow(job: &Serve, opened: &[OpenedModel]) -> Result<()> {
    let Some(shadow) = &job.shadow else { return Ok(()) };
    if !opened.iter().any(|model| model.name == shadow.reference) || opened.len() < 2 {
        let names: Vec<_> = opened.iter().map(|model| model.name.as_str()).collect();
        let allowed = format!("one of several models: {}; fix: add --also NAME=MODEL", names.join(", "));
        return Err(BadInput::new("--shadow", shadow.reference.clone(), allowed).into());
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

/// Refuses a KV cache that the fast engine does not run.
fn check_kv(job: &Serve, files: &ModelFiles) -> Result<()> {
    let config = load_config(files)?;
    let Some(policy) = policy_to_set(job.kv.as_deref(), files) else { return Ok(()) };
    if policy.is_calibrated() {
        let allowed = "a scheme whose levels need no calibration, or a model that stores them";
        return Err(BadInput::new("--kv", policy.to_string(), allowed).into());
    }
    KvPlan::of_policy(&config, policy)?;
    Ok(())
}
