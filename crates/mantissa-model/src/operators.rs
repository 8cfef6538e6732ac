//! Interface of a layer's computation: the operators of the owner of its weights ([`Operators`]), and buffers for its
//! activations ([`Activations`]).

use std::ops::Range;

use crate::absorbed::AbsorbedHeads;
use crate::error::ForwardError;
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind, SideKind, VectorKind};

/// Least number of rows of a whole-sequence pass: shorter ones are padded. Products of up to 64 rows may be summed in
/// another order, and a sequence must have the same bits alone and in a batch.
pub const MIN_ROWS: usize = 65;

/// Packed sequences: `lens[i]` tokens each, concatenated.
#[derive(Clone, Copy, Debug)]
pub struct Sequences<'a> {
    /// Length of each sequence in this pass.
    pub lens: &'a [usize],
    /// Position of the first token of each sequence: the number of its cached tokens. Empty for whole sequences.
    pub starts: &'a [usize],
    /// Rows of the activations, at least the sum of `lens`; the rest is padding.
    pub rows: usize,
}

impl<'a> Sequences<'a> {
    /// Creates whole sequences, padded to [`MIN_ROWS`].
    pub fn whole(lens: &'a [usize]) -> Self {
        Sequences { lens, starts: &[], rows: lens.iter().sum::<usize>().max(MIN_ROWS) }
    }

    /// Position of the first token of sequence `index`.
    pub fn start(&self, index: usize) -> usize {
        self.starts.get(index).copied().unwrap_or(0)
    }

    /// Number of rows that are not padding.
    pub fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }
}

/// One linear layer of a call to [`Operators::linears`].
#[derive(Debug)]
pub struct MatmulJob<'a> {
    /// The linear layer.
    pub kind: LinearKind,
    /// Output, `[rows, out]`.
    pub out: &'a mut [f32],
    /// True to add to `out`, false to overwrite it.
    pub accumulate: bool,
}

/// Linear layers that read one input, in a call to [`Operators::grouped`].
#[derive(Debug)]
pub struct Group<'g, 'a> {
    /// The input.
    pub input: LinearInput,
    /// Its values, `[rows, in]`; rows beyond the first `tokens` are padding.
    pub x: &'g [f32],
    /// Rows that are not padding.
    pub tokens: usize,
    /// Linear layers.
    pub jobs: &'g mut [MatmulJob<'a>],
}

/// Operators of one layer, provided by whoever holds its weights.
pub trait Operators {
    /// Normalizes each vector of `x` into `out`.
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]);

    /// Runs linear layers with their biases on the same input `x` `[rows, in]`; rows beyond the first `tokens` are
    /// padding.
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [MatmulJob<'_>],
    ) -> Result<(), ForwardError>;

    /// Runs linear layers of several inputs, such as those of a mixture's experts with the tokens routed to each.
    /// Every output is that of [`linears`](Self::linears).
    ///
    /// # Errors
    /// [`ForwardError::Input`].
    fn grouped(&mut self, groups: &mut [Group<'_, '_>]) -> Result<(), ForwardError> {
        groups.iter_mut().try_for_each(|group| self.linears(group.input, group.x, group.tokens, group.jobs))
    }

    /// Returns the least number of rows of [`linears`](Self::linears) in a pass over whole sequences: an expert's rows
    /// are padded to it.
    fn least_rows(&self) -> usize {
        MIN_ROWS
    }

    /// Computes `out = x Wᵀ + b` of a router, a gate or a mixer's rates. Does nothing in implementations that refuse
    /// models with experts and recurrent mixers.
    fn side(&mut self, _: SideKind, _x: &[f32], _out: &mut [f32]) {}

    /// Computes some `rows` of the outputs of [`side`](Self::side), `out` `[tokens, rows]`, of inputs `x` `[tokens, in]`. A
    /// token's outputs do not depend on the others.
    fn side_rows(&mut self, _: SideKind, _rows: Range<usize>, _x: &[f32], _out: &mut [f32]) {}

    /// Transforms and quantizes inputs `x` `[t, in]` of a linear layer, and writes the matching `weight` `[out, in]`:
    /// `x Wᵀ` is then the output without the bias.
    ///
    /// # Errors
    /// [`ForwardError::Input`]; [`ForwardError::OtherModel`] from implementations without a cache.
    fn apart(&mut self, _: LinearKind, _x: &mut [f32], _weight: &mut [f32]) -> Result<(), ForwardError> {
        Err(ForwardError::OtherModel { what: "KV cache" })
    }

    /// Returns the projection between latents and heads, if it is held apart from the other layers.
    fn absorbed(&self) -> Option<&AbsorbedHeads> {
        None
    }

    /// Returns a vector, if the layer has it.
    fn vector(&self, _: VectorKind) -> Option<&[f32]> {
        None
    }
}

