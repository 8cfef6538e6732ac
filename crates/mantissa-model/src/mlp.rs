//! Gated MLP (Shazeer 2020, "GLU Variants Improve Transformer"): `down(act(gate(x)) · up(x))`, with BitNet's norm
//! before the down projection; and the MLP without a gate, `down(act(up(x)))`.
//!
//! It reads `normed` `[rows, hidden]` and adds its result to `residual` `[rows, hidden]`, some rows at a time.

use mantissa_kernels::{for_each, kernels};

use crate::config::{MlpForm, ModelConfig};
use crate::frame::{Frame, scaled};
use crate::mixer::softplus;
use crate::program::{Buffer, Columns, Gating, Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind, VectorKind};

/// Least number of values that several threads compute.
const MANY: usize = 1 << 16;

/// MLP that every token passes through.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mlp {
    /// Inner width.
    pub(crate) width: usize,
    form: MlpForm,
    gating: Gating,
    /// True if the inner activation is normed.
    sub_norms: bool,
    /// Standard deviations above its mean at which the gate of a token is cut off.
    cutoff: Option<f32>,
    /// Factors of the gate before its activation, and of the inner activation.
    factors: [Option<f32>; 2],
}

impl Mlp {
    /// Creates the MLP of layer `layer`.
    pub(crate) fn new(config: &ModelConfig, layer: usize, gating: Gating) -> Self {
        let factors = config.multipliers;
        Mlp {
            width: config.ffn(layer),
            form: config.mlp,
            gating,
            sub_norms: config.has_sub_norms(),
            cutoff: config.by_layer.cutoffs.get(layer).copied().flatten(),
            factors: [factors.map(|factors| factors.gate), factors.map(|factors| factors.inner)],
        }
    }

    /// Runs the MLP on the normed states. Beside `experts`, its result stays in scratch, normed; else it is added to the
    /// residual stream.
    pub(crate) fn lower(&self, frame: &Frame, beside_experts: bool, ops: &mut Vec<Op>) {
        let [gate, up] = [Buffer::Gate, Buffer::Up].map(|buffer| View::kept(buffer, self.width));
        let inner = View::part(Buffer::Inner, self.width);
        self.gate_and_up(frame.normed(), [gate, up], ops);
        ops.extend(self.cutoff.map(|deviations| Op::CutOff { x: gate, deviations }));
        ops.extend(scaled(self.factors[0], gate));
        ops.push(Op::ActMul { gating: self.gating, gate, up: Some(up), out: inner });
        ops.extend(scaled(self.factors[1], inner));
        let mut x = inner;
        if self.sub_norms {
            let out = View::kept(Buffer::NormedInner, self.width);
            ops.push(Op::Norm { norm: NormKind::MlpSub, x, out });
            x = out;
        }
        let scratch = View::part(Buffer::Wide, frame.hidden);
        let down = (LinearKind::Down, LinearInput::Down);
        if beside_experts {
            let out = frame.normed();
            let outputs = vec![Output { linear: LinearKind::Down, out, add: false }];
            ops.push(Op::Matmuls { input: LinearInput::Down, x, outputs });
            ops.push(Op::Norm { norm: NormKind::AfterDense, x: out, out: scratch });
        } else {
            frame.add_result(down, x, NormKind::AfterMlp, scratch, ops);
        }
    }

    /// Projects `x` to gate and up, `[rows, width]`. Without a gate, `gate` receives the up projection and `up` ones.
    fn gate_and_up(&self, x: View, [gate, up]: [View; 2], ops: &mut Vec<Op>) {
        let output = |linear, out| Output { linear, out, add: false };
        let input = LinearInput::GateUp;
        match self.form {
            MlpForm::Gated => {
                let outputs = vec![output(LinearKind::Gate, gate), output(LinearKind::Up, up)];
                ops.push(Op::Matmuls { input, x, outputs });
            }
            MlpForm::GatedJoined => {
                let joined = View::part(Buffer::Wide, 2 * self.width);
                ops.push(Op::Matmuls { input, x, outputs: vec![output(LinearKind::GateUp, joined)] });
                for (out, from) in [(gate, 0), (up, self.width)] {
                    let columns = Columns::new(joined, (from, 0), out, (0, 0), [1, self.width]);
                    ops.push(Op::CopyColumns(columns));
                }
            }
            MlpForm::Plain => {
                ops.push(Op::Fill { out: up, value: 1.0 });
                ops.push(Op::Matmuls { input, x, outputs: vec![output(LinearKind::Up, gate)] });
            }
        }
    }
}

