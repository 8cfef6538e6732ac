//! Backward pass of a decoder layer, written by hand. In each half (attention, MLP), the gradient of the
//! residual stream is propagated through the branch and added to itself: `d_residual += (∂ branch / ∂
//! residual)ᵀ d_residual`. Branches that run in parallel both start from the gradient of their sum.
//!
//! Activation gradients are split over threads by tokens. Weight gradients sum over all tokens, so they are
//! computed afterwards, split by output features. Matmuls are in [`crate::products`].

mod attention;
mod experts;
mod mlp;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::LinearInput;
use mantissa_model::config::NormPlaces;
use mantissa_model::flow::parts;
use mantissa_model::graph::NormKind;

use crate::arena::Parameters;
use crate::form::Draws;
use crate::forms::Forms;
use crate::gradients::{Gradients, Wanted};
use crate::health::{Operator, Watch};
use crate::model::TrainModel;
use crate::operand::Operand;
use crate::ops::LayerOps;
use crate::plan::{Saved, Scratch};
use crate::products::{OutputGradient, Products};
use crate::profile::{Profile, StepPart};
use crate::rows::{PART, rows, rows_mut};

impl TrainModel {
    /// Propagates `d_residual` `[tokens, hidden]` from the output of layer `i` to its input. Overwrites the
    /// saved activations.
    pub(crate) fn layer_backward(&mut self, i: usize, lens: &[usize], wanted: Wanted) {
        self.scratch.forms.adapters.forget();
        let mut layer = LayerBackward {
            layer: &self.layers[i],
            params: &self.params,
            grads: &mut self.grads,
            saved: &mut self.saved[i],
            s: &mut self.scratch,
            tokens: lens.iter().sum(),
            hidden: self.config.hidden_size,
            threads: self.options.threads,
            profile: &self.profile,
            draws: Draws {
                seed: self.options.policy.seed,
                draw: self.draw,
                histories: &self.histories,
                watch: &self.watch,
                lost: &self.lost,
                threads: self.options.threads,
            },
            watch: &self.watch,
            balance: &self.balance,
            wanted,
        };
        layer.run(lens);
    }
}

/// Backward pass of one layer.
struct LayerBackward<'a> {
    layer: &'a LayerOps,
    params: &'a Parameters,
    grads: &'a mut Gradients,
    saved: &'a mut Saved,
    s: &'a mut Scratch,
    tokens: usize,
    hidden: usize,
    threads: usize,
    profile: &'a Profile,
    draws: Draws<'a>,
    watch: &'a Watch,
    /// Slopes of the load-balancing loss in the router's probabilities, by expert; empty without that loss.
    balance: &'a [f32],
    wanted: Wanted,
}

impl<'a> LayerBackward<'a> {
    fn run(&mut self, lens: &[usize]) {
        if self.layer.is_parallel() {
            let n = self.tokens * self.hidden;
            let s = &mut *self.s;
            self.profile.time(StepPart::Copies, || s.d_branch[..n].copy_from_slice(&s.d_residual[..n]));
        }
        match &self.layer.experts {
            Some(experts) => self.experts(experts),
            None => self.mlp(),
        }
        self.attention(lens);
    }

