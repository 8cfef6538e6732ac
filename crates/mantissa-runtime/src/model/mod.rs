//! A model under the fast contract: the layers of [`mantissa_model::flow`] with prepared linear layers.

mod operators;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use mantissa_kernels::for_each;
use mantissa_model::flow::{AbsorbedHeads, CachedAttention, Sequences};
use mantissa_model::{
    Batch, Buffers, Embedding, ForwardError, KvPolicy, LayerParts, Linear, LinearInfo, LinearKind, LoadError,
    ModelConfig, Norm, WeightSource, load_config, require_head,
};
use mantissa_store::convention::LinearWeight;

use self::operators::{FastLayer, Run, normalize};
use crate::cache::KvPlan;
use crate::prepared::{self, PreparedLinear, PreparedMatmul, Rows, Scratch};

/// A model ready to run. Any number of threads may run passes, each with its own [`FastBuffers`].
#[derive(Debug)]
pub struct FastModel {
    config: ModelConfig,
    embedding: Embedding<PreparedLinear>,
    layers: Vec<FastLayer>,
    norm: Norm,
    /// Output head; `None` if it is the embedding.
    head: Option<PreparedLinear>,
    threads: usize,
    kv: KvPlan,
}

/// Buffers of passes: planned once, reused by every pass.
#[derive(Debug)]
pub struct FastBuffers {
    buffers: Buffers,
    scratch: Scratch,
    /// Inputs of the head.
    gathered: Vec<f32>,
    /// Rows of the last pass.
    rows: usize,
}

impl FastBuffers {
    /// Index of the last row of the last pass; 0 before the first.
    pub fn last_row(&self) -> usize {
        self.rows.saturating_sub(1)
    }
}

/// Returns the number of layers that are loaded at a time.
pub(crate) fn loaders(config: &ModelConfig, threads: usize) -> usize {
    threads.min(config.num_hidden_layers).clamp(1, 4)
}

/// Caches of the layers of a pass.
pub trait Caches {
    /// Returns attention through the cache of layer `layer`.
    fn layer(&mut self, layer: usize) -> &mut dyn CachedAttention;
}

impl FastModel {
    /// Loads the model that `source` describes, to run on up to `threads` threads, which change no bit of a result.
    /// Up to four layers are loaded at a time, each with one weight as stored.
    ///
    /// # Errors
    /// As [`mantissa_model::Decoder::load`].
    pub fn load(source: &(dyn WeightSource + Sync), threads: usize) -> Result<Self, LoadError> {
        let config = load_config(source)?;
        require_head(&config, source)?;
        let threads = threads.max(1);
        let loaders = loaders(&config, threads);
        let layer = |i| {
            let mut absorbed = None;
            let prepare = |info: &LinearInfo, weight: LinearWeight| {
                if info.kind == LinearKind::KvB
                    && let Some(latent) = config.latent
                {
                    let linear = Linear::new(&info.module, weight.clone())?;
                    absorbed = Some(AbsorbedHeads::new(latent, config.num_attention_heads, &linear));
                }
                PreparedLinear::new(&info.module, weight, threads.div_ceil(loaders))
            };
            let parts = LayerParts::load(source, &config, i, prepare)?;
            Ok(FastLayer::new(parts, absorbed, threads))
        };
        // Reading and taking weights apart runs on one thread each.
        let mut layers: Vec<_> = (0..config.num_hidden_layers).map(|_| None).collect();
        let failed = AtomicBool::new(false);
        for_each(loaders, layers.iter_mut().enumerate(), |(i, place)| {
            if !failed.load(Ordering::Relaxed) {
                let layer = layer(i);
                failed.fetch_or(layer.is_err(), Ordering::Relaxed);
                *place = Some(layer);
            }
        });
        // After an error the layers that were not begun are left out.
        let layers = layers.into_iter().flatten().collect::<Result<Vec<_>, LoadError>>()?;
        let embedding = Embedding::load(source, &config, |module, weight| {
            PreparedLinear::table(module, weight, threads)
        })?;
        let head = match config.tie_word_embeddings {
            true => None,
            false => {
                let (rows, cols, module) = (config.vocab_size, config.hidden_size, config.head_module());
                let weight = source.linear(module, rows, cols, config.head_bias)?;
                Some(PreparedLinear::new(module, source.adapt(module, weight)?, threads)?)
            }
        };
        let kv = KvPlan::new(&config, layers.iter().map(|layer| layer.flow.attention().kv()))?;
        Ok(FastModel {
            norm: Norm::load(source, &config, &config.final_norm_module(), config.hidden_size)?,
            embedding,
            layers,
            head,
            kv,
            config,
            threads,
        })
    }

    /// Configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Storage of keys and values: the checkpoint's, or f16.
    pub fn kv(&self) -> &KvPlan {
        &self.kv
    }

    /// Stores keys and values by `policy` instead of the checkpoint's scheme.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`] if the model's heads cannot be stored that way, or the policy needs a calibration text.
    pub fn set_kv(&mut self, policy: &KvPolicy) -> Result<(), LoadError> {
        if policy.is_calibrated() {
            let allowed = "levels in the checkpoint, or --engine reference with --calibration";
            return Err(LoadError::KvScheme { scheme: policy.to_string(), allowed });
        }
        self.kv = KvPlan::of_policy(&self.config, policy)?;
        Ok(())
    }

    /// Bytes of a token in the cache.
    pub fn kv_bytes_per_token(&self) -> f64 {
        self.kv.bytes_per_token()
    }

    /// Number of threads of a pass.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Output head: the embedding, if they are tied.
    fn head(&self) -> &PreparedLinear {
        self.head.as_ref().unwrap_or(self.embedding.table())
    }

