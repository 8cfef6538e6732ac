//! What the settings of a run mean: model, tokenizer, tokens, memory.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::{Bos, ModelConfig, Tokenizer};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Output, hash_file, json};
use mantissa_train::config::{OptimizerOptions, RunConfig};
use mantissa_train::data::{Batches, Cursor, DataError, TokenFile, TokenWriter, documents_within};
use mantissa_train::{
    AdamW, DecayGroups, Optimizer, Options, ParamInfo, ParamTable, Parameters, Plan, Policy, Sgd, TrainModel,
    Trainer, TrainerOptions,
};
use serde_json::Value;

use crate::app::Context;
use crate::error::BadInput;
use crate::progress::anonymous_memory;

/// Pieces in which a checkpoint is copied and hashed, 1 MiB each.
const BUFFERS: u64 = 2 << 20;
/// What a thread packs matrices into, by measurement: 2.0 to 3.3 MB of whole runs on one thread are in no other entry.
const PACKING: u64 = 512 << 10;

/// Longest `config.json` read, in bytes.
const MAX_CONFIG: u64 = 16 << 20;

/// What settings mean: model, tokenizer, memory.
pub(super) struct Setup {
    pub(super) config: ModelConfig,
    pub(super) config_json: Value,
    pub(super) tokenizer: Tokenizer,
    pub(super) tokenizer_dir: PathBuf,
    pub(super) init: Option<ModelFiles>,
    options: Options,
    pub(super) policy: Policy,
    /// Bytes by name, predicted.
    pub(super) memory: Vec<(&'static str, u64)>,
    /// Bytes that the tokens may take while they are made.
    text_memory: u64,
    /// Every parameter, and whether its weights decay.
    pub(super) decays: Vec<(ParamInfo, bool)>,
}

impl Setup {
    /// # Errors
    /// A model, a tokenizer or settings that cannot be trained.
    pub(super) fn new(settings: &RunConfig, file: &str, base: &Path, context: &Context) -> Result<Self> {
        let path = base.join(&settings.model.config);
        let config_json = json::read_strict(&path, MAX_CONFIG, "a model's config.json")?;
        let config = ModelConfig::from_json(&config_json, &path.display().to_string())
            .map_err(mantissa_model::LoadError::from)?;
        let (needed, allowed) = (settings.data.length, config.max_position_embeddings);
        if needed > allowed {
            return Err(mantissa_model::LoadError::Context { needed, allowed }.into());
        }
        let tokenizer_dir = base.join(&settings.model.tokenizer);
        let what = format!("{}: tokenizer", tokenizer_dir.display());
        context.require_more_memory(&what, Tokenizer::bytes_to_load(&tokenizer_dir))?;
        let tokenizer = Tokenizer::load(&tokenizer_dir)?;
        let init = settings.model.init.as_ref().map(|dir| ModelFiles::open(&base.join(dir))).transpose()?;
        // Both were checked with the settings.
        let policy = settings.policy().unwrap_or_default();
        let options = Options {
            max_tokens: settings.data.batch.saturating_mul(settings.data.length),
            max_len: settings.data.length,
            threads: context.threads,
            policy: policy.clone(),
        };
        let mut memory = Plan::new(&config, &options).entries;
        let table = ParamTable::new(&config);
        let state = match settings.optimizer_options() {
            OptimizerOptions::AdamW(options) => AdamW::bytes(&table, &policy, options.moments),
            OptimizerOptions::Sgd(options) => Sgd::bytes(&table, &policy, options.momentum),
        };
        memory.push(("optimizer state", state));
        memory.push(("buffers", BUFFERS + PACKING * context.threads as u64));
        // Measured, now that they are there.
        memory.push(("program and tokenizer", anonymous_memory().unwrap_or(0)));
        let decays = settings.decay_groups().select(&table).map_err(|error| {
            let found = error.to_string();
            BadInput::new(format!("{file}: optimizer.{}", error.key), found, DecayGroups::ALLOWED)
        })?;
        let decays = table.iter().cloned().zip(decays).collect();
        let text_memory = context.memory_left();
        Ok(Setup {
            config,
            config_json,
            tokenizer,
            tokenizer_dir,
            init,
            options,
            policy,
            memory,
            text_memory,
            decays,
        })
    }

