//! Memory of models that run side by side.

use mantissa_eval::Sequence;
use mantissa_model::{Adapted, Buffers, KvCache, KvPolicy};
use mantissa_quant::model_config;
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::host::Host;
use crate::model::BASE;

/// Planned use of a model, for predicting memory.
#[derive(Clone, Copy)]
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
            kv: None,
            adapter: None,
        }
    }

    /// Checks that memory holds the models of these files side by side.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn require(self, models: &[ModelFiles], host: &Host) -> Result<()> {
        let (what, needs) = self.needed(models)?;
        Ok(host.require_memory(&what, needs)?)
    }

    /// Describes the models of these files side by side, and predicts their memory in bytes.
    ///
    /// # Errors
    /// As [`model_config`].
    pub fn needed(self, models: &[ModelFiles]) -> Result<(String, u64)> {
        let mut needs = BASE;
        for (i, files) in models.iter().enumerate() {
            let used = if i == 0 { self } else { ModelUse { kv: None, adapter: None, ..self } };
            needs = needs.saturating_add(used.bytes(files)?);
        }
        let names: Vec<_> = models.iter().map(|files| files.dir().display().to_string()).collect();
        Ok((format!("{}: weights, buffers and cache", names.join(" and ")), needs))
    }

    fn bytes(self, files: &ModelFiles) -> Result<u64> {
        let config = model_config(files)?;
        let buffers = Buffers::bytes_needed(&config, self.pass, self.longest);
        let logits = (self.logits as u64).saturating_mul(config.vocab_size as u64).saturating_mul(4);
        let cache = match self.kv {
            _ if !self.cached => 0,
            Some(policy) => KvCache::bytes_needed_under(&config, self.longest, policy)?,
            None => KvCache::bytes_needed(&config, self.longest),
        };
        // A tensor is held as stored bytes and, if quantized, as one byte per code.
        let largest = files.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
        let widest = config.decoder_linears().map(|l| (l.rows * l.cols) as u64).max().unwrap_or(0);
        let passing = largest.saturating_add(widest);
        let per_pass =
            buffers.saturating_add(logits).saturating_add(cache).saturating_mul(self.threads as u64);
        let weights = files.checkpoint().total_bytes().saturating_add(passing);
        let adapter = self.adapter.map_or(0, |adapter| Adapted::bytes_needed(&config, adapter));
        Ok(weights.saturating_add(per_pass).saturating_add(adapter))
    }
}
