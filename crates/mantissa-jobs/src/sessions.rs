//! Memory of models on the fast engine with their sessions, and what a session needs from a model.

use mantissa_model::{KvPolicy, ModelConfig, Tokenizer, load_config};
use mantissa_runtime::RuntimeOptions;
use mantissa_runtime::cache::KvPlan;
use mantissa_runtime::footprint::{Footprint, SessionFootprint};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use crate::adapter;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::load_needs::LoadNeeds;
use crate::model::{BASE, load_tokenizer};

/// Predicted memory of models and their sessions, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionNeeds {
    /// Weights of all models, repacked.
    pub weights: u64,
    /// Tensors as stored, at the peak of loading.
    pub loading: u64,
    /// Keys and values of all models.
    pub cache: u64,
    /// Buffers of all sessions.
    pub buffers: u64,
    /// Tokens that the cache of the last model has room for: whole blocks, one more than the context needs.
    pub room: usize,
    /// Bytes of a token in the caches of all models.
    pub token: f64,
}

impl SessionNeeds {
    /// Adds a model, with its adapter, and a session of these `sizes`. `kv` is the policy of its cache, if other than its
    /// own.
    ///
    /// # Errors
    /// A config that cannot be read.
    pub fn add_model(
        &mut self,
        files: &ModelFiles,
        (kv, adapter): (Option<&KvPolicy>, Option<&AdapterFiles>),
        sizes: &RuntimeOptions,
        threads: usize,
    ) -> Result<()> {
        let config = load_config(files)?;
        let held = || files.kv_policy().and_then(|text| text.parse::<KvPolicy>().ok());
        let policy = kv.cloned().or_else(held);
        // What the checkpoint may state without a policy takes less than f16.
        let plan = policy.and_then(|policy| KvPlan::of_policy(&config, &policy).ok());
        let plan = plan.map_or_else(|| f16_cache(&config), Ok)?;
        self.add(Footprint::of(files, &config, threads), SessionFootprint::of(sizes, &config, &plan));
        self.weights = self.weights.saturating_add(adapter::bytes_needed(files, adapter)?);
        let tokens = sizes.context.saturating_add(plan.block_tokens());
        self.room = tokens.checked_next_multiple_of(plan.block_tokens()).unwrap_or(tokens);
        self.token += plan.bytes_per_token();
        Ok(())
    }

    /// Adds a draft model for sessions of these `sizes`.
    ///
    /// # Errors
    /// A config that cannot be read.
    pub fn add_draft(&mut self, files: &ModelFiles, sizes: &RuntimeOptions, threads: usize) -> Result<()> {
        let config = load_config(files)?;
        let plan = f16_cache(&config)?;
        let session = SessionFootprint::of_draft(sizes, &config, &plan);
        self.add(Footprint::of(files, &config, threads), session);
        self.token += plan.bytes_per_token();
        Ok(())
    }

    /// Adds another session of these `sizes` on a model that is there.
    ///
    /// # Errors
    /// A config that cannot be read.
    pub fn add_session(&mut self, files: &ModelFiles, sizes: &RuntimeOptions) -> Result<()> {
        let config = load_config(files)?;
        self.add(Footprint::default(), SessionFootprint::of(sizes, &config, &f16_cache(&config)?));
        Ok(())
    }

    /// Describes them for sequences of these sizes under a policy of the cache. `peak` is the predicted peak.
    pub fn described(&self, sequences: usize, context: usize, kv: String, peak: u64) -> LoadNeeds {
        LoadNeeds {
            kv_bytes_per_token: self.token,
            kv_bytes: self.cache,
            weights: self.weights,
            loading: self.loading,
            buffers: self.buffers,
            predicted_peak_memory: peak,
            ..LoadNeeds::of(sequences, context, kv)
        }
    }

    fn add(&mut self, model: Footprint, session: SessionFootprint) {
        self.weights = self.weights.saturating_add(model.weights);
        self.loading = self.loading.max(model.loading);
        self.cache = self.cache.saturating_add(session.cache);
        self.buffers = self.buffers.saturating_add(session.buffers);
    }

    /// Bytes beside the weights at the peak: of the session, or of tensors while they load.
    pub fn beside_weights(&self) -> u64 {
        self.loading.max(self.cache.saturating_add(self.buffers))
    }

    /// Bytes at the peak.
    pub fn peak(&self) -> u64 {
        self.weights.saturating_add(self.beside_weights()).saturating_add(BASE)
    }
}

/// Returns the bytes of a token in a cache of f16; `None` for a model that the fast engine does not plan.
pub fn f16_bytes_per_token(files: &ModelFiles) -> Option<f64> {
    f16_cache(&load_config(files).ok()?).ok().map(|plan| plan.bytes_per_token())
}

/// Plan of keys and values in f16.
fn f16_cache(config: &ModelConfig) -> Result<KvPlan> {
    Ok(KvPlan::new(config, (0..config.num_hidden_layers).map(|_| None))?)
}

/// Returns the policy of the KV cache to set on the model of `files`: the `given` one, unless the checkpoint stores its
/// levels.
pub fn policy_to_set<'a>(given: Option<&'a KvPolicy>, files: &ModelFiles) -> Option<&'a KvPolicy> {
    given.filter(|policy| !(policy.is_calibrated() && files.kv_policy() == Some(&policy.to_string())))
}

/// Checks that the tokens of the draft model `files` are those of the model, whose tokenizer is `ours`.
///
/// # Errors
/// The first token that differs; a tokenizer that cannot be loaded.
pub fn same_vocabulary(files: &ModelFiles, ours: &Tokenizer, vocabulary: usize, host: &Host) -> Result<()> {
    let theirs = load_tokenizer(files, host)?;
    let Some((id, [own, other])) = ours.first_difference(&theirs, vocabulary) else { return Ok(()) };
    let found = format!("token {id} is {other:?}");
    let expected = format!("the vocabulary of the model, where it is {own:?}");
    Err(BadInput::new(format!("--draft {}", files.dir().display()), found, expected).into())
}
