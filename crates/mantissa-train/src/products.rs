//! The three matmuls of a decoder layer's linear layers, with plain or quantized operands: fprop `Y = X Wᵀ + b`, dgrad
//! `dX = dY W`, wgrad `dW = dYᵀ X` and `db = Σ dY`. Everything around them is here too: operands are prepared, times
//! are taken ([`Profile`]) and tensors shown to the telemetry ([`Watch`]). Forward and backward
//! passes state formulas only.
//!
//! X is `[tokens, cols]`, W `[rows, cols]`, Y and dY `[tokens, rows]`. Linear layers that read the same X are passed
//! together in the order of the forward pass, because they share the quantized X; the sum of their dX is what an
//! operation on dX sees.

use std::ops::Range;

use mantissa_model::LinearKind;
use mantissa_model::flow::MatmulJob;

use crate::adapter::{Adapted, Slot};
use crate::arena::Parameters;
use crate::form::{Draws, Form, FormRef, LinearPlace, Making, Matrix, Rule};
use crate::forms::Forms;
use crate::gemm_error::Exact;
use crate::gradients::Gradients;
use crate::health::{OperandKind, Operator, Watch};
use crate::linear::LinearOp;
use crate::operand::Operand;
use crate::ops::LayerOps;
use crate::policy::{Gemm, Side};
use crate::profile::{Profile, StepPart};
use crate::store::StoreRef;

/// Matmuls of one layer in one step.
#[derive(Clone, Copy)]
pub(crate) struct Products<'a> {
    pub(crate) layer: &'a LayerOps,
    pub(crate) params: &'a Parameters,
    pub(crate) draws: Draws<'a>,
    pub(crate) profile: &'a Profile,
}

/// Input X of linear layers, `[tokens, cols]`.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    /// Values before rounding.
    pub(crate) exact: &'a [f32],
    /// Values that matmuls with plain operands read.
    pub(crate) rounded: StoreRef<'a>,
}

impl<'a> Input<'a> {
    /// Takes values that matmuls with plain operands round by themselves.
    pub(crate) fn own(exact: &'a [f32]) -> Self {
        Input { exact, rounded: StoreRef::F32(exact) }
    }

    /// Takes values whose rounded copy, if any, is `rounded`.
    pub(crate) fn new(exact: &'a [f32], rounded: &'a Operand) -> Self {
        Input { exact, rounded: rounded.of(exact) }
    }
}

/// Gradient dY `[tokens, rows]` of a linear layer's output.
#[derive(Clone, Copy)]
pub(crate) struct OutputGradient<'a> {
    kind: LinearKind,
    exact: &'a [f32],
    rounded: StoreRef<'a>,
}

impl<'a> Products<'a> {
    /// Returns the same without telemetry, to repeat what it has seen.
    pub(crate) fn unseen(self) -> Self {
        static OFF: Watch = Watch::Off;
        Products { draws: Draws { watch: &OFF, ..self.draws }, ..self }
    }

