//! Forward pass that saves activations for the backward pass: runs the layers of `mantissa-model` over the
//! parameter arena.

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::{Activations, ExtraScratch, Job, MlpRows, Operators, Sequences, parts};
use mantissa_model::graph::NormKind;
use mantissa_model::{Batch, ForwardError, LinearInput};

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::form::{Draws, Forms};
use crate::health::{Operator, Watch};
use crate::model::{LayerOps, TrainModel};
use crate::operand::Operand;
use crate::products::{Input, Products};
use crate::profile::{Part, Profile};
use crate::rows::{PART, rows, rows_mut};
use crate::store::StoreRef;

/// Operators of a layer that save their inputs.
struct Saving<'a> {
    layer: &'a LayerOps,
    params: &'a Parameters,
    /// Inputs of the linear layers, in the order of [`LinearInput::PLAIN`].
    inputs: &'a mut [Operand; 4],
    /// Queries and keys before their head norms.
    raw: &'a mut [Vec<f32>; 2],
    /// Rows saved so far for each input.
    read: [usize; 4],
    eps: f32,
    threads: usize,
    profile: &'a Profile,
    watch: &'a Watch,
    /// Forms of quantized operands.
    forms: &'a mut Forms,
    draws: Draws<'a>,
    /// Tokens of the batch; rows beyond are padding.
    tokens: usize,
}

impl Operators for Saving<'_> {
    fn norm(&mut self, kind: NormKind, x: &[f32], out: &mut [f32]) {
        if let (Some([query, key]), NormKind::Query | NormKind::Key) = (&self.layer.head_norms, kind) {
            let (range, raw) = if kind == NormKind::Query { (query, 0) } else { (key, 1) };
            self.profile.time(Part::Copies, || self.raw[raw][..x.len()].copy_from_slice(x));
            let (weight, none) = (self.params.f32(range), &mut Operand::default());
            self.profile.time(Part::Norm, || rms_norm(x, &weight, self.eps, out, none, self.threads));
            return self.watch.result(Operator::Norm(self.layer.index, kind), "output", out);
        }
        // Other norms belong to models that training refuses.
        let range = if kind == NormKind::Post { &self.layer.post_norm } else { &self.layer.input_norm };
        let weight = self.params.f32(range);
        let input = if kind == NormKind::Post { LinearInput::GateUp } else { LinearInput::Qkv };
        let rounded = &mut self.inputs[input.index()];
        self.profile.time(Part::Norm, || rms_norm(x, &weight, self.eps, out, rounded, self.threads));
        self.watch.result(Operator::Norm(self.layer.index, kind), "output", out);
    }

    fn linears(
        &mut self,
        input: LinearInput,
        x: &[f32],
        _: usize,
        jobs: &mut [Job<'_>],
    ) -> Result<(), ForwardError> {
        let Some(cols) = jobs.first().map(|job| self.layer.linear(job.kind).cols()) else { return Ok(()) };
        let products =
            Products { layer: self.layer, params: self.params, draws: self.draws, profile: self.profile };
        if self.layer.is_quantized() {
            let x = &x[..self.tokens * cols];
            products.fprop(self.forms, Input { exact: x, rounded: StoreRef::F32(x) }, jobs);
            return Ok(());
        }
        let (rounded, read) = (&mut self.inputs[input.index()], &mut self.read[input.index()]);
        if matches!(input, LinearInput::O | LinearInput::Down) {
            self.profile.time(Part::Rounding, || rounded.round(*read, cols, x, self.threads));
        }
        let x = Input { exact: x, rounded: rounded.at_row(*read, cols, x) };
        *read += x.rounded.len() / cols;
        products.fprop(self.forms, x, jobs);
        Ok(())
    }
}

/// Applies RMSNorm to every row of `x`, and rounds the result into `rounded` for the linear layers that read
/// it.
pub(crate) fn rms_norm(
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
    rounded: &mut Operand,
    threads: usize,
) {
    let d = weight.len();
    let cut = parts(x.len() / d, PART);
    let pieces = cut.clone().zip(rows_mut(out, d, cut.clone())).zip(rounded.parts(d, cut));
    for_each(threads, pieces, |((part, out), rounded)| {
        kernels().rms_norm(rows(x, d, part), weight, eps, out);
        rounded.round(out);
    });
}

