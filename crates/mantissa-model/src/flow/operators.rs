//! What the flow of a layer asks of whoever holds its weights ([`Operators`]), and where its activations go
//! ([`Activations`]).

use crate::error::ForwardError;
use crate::graph::kinds::{LinearInput, LinearKind, NormKind, SideKind, VectorKind};

/// Least number of rows of a whole-sequence pass: shorter ones are padded. Products of up to 64 rows may be
/// summed in another order, and a sequence is to have the same bits alone and in a batch.
pub const MIN_ROWS: usize = 65;

/// Packed sequences: `lens[i]` tokens each, one after another, all beginning at position `start`.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// Number of tokens of each.
    pub lens: &'a [usize],
    /// Position of the first token of each.
    pub start: usize,
    /// Rows of the activations, at least the sum of `lens`; what is beyond is padding.
    pub rows: usize,
}

impl<'a> Sequences<'a> {
    /// Whole sequences, padded to [`MIN_ROWS`].
    pub fn whole(lens: &'a [usize]) -> Self {
        Sequences { lens, start: 0, rows: lens.iter().sum::<usize>().max(MIN_ROWS) }
    }

    /// Rows that are no padding.
    pub fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }
}

/// One linear layer's share of [`Operators::linears`].
#[derive(Debug)]
pub struct Job<'a> {
    /// Which one.
    pub kind: LinearKind,
    /// Its result, `[rows, out]`.
    pub out: &'a mut [f32],
    /// Whether to add to `out` instead of overwriting it.
    pub accumulate: bool,
}

/// What the flow of one layer asks of whoever holds its weights.
pub trait Operators {
    /// Normalizes each vector of `x` into `out`.
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]);

    /// Runs linear layers, biases included, that all read `x` `[rows, in]`, of which the first `tokens` rows
    /// are no padding.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [Job<'_>],
    ) -> Result<(), ForwardError>;

    /// `out = x Wᵀ + b` of a layer beside the experts; nothing where models with experts are refused.
    fn side(&mut self, _: SideKind, _x: &[f32], _out: &mut [f32]) {}

    /// Brings inputs of a linear layer, `x` `[t, in]`, to what `weight` `[out, in]`, which is written, is to be multiplied by:
    /// `x Wᵀ` is then the layer's result without its bias.
    ///
    /// # Errors
    /// [`ForwardError::Input`]; [`ForwardError::OtherModel`] of who has no cache.
    fn apart(&mut self, _: LinearKind, _x: &mut [f32], _weight: &mut [f32]) -> Result<(), ForwardError> {
        Err(ForwardError::OtherModel { what: "KV cache" })
    }

    /// A vector, where the layer has it.
    fn vector(&self, _: VectorKind) -> Option<&[f32]> {
        None
    }
}

/// Where a layer's pass puts its activations. Slices may be longer than the pass needs.
#[derive(Debug)]
pub struct Activations<'a> {
    /// The residual stream, `[rows, hidden]`: read and added to.
    pub residual: &'a mut [f32],
    /// Its normalized copy, `[rows, hidden]`.
    pub normed: &'a mut [f32],
    /// Queries, rotated, `[rows, query width]`.
    pub q: &'a mut [f32],
    /// Keys, rotated, `[rows, key width]`.
    pub k: &'a mut [f32],
    /// Values, `[rows, key width]`.
    pub v: &'a mut [f32],
    /// The joined heads, `[rows, query width]`.
    pub attended: &'a mut [f32],
    /// Log-sum-exp of the scores, `[tokens, heads]`, where a backward pass is to follow.
    pub lse: Option<&'a mut [f32]>,
    /// The MLP's two inner projections, `[rows, intermediate]` or as [`MlpRows`] says.
    pub gate: &'a mut [f32],
    /// See `gate`.
    pub up: &'a mut [f32],
    /// Their product, `[most rows of a part, intermediate]`.
    pub inner: &'a mut [f32],
    /// How the MLP goes through the rows.
    pub mlp: MlpRows,
    /// Scores of a block of queries for each of `threads`: [`CausalAttention::scratch_len`] times their number.
    pub scores: &'a mut [f32],
    /// `[positions, head_dim / 2]`.
    pub cos: &'a [f32],
    /// `[positions, head_dim / 2]`.
    pub sin: &'a [f32],
    /// What only some architectures need; empty for the others.
    pub extra: Extra<'a>,
}

/// Scratch of architectures whose layers are not plain.
#[derive(Debug, Default)]
pub struct Extra<'a> {
    /// Projections stored as one, latents, or a result to be normed before it is added: `[rows, widest of them]`.
    pub wide: &'a mut [f32],
    /// A router's logits, `[rows of a part, experts]`.
    pub logits: &'a mut [f32],
    /// What an expert reads, `[rows of a part, hidden]`.
    pub gathered: &'a mut [f32],
    /// What it gives, `[rows of a part, hidden]`.
    pub result: &'a mut [f32],
    /// The weighted sum of all, `[rows of a part, hidden]`.
    pub sum: &'a mut [f32],
    /// Which tokens go to which experts.
    pub choices: Option<&'a mut Vec<Choice>>,
}

/// A token's way through an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The expert.
    pub expert: u16,
    /// Row of the token within its part.
    pub row: u32,
    /// Weight of the expert's result.
    pub weight: f32,
}

/// The MLP takes the rows in parts: its inner activations are by far the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpRows {
    /// Most rows of a part.
    pub most: usize,
    /// Whether `gate` and `up` keep all rows, for a backward pass, or those of one part.
    pub keep: bool,
}
