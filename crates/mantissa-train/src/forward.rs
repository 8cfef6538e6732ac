//! Forward pass that saves activations for the backward pass: runs the layers of `mantissa-model` over the
//! parameter arena.

use std::borrow::Cow;

use mantissa_kernels::kernels;
use mantissa_model::config::NormPlaces;
use mantissa_model::flow::{Activations, ExtraScratch, MatmulJob, MlpRows, Operators, Sequences};
use mantissa_model::graph::{NormKind, SideKind, VectorKind};
use mantissa_model::{Batch, ForwardError, LinearInput, LinearKind};

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::exchange::Unit;
use crate::form::Draws;
use crate::forms::Forms;
use crate::health::{Operator, Watch};
use crate::model::TrainModel;
use crate::operand::Operand;
use crate::ops::LayerOps;
use crate::plan::{Mixture, Saved, Scratch};
use crate::products::{Input, Products};
use crate::profile::{Profile, StepPart};
use crate::rows::PART;

/// Operators of a layer that save their inputs.
struct Saving<'a> {
    layer: &'a LayerOps,
    params: &'a Parameters,
    /// Inputs of the linear layers, in the order of [`LinearInput::PLAIN`].
    inputs: &'a mut [Operand; 4],
    /// Queries and keys before they are normed or clipped.
    raw: &'a mut [Vec<f32>; 2],
    /// Results of attention and MLP before their norms.
    results: &'a mut [Vec<f32>; 2],
    /// Logits of the router.
    router: &'a mut Vec<f32>,
    /// Vectors of the layer.
    vectors: Vec<(VectorKind, Cow<'a, [f32]>)>,
    /// Rows saved so far for each input.
    read: [usize; 4],
    /// Values saved so far of the MLP's result.
    mlp_at: usize,
    threads: usize,
    profile: &'a Profile,
    watch: &'a Watch,
    /// Forms of quantized operands.
    forms: &'a mut Forms,
    draws: Draws<'a>,
}

impl Saving<'_> {
    /// True if no norm has rounded this input.
    fn is_fresh(&self, input: LinearInput) -> bool {
        match input {
            LinearInput::Qkv => self.layer.places == NormPlaces::After,
            LinearInput::GateUp => {
                matches!(self.layer.places, NormPlaces::After | NormPlaces::ParallelShared)
            }
            _ => true,
        }
    }

    /// Saves the input of a norm that the backward cannot make from other saved activations.
    fn save(&mut self, kind: NormKind, x: &[f32]) {
        let to = match kind {
            NormKind::Query => &mut self.raw[0][..x.len()],
            NormKind::Key => &mut self.raw[1][..x.len()],
            NormKind::AfterAttention => &mut self.results[0][..x.len()],
            NormKind::AfterMlp => {
                let first = self.mlp_at;
                self.mlp_at += x.len();
                &mut self.results[1][first..first + x.len()]
            }
            _ => return,
        };
        self.profile.time(StepPart::Copies, || to.copy_from_slice(x));
    }
}

