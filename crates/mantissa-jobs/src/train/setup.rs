//! Resolved settings of a run: model, tokenizer, memory.

use std::path::Path;
use std::sync::Arc;

use mantissa_model::{Buffers, ModelConfig, Tokenizer, load_config, untie};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, hash_file, json, regular};
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::DefaultTemplate;
use mantissa_train::data::{BEGIN, Data, END};
use mantissa_train::{
    DecayGroups, MemoryPlan, NoSuchTensor, Optimizer, ParamInfo, ParamTable, Precision, SoftTargets, Teacher,
    TrainModel, Trainer, TrainerOptions,
};
use serde_json::Value;

use super::ranks::Ranks;
use super::replica::{Replica, initial};
use super::start::StartMode;
use super::teacher::open_teacher;
use super::vocabulary::Vocabulary;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::memory;

/// Buffers for copying and hashing a checkpoint, up to 1 MiB each.
const BUFFERS: u64 = 2 << 20;
/// Matmul packing buffers per thread, from measurement: whole runs on one thread use 2.0 to 3.3 MB beyond the
/// other entries.
const PACKING: u64 = 512 << 10;

/// Maximum size of `config.json` in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// Resolved settings of a run.
pub(crate) struct Setup {
    /// Model and optimizer, which every rank makes.
    pub(crate) replica: Arc<Replica>,
    pub(crate) config_json: Value,
    pub(crate) tokenizer: Tokenizer,
    /// Its folder.
    pub(crate) vocabulary: Vocabulary,
    /// Template for conversations, if the model that is fine-tuned has none.
    pub(crate) dialogue: Option<DefaultTemplate>,
    /// Files of the teacher, and its weight and temperature in the loss.
    teacher: Option<(ModelFiles, SoftTargets)>,
    /// Predicted bytes by purpose.
    pub(crate) memory: Vec<(&'static str, u64)>,
    /// Bytes of optimizer state in a file.
    pub(crate) paged: u64,
    /// Bytes available for making the tokens.
    pub(crate) text_memory: u64,
    /// Parameters, each with its weight decay flag.
    pub(crate) decays: Vec<(ParamInfo, bool)>,
}

impl Setup {
    /// Number of parameters that train, those of adapters included.
    pub(crate) fn trainable(&self) -> u64 {
        self.decays.iter().map(|(param, _)| param.range.len() as u64).sum()
    }

    /// Resolves the settings and checks them against model and tokenizer.
    ///
    /// # Errors
    /// A model, tokenizer or settings that cannot be trained.
    pub(crate) fn new(
        settings: &RunConfig,
        file: &str,
        base: &Path,
        (how, ranks): (StartMode, &Ranks),
        host: &Host,
    ) -> Result<Self> {
        ranks.check(settings)?;
        let adapts = settings.adapter.is_some();
        // Before the configuration, which a GGUF file has elsewhere.
        let init = settings.model.init.as_ref().map(|dir| initial(&base.join(dir), adapts)).transpose()?;
        let (mut config_json, place) = architecture(settings, file, base)?;
        if let Some(files) = init.as_ref().filter(|_| settings.model.config.is_none()) {
            config_json = of_weights(files, config_json)?;
        }
        let read =
            |json: &Value| ModelConfig::from_json(json, &place).map_err(mantissa_model::LoadError::from);
        let mut config = read(&config_json)?;
        let (needed, allowed) = (settings.data.length, config.max_position_embeddings);
        if needed > allowed {
            return Err(mantissa_model::LoadError::Context { needed, allowed }.into());
        }
        let data = settings.data.files.iter().chain(&settings.validation.files);
        data.into_iter().try_for_each(|file| require_file(&base.join(file)))?;
        let run = base.join(&settings.out);
        let vocabulary = Vocabulary::find(settings, base, (&run, how), config.vocab_size, host)?;
        if let Some(size) = vocabulary.size {
            set_vocabulary(&mut config_json, size);
            config = read(&config_json)?;
        }
        let tokenizer = tokenizer(&vocabulary.dir, host)?;
        let has_default = tokenizer.chat_template().is_none() && settings.model.init.is_some();
        let dialogue = has_default.then(|| DefaultTemplate::dialogue(&tokenizer)).transpose()?;
        let threads = (host.threads / ranks.in_process().max(1)).max(1);
        let replica = Replica::new(settings, config, init, threads)?;
        let Replica { config, options, tuning, policy, .. } = &replica;
        let with_scales = || ParamTable::with_scales(config, policy);
        let table = tuning.as_ref().map_or_else(with_scales, |(tuning, _)| tuning.table(config));
        let plan = match tuning {
            Some((tuning, formats)) => MemoryPlan::tuned(config, options, tuning, formats),
            None => MemoryPlan::new(config, options),
        };
        let mut memory = memory(plan, (&replica, ranks), &table, settings, merged_precision(&config_json));
        let teacher = open_teacher(settings, base, (config, &tokenizer), host)?;
        if let Some((files, _)) = &teacher {
            let buffers = Teacher::bytes(&load_config(files)?, options.max_tokens, options.max_len);
            memory.push(("teacher", files.checkpoint().total_bytes() + buffers));
        }
        let fault = |error: NoSuchTensor| {
            let found = error.to_string();
            BadInput::new(format!("{file}: optimizer.{}", error.key), found, DecayGroups::ALLOWED)
        };
        let decays = settings.optimizer.decay_groups().select(&table).map_err(fault)?;
        settings.optimizer.rate_scales().select(&table).map_err(fault)?;
        // With ZeRO each rank has a part of the file, without it all.
        let files = if settings.parallel.zero == 0 { ranks.in_process().max(1) as u64 } else { 1 };
        let paged = files * settings.optimizer.recipe().paged_bytes(&table);
        let decays = table.iter().cloned().zip(decays).collect();
        let text_memory = host.memory_left();
        Ok(Setup {
            replica: Arc::new(replica),
            config_json,
            tokenizer,
            vocabulary,
            dialogue,
            teacher,
            memory,
            paged,
            text_memory,
            decays,
        })
    }