    /// The run at its beginning.
    ///
    /// # Errors
    /// Memory, or weights that cannot be read.
    pub(super) fn trainer(&self, settings: &RunConfig, tokens: TokenFile) -> Result<Trainer> {
        let params = match &self.init {
            Some(files) => Parameters::load_as(files, &self.config, self.policy.initial_weights())?,
            None => {
                let (std, precision) = (settings.model.std as f32, self.policy.initial_weights());
                Parameters::random_as(&self.config, std, settings.seed, precision)?
            }
        };
        let optimizer: Optimizer = match settings.optimizer_options() {
            OptimizerOptions::AdamW(options) => AdamW::new(&params, &self.policy, options)?.into(),
            OptimizerOptions::Sgd(options) => Sgd::new(&params, &self.policy, options)?.into(),
        };
        let optimizer = optimizer
            .with_decay(&settings.decay_groups(), params.table())
            .map_err(|error| BadInput::new(error.key, error.to_string(), DecayGroups::ALLOWED))?;
        let model = TrainModel::new(self.config.clone(), params, self.options.clone())?;
        let batches = Batches::new(tokens, settings.data.length, settings.seed, Cursor::default())?;
        let options = TrainerOptions {
            batch: settings.data.batch,
            accumulate: settings.data.accumulate,
            schedule: settings.schedule(),
        };
        Ok(Trainer::new(model, optimizer, batches, options)?)
    }
}

/// The run's tokens, made once from its data and its tokenizer.
///
/// # Errors
/// Data or a tokenizer that cannot be read; I/O.
pub(super) fn tokens(run: &Path, settings: &RunConfig, base: &Path, setup: &Setup) -> Result<TokenFile> {
    let path = run.join("tokens.safetensors");
    let made_from = made_from(settings, base, &setup.tokenizer_dir)?;
    if path.exists() {
        let file = TokenFile::open(&path)?;
        if file.about().get("made_from") == Some(&made_from) {
            return Ok(file);
        }
    }
    let mut writer = TokenWriter::new(setup.config.vocab_size);
    let mut count = 0;
    for file in &settings.data.files {
        let file = base.join(file);
        let within = setup.text_memory;
        count += documents_within(&file, &settings.format_of(&file), within, |document| {
            let needs = (document.len() as u64).saturating_mul(Tokenizer::ENCODING) + writer.bytes();
            if needs > within {
                return Err(DataError::Memory { file: file.display().to_string(), needs, allowed: within });
            }
            let mut ids = setup.tokenizer.encode(document, Bos::Auto).map_err(DataError::from)?;
            ids.extend(setup.config.eos_token_ids.first());
            writer.push(&ids)
        })?;
    }
    let about = [("made_from".to_owned(), made_from), ("documents".to_owned(), count.to_string())];
    writer.finish(&Output::owned(&path), about.into())?;
    Ok(TokenFile::open(&path)?)
}

/// Hash of what tokens follow from: the files, the tokenizer, and how the files are cut.
fn made_from(settings: &RunConfig, base: &Path, tokenizer: &Path) -> Result<String> {
    let mut text = format!("{:?} {}", settings.data.split, settings.data.field);
    let files = settings.data.files.iter().map(|file| base.join(file));
    for file in files.chain([tokenizer.join("tokenizer.json")]) {
        if !file.is_file() {
            return Err(BadInput::new(file.display().to_string(), "no such file", "a file").into());
        }
        text += &format!(" {}", hash_file(&file)?.hex());
    }
    Ok(FileDigest::of(text.as_bytes()).hex())
}