/// Buffers of an indexer; empty in models without.
#[derive(Debug, Default)]
pub struct IndexRows<'a> {
    /// Queries, `[rows, heads · dim]`, before RoPE.
    pub queries: &'a mut [f32],
    /// Normed keys, `[rows, dim]`, before RoPE.
    pub keys: &'a mut [f32],
    /// Weights of the heads, `[rows, heads]`.
    pub weights: &'a mut [f32],
    /// Tokens that each query attends to, ascending, `[rows, chosen]`, by the last layer that has chosen. Empty if
    /// planned sequences are so short that all tokens are chosen.
    pub chosen: &'a mut [u32],
}

impl IndexRows<'_> {
    /// Borrows the buffers.
    pub fn borrowed(&mut self) -> IndexRows<'_> {
        IndexRows { queries: self.queries, keys: self.keys, weights: self.weights, chosen: self.chosen }
    }
}

/// Buffers for the activations of a layer. Slices may be longer than the pass needs.
#[derive(Debug)]
pub struct Activations<'a> {
    /// Residual stream, `[rows, hidden]`: read and added to.
    pub residual: &'a mut [f32],
    /// Normalized copy, `[rows, hidden]`.
    pub normed: &'a mut [f32],
    /// Queries, rotated, `[rows, query width]`.
    pub q: &'a mut [f32],
    /// Keys, rotated, `[rows, key width]`. A layer without keys and values of its own reads those that an earlier one
    /// has left.
    pub k: &'a mut [f32],
    /// Values, `[rows, key width]`.
    pub v: &'a mut [f32],
    /// Joined heads, `[rows, query width]`, or the result of a recurrent mixer.
    pub attended: &'a mut [f32],
    /// Log-sum-exp of the scores, `[tokens, heads]`, if a backward pass follows.
    pub lse: Option<&'a mut [f32]>,
    /// Inner projections of the MLP, `[rows, intermediate]` or as in [`MlpRows`].
    pub gate: &'a mut [f32],
    /// See `gate`.
    pub up: &'a mut [f32],
    /// Product of gate and up, `[most rows of a part, intermediate]`.
    pub inner: &'a mut [f32],
    /// Split of the rows for the MLP.
    pub mlp: MlpRows,
    /// Scores of a block of queries for each thread:
    /// [`CausalAttention::scratch_len`](mantissa_kernels::CausalAttention::scratch_len) times the threads.
    pub scores: &'a mut [f32],
    /// `[positions, head_dim / 2]`.
    pub cos: &'a [f32],
    /// `[positions, head_dim / 2]`.
    pub sin: &'a [f32],
    /// The layer's own input, `[rows, width]`, or the tokens; empty in models without.
    pub layer_input: &'a [f32],
    /// Parallel streams of states, the first one included, `[streams, planned rows, hidden]`, or `[planned rows, streams,
    /// hidden]` with the weights that spread and mix them; empty in models without.
    pub streams: &'a mut [f32],
    /// Scratch of particular architectures; empty for the others.
    pub extra: ExtraScratch<'a>,
}

/// Scratch of particular architectures.
#[derive(Debug)]
pub struct ExtraScratch<'a> {
    /// Joined projections, gates of the heads, latents, scratch of a recurrent mixer, or a result to be normed before it is added: `[rows, widest of them]`.
    pub wide: &'a mut [f32],
    /// Logits of a router, `[rows of a part, experts]`.
    pub logits: &'a mut [f32],
    /// Inputs of some experts, `[rows of a part, hidden]`.
    pub gathered: &'a mut [f32],
    /// Outputs of some experts, `[rows of a part, hidden]`.
    pub result: &'a mut [f32],
    /// Weighted sum of all experts, `[rows of a part, hidden]`.
    pub sum: &'a mut [f32],
    /// Routing of tokens to experts.
    pub choices: &'a mut Vec<ExpertChoice>,
    /// Rows of an indexer.
    pub index: IndexRows<'a>,
}

/// Routing of one token to one expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertChoice {
    /// The expert.
    pub expert: u16,
    /// Row of the token within its part.
    pub row: u32,
    /// Weight of the expert's result.
    pub weight: f32,
}

/// Split of the rows for the MLP, whose inner activations are by far the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpRows {
    /// Largest number of rows of a part.
    pub most: usize,
    /// True if `gate` and `up` keep all rows, for a backward pass; false if they hold one part.
    pub keep: bool,
}

/// Tokens of latent attention in a pass through a cache.
#[derive(Debug)]
pub struct LatentTokens<'a> {
    /// Queries, `[tokens, query width]`, before RoPE; the rotated part is first in each head.
    pub q: &'a mut [f32],
    /// Normed latents, `[tokens, kv_rank]`.
    pub latents: &'a mut [f32],
    /// Rotated parts of the keys, `[tokens, rotated]`, before RoPE.
    pub rotated: &'a mut [f32],
    /// Joined heads, `[tokens, query width]`.
    pub attended: &'a mut [f32],
    /// Rows of an indexer; slices may be longer.
    pub index: IndexRows<'a>,
    /// `[positions, rotated / 2]`.
    pub cos: &'a [f32],
    /// `[positions, rotated / 2]`.
    pub sin: &'a [f32],
}
