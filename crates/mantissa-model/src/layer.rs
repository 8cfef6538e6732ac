//! One decoder layer: `x += attention(norm(x))`, `x += mlp(norm(x))`, on `residual` `[rows, hidden]`.

use crate::attention::Attention;
use crate::buffers::{Buffers, Sequences};
use crate::cache::LayerCache;
use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::graph::{LinearInfo, LinearKind, prefix};
use crate::linear::Linear;
use crate::mlp::Mlp;
use crate::norm::RmsNorm;
use crate::source::WeightSource;

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
        Ok(Layer {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(source, config, layer)?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(source, config, layer)?,
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

    /// Takes `b.residual` through the layer.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub(crate) fn forward(
        &self,
        seqs: &Sequences<'_>,
        past: Option<&mut LayerCache>,
        b: &mut Buffers,
    ) -> Result<(), ForwardError> {
        let len = seqs.rows * self.input_norm.weight().len();
        self.input_norm.forward(&b.residual[..len], &mut b.normed[..len]);
        self.attention.forward(seqs, past, b)?;
        self.post_norm.forward(&b.residual[..len], &mut b.normed[..len]);
        self.mlp.forward(seqs.rows, b)
    }
}

pub(crate) fn load_linear(source: &dyn WeightSource, info: &LinearInfo) -> Result<Linear, LoadError> {
    let weight = source.linear(&info.module, info.rows, info.cols, info.bias)?;
    Linear::new(&info.module, weight)
}