    fn products(&self) -> Products<'a> {
        Products { layer: self.layer, params: self.params, draws: self.draws, profile: self.profile }
    }

    /// Shows the input gradient of an operator to the telemetry.
    fn look(&self, at: Operator, values: &[f32]) {
        self.watch.result(at, "gradient", values);
    }

    /// Takes the gradient of a branch's result out of the scratch, to be [returned](Self::give_back): the gradient of the
    /// residual stream, propagated through the result's norm `kind` if there is one.
    fn branch(&mut self, kind: NormKind) -> Vec<f32> {
        let n = self.tokens * self.hidden;
        let s = &mut *self.s;
        if let Some(norm) = self.layer.norm(kind) {
            let x = &self.saved.results[usize::from(kind == NormKind::AfterMlp)][..n];
            let pair = (x, &s.d_residual[..n]);
            self.profile.time(StepPart::NormBackward, || {
                let dx = &mut s.d_branch[..n];
                dx.fill(0.0);
                norm.backward(self.params, self.hidden, pair, dx, &mut s.partials, self.grads, self.threads);
            });
            self.watch.result(Operator::Norm(self.layer.index, kind), "gradient", &s.d_branch[..n]);
        }
        std::mem::take(self.branch_place())
    }

    /// Returns what [`branch`](Self::branch) took.
    fn give_back(&mut self, d_out: Vec<f32>) {
        *self.branch_place() = d_out;
    }

    fn branch_place(&mut self) -> &mut Vec<f32> {
        let own = self.layer.norms_results() || self.layer.is_parallel();
        if own { &mut self.s.d_branch } else { &mut self.s.d_residual }
    }

    /// Norm before a half, and the states it reads: `kind` is [`NormKind::Input`] or [`NormKind::Post`].
    fn entrance(&self, kind: NormKind) -> (Option<NormKind>, bool) {
        let reads_middle = kind == NormKind::Post && !self.layer.is_parallel();
        let norm = match self.layer.places {
            NormPlaces::After => None,
            NormPlaces::ParallelShared => Some(NormKind::Input),
            _ => Some(kind),
        };
        (norm, reads_middle)
    }

    /// Makes the input of a half in `normed`, if it was not saved: its norm's output, or the residual stream.
    fn remake(&mut self, kind: NormKind) {
        let input = if kind == NormKind::Post { LinearInput::GateUp } else { LinearInput::Qkv };
        // Telemetry compares with products of values that are not rounded.
        let needed = self.saved.inputs[input.index()].needs_values() || !self.watch.is_off();
        if !needed && self.layer.experts.is_none() {
            return;
        }
        let n = self.tokens * self.hidden;
        let (norm, reads_middle) = self.entrance(kind);
        let x = if reads_middle { &self.saved.middle[..n] } else { &self.saved.residual[..n] };
        let to = &mut self.s.normed[..n];
        self.profile.time(StepPart::Norm, || match norm.and_then(|kind| self.layer.norm(kind)) {
            Some(norm) => norm.run(self.params, x, to, &mut Operand::default(), self.threads),
            None => to.copy_from_slice(x),
        });
    }

    /// Propagates from the linear layers that read the input of a half, whose output gradients are `outputs`, to the
    /// residual stream. Without `outputs`, `d_normed` holds the gradient of the half's input.
    fn enter_backward(&mut self, kind: NormKind, forms: &Forms, outputs: &[OutputGradient<'_>]) {
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        let (_, reads_middle) = self.entrance(kind);
        let shared = self.layer.places == NormPlaces::ParallelShared;
        // The MLP's share waits for the attention's, which passes both through the common norm.
        let (waits, accumulate) = (shared && kind == NormKind::Post, shared && kind == NormKind::Input);
        let norm = self.layer.norm(kind);
        let values = norm.map(|norm| norm.values(self.params));
        let (saved, s) = (&*self.saved, &mut *self.s);
        let x = if reads_middle { &saved.middle } else { &saved.residual };
        let cut = parts(tokens, PART);
        let pieces = cut.clone().zip(rows_mut(&mut s.d_normed, d, cut.clone()));
        let partial = norm.map_or(0, crate::norm::NormOp::partial);
        let pieces = pieces.zip(rows_mut(&mut s.partials, partial, cut.clone().map(|_| 0..1)));
        let pieces = pieces.zip(rows_mut(&mut s.d_residual, d, cut.clone()));
        for_each(self.threads, pieces, |(((part, d_normed), partial), dx)| {
            products.dgrad(forms, outputs, part.clone(), d_normed, accumulate, 1);
            self.profile.time(StepPart::NormBackward, || match &values {
                Some(values) => values.backward(rows(x, d, part), d_normed, dx, partial),
                None if waits => {}
                None => kernels().axpy(1.0, d_normed, dx),
            });
        });
        if let Some(norm) = norm {
            norm.add_partials(&s.partials, cut.count(), self.grads);
        }
        self.watch.result(Operator::Norm(self.layer.index, kind), "gradient", &s.d_residual[..tokens * d]);
        let input = if kind == NormKind::Post { LinearInput::GateUp } else { LinearInput::Qkv };
        let read = &mut self.saved.inputs[input.index()];
        read.add_slopes(&s.normed[..tokens * d], &s.d_normed[..tokens * d], d);
    }
}
