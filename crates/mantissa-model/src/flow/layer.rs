//! Blocks of a layer, from the configuration, and the program that they lower to.

use mantissa_kernels::CausalAttention;

use crate::attention::Attention;
use crate::config::{Activation, DenseMlp, Mixing, ModelConfig, Recurrent};
use crate::experts::Experts;
use crate::frame::{Frame, scaled};
use crate::indexer::IndexerFlow;
use crate::kv::KvQuantizer;
use crate::mlp::{Mlp, add_input};
use crate::program::{Buffer, Gating, Op, Program, View};
use mantissa_arch::kinds::{HyperSite, LinearInput, LinearKind, NormKind, VectorKind};

/// Blocks of a layer and their frame.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerFlow {
    /// Index of the layer.
    pub(crate) index: usize,
    pub(crate) threads: usize,
    pub(crate) frame: Frame,
    /// True if the layer has its own rotary parameters.
    pub(crate) local: bool,
    /// What the first half is made of.
    pub(crate) mixing: Mixing,
    /// Attention; without keys and values if the first half has none.
    pub(crate) attention: Attention,
    /// Recurrent mixer of the layer's tokens.
    pub(crate) recurrent: Option<Recurrent>,
    /// Factor of the mixer's result.
    mixed_factor: Option<f32>,
    /// Nonlinearity of MLP and experts.
    pub(crate) gating: Gating,
    /// MLP that every token passes through.
    mlp: Option<Mlp>,
    pub(crate) experts: Option<Experts>,
    /// Width of the layer's own input.
    input: Option<usize>,
    /// True if the states are multiplied by a number after the layer.
    scales: bool,
    pub(super) program: Program,
}

impl LayerFlow {
    /// Creates the blocks of layer `layer`, on up to `threads` threads, which change no bit of the result.
    pub fn new(config: &ModelConfig, layer: usize, threads: usize) -> Self {
        let threads = threads.max(1);
        let experts = Experts::new(config, layer);
        let gating = Gating {
            activation: config.hidden_act,
            limited: experts.as_ref().and_then(|experts| experts.limited),
        };
        let dense = experts.as_ref().is_none_or(|experts| experts.dense != DenseMlp::None);
        let has_mlp = config.has_mlp[layer];
        let mut flow = LayerFlow {
            index: layer,
            threads,
            frame: Frame::new(config, layer),
            local: config.local_rope.is_some() && config.windows[layer].is_some(),
            mixing: config.mixing[layer],
            attention: Attention::new(config, layer, threads),
            recurrent: config.recurrent_in(layer),
            mixed_factor: config.multipliers.map(|multipliers| multipliers.mixed),
            gating,
            mlp: (has_mlp && dense).then(|| Mlp::new(config, layer, gating)),
            experts: experts.filter(|_| has_mlp),
            input: config.by_layer.inputs.map(|inputs| inputs.width).filter(|_| has_mlp),
            scales: config.by_layer.scales && has_mlp,
            program: Program::default(),
        };
        flow.program = flow.lower(has_mlp);
        flow
    }

    /// Lowers the blocks to operations.
    fn lower(&self, has_mlp: bool) -> Program {
        let mut program = Program::default();
        let hidden = self.frame.hidden;
        if let Some(streams) = self.frame.streams.filter(|_| self.mixing != Mixing::None) {
            program.predict = streams.predict(hidden, false);
            program.resume = streams.predict(hidden, true);
        }
        program.read = self.lower_read(false);
        program.heads = self.lower_heads(false);
        if self.attends() && self.attention.latent.is_some() {
            program.read_cached = Some(self.lower_read(true));
            program.heads_cached = Some(self.lower_heads(true));
        }
        program.output = self.lower_output();
        if has_mlp {
            self.lower_mlp(&mut program);
        }
        program
    }

    /// First half up to its projections.
    fn lower_read(&self, cached: bool) -> Vec<Op> {
        let (frame, mut ops) = (&self.frame, Vec::new());
        if self.mixing == Mixing::None {
            return ops;
        }
        ops.extend(frame.join(HyperSite::Attention));
        ops.push(frame.enter(NormKind::Input));
        ops.extend(frame.clear());
        if let Some(recurrent) = &self.recurrent {
            recurrent.mixer().project(frame.normed(), &mut ops);
        }
        if self.attends() {
            self.attention.project(frame, cached, &mut ops);
        }
        ops
    }

    /// First half from there up to the input of its output projection.
    fn lower_heads(&self, cached: bool) -> Vec<Op> {
        let mut ops = Vec::new();
        if self.mixing == Mixing::None {
            return ops;
        }
        if let (Some(out), Some(recurrent)) = (self.mixed(), &self.recurrent) {
            let scratch = View::new(Buffer::Wide, recurrent.mixer().scratch());
            ops.push(Op::Scan { scratch, out });
            ops.extend(scaled(self.mixed_factor, out));
        }
        if self.attends() {
            self.attention.heads(cached, &mut ops);
        }
        ops.extend(self.frame.enter_parallel());
        ops
    }