impl Operators for Saving<'_> {
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]) {
        self.save(kind, x);
        let none = &mut Operand::default();
        let rounded = match kind {
            NormKind::Input => &mut self.inputs[LinearInput::Qkv.index()],
            NormKind::Post => &mut self.inputs[LinearInput::GateUp.index()],
            _ => none,
        };
        // The flow asks only for norms in the config, and the layer has those.
        let Some(norm) = self.layer.norm(kind) else { return };
        self.profile.time(StepPart::Norm, || norm.run(self.params, x, out, rounded, self.threads));
        self.watch.result(Operator::Norm(self.layer.index, kind), "output", out);
    }

    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        tokens: usize,
        jobs: &mut [MatmulJob<'_>],
    ) -> Result<(), ForwardError> {
        let Some(cols) = jobs.first().map(|job| self.layer.linear(job.kind).cols()) else { return Ok(()) };
        let products =
            Products { layer: self.layer, params: self.params, draws: self.draws, profile: self.profile };
        let index = input.index();
        if self.layer.is_quantized() {
            products.fprop(self.forms, Input::own(&x[..tokens * cols]), jobs);
        } else if index < self.inputs.len() {
            let fresh = self.is_fresh(input);
            let (rounded, read) = (&mut self.inputs[index], &mut self.read[index]);
            if fresh {
                self.profile.time(StepPart::Rounding, || rounded.round(*read, cols, x, self.threads));
            }
            let x = Input { exact: x, rounded: rounded.at_row(*read, cols, x) };
            *read += x.rounded.len() / cols;
            products.fprop(self.forms, x, jobs);
        } else {
            products.fprop(self.forms, Input::own(x), jobs);
        }
        if self.layer.clip.is_some() {
            for (own, raw) in [LinearKind::Q, LinearKind::K].into_iter().zip(self.raw.iter_mut()) {
                for job in jobs.iter().filter(|job| job.kind == own) {
                    raw[..job.out.len()].copy_from_slice(job.out);
                }
            }
        }
        Ok(())
    }

    fn side(&mut self, kind: SideKind, x: &[f32], out: &mut [f32]) {
        let Some(side) = self.layer.side(kind) else { return };
        self.profile.time(StepPart::Fprop, || side.narrow(self.params, x, out, self.threads));
        if kind == SideKind::Router {
            self.router[..out.len()].copy_from_slice(out);
        }
    }

    fn vector(&self, kind: VectorKind) -> Option<&[f32]> {
        self.vectors.iter().find(|(of, _)| *of == kind).map(|(_, values)| &**values)
    }
}

/// Buffers of a layer's pass, and the saved activations that it does not write to itself.
type Borrowed<'a> = (Activations<'a>, &'a mut Forms);

/// Takes the buffers that a pass through `layer` writes, from `saved` only the given names.
fn activations<'a>(
    layer: &LayerOps,
    scratch: &'a mut Scratch,
    saved: SavedBuffers<'a>,
    most: usize,
) -> Borrowed<'a> {
    let [cos, sin] = if layer.flow.has_local_rope() { &scratch.local_angles } else { &scratch.angles };
    let Mixture { gate, up, logits, gathered, result, sum, .. } = &mut scratch.mixture;
    let SavedBuffers { q, k, v, attended, lse, gate: saved_gate, up: saved_up, choices } = saved;
    let mixed = layer.experts.is_some();
    let a = Activations {
        residual: &mut scratch.residual,
        normed: &mut scratch.normed,
        q,
        k,
        v,
        attended,
        lse: Some(lse),
        gate: if mixed { gate } else { saved_gate },
        up: if mixed { up } else { saved_up },
        inner: &mut scratch.inner,
        mlp: MlpRows { most, keep: true },
        scores: &mut scratch.scores,
        cos,
        sin,
        layer_input: &[],
        streams: &mut [],
        extra: ExtraScratch {
            wide: &mut scratch.wide,
            logits,
            gathered,
            result,
            sum,
            choices,
            index: Default::default(),
        },
    };
    (a, &mut scratch.forms)
}

/// Saved activations that the layer's computation writes.
struct SavedBuffers<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    attended: &'a mut [f32],
    lse: &'a mut [f32],
    gate: &'a mut [f32],
    up: &'a mut [f32],
    choices: &'a mut Vec<mantissa_model::flow::ExpertChoice>,
}

impl TrainModel {
    /// Runs a checked batch. The final hidden states are in `scratch.residual`, normed in `scratch.normed`;
    /// activations for the backward are in `saved`.
    pub(crate) fn forward_saving(&mut self, batch: &Batch<'_>) -> Result<(), TrainError> {
        self.reach(Unit::Embedding)?;
        self.embed(batch);
        self.watch.result(
            Operator::Embedding,
            "output",
            &self.scratch.residual[..batch.tokens.len() * self.config.hidden_size],
        );
        self.run_layers(&Self::sequences(batch))?;
        self.reach(Unit::Head)?;
        self.final_norm(batch.tokens.len());
        Ok(())
    }

    /// Applies the final norm to `tokens` rows of `scratch.residual`, into `scratch.normed`.
    pub(crate) fn final_norm(&mut self, tokens: usize) {
        let (scratch, params) = (&mut self.scratch, &self.params);
        let len = tokens * self.config.hidden_size;
        let (x, out) = (&scratch.residual[..len], &mut scratch.normed[..len]);
        self.profile.time(StepPart::Norm, || {
            self.final_norm.run(params, x, out, &mut scratch.head_input, self.options.threads);
        });
        self.watch.result(Operator::FinalNorm, "output", &scratch.normed[..len]);
    }

