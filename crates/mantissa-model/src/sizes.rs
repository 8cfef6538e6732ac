//! Sizes and factors of blocks that operations and stored weights hold.

use mantissa_kernels::CausalAttention;

/// Multi-head latent attention (DeepSeek-V2, sec. 2.1): queries, keys and values are projected from narrow latents. Only a
/// part of a head is rotated; its keys are shared by all heads.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Latent {
    /// Width of the latent of the queries; `None` if queries are projected directly.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Width of the rotated part of a head, even.
    pub rotated: usize,
    /// Width of the other part.
    pub unrotated: usize,
    /// Width of a head of the values.
    pub value: usize,
    /// True if the rotated pairs are adjacent in the weights, not half a head apart.
    pub interleaved: bool,
}

impl Latent {
    /// Epsilon of the norms of the latents, independent of the config's epsilon for other norms.
    pub const EPS: f32 = 1e-6;

    /// Width of a head of queries and keys.
    pub fn head(&self) -> usize {
        self.rotated + self.unrotated
    }

    /// Shape of attention over latents: every head reads the same vector of a token, its latent and the rotated part
    /// of its keys.
    pub(crate) fn attention(&self, heads: usize, scale: f32) -> CausalAttention {
        let head_dim = self.kv_rank + self.rotated;
        CausalAttention { heads, kv_heads: 1, head_dim, scale, window: None, chunk: None }
    }

    /// Bytes of a token of a layer in f32.
    pub(crate) fn bytes_per_token(&self) -> f64 {
        4.0 * (self.kv_rank + self.rotated) as f64
    }
}

/// Factor of the queries that grows with the position (Nakanishi 2025, "Scalable-Softmax"; Llama 4):
/// `1 + rate · ln(1 + ⌊(position + offset) / period⌋)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    /// Factor of the logarithm.
    pub rate: f32,
    /// Positions after which the factor grows.
    pub period: f32,
    /// Positions that are added.
    pub offset: f32,
    /// True if only layers that are not rotated have it.
    pub unrotated: bool,
}

impl QueryGrowth {
    /// Factor at `position`.
    pub fn at(&self, position: usize) -> f32 {
        1.0 + self.rate * ((position as f32 + self.offset) / self.period).floor().ln_1p()
    }
}

/// `(up + offset) · gate · sigmoid(alpha · gate)` with `gate` at most `limit` and `up` within `±limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitedSwiglu {
    /// Factor in the sigmoid.
    pub alpha: f32,
    /// Limit of gate and up.
    pub limit: f32,
    /// Number that is added to up.
    pub offset: f32,
}