    /// Rest of the first half.
    fn lower_output(&self) -> Vec<Op> {
        let (frame, mut ops) = (&self.frame, Vec::new());
        if let Some(x) = self.mixed() {
            let scratch = View::new(Buffer::Wide, frame.hidden);
            let linear = (LinearKind::MixOut, LinearInput::Mixed);
            frame.add_result(linear, x, NormKind::AfterAttention, scratch, &mut ops);
        }
        if self.attends() {
            if let Some(streams) = &frame.streams {
                streams.add_laurel(frame.hidden, &mut ops);
            }
            self.attention.output(frame, &mut ops);
            if frame.streams.is_some() {
                ops.push(Op::Scale { x: frame.residual(), factor: std::f32::consts::FRAC_1_SQRT_2 });
            }
        }
        ops.extend(frame.mix(HyperSite::Attention));
        ops
    }

    /// Second half.
    fn lower_mlp(&self, program: &mut Program) {
        let frame = &self.frame;
        program.enter.extend(frame.join(HyperSite::Mlp));
        if !frame.parallel() {
            program.enter.push(frame.enter(NormKind::Post));
        }
        program.enter.extend(frame.clear());
        let beside = self.experts.as_ref().is_some_and(|experts| experts.dense == DenseMlp::Normed);
        if let Some(mlp) = &self.mlp {
            mlp.lower(frame, beside, &mut program.parts);
        }
        if let Some(experts) = &self.experts {
            experts.lower(self.gating, frame, &mut program.parts);
        }
        if let Some(streams) = &frame.streams {
            streams.correct(frame.hidden, &mut program.parts);
        }
        if let Some(width) = self.input {
            add_input(width, self.gating, frame, &mut program.parts);
        }
        if let Some(streams) = &frame.streams {
            streams.join(frame.hidden, &mut program.parts);
        }
        program.leave.extend(frame.mix(HyperSite::Mlp));
        if self.scales {
            program.leave.push(Op::ScaleByVector { x: frame.residual(), vector: VectorKind::Scale });
        }
    }

    /// Operations of the layer, in the order of a pass.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Attention, if the first half has it.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// True if a pass may stop after the joined heads or the MLP's input, and go on from there. Not with streams that are
    /// mixed between the halves.
    pub(crate) fn pauses(&self) -> bool {
        !self.frame.parallel() && self.mixing != Mixing::Both && self.frame.hyper.is_none()
    }

    /// Quantizes keys and values with `kv` before attention reads them, as they enter a cache.
    pub fn with_kv(mut self, kv: Option<KvQuantizer>) -> Self {
        self.attention.kv = kv;
        self
    }

    /// Runs on up to `threads` threads.
    pub fn on_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self.attention.threads = self.threads;
        self
    }

    /// True if the layer has its own rotary parameters: see [`Buffers::activations`](crate::Buffers::activations).
    pub fn has_local_rope(&self) -> bool {
        self.local
    }

    /// True if the layer has attention, and so keys and values.
    pub fn attends(&self) -> bool {
        self.mixing.attends()
    }

    /// Shape and mask of the attention.
    pub fn attention_shape(&self) -> &CausalAttention {
        self.attention.shape()
    }

    /// Indexer of the layer's sparse attention.
    pub fn indexer(&self) -> Option<&IndexerFlow> {
        self.attention.indexer()
    }

    /// Width of the input of the output projection, before padding is dropped.
    pub(crate) fn joined_width(&self) -> usize {
        self.mixed_from() + self.recurrent.as_ref().map_or(0, Recurrent::width)
    }

    /// Width of the joined heads, which come before the mixer's result.
    pub(crate) fn mixed_from(&self) -> usize {
        if self.attends() { self.attention.widths().0 } else { 0 }
    }

    /// Result of the recurrent mixer.
    fn mixed(&self) -> Option<View> {
        let recurrent = self.recurrent.as_ref()?;
        Some(View::new(Buffer::Attended, self.mixed_from()).then(recurrent.width()))
    }

    /// Activation of the MLP.
    pub fn activation(&self) -> Activation {
        self.gating.activation
    }

    /// Returns the numbers of the activation from the layer's vectors, for [`activate`](Self::activate).
    pub fn activation_numbers(&self, vector: impl Fn(VectorKind) -> Option<f32>) -> [f32; 4] {
        self.gating.numbers(vector)
    }

    /// Computes `inner = act(gate) · up`, all `[rows, width]`.
    pub fn activate(&self, numbers: [f32; 4], width: usize, gate: &[f32], up: &[f32], inner: &mut [f32]) {
        self.gating.run((self.threads, numbers), width, gate, up, inner);
    }

    /// Backward of [`activate`](Self::activate) on this thread: `gate` and `up` become their gradients, and `inner`,
    /// which holds its gradient, becomes the activation again. Clamped SwiGLU has none, and must not be asked for.
    pub fn activate_backward(&self, numbers: [f32; 4], gate: &mut [f32], up: &mut [f32], inner: &mut [f32]) {
        self.gating.run_backward(numbers, gate, up, inner);
    }
}
