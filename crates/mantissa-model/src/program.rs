//! Operations that the blocks of a layer lower to: a layer's computation as data.
//!
//! A [`Program`] is made once per model and layer from the configuration. It lists operations over named buffers
//! ([`View`]); an executor runs the list with the weights of one owner ([`Operators`](crate::flow::Operators)) and the
//! memory of one pass ([`Activations`](crate::flow::Activations)). [`crate::flow`] is the executor on the processor, for
//! evaluation, calibration, generation and training; a second device runs the same list over buffers of its own.
//!
//! Widths are values per row. Unless an operation says otherwise it runs on every row, padding included.

mod memory;
mod view;

pub(crate) use memory::{Memory, Scope, memory};
pub use view::{Buffer, View};

use crate::sizes::{LimitedSwiglu, QueryGrowth};
use mantissa_arch::kinds::{HyperSite, LinearInput, LinearKind, NormKind, SideKind, VectorKind};
use mantissa_kernels::Activation;

/// Output of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Output {
    /// The linear layer.
    pub linear: LinearKind,
    /// Its values, `[rows, out]`.
    pub out: View,
    /// True to add to `out`, false to overwrite it.
    pub add: bool,
}

/// Nonlinearity of an MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gating {
    /// Function of the gate.
    pub activation: Activation,
    /// Clamped form, which takes the place of the function.
    pub limited: Option<LimitedSwiglu>,
}

/// Copy of some columns of every group of a row, such as a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Columns {
    /// Source.
    pub x: View,
    /// First column of `x`, and columns from a group to the next; 0 if all groups read the same.
    pub from: (usize, usize),
    /// Destination.
    pub out: View,
    /// First column of `out`, and columns from a group to the next.
    pub to: (usize, usize),
    /// Groups of a row.
    pub groups: usize,
    /// Columns of a group that are copied.
    pub count: usize,
    /// True to bring adjacent pairs half of the columns apart.
    pub pairs: bool,
}

impl Columns {
    /// Creates a copy of `count` columns of each of `groups` groups of a row.
    pub fn new(
        x: View,
        from: (usize, usize),
        out: View,
        to: (usize, usize),
        [groups, count]: [usize; 2],
    ) -> Self {
        Columns { x, from, out, to, groups, count, pairs: false }
    }

    /// Brings adjacent pairs of the columns half of them apart, if `interleaved`.
    pub fn with_pairs(self, interleaved: bool) -> Self {
        Columns { pairs: interleaved, ..self }
    }
}

