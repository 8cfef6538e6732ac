//! Resolved settings of a run: model, tokenizer, memory.

use std::path::Path;

use mantissa_model::{Buffers, ModelConfig, Tokenizer, load_config, untie};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Manifest, hash_file, json, regular};
use mantissa_train::config::RunConfig;
use mantissa_train::data::chat::DefaultTemplate;
use mantissa_train::data::{BEGIN, Data, END};
use mantissa_train::{
    DecayGroups, Formats, MemoryPlan, NoSuchTensor, Optimizer, Options, ParamInfo, ParamTable, Parameters,
    Policy, Precision, SoftTargets, Teacher, TrainModel, Trainer, TrainerOptions, Tuning,
};
use serde_json::Value;

use super::start::StartMode;
use super::teacher::open_teacher;
use super::vocabulary::Vocabulary;
use crate::error::{BadInput, Result};
use crate::escape::quoted;
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
    pub(crate) config: ModelConfig,
    pub(crate) config_json: Value,
    pub(crate) tokenizer: Tokenizer,
    /// Its folder.
    pub(crate) vocabulary: Vocabulary,
    /// Template for conversations, if the model that is fine-tuned has none.
    pub(crate) dialogue: Option<DefaultTemplate>,
    pub(crate) init: Option<ModelFiles>,
    options: Options,
    /// Settings of adapters, and the formats of the frozen weights.
    tuning: Option<(Tuning, Formats)>,
    pub(crate) policy: Policy,
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
        how: StartMode,
        host: &Host,
    ) -> Result<Self> {
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
        // Settings were validated, so neither default is used.
        let policy = settings.policy().unwrap_or_default();
        let options = Options {
            max_tokens: settings.data.batch.saturating_mul(settings.data.length),
            max_len: settings.data.length,
            threads: host.threads,
            policy: policy.clone(),
        };
        let tuning = match (settings.tuning(), &init) {
            (Some(tuning), Some(files)) => {
                tuning.check(&config)?;
                let formats = tuning.formats(files, &config)?;
                Some((tuning, formats))
            }
            _ => None,
        };
        let with_scales = || ParamTable::with_scales(&config, &policy);
        let table = tuning.as_ref().map_or_else(with_scales, |(tuning, _)| tuning.table(&config));
        let plan = match &tuning {
            Some((tuning, formats)) => MemoryPlan::tuned(&config, &options, tuning, formats),
            None => MemoryPlan::new(&config, &options),
        };
        let mut memory = memory(plan, &options, &table, settings, (&config, merged_precision(&config_json)));
        let teacher = open_teacher(settings, base, (&config, &tokenizer), host)?;
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
        let paged = settings.optimizer.recipe().paged_bytes(&table);
        let decays = table.iter().cloned().zip(decays).collect();
        let text_memory = host.memory_left();
        Ok(Setup {
            config,
            config_json,
            tokenizer,
            vocabulary,
            dialogue,
            init,
            options,
            tuning,
            policy,
            teacher,
            memory,
            paged,
            text_memory,
            decays,
        })
    }

    /// Loads or initializes the model, and makes its optimizer. Writes nothing, so that weights that do not
    /// fit are found before an old run is removed.
    ///
    /// # Errors
    /// Not enough memory, or weights that cannot be read.
    pub(crate) fn model(&self, settings: &RunConfig) -> Result<(TrainModel, Optimizer)> {
        let params = match (&self.init, &self.tuning) {
            (Some(files), Some((tuning, _))) => {
                Parameters::tuned(files, &self.config, tuning, &self.policy, self.options.threads)?
            }
            (Some(files), None) => Parameters::load_as(files, &self.config, self.policy.initial_weights())?,
            (None, _) => {
                let (std, precision) = (settings.model.std as f32, self.policy.initial_weights());
                Parameters::random_as(&self.config, std, settings.seed, precision)?
            }
        };
        let params = params.with_scales(&self.config, &self.policy)?;
        let chosen = &settings.optimizer;
        let optimizer = Optimizer::new(&params, &self.policy, &chosen.recipe())?
            .with_decay(&chosen.decay_groups(), params.table())
            .and_then(|optimizer| optimizer.with_rates(&chosen.rate_scales(), params.table()))
            .map_err(|error| BadInput::new(error.key, error.to_string(), DecayGroups::ALLOWED))?;
        let mut model = TrainModel::new(self.config.clone(), params, self.options.clone())?;
        if let Some(factor) = settings.model.balance {
            model.set_balance_factor(factor as f32);
        }
        Ok((model, optimizer))
    }

    /// Returns the predicted bytes.
    pub(crate) fn needs(&self) -> u64 {
        self.memory.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Predicts the bytes that an autopsy takes beyond a run's.
    pub(crate) fn autopsy_bytes(&self) -> u64 {
        Trainer::autopsy_bytes(&self.config, &self.options)
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
        let sizes = (self.options.max_tokens, self.options.max_len);
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
    options: &Options,
    table: &ParamTable,
    settings: &RunConfig,
    (config, merged): (&ModelConfig, Precision),
) -> Vec<(&'static str, u64)> {
    let mut memory = plan.entries;
    let recipe = settings.optimizer.recipe();
    let state = recipe.bytes(table, &options.policy);
    memory.push(("optimizer state", state));
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

/// Opens the initial model in `dir`, whose layers may be quantized if only adapters train.
fn initial(dir: &Path, adapts: bool) -> Result<ModelFiles> {
    let files = ModelFiles::open(dir)?;
    let refused = |found: String, allowed: &str, fix: String| {
        Err(BadInput::new(format!("{}: model.init", dir.display()), found, allowed).with_fix(fix).into())
    };
    let decode = format!("mantissa convert {} --format native --requantize bf16 --out FOLDER", quoted(dir));
    if files.gguf().is_some() {
        let fix = format!("{decode}, and train an adapter on FOLDER; it fits this file too");
        return refused("a GGUF file".to_owned(), "a model folder", fix);
    }
    if files.is_quantized() && !adapts {
        let found = format!("weights in format {}", files.convention_name());
        let fix =
            "set model.init to the folder that it was quantized from, or train an adapter (--adapter lora)";
        return refused(found, "a dense model folder", fix.to_owned());
    }
    if let Some(table) = quantized_table(&files)? {
        let fix = format!("{decode}, which decodes it, and train on FOLDER");
        return refused(format!("a quantized {table}"), "an unquantized embedding and head", fix);
    }
    // The history goes into the trained model's manifest, which is written last; a bad one must fail now.
    Manifest::history(files.dir())?;
    Ok(files)
}

/// Returns the embedding or head of a quantized folder if it is quantized too: training reads both in floats.
fn quantized_table(files: &ModelFiles) -> Result<Option<String>> {
    if !files.is_quantized() {
        return Ok(None);
    }
    let tables = load_config(files)?.tables().into_iter().map(|table| table.module);
    Ok(tables.into_iter().find(|module| !files.is_dense(&format!("{module}.weight"))))
}

/// Refuses a data file that is missing or cannot be opened.
fn require_file(path: &Path) -> Result<()> {
    regular::open(path, "a file of training data")?;
    Ok(())
}