    fn linear(self, kind: LinearKind) -> &'a LinearOp {
        self.layer.linear(kind)
    }

    fn at(self, kind: LinearKind) -> Operator {
        Operator::Linear(self.layer.index, kind)
    }

    fn making(self, kind: LinearKind, gemm: Gemm, side: Side) -> Making<'a> {
        let place = LinearPlace { layer: self.layer.index, kind, index: self.linear(kind).place() };
        let making = self.draws.making(place, gemm, side);
        let Some(rule) = self.weight_rule(kind, gemm, side) else { return making };
        let amax = || self.layer.fused_amax(self.params, kind, self.draws.threads);
        let amax = rule.shares_global_scale().then(amax).flatten();
        let scales = rule.learns().then(|| self.scales(kind)).flatten();
        Making { scales, amax, ..making }
    }

    /// Returns the rule of an operand that is the weight.
    fn weight_rule(self, kind: LinearKind, gemm: Gemm, side: Side) -> Option<&'a Rule> {
        let rules = self.linear(kind).rules()?;
        match (gemm, side) {
            (Gemm::Fprop, Side::Right) => Some(&rules.fprop[1]),
            (Gemm::Dgrad, Side::Right) => Some(&rules.dgrad[1]),
            _ => None,
        }
    }

    /// Returns the learned scales of a linear layer's weight.
    fn scales(self, kind: LinearKind) -> Option<StoreRef<'a>> {
        self.linear(kind).scales().map(|scales| self.params.get(scales.clone()))
    }

    /// Runs `jobs`, which all read `x`. Rows of their outputs beyond the rows of `x` become 0 if operands are quantized.
    pub(crate) fn fprop(self, forms: &mut Forms, x: Input<'_>, jobs: &mut [MatmulJob<'_>]) {
        let Some(first) = jobs.first().map(|job| job.kind) else { return };
        for MatmulJob { kind, .. } in &*jobs {
            self.draws.watch.operand(self.at(*kind), OperandKind::X, &self.layer.policy, x.exact);
        }
        for (i, MatmulJob { kind, out, accumulate }) in jobs.iter_mut().enumerate() {
            let (linear, threads) = (self.linear(*kind), self.draws.threads);
            self.prepare_weight(forms, *kind, Slot::Forward);
            if linear.rules().is_some() {
                self.prepare_fprop(forms, *kind, (i == 0).then_some((first, x.exact)));
                let operands = forms.of_fprop().map(|form| form.all());
                let weight = forms.adapters.weight(self.params, linear, Slot::Forward);
                self.compare(*kind, Gemm::Fprop, x.exact, weight, Some(operands));
                self.profile.time(StepPart::Fprop, || {
                    linear.fprop_of(self.params, operands, out, *accumulate, threads);
                });
            } else {
                let weight = forms.adapters.weight(self.params, linear, Slot::Forward);
                self.profile.time(StepPart::Fprop, || {
                    linear.fprop_with(self.params, weight, x.rounded, out, *accumulate, threads);
                });
            }
            if let Some(adapted) = self.adapted(*kind) {
                let own = &mut out[..x.exact.len() / linear.cols() * linear.rows()];
                self.profile.time(StepPart::Fprop, || adapted.fprop(&mut forms.adapters, x.rounded, own));
            }
            self.draws.watch.result(self.at(*kind), "fprop y", out);
        }
    }

    /// Returns the linear layer if it has an adapter.
    fn adapted(self, kind: LinearKind) -> Option<Adapted<'a>> {
        Adapted::of(self.params, self.linear(kind), kind, self.draws.threads)
    }

    /// Makes the values of a frozen weight, and DoRA's factors.
    fn prepare_weight(self, forms: &mut Forms, kind: LinearKind, slot: Slot) {
        self.profile.time(StepPart::Rounding, || {
            forms.adapters.prepare(self.params, self.linear(kind), slot, self.draws.threads);
        });
    }

    /// Passes the weight that matmuls of a linear layer read to `make`, with the forms.
    fn with_weight(
        self,
        forms: &mut Forms,
        kind: LinearKind,
        slot: Slot,
        make: impl FnOnce(&mut Forms, Matrix<'_>),
    ) {
        // Moved out, because the weight may lie in it.
        let adapters = std::mem::take(&mut forms.adapters);
        let linear = self.linear(kind);
        make(forms, Matrix::new(adapters.weight(self.params, linear, slot), linear.cols()));
        forms.adapters = adapters;
    }

    /// Shows a matmul's operands before and after rounding to the telemetry: `left` is X or dY, `right` W or X.
    fn compare(
        self,
        kind: LinearKind,
        gemm: Gemm,
        left: &[f32],
        right: StoreRef<'_>,
        forms: Option<[FormRef<'_>; 2]>,
    ) {
        self.draws.watch.gemm(self.at(kind), self.linear(kind), Exact { gemm, left, right }, forms);
    }

    /// Makes the quantized W of fprop, and X if it is given with the first linear layer that reads it.
    fn prepare_fprop(self, forms: &mut Forms, kind: LinearKind, x: Option<(LinearKind, &[f32])>) {
        let linear = self.linear(kind);
        let Some(rules) = linear.rules() else { return };
        self.profile.time(StepPart::Rounding, || {
            if let Some((first, x)) = x {
                let x = Matrix::new(StoreRef::F32(x), linear.cols());
                let making = self.making(first, Gemm::Fprop, Side::Left);
                forms.fprop_x(&rules.fprop[0], x, making);
                forms.keep_mask(self.linear(first).place(), &rules.fprop[0], x, making);
            }
            self.with_weight(forms, kind, Slot::Forward, |forms, weight| {
                forms.fprop_w(&rules.fprop[1], weight, self.making(kind, Gemm::Fprop, Side::Right));
            });
        });
    }

    /// Takes the gradient `dy` of a linear layer's output and rounds it into `rounded`.
    pub(crate) fn output<'b>(
        self,
        kind: LinearKind,
        dy: &'b [f32],
        rounded: &'b mut Operand,
    ) -> OutputGradient<'b> {
        self.profile.time(StepPart::Rounding, || {
            rounded.round(0, self.linear(kind).rows(), dy, self.draws.threads);
        });
        self.rounded_output(kind, dy, rounded)
    }

    /// Takes the gradient `dy` of a linear layer's output, which was rounded into `rounded` before.
    pub(crate) fn rounded_output<'b>(
        self,
        kind: LinearKind,
        dy: &'b [f32],
        rounded: &'b Operand,
    ) -> OutputGradient<'b> {
        self.draws.watch.operand(self.at(kind), OperandKind::Dy, &self.layer.policy, dy);
        OutputGradient { kind, exact: dy, rounded: rounded.of(dy) }
    }

    /// Takes the gradient `dy` of a linear layer's output; matmuls with plain operands round it by themselves.
    pub(crate) fn own_output(self, kind: LinearKind, dy: &[f32]) -> OutputGradient<'_> {
        self.draws.watch.operand(self.at(kind), OperandKind::Dy, &self.layer.policy, dy);
        OutputGradient { kind, exact: dy, rounded: StoreRef::F32(dy) }
    }

    /// Adds to the gradients of weights and biases of linear layers that read `x`.
    pub(crate) fn wgrad(
        self,
        forms: &mut Forms,
        x: Input<'_>,
        outputs: &[OutputGradient<'_>],
        grads: &mut Gradients,
    ) {
        let Some(first) = outputs.first().map(|output| output.kind) else { return };
        let mut x_is_made = false;
        for OutputGradient { kind, exact: dy, rounded } in outputs {
            let (linear, threads) = (self.linear(*kind), self.draws.threads);
            if let Some(adapted) = self.adapted(*kind) {
                let adapters = &mut forms.adapters;
                self.profile.time(StepPart::Wgrad, || {
                    adapted.wgrad(adapters, x.rounded, (dy, *rounded), grads);
                });
            }
            if !grads.holds(&linear.weight()) {
                self.profile.time(StepPart::Wgrad, || linear.bias_grad(dy, grads));
                continue; // frozen
            }
            if linear.rules().is_some() {
                self.prepare_wgrad(forms, *kind, dy, (!x_is_made).then_some((first, x.exact)));
                x_is_made = true;
                let operands = forms.of_wgrad().map(|form| form.all());
                self.compare(*kind, Gemm::Wgrad, dy, StoreRef::F32(x.exact), Some(operands));
                self.profile.time(StepPart::Wgrad, || self.wgrad_of_forms(forms, *kind, grads));
            } else {
                // Here all tokens are at hand; the forward has some at a time, as many as there are threads for.
                self.compare(*kind, Gemm::Fprop, x.exact, self.params.get(linear.weight()), None);
                self.compare(*kind, Gemm::Wgrad, dy, StoreRef::F32(x.exact), None);
                self.profile.time(StepPart::Wgrad, || linear.wgrad(*rounded, x.rounded, grads, threads));
            }
            self.profile.time(StepPart::Wgrad, || linear.bias_grad(dy, grads));
        }
        if !self.draws.watch.is_off() {
            for OutputGradient { kind, .. } in outputs {
                if !grads.holds(&self.linear(*kind).weight()) {
                    continue;
                }
                let dw = grads.get(self.linear(*kind).weight());
                self.draws.watch.result(self.at(*kind), "wgrad dw", &dw.widened());
            }
        }
    }

    /// Adds the product of the quantized operands of wgrad to the gradient of the weight.
    fn wgrad_of_forms(self, forms: &mut Forms, kind: LinearKind, grads: &mut Gradients) {
        let (linear, threads) = (self.linear(kind), self.draws.threads);
        let product = |operands: [&Form; 2], dw: &mut [f32]| {
            linear.wgrad_of(operands.map(|form| form.all()), dw, threads);
        };
        let mut scale_grads = Vec::new();
        grads.add(linear.weight(), |dw| match linear.rules().map(|rules| &rules.fprop[1]) {
            Some(rule) if rule.learns() => {
                let making = self.making(kind, Gemm::Fprop, Side::Right);
                let weight = Matrix::new(self.params.get(linear.weight()), linear.cols());
                let count = linear.scales().map_or(0, Range::len);
                scale_grads = forms.learn_w(rule, (weight, making), count, dw, product);
            }
            Some(rule) if rule.passes_back() => {
                let making = self.making(kind, Gemm::Fprop, Side::Right);
                let weight = Matrix::new(self.params.get(linear.weight()), linear.cols());
                forms.pass_back_w(rule, weight, making, dw, product);
            }
            _ => product(forms.of_wgrad(), dw),
        });
        if let Some(scales) = linear.scales() {
            grads.add(scales.clone(), |sum| mantissa_kernels::kernels().axpy(1.0, &scale_grads, sum));
        }
    }

    /// Makes the quantized dY of wgrad, and X if it is given with the first linear layer that reads it.
    fn prepare_wgrad(self, forms: &mut Forms, kind: LinearKind, dy: &[f32], x: Option<(LinearKind, &[f32])>) {
        let linear = self.linear(kind);
        let Some(rules) = linear.rules() else { return };
        self.profile.time(StepPart::Rounding, || {
            if let Some((first, x)) = x {
                let x = Matrix::new(StoreRef::F32(x), linear.cols());
                let forward = (&rules.fprop[0], self.making(first, Gemm::Fprop, Side::Left));
                forms.wgrad_x(&rules.wgrad[1], x, self.making(first, Gemm::Wgrad, Side::Right), forward);
            }
            let dy = Matrix::new(StoreRef::F32(dy), linear.rows());
            forms.wgrad_dy(&rules.wgrad[0], dy, self.making(kind, Gemm::Wgrad, Side::Left));
        });
    }

    /// Makes the quantized operands of dgrad of linear layers with the same input.
    pub(crate) fn prepare_dgrad(self, forms: &mut Forms, outputs: &[OutputGradient<'_>]) {
        for OutputGradient { kind, exact: dy, rounded } in outputs {
            let (linear, slot) = (self.linear(*kind), kind.slot());
            self.prepare_weight(forms, *kind, Slot::of(*kind));
            if let Some(adapted) = self.adapted(*kind) {
                let adapters = &mut forms.adapters;
                self.profile.time(StepPart::Dgrad, || adapted.prepare_dgrad(adapters, *rounded));
            }
            let Some(rules) = linear.rules() else {
                let weight = forms.adapters.weight(self.params, linear, Slot::of(*kind));
                self.compare(*kind, Gemm::Dgrad, dy, weight, None);
                continue;
            };
            self.profile.time(StepPart::Rounding, || {
                let dy = Matrix::new(StoreRef::F32(dy), linear.rows());
                forms.dgrad_dy(slot, &rules.dgrad[0], dy, self.making(*kind, Gemm::Dgrad, Side::Left));
                let forward = (&rules.fprop[1], self.making(*kind, Gemm::Fprop, Side::Right));
                let making = self.making(*kind, Gemm::Dgrad, Side::Right);
                self.with_weight(forms, *kind, Slot::of(*kind), |forms, weight| {
                    forms.dgrad_w(slot, &rules.dgrad[1], weight, making, forward);
                });
            });
            let weight = forms.adapters.weight(self.params, linear, Slot::of(*kind));
            let operands = forms.of_dgrad(slot).map(|form| form.all());
            self.compare(*kind, Gemm::Dgrad, dy, weight, Some(operands));
        }
    }

    /// Computes the gradient `dx` `[part, cols]` of the input of linear layers for the tokens `part`, the sum over
    /// all, on up to `threads` threads; adds it to `dx` if `accumulate`. Quantized operands were made by
    /// [`prepare_dgrad`](Self::prepare_dgrad).
    pub(crate) fn dgrad(
        self,
        forms: &Forms,
        outputs: &[OutputGradient<'_>],
        part: Range<usize>,
        dx: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        let rule =
            outputs.first().and_then(|first| self.linear(first.kind).rules()).map(|rules| &rules.fprop[0]);
        let back = rule.filter(|rule| rule.passes_back());
        if accumulate && back.is_some() {
            // Only what these layers add is passed back.
            let mut own = vec![0.0; dx.len()];
            self.dgrad(forms, outputs, part, &mut own, false, threads);
            return mantissa_kernels::kernels().axpy(1.0, &own, dx);
        }
        for (i, OutputGradient { kind, rounded, .. }) in outputs.iter().enumerate() {
            let (linear, accumulate) = (self.linear(*kind), accumulate || i > 0);
            self.profile.time(StepPart::Dgrad, || {
                if linear.rules().is_some() {
                    let [dy, weight] = forms.of_dgrad(kind.slot());
                    let operands = [dy.all().slice(part.clone()), weight.all()];
                    linear.dgrad_of(operands, dx, accumulate, threads);
                } else {
                    let dy = rounded.slice(part.start * linear.rows()..part.end * linear.rows());
                    let weight = forms.adapters.weight(self.params, linear, Slot::of(*kind));
                    linear.dgrad_with(weight, dy, dx, accumulate, threads);
                }
                if let Some(adapted) = self.adapted(*kind).filter(|_| back.is_none()) {
                    adapted.dgrad(&forms.adapters, part.clone(), dx, threads);
                }
            });
            self.draws.watch.result(self.at(*kind), "dgrad dx", dx);
        }
        let Some((rule, first)) = back.zip(outputs.first()) else { return };
        let making = self.making(first.kind, Gemm::Fprop, Side::Left);
        self.profile.time(StepPart::Rounding, || {
            let dx = (part.start, &mut *dx, self.linear(first.kind).cols());
            forms.pass_back_x(self.linear(first.kind).place(), rule, dx, making);
        });
        // Adapters read the values themselves.
        for OutputGradient { kind, .. } in outputs {
            if let Some(adapted) = self.adapted(*kind) {
                self.profile
                    .time(StepPart::Dgrad, || adapted.dgrad(&forms.adapters, part.clone(), dx, threads));
            }
        }
    }
}
