//! Frame of recurrent mixers: the trait, and what several of them share.

use mantissa_kernels::{for_each, kernels};
use mantissa_store::convention::gguf::DeltaHeads;

use super::gguf::{GgufAround, Uncomputed};
use crate::operators::{Operators, Sequences};
use crate::program::{Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, SideInfo, SideKind, VectorKind};

/// Size of the state of one sequence in one layer, in f32 values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateShape {
    /// Last inputs of the convolution, `[kernel - 1, channels]`, or all of the state of a mixer without heads.
    pub tail: usize,
    /// Last values of the tail that are written once, as tokens come, and do not change.
    pub grows: usize,
    /// Heads.
    pub heads: usize,
    /// Values of one head.
    pub head: usize,
}

impl StateShape {
    /// Number of values.
    pub fn values(&self) -> usize {
        self.tail + self.heads * self.head
    }

    /// Number of values that a pass may change.
    pub fn changed(&self) -> usize {
        self.values() - self.grows
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        4 * self.values() as u64
    }
}

/// States of one layer, of several sequences. A sequence that begins in a pass, at position 0, ignores and replaces
/// what its slot holds.
#[derive(Debug)]
pub struct States<'a> {
    /// Last inputs of the convolution, `[slots, tail]`.
    pub tails: &'a mut [f32],
    /// States of the heads, `[heads, slots, values of a head]`.
    pub heads: &'a mut [f32],
    /// Number of slots.
    pub slots: usize,
    /// Slot of each sequence of the pass.
    pub of: &'a [usize],
}

/// Largest number of linear layers of a mixer.
pub(crate) const MOST_LINEARS: usize = 4;

/// A linear layer of a mixer.
pub(crate) struct MixerLinear {
    pub(crate) kind: LinearKind,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) bias: bool,
}

/// Rows of a pass through a mixer.
pub(crate) struct MixRows<'a> {
    /// Sequences of the pass.
    pub(crate) seqs: &'a Sequences<'a>,
    /// States of the sequences; `None` for whole sequences without a cache.
    pub(crate) states: Option<States<'a>>,
    /// Largest number of threads.
    pub(crate) threads: usize,
    /// Scratch that [`Mixer::project`] filled.
    pub(crate) scratch: &'a mut [f32],
    /// Input of the output projection, `[rows, width]`.
    pub(crate) out: &'a mut [f32],
    /// Cosines and sines of the layer by position, `[positions, half the rotated width]`.
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
}

/// A recurrent token mixer.
pub(crate) trait Mixer {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Lists its linear layers, in the order of the forward pass; the output projection is the last. Without an
    /// allocation, because passes check sizes.
    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS];

    /// Lists its small projections, which stay unquantized.
    fn sides(&self) -> Vec<SideInfo>;

    /// Lists its vectors and their shapes in a checkpoint.
    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)>;

    /// Size of the state of a sequence of up to `context` tokens.
    fn state(&self, context: usize) -> StateShape;

    /// Width of the input of the output projection.
    fn width(&self) -> usize;

    /// Values of scratch per row.
    fn scratch(&self) -> usize;

    /// Projects the normed states `x` `[rows, hidden]` into scratch.
    fn project(&self, x: View, ops: &mut Vec<Op>);

    /// Mixes the tokens of each sequence into `rows.out`, and advances their states. Padding is 0.
    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>);

    /// Keys of a GGUF file after the architecture's name, and their numbers.
    fn gguf_numbers(&self) -> Vec<(&'static str, usize)>;

    /// Checks that llama.cpp computes the mixer.
    ///
    /// # Errors
    /// [`Uncomputed`] for the first value that it does not.
    fn check_gguf(&self, _around: &GgufAround) -> Result<(), Uncomputed> {
        Ok(())
    }

    /// What llama.cpp computes differently, in a model whose norms have `eps`.
    fn gguf_note(&self, _eps: f32) -> Option<String> {
        None
    }

    /// Heads of gated DeltaNet, whose rows GGUF files may hold in another order.
    fn delta_heads(&self) -> Option<DeltaHeads> {
        None
    }

    /// Groups of heads, into which GGUF files split the weights of the mixer's norm.
    fn groups(&self) -> usize {
        1
    }

    /// Epsilon of the mixer's norm, if a GGUF file states it as that of the model.
    fn gguf_eps(&self) -> Option<f32> {
        None
    }

    /// Rows of each part of the input projection that constant factors multiply apart; none if one factor is for all.
    fn input_parts(&self) -> Vec<usize> {
        Vec::new()
    }
}