    /// Returns the predicted bytes.
    pub(crate) fn needs(&self) -> u64 {
        self.memory.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Predicts the bytes that an autopsy takes beyond a run's.
    pub(crate) fn autopsy_bytes(&self) -> u64 {
        Trainer::autopsy_bytes(&self.replica.config, &self.replica.options)
    }

    /// Returns the hash of the teacher's weights; `None` without a teacher.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn teacher_digest(&self) -> Result<Option<String>> {
        let Some((files, _)) = &self.teacher else { return Ok(None) };
        let mut text = String::new();
        for path in files.checkpoint().files() {
            text += &hash_file(path)?.hex();
        }
        Ok(Some(FileDigest::of(text.as_bytes()).hex()))
    }

    /// Loads the teacher.
    ///
    /// # Errors
    /// Not enough memory, or weights that cannot be read.
    pub(crate) fn teacher(&self) -> Result<Option<Teacher>> {
        let Some(((files, soft), digest)) = self.teacher.as_ref().zip(self.teacher_digest()?) else {
            return Ok(None);
        };
        let sizes = (self.replica.options.max_tokens, self.replica.options.max_len);
        Ok(Some(Teacher::load(files, sizes, digest)?.with_soft_targets(*soft)))
    }

    /// Returns the files of the teacher, if there is one.
    pub(crate) fn teacher_files(&self) -> Option<&ModelFiles> {
        self.teacher.as_ref().map(|(files, _)| files)
    }