    /// Runs the padded residual stream in `scratch` through all layers.
    pub(crate) fn run_layers(&mut self, seqs: &Sequences<'_>) -> Result<(), TrainError> {
        for i in 0..self.layers.len() {
            self.go_on()?;
            self.reach(Unit::Layer(i))?;
            self.run_layer(i, seqs)?;
        }
        Ok(())
    }

    /// Runs the residual stream in `scratch` through layer `i`.
    fn run_layer(&mut self, i: usize, seqs: &Sequences<'_>) -> Result<(), TrainError> {
        let (scratch, params) = (&mut self.scratch, &self.params);
        let len = seqs.rows * self.config.hidden_size;
        let draws = Draws {
            seed: self.options.policy.seed,
            draw: self.draw,
            histories: &self.histories,
            watch: &self.watch,
            lost: &self.lost,
            threads: self.options.threads,
        };
        let (layer, saved) = (&self.layers[i], &mut self.saved[i]);
        // Scales of a tensor need all of its rows; frozen weights are dequantized once; the routing is saved as a
        // whole.
        let whole = layer.is_quantized() || layer.is_tuned() || layer.experts.is_some();
        let most = if whole { seqs.rows } else { PART * self.options.threads };
        let Saved { residual, q, k, v, attended, lse, middle, gate, up, raw, results, router, .. } = saved;
        let choices = &mut saved.choices;
        let buffers = SavedBuffers { q, k, v, attended, lse, gate, up, choices };
        let (mut activations, forms) = activations(layer, scratch, buffers, most);
        let mut operators = Saving {
            layer,
            params,
            inputs: &mut saved.inputs,
            raw,
            results,
            router,
            vectors: layer.vectors().map(|(kind, range)| (kind, params.f32(range))).collect(),
            read: [0; 4],
            mlp_at: 0,
            threads: self.options.threads,
            profile: &self.profile,
            watch: &self.watch,
            forms,
            draws,
        };
        let keep = |from: &[f32], to: &mut [f32]| {
            self.profile.time(StepPart::Copies, || to[..len].copy_from_slice(&from[..len]));
        };
        // The residual stream is overwritten in place, so the input of each half is copied for the backward.
        keep(activations.residual, residual);
        self.profile.time_without(
            StepPart::Attention,
            &[StepPart::Norm, StepPart::Rounding, StepPart::Fprop],
            || layer.flow.run_attention(&mut operators, seqs, &mut activations),
        )?;
        if !layer.is_parallel() {
            keep(activations.residual, middle);
        }
        self.profile.time_without(
            StepPart::Gate,
            &[StepPart::Norm, StepPart::Rounding, StepPart::Fprop],
            || layer.flow.run_mlp(&mut operators, seqs, &mut activations),
        )?;
        Ok(())
    }

    /// Fills the residual stream with embedding rows, scaled, plus learned positions; padding rows are zero.
    fn embed(&mut self, batch: &Batch<'_>) {
        let d = self.config.hidden_size;
        let (params, first) = (&self.params, self.embedding.start);
        let rows = Self::sequences(batch).rows;
        let (states, padding) = self.scratch.residual[..rows * d].split_at_mut(batch.tokens.len() * d);
        self.profile.time(StepPart::Embedding, || {
            for (&token, state) in batch.tokens.iter().zip(states.chunks_exact_mut(d)) {
                let row = first + token as usize * d;
                params.get(row..row + d).widen(state);
                if let Some(scale) = self.config.embedding_scale {
                    state.iter_mut().for_each(|x| *x *= scale);
                }
            }
            if let Some(positions) = &self.positions {
                let row = &mut self.scratch.normed[..d];
                let places = batch.lens.iter().flat_map(|&len| 0..len);
                for (position, state) in places.zip(states.chunks_exact_mut(d)) {
                    let first = positions.start + position * d;
                    params.get(first..first + d).widen(row);
                    kernels().axpy(1.0, row, state);
                }
            }
            padding.fill(0.0);
        });
    }
}