/// Runs linear layers of a mixer on the states `x`.
pub(super) fn matmuls<const N: usize>(x: View, outputs: [(LinearKind, View); N]) -> Op {
    let outputs = outputs.map(|(linear, out)| Output { linear, out, add: false }).to_vec();
    Op::Matmuls { input: LinearInput::Qkv, x, outputs }
}

/// Returns a side of `rows` outputs that reads the layer's input of width `cols`.
pub(super) fn side(kind: SideKind, rows: usize, cols: usize) -> SideInfo {
    SideInfo { kind, rows, cols, bias: false }
}

/// States of one head, `[slots, values]`, and the slot of each sequence of the pass.
pub(super) type HeadStates<'a> = Option<(&'a mut [f32], &'a [usize])>;

/// Runs every head as a task of its own, on up to `threads` threads: `run` gets its number, its states, of `size` values a
/// slot, and its part of `out` `[heads, part]`.
pub(super) fn for_each_head(
    threads: usize,
    (states, size): (Option<States<'_>>, usize),
    (out, part): (&mut [f32], usize),
    run: impl Fn(usize, HeadStates<'_>, &mut [f32]) + Sync,
) {
    let (slots, of) = states.as_ref().map_or((0, [].as_slice()), |states| (states.slots, states.of));
    let mut of_heads = states.map(|States { heads, .. }| heads.chunks_mut(slots * size));
    let tasks = out.chunks_mut(part).enumerate();
    let tasks = tasks.map(|(head, out)| (head, out, of_heads.as_mut().and_then(Iterator::next)));
    for_each(threads, tasks, |(head, out, states)| run(head, states.map(|states| (states, of)), out));
}

/// Runs `step` with every token's row and the state of its sequence, in order, for one head. Sequences without a cache
/// have `own`, one after another.
pub(super) fn for_each_token(
    seqs: &Sequences<'_>,
    mut states: HeadStates<'_>,
    own: &mut [f32],
    mut step: impl FnMut(usize, &mut [f32]),
) {
    let (size, mut first) = (own.len(), 0);
    for (i, &len) in seqs.lens.iter().enumerate() {
        let state = match &mut states {
            Some((states, of)) => &mut states[of[i] * size..(of[i] + 1) * size],
            None => &mut *own,
        };
        if seqs.start(i) == 0 {
            state.fill(0.0);
        }
        (first..first + len).for_each(|row| step(row, state));
        first += len;
    }
}

/// Copies the results of one token out of `heads` `[heads, tokens, width]` into `out` `[heads · width]`.
pub(super) fn join_heads(heads: &[f32], tokens: usize, row: usize, width: usize, out: &mut [f32]) {
    for (head, out) in out.chunks_exact_mut(width).enumerate() {
        let at = (head * tokens + row) * width;
        out.copy_from_slice(&heads[at..at + width]);
    }
}

/// Splits scratch into parts `[rows, width]` of these widths.
pub(super) fn split_rows<const N: usize>(
    rows: usize,
    widths: [usize; N],
    mut scratch: &mut [f32],
) -> [&mut [f32]; N] {
    widths.map(|width| take(&mut scratch, rows * width))
}

/// Splits the first `n` values off `rest`.
pub(super) fn take<'a>(rest: &mut &'a mut [f32], n: usize) -> &'a mut [f32] {
    let (first, others) = std::mem::take(rest).split_at_mut(n);
    *rest = others;
    first
}

/// `ln(1 + e^x)`.
pub(crate) fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Multiplies `x` by the inverse of its Euclidean norm and by `scale`, into `out`.
pub(super) fn unit(x: &[f32], eps: f32, scale: f32, out: &mut [f32]) {
    let factor = scale / (kernels().dot(x, x) + eps).sqrt();
    out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor);
}