/// An operation.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Norms each vector of `x` into `out`, by a norm of the layer.
    Norm {
        /// The norm, whose width divides that of `x`.
        norm: NormKind,
        /// Input.
        x: View,
        /// Output.
        out: View,
    },
    /// Norms the first columns of each row of `x`, as many as `out` has, into `out`.
    NormColumns {
        /// The norm.
        norm: NormKind,
        /// Input.
        x: View,
        /// Output.
        out: View,
    },
    /// Divides each row by its root mean square and multiplies it by a vector of the layer (RMSNorm).
    VectorNorm {
        /// The weight.
        weight: VectorKind,
        /// Added to the mean square.
        eps: f32,
        /// Input.
        x: View,
        /// Output.
        out: View,
    },
    /// Runs linear layers with their biases on one input.
    Matmuls {
        /// What the input is.
        input: LinearInput,
        /// Input, `[rows, in]`.
        x: View,
        /// Outputs; at most [`Op::MOST_OUTPUTS`].
        outputs: Vec<Output>,
    },
    /// Runs a small projection that is never quantized.
    Side {
        /// The projection.
        side: SideKind,
        /// Input.
        x: View,
        /// Output.
        out: View,
    },
    /// Copies `x`.
    Copy {
        /// Source.
        x: View,
        /// Destination.
        out: View,
    },
    /// Copies some columns.
    CopyColumns(Columns),
    /// Sets the columns from `from` on in each of `groups` groups of a row to 0.
    ClearColumns {
        /// Destination.
        out: View,
        /// Groups of a row.
        groups: usize,
        /// First column.
        from: usize,
    },
    /// Brings the first `rotated` values of each head from adjacent pairs half of them apart.
    SplitPairs {
        /// Heads, in place.
        x: View,
        /// Width of a head.
        head: usize,
        /// Values of a head that are rotated.
        rotated: usize,
        /// Scratch of at least `rotated` values.
        scratch: View,
    },
    /// Rotates the first values of each head by the angles of the row's position (RoPE).
    Rotate {
        /// Heads, in place.
        x: View,
        /// Width of a head.
        head: usize,
        /// Half the rotated width of a head.
        half: usize,
    },
    /// Sets all values.
    Fill {
        /// Destination.
        out: View,
        /// The value.
        value: f32,
    },
    /// Clamps values to `[-limit, limit]`.
    Clip {
        /// Values, in place.
        x: View,
        /// Largest magnitude.
        limit: f32,
    },
    /// Multiplies by a number.
    Scale {
        /// Values, in place.
        x: View,
        /// The number.
        factor: f32,
    },
    /// Divides by a number.
    Divide {
        /// Values, in place.
        x: View,
        /// The number.
        by: f32,
    },
    /// Multiplies by a vector of the layer, if it has it: one number for all values, or one per column.
    ScaleByVector {
        /// Values, in place.
        x: View,
        /// The vector.
        vector: VectorKind,
    },
    /// Multiplies rows by a factor of their positions.
    Grow {
        /// Values, in place.
        x: View,
        /// The factor.
        growth: QueryGrowth,
    },
    /// Adds `x` to `out`.
    Add {
        /// Values that are added.
        x: View,
        /// Sum, in place.
        out: View,
    },
    /// Adds each row of `x`, times the sigmoid of its gate, to `out`.
    AddGated {
        /// Gates, one per row; their sigmoids afterwards.
        gates: View,
        /// Values that are added.
        x: View,
        /// Sum, in place.
        out: View,
    },
    /// Computes `act(gate) · up`.
    ActMul {
        /// The function.
        gating: Gating,
        /// Gate.
        gate: View,
        /// The other factor; `None` for the layer's own input.
        up: Option<View>,
        /// Output.
        out: View,
    },
    /// Subtracts mean and `deviations` standard deviations of each row from it, and cuts it off at 0 (Gemma 3n).
    CutOff {
        /// Values, in place.
        x: View,
        /// Standard deviations above the mean.
        deviations: f32,
    },
    /// Multiplies every head of the rows that are not padding by the sigmoid of its gate.
    GateHeads {
        /// Queries and gates of each head, `[rows, heads · 2 head]`.
        gates: View,
        /// Heads, in place.
        x: View,
        /// Width of a head.
        head: usize,
    },
    /// Replaces `x` by `tanh(x / divisor)`.
    Tanh {
        /// Values, in place.
        x: View,
        /// The divisor.
        divisor: f64,
    },
    /// Scales each row to the mean square of that row of `like`.
    MatchSquares {
        /// Rows with the mean squares.
        like: View,
        /// Rows that are scaled, in place.
        x: View,
    },
    /// Adds to every parallel stream its row of a matrix times the streams, `x_i += Σ_j C_ij x_j`.
    MixStreams {
        /// Matrices, `[rows, streams²]`.
        matrices: View,
        /// The first stream.
        first: View,
    },
    /// Adds to every parallel stream its share, plus 1, of the change of the first.
    CorrectStreams {
        /// Shares, `[rows, streams]`.
        shares: View,
        /// The first stream as it was.
        first: View,
        /// The first stream as it is.
        changed: View,
    },
    /// Joins hyper-connected streams into the residual stream.
    JoinHyper(HyperSite),
    /// Mixes hyper-connected streams and adds the residual stream to each.
    MixHyper(HyperSite),
    /// Projects the keys of an indexer, if a cache keeps them or a query chooses, and in the latter case its queries and
    /// weights.
    ProjectIndex {
        /// Normed states.
        x: View,
        /// Normed latent of the queries.
        latent: View,
    },
    /// Quantizes latents of the rows that are not padding, as a cache would.
    StoreLatents {
        /// Latents, in place.
        x: View,
    },
    /// Rotates queries and keys, appends keys and values to the cache if there is one, and attends.
    Attend,
    /// Attends to the latents of a cache, to which those of the pass are appended.
    AttendLatents,
    /// Runs a recurrent mixer over the tokens of each sequence.
    Scan {
        /// What was projected, and scratch.
        scratch: View,
        /// Result, zeros in padding.
        out: View,
    },
    /// Chooses experts for every token that is not padding by the logits of a router, and weighs them.
    Route {
        /// Logits, `[rows, experts]`; scores afterwards.
        logits: View,
    },
    /// Runs the chosen experts on their tokens and adds their weighted results to `out`.
    Experts {
        /// What experts read, `[rows, width]`.
        x: View,
        /// Sum of the results, of the same width.
        out: View,
    },
}

