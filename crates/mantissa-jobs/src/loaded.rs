//! Models that run side by side on the reference engine: their memory, and loading.

use mantissa_eval::Sequence;
use mantissa_model::{Adapted, Buffers, Decoder, KvCache, KvPolicy, load_config};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use crate::adapter;
use crate::calibration::Calibration;
use crate::error::Result;
use crate::host::Host;
use crate::load_needs::{LoadNeeds, kv_name};
use crate::model::BASE;

/// Model ready to run.
pub struct LoadedModel {
    /// Files of the model.
    pub files: ModelFiles,
    /// Loaded decoder.
    pub decoder: Decoder,
}

impl LoadedModel {
    /// Loads the model of `files`.
    ///
    /// # Errors
    /// As [`Decoder::load`].
    pub fn new(files: ModelFiles) -> Result<Self> {
        Ok(LoadedModel { decoder: Decoder::load(&files)?, files })
    }

    /// Sets the KV cache policy, and learns its levels on `calibration`, drawn by a seed, if it needs them.
    fn set_kv(
        &mut self,
        policy: &KvPolicy,
        calibration: Option<(&Calibration, u64)>,
        host: &Host,
    ) -> Result<()> {
        let set = match calibration {
            Some((texts, seed)) if policy.is_calibrated() => texts.load(&self.files, None, seed, host)?,
            _ => None,
        };
        let Some(set) = set else {
            let stored = policy.is_calibrated() && self.files.kv_policy() == Some(&policy.to_string());
            return if stored { Ok(()) } else { Ok(self.decoder.set_kv(policy)?) };
        };
        let (config, tokens) = (self.decoder.config(), set.windows.iter().map(Vec::len));
        let (longest, all) = (tokens.clone().max().unwrap_or(0), tokens.sum::<usize>() as u64);
        // Hidden states of all tokens, and keys and values of one layer, each with a weight and an index.
        let each = (config.hidden_size as u64).saturating_add(6 * config.key_value_width() as u64);
        let needs =
            Buffers::bytes_needed(config, longest, longest).saturating_add(all.saturating_mul(4 * each));
        host.require_more_memory("calibration of the KV cache", needs)?;
        Ok(self.decoder.set_kv_calibrated(policy, &set.windows)?)
    }
}

/// Planned use of a model, for predicting memory and loading.
#[derive(Clone, Copy, Default)]
pub struct ModelUse<'a> {
    /// Tokens of the longest pass, whose hidden states are held at once.
    pub pass: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Number of concurrent passes.
    pub threads: usize,
    /// True if a KV cache is kept.
    pub cached: bool,
    /// Rows of logits held by each pass.
    pub logits: usize,
    /// KV cache policy of the first model, if other than its own.
    pub kv: Option<&'a KvPolicy>,
    /// Calibration, and its seed, for a policy that learns levels.
    pub calibration: Option<(&'a Calibration, u64)>,
    /// Adapter of the first model.
    pub adapter: Option<&'a AdapterFiles>,
}

impl ModelUse<'_> {
    /// Describes an evaluation on `sequences` with up to `threads` concurrent passes.
    pub fn evaluation(sequences: &[Sequence], threads: usize) -> Self {
        let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let threads = threads.min(sequences.len());
        ModelUse {
            pass: longest,
            longest,
            threads,
            cached: false,
            logits: mantissa_eval::ROWS,
            ..ModelUse::default()
        }
    }

    /// Loads the model of `files` and, if there is one, that of `other`, if memory holds them side by side.
    ///
    /// # Errors
    /// As [`Decoder::load`]; not enough memory.
    pub fn load(
        self,
        files: ModelFiles,
        other: Option<ModelFiles>,
        host: &Host,
    ) -> Result<(LoadedModel, Option<LoadedModel>)> {
        self.require(&std::iter::once(&files).chain(&other).collect::<Vec<_>>(), host)?;
        let mut model = LoadedModel { decoder: adapter::decoder(&files, self.adapter)?, files };
        let other = other.map(LoadedModel::new).transpose()?;
        if let Some(policy) = self.kv {
            model.set_kv(policy, self.calibration, host)?;
        }
        Ok((model, other))
    }

    /// Checks that memory holds the models of these files side by side.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn require(self, models: &[&ModelFiles], host: &Host) -> Result<()> {
        let (what, needs) = self.needed(models)?;
        Ok(host.require_memory(&what, needs)?)
    }

    /// Describes the models of these files side by side, and predicts their memory in bytes.
    ///
    /// # Errors
    /// As [`load_config`].
    pub fn needed(self, models: &[&ModelFiles]) -> Result<(String, u64)> {
        let needs = self.needs(models)?.predicted_peak_memory;
        let names: Vec<_> = models.iter().map(|files| files.dir().display().to_string()).collect();
        Ok((format!("{}: weights, buffers and cache", names.join(" and ")), needs))
    }

    /// Predicts the memory of the models of these files side by side.
    ///
    /// # Errors
    /// As [`load_config`].
    pub fn needs(self, models: &[&ModelFiles]) -> Result<LoadNeeds> {
        let kv = match models.first() {
            Some(files) if self.cached => kv_name(self.kv, files, "f32"),
            _ => "none".to_owned(),
        };
        let mut all = LoadNeeds::of(self.threads, self.longest, kv);
        for (i, files) in models.iter().enumerate() {
            let used = if i == 0 { self } else { ModelUse { kv: None, adapter: None, ..self } };
            used.add(files, &mut all)?;
        }
        let LoadNeeds { kv_bytes, weights, loading, buffers, .. } = all;
        let parts = [kv_bytes, weights, loading, buffers];
        all.predicted_peak_memory = parts.into_iter().fold(BASE, u64::saturating_add);
        Ok(all)
    }

    /// Adds the model of `files`.
    fn add(self, files: &ModelFiles, all: &mut LoadNeeds) -> Result<()> {
        let config = load_config(files)?;
        let buffers = Buffers::bytes_needed(&config, self.pass, self.longest);
        let logits = (self.logits as u64).saturating_mul(config.vocab_size as u64).saturating_mul(4);
        let (cache, token) = match self.kv {
            _ if !self.cached => (0, 0),
            Some(policy) => (
                KvCache::bytes_needed_under(&config, self.longest, policy)?,
                KvCache::bytes_needed_under(&config, 1, policy)?,
            ),
            None => (KvCache::bytes_needed(&config, self.longest), KvCache::bytes_needed(&config, 1)),
        };
        // A tensor is held as stored bytes and, if quantized, as one byte per code.
        let largest = files.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
        let widest = config.decoder_linears().map(|l| (l.rows * l.cols) as u64).max().unwrap_or(0);
        let adapter = self.adapter.map_or(0, |adapter| Adapted::bytes_needed(&config, adapter));
        let threads = self.threads as u64;
        let work = buffers.saturating_add(logits).saturating_mul(threads);
        all.buffers = all.buffers.saturating_add(work);
        all.kv_bytes = all.kv_bytes.saturating_add(cache.saturating_mul(threads));
        all.kv_bytes_per_token += token as f64;
        all.loading = all.loading.saturating_add(largest.saturating_add(widest));
        let weights = files.checkpoint().total_bytes().saturating_add(adapter);
        all.weights = all.weights.saturating_add(weights);
        Ok(())
    }
}