    /// Makes the trainer at step 0.
    ///
    /// # Errors
    /// Too few tokens.
    pub(crate) fn trainer(
        (model, optimizer): (TrainModel, Optimizer),
        settings: &RunConfig,
        data: Box<dyn Data>,
    ) -> Result<Trainer> {
        let options = TrainerOptions {
            batch: settings.data.batch,
            accumulate: settings.data.accumulate,
            schedule: settings.schedule(),
        };
        Ok(Trainer::new(model, optimizer, data, options)?)
    }
}

/// Reads the model's configuration from the file or table of the settings, or from the initial model; returns it with
/// its name for messages.
fn architecture(settings: &RunConfig, file: &str, base: &Path) -> Result<(Value, String)> {
    if let Some(table) = &settings.model.architecture {
        return Ok((serde_json::to_value(table)?, format!("{file}: model.architecture")));
    }
    let path = settings.model_config(base);
    Ok((json::read_strict(&path, MAX_CONFIG, "a model's config.json")?, path.display().to_string()))
}

/// Returns the configuration of the initial model, `config`, as its weights show it: with a head of its own if it has one.
fn of_weights(files: &ModelFiles, config: Value) -> Result<Value> {
    let mut config = files.config().cloned().unwrap_or(config);
    let shown = load_config(files)?;
    if shown.states_tied && !shown.tie_word_embeddings {
        untie(&mut config);
    }
    Ok(config)
}

/// Sets the vocabulary of a tokenizer that was trained on the data.
fn set_vocabulary(config: &mut Value, size: usize) {
    let Value::Object(fields) = config else { return };
    for (field, value) in
        [("vocab_size", size), ("bos_token_id", BEGIN as usize), ("eos_token_id", END as usize)]
    {
        fields.insert(field.to_owned(), value.into());
    }
}

/// Dtype of a merged model: bf16 if the source has 16 bits, else f32.
pub(crate) fn merged_precision(config_json: &Value) -> Precision {
    let dtype = ["torch_dtype", "dtype"].iter().find_map(|field| config_json[*field].as_str());
    match dtype {
        Some("bfloat16" | "float16") => Precision::Bf16,
        _ => Precision::F32,
    }
}

/// Bytes of a merged model that is loaded to compare its logits over windows of `length` tokens with the trained one's.
fn merging(config: &ModelConfig, precision: Precision, length: usize) -> u64 {
    let lengths = config.tensors().into_iter().map(|tensor| tensor.shape.iter().product::<usize>() as u64);
    let (all, largest) = lengths.fold((0, 0), |(sum, most), n| (sum + n, n.max(most)));
    let logits = 2 * 4 * (length as u64).saturating_mul(config.vocab_size as u64);
    let buffers = Buffers::bytes_needed(config, length, length);
    (precision.bytes() * (all + largest)).saturating_add(logits).saturating_add(buffers)
}

/// Predicts the memory of a run by purpose.
fn memory(
    plan: MemoryPlan,
    (replica, ranks): (&Replica, &Ranks),
    table: &ParamTable,
    settings: &RunConfig,
    merged: Precision,
) -> Vec<(&'static str, u64)> {
    let Replica { config, options, parallel, .. } = replica;
    let batches = settings.data.accumulate / parallel.leaves.max(1);
    let held = parallel.held(config, table, ranks.count(), batches);
    let mut memory = plan.entries;
    for (what, bytes) in &mut memory {
        // What other ranks hold takes no memory here.
        let share = [("parameters", held.weights), ("gradients", held.gradients)];
        if let Some((_, share)) = share.into_iter().find(|(divided, _)| divided == what) {
            *bytes = (*bytes as f64 * share) as u64;
        }
    }
    let model: u64 = memory.iter().map(|(_, bytes)| bytes).sum();
    let recipe = settings.optimizer.recipe();
    let state = match parallel.zero > 0 && ranks.count() > 1 {
        true => recipe.bytes_of_rank(table, &options.policy, ranks.count()),
        false => recipe.bytes(table, &options.policy),
    };
    memory.push(("optimizer state", state));
    let largest = table.iter().map(|param| param.range.len()).max().unwrap_or(0);
    let gradients = options.policy.gradients;
    let leaves =
        parallel.bytes((table.len(), largest), gradients, ranks.count()) + gradients.bytes() * held.messages;
    if leaves > 0 {
        memory.push(("leaves and messages", leaves));
    }
    let others = ranks.in_process().saturating_sub(1) as u64;
    if others > 0 {
        let buffers = PACKING * options.threads as u64 + recipe.page_buffers(options.threads);
        memory.push(("other ranks", others * (model + state + leaves + buffers)));
    }
    let pages = recipe.page_buffers(options.threads);
    let copied = BUFFERS.min(2 * (state + options.policy.weights.bytes() * table.len() as u64));
    let merges = settings.adapter.as_ref().is_some_and(|own| own.merge || own.requantize.is_some());
    let merging = if merges { merging(config, merged, settings.data.length) } else { 0 };
    // No checkpoint is written while the models are compared.
    let copied = copied.saturating_sub(merging);
    memory.push(("buffers", copied + PACKING * options.threads as u64 + pages));
    if merges {
        memory.push(("merged model and its KL", merging));
    }
    // Measured now that the tokenizer is loaded.
    memory.push(("program and tokenizer", memory::anonymous().unwrap_or(0)));
    memory
}

/// Loads the tokenizer in `dir`, if memory holds it.
fn tokenizer(dir: &Path, host: &Host) -> Result<Tokenizer> {
    let what = format!("{}: tokenizer", dir.display());
    host.require_more_memory(&what, Tokenizer::bytes_to_load(dir))?;
    Ok(Tokenizer::load(dir)?)
}

/// Refuses a data file that is missing or cannot be opened.
fn require_file(path: &Path) -> Result<()> {
    regular::open(path, "a file of training data")?;
    Ok(())
}