/// Adds the layer's own input `e` `[rows, width]`, gated by the states: `residual += norm(P (act(G residual) · e))`
/// (Gemma 4).
pub(crate) fn add_input(width: usize, gating: Gating, frame: &Frame, ops: &mut Vec<Op>) {
    let [gate, inner] = [Buffer::Gate, Buffer::Inner].map(|buffer| View::part(buffer, width));
    let (out, normed) = (frame.normed(), View::part(Buffer::Wide, frame.hidden));
    // Of parallel streams, the corrected states with their factors.
    let states = if frame.streams.is_some() { frame.normed() } else { frame.residual() };
    let gates = vec![Output { linear: LinearKind::InputGate, out: gate, add: false }];
    let projected = vec![Output { linear: LinearKind::InputProjection, out, add: false }];
    ops.extend([
        Op::Matmuls { input: LinearInput::States, x: states, outputs: gates },
        Op::ActMul { gating, gate, up: None, out: inner },
        Op::Matmuls { input: LinearInput::Gated, x: inner, outputs: projected },
        Op::Norm { norm: NormKind::AfterInput, x: out, out: normed },
    ]);
    match &frame.streams {
        None => ops.push(Op::Add { x: normed, out: frame.residual() }),
        // To every stream but the first.
        Some(streams) => {
            ops.extend(
                (1..streams.count).map(|i| Op::Add { x: normed, out: streams.stream(i, frame.hidden) }),
            );
        }
    }
}

impl Gating {
    /// Returns the numbers of a layer's activation from its vectors, as kernels take them; zeros where it has none.
    pub(crate) fn numbers(&self, vector: impl Fn(VectorKind) -> Option<f32>) -> [f32; 4] {
        let mut numbers = [0.0; 4];
        for (number, parameter) in numbers.iter_mut().zip(self.activation.parameters()) {
            // The program asks only for vectors in the config, and those were loaded.
            let stored = vector(VectorKind::Activation(parameter.name)).unwrap_or(0.0);
            *number = if parameter.softplus { softplus(f64::from(stored)) as f32 } else { stored };
        }
        numbers
    }

    /// Computes `inner = act(gate) · up`, all `[rows, width]`, on up to `threads` threads. `numbers` are those of the layer's
    /// activation.
    pub(crate) fn run(
        &self,
        (threads, numbers): (usize, [f32; 4]),
        width: usize,
        gate: &[f32],
        up: &[f32],
        inner: &mut [f32],
    ) {
        let threads = if inner.len() < MANY { 1 } else { threads };
        let piece = ((inner.len() / width).div_ceil(threads) * width).max(1);
        let pieces = gate.chunks(piece).zip(up.chunks(piece)).zip(inner.chunks_mut(piece));
        for_each(threads, pieces, |((gate, up), inner)| match self.limited {
            Some(l) => kernels().limited_swiglu_mul([l.alpha, l.limit, l.offset], gate, up, inner),
            None => kernels().act_mul(self.activation, numbers, gate, up, inner),
        });
    }

    /// Backward of [`run`](Self::run) on this thread: `gate` and `up` become their gradients, and `inner`, which holds its
    /// gradient, becomes the activation again. Clamped SwiGLU has none, and must not be asked for.
    pub(crate) fn run_backward(
        &self,
        numbers: [f32; 4],
        gate: &mut [f32],
        up: &mut [f32],
        inner: &mut [f32],
    ) {
        kernels().act_mul_backward(self.activation, numbers, gate, up, inner);
    }
}
