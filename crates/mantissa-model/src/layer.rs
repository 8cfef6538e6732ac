//! One decoder layer and its weights as evaluation holds them; what it computes is in [`crate::flow`].

use crate::attention::Attention;
use crate::buffers::Buffers;
use crate::cache::LayerCache;
use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::flow::{self, LayerFlow, MIN_ROWS, NormKind, Operators, Sequences};
use crate::graph::{LinearInfo, LinearInput, LinearKind, prefix};
use crate::kv::KvQuantizer;
use crate::linear::{Job, Linear, forward_fused};
use crate::mlp::Mlp;
use crate::norm::RmsNorm;
use crate::source::WeightSource;

/// Told what the linear layers of a decoder layer read: which input, and its values `[tokens, width]`, padding aside and
/// before a run-time quantization of it. Tokens come in order; those of a long pass may come in several calls.
pub type Observer<'a> = dyn FnMut(LinearInput, &[f32]) + 'a;

/// A decoder layer.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Norm before the attention.
    pub input_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// Norm before the MLP.
    pub post_norm: RmsNorm,
    /// MLP.
    pub mlp: Mlp,
    flow: LayerFlow,
}

impl Layer {
    /// Reads layer `layer` by itself, for work that holds one layer at a time.
    ///
    /// # Errors
    /// As [`WeightSource`]'s.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig, layer: usize) -> Result<Self, LoadError> {
        let norm = |name: &str| {
            RmsNorm::load(
                source,
                &format!("{}{name}", prefix(layer)),
                config.hidden_size,
                config.rms_norm_eps,
            )
        };
        let mut flow = LayerFlow::new(config, layer, 1);
        let (module, heads) = (format!("{}self_attn", prefix(layer)), config.num_key_value_heads);
        if let Some(quant) = source.kv_quant(&module, heads)? {
            flow.kv = Some(KvQuantizer::new(&module, &quant, heads, config.head_dim)?);
        }
        Ok(Layer {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(source, config, layer)?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(source, config, layer)?,
            flow,
        })
    }

    /// One of its linear layers.
    pub fn linear(&self, kind: LinearKind) -> &Linear {
        match kind {
            LinearKind::Q => &self.attention.q,
            LinearKind::K => &self.attention.k,
            LinearKind::V => &self.attention.v,
            LinearKind::O => &self.attention.o,
            LinearKind::Gate => &self.mlp.gate,
            LinearKind::Up => &self.mlp.up,
            LinearKind::Down => &self.mlp.down,
        }
    }

    /// The same, to put another one in its place.
    pub fn linear_mut(&mut self, kind: LinearKind) -> &mut Linear {
        match kind {
            LinearKind::Q => &mut self.attention.q,
            LinearKind::K => &mut self.attention.k,
            LinearKind::V => &mut self.attention.v,
            LinearKind::O => &mut self.attention.o,
            LinearKind::Gate => &mut self.mlp.gate,
            LinearKind::Up => &mut self.mlp.up,
            LinearKind::Down => &mut self.mlp.down,
        }
    }

    /// Takes the states of whole sequences, `[tokens, hidden]`, one after another and of `lens` tokens each, through this
    /// layer by itself: the bits that they have after it in [`Decoder::forward`](crate::Decoder::forward).
    ///
    /// # Errors
    /// As [`Decoder::forward`](crate::Decoder::forward). The states are then as they were.
    pub fn run(
        &self,
        config: &ModelConfig,
        lens: &[usize],
        states: &mut [f32],
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let tokens = states.len() / config.hidden_size;
        let sum = lens.iter().fold(0usize, |sum, &len| sum.saturating_add(len));
        if sum != tokens || tokens * config.hidden_size != states.len() {
            return Err(ForwardError::Lengths { sum, tokens });
        }
        b.check(config, tokens, lens.iter().max().copied().unwrap_or(0))?;
        let rows = tokens.max(MIN_ROWS);
        let (residual, padding) = b.residual[..rows * config.hidden_size].split_at_mut(states.len());
        residual.copy_from_slice(states);
        padding.fill(0.0);
        self.forward(&Sequences { lens, start: 0, rows }, None, observer, b)?;
        states.copy_from_slice(&b.residual[..states.len()]);
        Ok(())
    }

    /// Takes `b.residual` through the layer.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub(crate) fn forward(
        &self,
        seqs: &Sequences<'_>,
        past: Option<&mut LayerCache>,
        observer: Option<&mut Observer<'_>>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let (mut activations, quantized, panel) = b.activations();
        let mut operators = Evaluate { layer: self, observer, quantized, panel };
        self.flow.attention_after(&mut operators, seqs, past, &mut activations)?;
        self.flow.mlp(&mut operators, seqs, &mut activations)
    }
}

/// The operators of a layer whose weights stay as they are: each linear layer reads its own storage.
struct Evaluate<'a, 'o> {
    layer: &'a Layer,
    observer: Option<&'a mut Observer<'o>>,
    quantized: &'a mut [f32],
    panel: &'a mut [f32],
}

impl Operators for Evaluate<'_, '_> {
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]) {
        let attention = &self.layer.attention;
        let heads = attention.head_norms.as_ref();
        let norm = match kind {
            NormKind::Input => Some(&self.layer.input_norm),
            NormKind::Post => Some(&self.layer.post_norm),
            NormKind::Query => heads.map(|norms| &norms.0),
            NormKind::Key => heads.map(|norms| &norms.1),
            NormKind::AttentionSub => attention.sub_norm.as_ref(),
            NormKind::MlpSub => self.layer.mlp.sub_norm.as_ref(),
        };
        match norm {
            Some(norm) => norm.forward(x, out),
            // The flow asks only for norms that the config has, and those were loaded.
            None => out.copy_from_slice(x),
        }
    }

    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [flow::Job<'_>],
    ) -> Result<(), ForwardError> {
        let linear = |kind| self.layer.linear(kind);
        if let (Some(observe), Some(job)) = (self.observer.as_mut(), jobs.first()) {
            observe(input, &x[..tokens * linear(job.kind).cols()]);
        }
        let jobs = jobs.iter_mut().map(|job| Job {
            linear: linear(job.kind),
            out: &mut *job.out,
            accumulate: job.accumulate,
        });
        forward_fused(jobs, x, self.quantized, self.panel)
    }
}

pub(crate) fn load_linear(source: &dyn WeightSource, info: &LinearInfo) -> Result<Linear, LoadError> {
    let weight = source.linear(&info.module, info.rows, info.cols, info.bias)?;
    Linear::new(&info.module, weight)
}
