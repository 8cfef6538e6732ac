//! Base of all arms of experiments: settings, architecture, tokens, and the results of runs.

use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::path::{Path, PathBuf};

use mantissa_model::{Batch, Bos, ModelConfig, Tokenizer};
use mantissa_store::json;
use mantissa_train::config::RunConfig;
use mantissa_train::data::{Batches, Cursor, Sample, TokenFile, TokenWriter, documents};
use mantissa_train::{
    Optimizer, Options, Parameters, Policy, TrainError, TrainModel, Trainer, TrainerOptions,
};
use tempfile::TempDir;

/// The share of the text, its end, that is not trained on.
const HELD_OUT: f64 = 0.1;

/// Figures of a run or a measurement, by name.
pub type Figures = BTreeMap<String, f64>;

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Trained {
    /// As `Arm::Train`.
    pub figures: Figures,
    /// Final weights.
    pub params: Parameters,
}

/// Settings, architecture, tokens.
#[derive(Debug)]
pub struct Lab {
    base: String,
    base_name: String,
    config: ModelConfig,
    temp: TempDir,
    threads: usize,
    /// Runs by settings and initial weights.
    done: HashMap<String, Trained>,
}

impl Lab {
    /// Prepares the folder `dir`, whose text is tokenized.
    pub fn new(dir: &Path) -> Result<Self, Box<dyn Error>> {
        let path = dir.join("base.toml");
        let base_name = path.display().to_string();
        let base = std::fs::read_to_string(&path).map_err(|error| format!("{base_name}: {error}"))?;
        let settings = RunConfig::parse(&base_name, &base, &[])?;
        let config = dir.join(settings.model.config.as_deref().unwrap_or("config.json"));
        let value = json::read_strict(&config, 1 << 20, "a model's config.json")?;
        let config = ModelConfig::from_json(&value, &config.display().to_string())?;
        let tokenizer = Tokenizer::load(&dir.join(settings.model.tokenizer.as_deref().unwrap_or("bytes")))?;
        let mut ids = Vec::new();
        for file in &settings.data.files {
            let file = dir.join(file);
            documents(&file, &settings.format_of(&file), |document| {
                ids.extend(tokenizer.encode(document, Bos::Auto)?);
                Ok(())
            })?;
        }
        let cut = ids.len() - (ids.len() as f64 * HELD_OUT) as usize;
        let (trained, held_out) = ids.split_at(cut);
        let temp = TempDir::new()?;
        // The matmuls are too small to share between threads.
        let lab = Lab { base, base_name, config, temp, threads: 1, done: HashMap::new() };
        for (name, ids) in [("trained", trained), ("held-out", held_out)] {
            let mut writer = TokenWriter::new(lab.config.vocab_size);
            writer.push(ids)?;
            writer.finish(&mantissa_store::Output::owned(lab.file(name)), BTreeMap::new())?;
        }
        Ok(lab)
    }

    /// Returns a path of this session.
    pub fn file(&self, name: &str) -> PathBuf {
        self.temp.path().join(format!("{name}.safetensors"))
    }

    /// Returns the base settings with `changes`; `seed` applies unless they set one.
    pub fn settings(&self, seed: u64, changes: &[String]) -> Result<RunConfig, TrainError> {
        let mut all = vec![format!("seed={seed}")];
        all.extend_from_slice(changes);
        RunConfig::parse(&self.base_name, &self.base, &all)
    }

    /// Returns windows of the text in the order of `seed`.
    pub fn batches(&self, part: &str, settings: &RunConfig, seed: u64) -> Result<Batches, TrainError> {
        let tokens = TokenFile::open(&self.file(part))?;
        Ok(Batches::new(tokens, settings.data.length, seed, Cursor::default())?)
    }

    /// Makes a model with the weights `params`.
    pub fn model(
        &self,
        settings: &RunConfig,
        policy: Policy,
        params: Parameters,
    ) -> Result<TrainModel, TrainError> {
        let (batch, max_len) = (settings.data.batch, settings.data.length);
        let options = Options { max_tokens: batch * max_len, max_len, threads: self.threads, policy };
        TrainModel::new(self.config.clone(), params, options)
    }

    /// Prepares a run with the weights `from`, or with fresh ones.
    pub fn trainer(
        &self,
        settings: &RunConfig,
        from: Option<&Parameters>,
    ) -> Result<Trainer, Box<dyn Error>> {
        let params = match from {
            Some(params) => params.clone(),
            None => Parameters::random(&self.config, settings.model.std as f32, settings.seed)?,
        };
        let policy = settings.policy().unwrap_or_default();
        let params = params.with_scales(&self.config, &policy)?;
        let chosen = &settings.optimizer;
        let optimizer = Optimizer::new(&params, &policy, &chosen.recipe())?
            .with_decay(&chosen.decay_groups(), params.table())
            .and_then(|optimizer| optimizer.with_rates(&chosen.rate_scales(), params.table()))
            .map_err(|error| error.to_string())?;
        let model = self.model(settings, policy, params)?;
        let (batch, accumulate) = (settings.data.batch, settings.data.accumulate);
        let options = TrainerOptions { batch, accumulate, schedule: settings.schedule() };
        Ok(Trainer::new(model, optimizer, self.batches("trained", settings, settings.seed)?, options)?)
    }

    /// Trains with `settings`, or returns the cached result for the same settings and initial weights.
    pub fn train(
        &mut self,
        settings: &RunConfig,
        from: Option<(&str, &Parameters)>,
    ) -> Result<Trained, Box<dyn Error>> {
        let key = format!("{} {}", from.map_or("", |(name, _)| name), settings.resolved());
        if let Some(done) = self.done.get(&key) {
            return Ok(done.clone());
        }
        let mut trainer = self.trainer(settings, from.map(|(_, params)| params))?;
        let before = trainer.model().parameters().clone();
        let start = self.held_out(settings, &before)?;
        let (mut worst, mut diverged) = (0.0f64, false);
        for _ in 0..settings.schedule.steps {
            match trainer.step() {
                Ok(report) => worst = worst.max(report.loss),
                Err(TrainError::Diverged { .. }) => {
                    diverged = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        let params = trainer.model().parameters().clone();
        let loss = if diverged { f64::INFINITY } else { self.held_out(settings, &params)? };
        let (a, b) = (before.values(), params.values());
        let changed = a.iter().zip(&*b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        // Padding between tensors is 0 and stays 0.
        let all: usize = params.table().iter().map(|param| param.range.len()).sum();
        let figures = [
            ("start", start),
            ("loss", loss),
            ("gain", start - loss),
            ("worst", worst),
            ("changed", changed as f64 / all as f64),
        ];
        let figures = figures.map(|(name, value)| (name.to_owned(), value)).into();
        let trained = Trained { figures, params };
        self.done.insert(key, trained.clone());
        Ok(trained)
    }

    /// Returns the mean loss on the validation text.
    fn held_out(&self, settings: &RunConfig, params: &Parameters) -> Result<f64, TrainError> {
        let policy = settings.policy().unwrap_or_default();
        let mut model = self.model(settings, policy, params.clone())?;
        let mut batches = self.batches("held-out", settings, 0)?;
        let (mut sample, mut nll, mut targets) = (Sample::default(), 0.0, 0);
        let batch = settings.data.batch;
        for _ in 0..batches.windows() as usize / batch {
            batches.next(batch, &mut sample)?;
            let Sample { tokens, targets: next, lens } = &sample;
            let loss = model.loss(&Batch { tokens, lens }, next)?;
            (nll, targets) = (nll + loss.nll, targets + loss.targets);
        }
        Ok(nll / targets as f64)
    }
}
