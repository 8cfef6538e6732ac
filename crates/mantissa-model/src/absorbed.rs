//! Projection between latents and heads, for attention that reads latents: one part maps queries to latents, the
//! other weighted latents to heads of values (DeepSeek-V2, arXiv 2405.04434, sec. 2.1.2).

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_num::stored::Map;

use crate::error::ForwardError;
use crate::input::InputQuantizer;
use crate::linear::Linear;
use crate::sizes::Latent;

/// The two parts of the projection of one layer, in f32.
#[derive(Clone, Debug)]
pub struct AbsorbedHeads {
    latent: Latent,
    /// `[heads, kv_rank, unrotated]`.
    keys: Vec<f32>,
    /// `[heads, value, kv_rank]`.
    values: Vec<f32>,
    module: String,
    /// Transforms of the latents before they are quantized.
    before: Vec<Map>,
    input: Option<InputQuantizer>,
}

impl AbsorbedHeads {
    /// Splits the projection `linear` from latents to `heads` heads.
    ///
    /// # Panics
    /// If the projection has another shape.
    pub fn new(latent: Latent, heads: usize, linear: &Linear) -> Self {
        let (rank, each) = (latent.kv_rank, latent.unrotated + latent.value);
        let mut weight = vec![0.0; heads * each * rank];
        linear.apart_weight(&mut weight);
        let mut keys = vec![0.0; heads * rank * latent.unrotated];
        let mut values = Vec::with_capacity(heads * latent.value * rank);
        let parts = weight.chunks_exact(each * rank).zip(keys.chunks_exact_mut(rank * latent.unrotated));
        for (rows, keys) in parts {
            let (of_keys, of_values) = rows.split_at(latent.unrotated * rank);
            for (i, row) in of_keys.chunks_exact(rank).enumerate() {
                row.iter().enumerate().for_each(|(j, x)| keys[j * latent.unrotated + i] = *x);
            }
            values.extend_from_slice(of_values);
        }
        let input = linear.input().cloned();
        let before = if input.is_some() { linear.transforms().before.clone() } else { Vec::new() };
        AbsorbedHeads { latent, keys, values, module: linear.module().into(), before, input }
    }

    /// Widths of latents, heads and their parts.
    pub fn latent(&self) -> &Latent {
        &self.latent
    }

    /// Transforms and quantizes latents `[tokens, kv_rank]` as the projection's input.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    pub fn enter(&self, latents: &mut [f32]) -> Result<(), ForwardError> {
        let rank = self.latent.kv_rank;
        self.before.iter().for_each(|map| map.apply(latents, rank));
        match &self.input {
            Some(input) => input
                .apply(latents, rank)
                .map_err(|error| ForwardError::Input { module: self.module.clone(), error }),
            None => Ok(()),
        }
    }

    /// Most rows of a product. Each of so few is computed by itself, so a token does not depend on the others of its
    /// pass.
    pub const ROWS: usize = 16;

    /// Maps the unrotated parts `q` `[rows, unrotated]` of queries of head `head` to latents, `out` `[rows, kv_rank]`.
    ///
    /// # Panics
    /// If shapes do not agree, there are more than [`ROWS`](Self::ROWS) rows, or no such head.
    pub fn queries(&self, head: usize, q: MatRef<'_>, out: MatMut<'_>) {
        product(&self.keys, head, (self.latent.kv_rank, self.latent.unrotated), q, out);
    }

    /// Maps weighted latents `x` `[rows, kv_rank]` of head `head` to its values, `out` `[rows, value]`.
    ///
    /// # Panics
    /// As [`queries`](Self::queries).
    pub fn values(&self, head: usize, x: MatRef<'_>, out: MatMut<'_>) {
        product(&self.values, head, (self.latent.value, self.latent.kv_rank), x, out);
    }
}

/// Computes `out = x Wᵀ` with matrix `head` of `weights`.
fn product(weights: &[f32], head: usize, (rows, cols): (usize, usize), x: MatRef<'_>, out: MatMut<'_>) {
    assert!(x.rows() <= AbsorbedHeads::ROWS, "latent: {} rows of a product", x.rows());
    let weight = &weights[head * rows * cols..][..rows * cols];
    kernels().gemm_nt(x, MatRef::new(weight, rows, cols), out, false);
}