impl TrainModel {
    /// Runs a checked batch. The final hidden states are in `scratch.residual`, normed in `scratch.normed`;
    /// activations for the backward are in `saved`.
    pub(crate) fn forward_saving(&mut self, batch: &Batch<'_>) -> Result<(), TrainError> {
        self.embed(batch);
        self.watch.result(
            Operator::Embedding,
            "output",
            &self.scratch.residual[..batch.tokens.len() * self.config.hidden_size],
        );
        self.run_layers(&Self::sequences(batch))?;
        self.final_norm(batch.tokens.len());
        Ok(())
    }

    /// Applies the final norm to `tokens` rows of `scratch.residual`, into `scratch.normed`.
    pub(crate) fn final_norm(&mut self, tokens: usize) {
        let (scratch, params) = (&mut self.scratch, &self.params);
        let len = tokens * self.config.hidden_size;
        let (weight, eps) = (params.f32(&self.final_norm), self.config.rms_norm_eps);
        self.profile.time(Part::Norm, || {
            rms_norm(
                &scratch.residual[..len],
                &weight,
                eps,
                &mut scratch.normed[..len],
                &mut scratch.head_input,
                self.options.threads,
            );
        });
        self.watch.result(Operator::FinalNorm, "output", &scratch.normed[..len]);
    }

    /// Runs the padded residual stream in `scratch` through all layers.
    pub(crate) fn run_layers(&mut self, seqs: &Sequences<'_>) -> Result<(), TrainError> {
        let (scratch, params) = (&mut self.scratch, &self.params);
        let len = seqs.rows * self.config.hidden_size;
        let draws = Draws {
            seed: self.options.policy.seed,
            draw: self.draw,
            histories: &self.histories,
            watch: &self.watch,
            threads: self.options.threads,
        };
        let tokens = seqs.lens.iter().sum();
        for (layer, saved) in self.layers.iter().zip(&mut self.saved) {
            if self.stop.is_some_and(|stop| stop()) {
                return Err(TrainError::Stopped);
            }
            let mut operators = Saving {
                layer,
                params,
                inputs: &mut saved.inputs,
                raw: &mut saved.raw,
                read: [0; 4],
                eps: self.config.rms_norm_eps,
                threads: self.options.threads,
                profile: &self.profile,
                watch: &self.watch,
                forms: &mut scratch.forms,
                draws,
                tokens,
            };
            // Scales of a tensor need all of its rows; frozen weights are dequantized once.
            let most = if layer.is_quantized() || layer.is_tuned() {
                seqs.rows
            } else {
                PART * self.options.threads
            };
            let keep = |from: &[f32], to: &mut [f32]| {
                self.profile.time(Part::Copies, || to[..len].copy_from_slice(&from[..len]));
            };
            let mut activations = Activations {
                residual: &mut scratch.residual,
                normed: &mut scratch.normed,
                q: &mut saved.q,
                k: &mut saved.k,
                v: &mut saved.v,
                attended: &mut saved.attended,
                lse: Some(&mut saved.lse),
                gate: &mut saved.gate,
                up: &mut saved.up,
                inner: &mut scratch.inner,
                mlp: MlpRows { most, keep: true },
                scores: &mut scratch.scores,
                cos: &scratch.cos,
                sin: &scratch.sin,
                extra: ExtraScratch::default(),
            };
            // The residual stream is overwritten in place, so the input of each half is copied for the backward.
            keep(activations.residual, &mut saved.residual);
            self.profile.time_without(Part::Attention, &[Part::Norm, Part::Rounding, Part::Fprop], || {
                layer.flow.attention(&mut operators, seqs, &mut activations)
            })?;
            keep(activations.residual, &mut saved.middle);
            self.profile.time_without(Part::Gate, &[Part::Norm, Part::Rounding, Part::Fprop], || {
                layer.flow.mlp(&mut operators, seqs, &mut activations)
            })?;
        }
        Ok(())
    }

    /// Fills the residual stream with embedding rows; padding rows are zero.
    fn embed(&mut self, batch: &Batch<'_>) {
        let d = self.config.hidden_size;
        let (params, first) = (&self.params, self.embedding.start);
        let rows = Self::sequences(batch).rows;
        let (states, padding) = self.scratch.residual[..rows * d].split_at_mut(batch.tokens.len() * d);
        self.profile.time(Part::Embedding, || {
            for (&token, state) in batch.tokens.iter().zip(states.chunks_exact_mut(d)) {
                let row = first + token as usize * d;
                params.get(row..row + d).widen(state);
            }
            padding.fill(0.0);
        });
    }
}