    /// Allocates buffers for passes of up to `tokens` tokens in sequences (including cached tokens) of up to `context`.
    ///
    /// # Errors
    /// As [`Buffers::plan`].
    pub fn plan(&self, tokens: usize, context: usize) -> Result<FastBuffers, LoadError> {
        self.plan_on(1, tokens, context)
    }

    /// Runs [`plan`](Self::plan) for passes of [whole](Self::whole) sequences, whose attention runs on all threads.
    ///
    /// # Errors
    /// As [`Buffers::plan`].
    pub fn plan_whole(&self, tokens: usize, context: usize) -> Result<FastBuffers, LoadError> {
        self.plan_on(self.threads, tokens, context)
    }

    fn plan_on(&self, threads: usize, tokens: usize, context: usize) -> Result<FastBuffers, LoadError> {
        Ok(FastBuffers {
            buffers: Buffers::plan_for(&self.config, tokens, context, threads)?,
            scratch: Scratch::default(),
            gathered: Vec::new(),
            rows: 0,
        })
    }

    /// Iterates over its prepared linear layers, the head last.
    pub fn linears(&self) -> impl Iterator<Item = &PreparedLinear> {
        self.layers.iter().flat_map(FastLayer::linears).chain([self.head()])
    }

    /// Runs whole sequences without a cache, with buffers of [`plan_whole`](Self::plan_whole), and returns the hidden states after the last norm, `[tokens, hidden]`. A
    /// sequence has the same bits in any batch.
    ///
    /// # Errors
    /// As [`mantissa_model::Decoder::forward`].
    pub fn whole<'b>(&self, batch: &Batch<'_>, b: &'b mut FastBuffers) -> Result<&'b [f32], ForwardError> {
        let seqs = Sequences { lens: batch.lens, starts: &[], rows: batch.tokens.len() };
        self.pass(batch.tokens, &seqs, None, b)
    }

    /// Runs `tokens` of `seqs`, which continue what `caches` hold, appends them there, and returns the hidden states
    /// after the last norm, `[tokens, hidden]`.
    ///
    /// # Errors
    /// [`ForwardError`] if a token is not in the vocabulary, the pass is inconsistent or larger than planned, or an
    /// activation or a cached value has no code.
    pub fn continued<'b>(
        &self,
        tokens: &[u32],
        seqs: &Sequences<'_>,
        caches: &mut dyn Caches,
        b: &'b mut FastBuffers,
    ) -> Result<&'b [f32], ForwardError> {
        self.pass(tokens, seqs, Some(caches), b)
    }

    fn pass<'b>(
        &self,
        tokens: &[u32],
        seqs: &Sequences<'_>,
        mut caches: Option<&mut dyn Caches>,
        b: &'b mut FastBuffers,
    ) -> Result<&'b [f32], ForwardError> {
        let spans = seqs.lens.iter().enumerate().map(|(i, len)| seqs.start(i).saturating_add(*len));
        b.buffers.check(&self.config, tokens.len(), spans.max().unwrap_or(0))?;
        b.rows = tokens.len();
        let (len, scratch) = (tokens.len() * self.config.hidden_size, &mut b.scratch);
        let a = b.buffers.activations(false).0;
        self.embedding.embed_at(tokens, seqs, &mut a.residual[..len], a.normed)?;
        let inputs = self.embedding.layer_embeddings();
        if inputs.is_some() {
            b.buffers.keep_first(len);
        }
        for (i, layer) in self.layers.iter().enumerate() {
            if let Some(inputs) = inputs {
                let (first, input) = b.buffers.layer_inputs();
                inputs.fill(i, tokens, &first[..len], input, self.threads);
            }
            let mut activations = b.buffers.activations(layer.flow.has_local_rope()).0;
            let mut operators = Run { layer, scratch, threads: self.threads };
            let cache = caches.as_mut().map(|caches| caches.layer(i));
            layer.flow.run_attention_after(&mut operators, seqs, cache, &mut activations)?;
            layer.flow.run_mlp(&mut operators, seqs, &mut activations)?;
        }
        let activations = b.buffers.activations(false).0;
        let normed = &mut activations.normed[..len];
        normalize(&self.norm, &activations.residual[..len], normed, self.config.hidden_size, self.threads);
        Ok(normed)
    }

    /// Hidden states after the last norm of the rows `rows` of the last pass, `[rows.len(), hidden]`.
    ///
    /// # Panics
    /// If a row is out of range.
    pub fn hidden<'b>(&self, rows: Range<usize>, b: &'b mut FastBuffers) -> &'b [f32] {
        let d = self.config.hidden_size;
        &b.buffers.activations(false).0.normed[rows.start * d..rows.end * d]
    }

    /// Computes the logits of the rows `rows` of the last pass into `out` `[rows.len(), vocabulary]`. A row has the
    /// same bits in any call.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    ///
    /// # Panics
    /// If a row is out of range or `out` has another length.
    pub fn logits(&self, rows: &[usize], out: &mut [f32], b: &mut FastBuffers) -> Result<(), ForwardError> {
        let d = self.config.hidden_size;
        let states = b.buffers.activations(false).0.normed;
        b.gathered.clear();
        rows.iter().for_each(|row| b.gathered.extend_from_slice(&states[row * d..(row + 1) * d]));
        let jobs =
            [PreparedMatmul { linear: self.head(), input: 0, out: &mut *out, accumulate: false }].into_iter();
        let rows = [Rows { x: &b.gathered, tokens: rows.len() }];
        prepared::forward(jobs, &rows, &mut b.scratch, self.threads)?;
        self.config.finish_logits(out);
        Ok(())
    }
}