impl Op {
    /// Most outputs of [`Op::Matmuls`].
    pub const MOST_OUTPUTS: usize = 4;

    /// Lists the views that the operation reads or writes.
    pub fn views(&self) -> Vec<View> {
        match self {
            Op::Norm { x, out, .. }
            | Op::NormColumns { x, out, .. }
            | Op::VectorNorm { x, out, .. }
            | Op::Side { x, out, .. }
            | Op::Copy { x, out }
            | Op::CopyColumns(Columns { x, out, .. })
            | Op::Add { x, out }
            | Op::Experts { x, out } => vec![*x, *out],
            Op::Matmuls { x, outputs, .. } => {
                std::iter::once(*x).chain(outputs.iter().map(|output| output.out)).collect()
            }
            Op::ClearColumns { out, .. } | Op::Fill { out, .. } => vec![*out],
            Op::SplitPairs { x, scratch, .. } => vec![*x, *scratch],
            Op::Clip { x, .. }
            | Op::Scale { x, .. }
            | Op::Divide { x, .. }
            | Op::ScaleByVector { x, .. }
            | Op::Rotate { x, .. }
            | Op::Grow { x, .. }
            | Op::CutOff { x, .. }
            | Op::Tanh { x, .. }
            | Op::StoreLatents { x }
            | Op::Route { logits: x } => vec![*x],
            Op::AddGated { gates, x, out } => vec![*gates, *x, *out],
            Op::ActMul { gate, up, out, .. } => {
                [Some(*gate), *up, Some(*out)].into_iter().flatten().collect()
            }
            Op::GateHeads { gates, x, .. } => vec![*gates, *x],
            Op::MatchSquares { like, x } => vec![*like, *x],
            Op::MixStreams { matrices, first } => vec![*matrices, *first],
            Op::CorrectStreams { shares, first, changed } => vec![*shares, *first, *changed],
            Op::ProjectIndex { x, latent } => vec![*x, *latent],
            Op::Scan { scratch, out } => vec![*scratch, *out],
            Op::JoinHyper(_) | Op::MixHyper(_) | Op::Attend | Op::AttendLatents => Vec::new(),
        }
    }
}

/// Computation of a layer, in the order of the pass. A pass may stop between its parts and go on from there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Program {
    /// Prediction of parallel streams, before anything else.
    pub predict: Vec<Op>,
    /// Prediction of parallel streams of which the first has advanced inside the layer.
    pub resume: Vec<Op>,
    /// First half up to its projections.
    pub read: Vec<Op>,
    /// Takes the place of `read` if a cache holds the latents of latent attention.
    pub read_cached: Option<Vec<Op>>,
    /// First half up to the input of its output projection, in [`Buffer::Attended`].
    pub heads: Vec<Op>,
    /// Takes the place of `heads` with `read_cached`.
    pub heads_cached: Option<Vec<Op>>,
    /// Rest of the first half.
    pub output: Vec<Op>,
    /// Second half before its parts.
    pub enter: Vec<Op>,
    /// Second half, for some rows at a time.
    pub parts: Vec<Op>,
    /// Second half after its parts.
    pub leave: Vec<Op>,
}

impl Program {
    /// Iterates over all operations.
    pub fn ops(&self) -> impl Iterator<Item = &Op> {
        let cached = [&self.read_cached, &self.heads_cached].into_iter().flatten();
        let parts = [&self.predict, &self.resume, &self.read, &self.heads, &self.output];
        let mlp = [&self.enter, &self.parts, &self.leave];
        parts.into_iter().chain(cached).chain(mlp).flatten()
    }

    /// Most values per row of a buffer that the operations use.
    pub fn width(&self, buffer: Buffer) -> usize {
        let views = self.ops().flat_map(Op::views).filter(|view| view.buffer == buffer);
        views.map(|view| view.end()).max().unwrap_or(0)
    }
}
