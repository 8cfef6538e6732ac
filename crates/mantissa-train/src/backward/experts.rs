//! Backward of a mixture of experts. The output of token t is `Σ w_e y_e`, with the weights w of the router and the
//! result y_e of expert e: `dy_e = w_e dout` and `dw_e = dout · y_e`. Experts are recomputed one by one from the saved
//! choices, so that their activations are never held for all. The router's gradient includes the
//! load-balancing loss (see [`crate::balance`]).

use mantissa_kernels::kernels;
use mantissa_model::LinearKind;
use mantissa_model::config::Experts;
use mantissa_model::flow::{ExpertChoice, MIN_ROWS, MatmulJob, route_backward, sigmoid};
use mantissa_model::graph::{NormKind, SideKind};

use super::LayerBackward;
use crate::balance::add_slopes;
use crate::forms::Forms;
use crate::gradients::Gradients;
use crate::linear::LinearOp;
use crate::plan::Mixture;
use crate::products::{Input, Products};
use crate::profile::StepPart;
use crate::store::StoreRef;

/// Gate, up and down of one MLP.
type Kinds = [LinearKind; 3];

/// Buffers of one expert, for up to `rows` tokens.
struct Expert<'b> {
    /// Its input `[rows, hidden]`, padded with zeros like in the forward pass.
    x: &'b mut [f32],
    gate: &'b mut [f32],
    up: &'b mut [f32],
    inner: &'b mut [f32],
    /// Its result `[rows, hidden]`, then the gradient of its input.
    result: &'b mut [f32],
    /// Gradient of its result, `[rows, hidden]`.
    dy: &'b mut [f32],
}

impl LayerBackward<'_> {
    pub(super) fn experts(&mut self, experts: &Experts) {
        let (d, tokens) = (self.hidden, self.tokens);
        let d_out = self.branch(NormKind::AfterMlp);
        self.remake(NormKind::Post);
        // Moved out, because the rest of the scratch is borrowed below.
        let (mut forms, mut mixture) =
            (std::mem::take(&mut self.s.forms), std::mem::take(&mut self.s.mixture));
        self.s.d_normed[..tokens * d].fill(0.0);
        let choices = std::mem::take(&mut self.saved.choices);
        let [mut by_token, mut slopes] = std::mem::take(&mut mixture.by_token);
        by_token.clear();
        by_token.extend_from_slice(&choices);
        slopes.clear();
        for chosen in choices.chunk_by(|a, b| a.expert == b.expert) {
            let expert = chosen[0].expert;
            let kinds = [
                LinearKind::ExpertGate(expert),
                LinearKind::ExpertUp(expert),
                LinearKind::ExpertDown(expert),
            ];
            self.expert(kinds, chosen, &d_out, &mut forms, &mut mixture, &mut slopes);
        }
        if let Some(shared) = experts.shared {
            self.shared(shared.gated, &d_out, &mut forms, &mut mixture);
        }
        self.router(experts, &mut mixture.logits, [&mut by_token, &mut slopes]);
        mixture.by_token = [by_token, slopes];
        self.saved.choices = choices;
        self.give_back(d_out);
        self.enter_backward(NormKind::Post, &forms, &[]);
        (self.s.forms, self.s.mixture) = (forms, mixture);
    }

    /// Propagates `d_out` `[tokens, hidden]` through one expert for the tokens that chose it. Adds to `d_normed`, and
    /// appends the gradients of the weights of the choices to the slopes.
    fn expert(
        &mut self,
        kinds: Kinds,
        chosen: &[ExpertChoice],
        d_out: &[f32],
        forms: &mut Forms,
        mixture: &mut Mixture,
        slopes: &mut Vec<ExpertChoice>,
    ) {
        let (d, n, products) = (self.hidden, chosen.len(), self.products());
        let mut e = expert_buffers(mixture, &mut self.s.inner, &products, kinds[2], n.max(MIN_ROWS), d);
        e.x.fill(0.0);
        for (x, choice) in e.x.chunks_exact_mut(d).zip(chosen) {
            x.copy_from_slice(row(&self.s.normed, choice, d));
        }
        recompute(products, kinds, forms, &mut e, n);
        let results = e.result.chunks_exact(d).zip(e.dy.chunks_exact_mut(d));
        slopes.extend(chosen.iter().zip(results).map(|(choice, (y, dy))| {
            let d_out = row(d_out, choice, d);
            dy.iter_mut().zip(d_out).for_each(|(dy, d_out)| *dy = choice.weight * d_out);
            ExpertChoice { weight: kernels().dot(d_out, y), ..*choice }
        }));
        propagate(products, kinds, forms, &mut e, n, self.wanted.weights().then_some(&mut *self.grads));
        for (dx, choice) in e.result.chunks_exact(d).zip(chosen) {
            let first = choice.row as usize * d;
            kernels().axpy(1.0, dx, &mut self.s.d_normed[first..first + d]);
        }
    }

    /// Propagates `d_out` through the experts that every token passes through, weighted by the sigmoid of a gate if
    /// `gated`: `dg = dout · y`, and `g (1 - g) dg` for the gate's projection.
    fn shared(&mut self, gated: bool, d_out: &[f32], forms: &mut Forms, mixture: &mut Mixture) {
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        let kinds = [LinearKind::SharedGate, LinearKind::SharedUp, LinearKind::SharedDown];
        let rows = tokens.max(MIN_ROWS);
        let mut gates = std::mem::take(&mut mixture.logits);
        let mut e = expert_buffers(mixture, &mut self.s.inner, &products, kinds[2], rows, d);
        let (x, padding) = e.x.split_at_mut(tokens * d);
        x.copy_from_slice(&self.s.normed[..tokens * d]);
        padding.fill(0.0);
        recompute(products, kinds, forms, &mut e, tokens);
        let side = self.layer.side(SideKind::SharedGate).filter(|_| gated);
        if let Some(side) = side {
            let gates = &mut gates[..tokens];
            side.narrow(self.params, &e.x[..tokens * d], gates, self.threads);
            sigmoid(gates);
            let results = e.result.chunks_exact(d).zip(e.dy.chunks_exact_mut(d)).zip(d_out.chunks_exact(d));
            for (gate, ((y, dy), d_out)) in gates.iter_mut().zip(results) {
                dy.iter_mut().zip(d_out).for_each(|(dy, d_out)| *dy = *gate * d_out);
                *gate = kernels().dot(d_out, y) * *gate * (1.0 - *gate);
            }
        } else {
            e.dy[..tokens * d].copy_from_slice(&d_out[..tokens * d]);
        }
        propagate(products, kinds, forms, &mut e, tokens, self.wanted.weights().then_some(&mut *self.grads));
        kernels().axpy(1.0, &e.result[..tokens * d], &mut self.s.d_normed[..tokens * d]);
        if let Some(side) = side {
            self.side(side, &gates[..tokens]);
        }
        mixture.logits = gates;
    }

    /// Propagates from the weights of the choices, of which `by_token` are the choices and their gradients, through the
    /// router.
    fn router(&mut self, experts: &Experts, logits: &mut [f32], by_token: [&mut Vec<ExpertChoice>; 2]) {
        let Some(side) = self.layer.side(SideKind::Router) else { return };
        let count = side.rows();
        let [choices, slopes] = by_token.map(|all| {
            all.sort_unstable_by_key(|choice| (choice.row, choice.expert));
            &*all
        });
        let logits = &mut logits[..self.tokens * count];
        logits.copy_from_slice(&self.saved.router[..self.tokens * count]);
        let (mut weights, mut before) = (Vec::with_capacity(experts.per_token), vec![0.0; count]);
        let chosen = choices.chunk_by(|a, b| a.row == b.row).zip(slopes.chunk_by(|a, b| a.row == b.row));
        for ((chosen, slopes), logits) in chosen.zip(logits.chunks_exact_mut(count)) {
            before.copy_from_slice(logits);
            weights.clear();
            weights.extend(slopes.iter().map(|slope| slope.weight));
            route_backward(&experts.routing, logits, chosen, &weights);
            add_slopes(self.balance, &mut before, logits);
        }
        self.side(side, logits);
    }

    /// Propagates the gradient `dy` of a router's or gate's output: to its weights, and to `d_normed`.
    fn side(&mut self, side: &LinearOp, dy: &[f32]) {
        let n = self.tokens * self.hidden;
        let (x, dy_ref) = (StoreRef::F32(&self.s.normed[..n]), StoreRef::F32(dy));
        if self.wanted.weights() {
            self.profile.time(StepPart::Wgrad, || {
                side.wgrad(dy_ref, x, self.grads, self.threads);
                side.bias_grad(dy, self.grads);
            });
        }
        let dx = &mut self.s.d_normed[..n];
        self.profile.time(StepPart::Dgrad, || side.dgrad(self.params, dy_ref, dx, true, self.threads));
    }
}

/// Row of the token of a choice.
fn row<'x>(x: &'x [f32], choice: &ExpertChoice, d: usize) -> &'x [f32] {
    &x[choice.row as usize * d..][..d]
}

/// Takes buffers for `rows` tokens of an MLP with the down projection `down`.
fn expert_buffers<'b>(
    mixture: &'b mut Mixture,
    inner: &'b mut [f32],
    products: &Products<'_>,
    down: LinearKind,
    rows: usize,
    d: usize,
) -> Expert<'b> {
    let width = products.layer.linear(down).cols();
    Expert {
        x: &mut mixture.gathered[..rows * d],
        gate: &mut mixture.gate[..rows * width],
        up: &mut mixture.up[..rows * width],
        inner: &mut inner[..rows * width],
        result: &mut mixture.result[..rows * d],
        dy: &mut mixture.sum[..rows * d],
    }
}

/// Repeats the forward pass of an MLP for `n` tokens, with its bits.
fn recompute(
    products: Products<'_>,
    [gate, up, down]: Kinds,
    forms: &mut Forms,
    e: &mut Expert<'_>,
    n: usize,
) {
    let products = products.unseen();
    // Quantized operands have no padding.
    let rows = |x: &[f32], cols: usize| if products.layer.is_quantized() { n * cols } else { x.len() };
    let (d, width) = (products.layer.linear(gate).cols(), products.layer.linear(down).cols());
    let mut jobs = [
        MatmulJob { kind: gate, out: &mut *e.gate, accumulate: false },
        MatmulJob { kind: up, out: &mut *e.up, accumulate: false },
    ];
    products.fprop(forms, Input::own(&e.x[..rows(e.x, d)]), &mut jobs);
    products.layer.flow.activate([0.0; 4], width, e.gate, e.up, e.inner);
    let mut jobs = [MatmulJob { kind: down, out: &mut *e.result, accumulate: false }];
    products.fprop(forms, Input::own(&e.inner[..rows(e.inner, width)]), &mut jobs);
}

/// Propagates `dy` of `n` tokens through an MLP: `result` becomes the gradient of its input. Adds to `grads`, if weight
/// gradients are wanted.
fn propagate(
    products: Products<'_>,
    [gate, up, down]: Kinds,
    forms: &mut Forms,
    e: &mut Expert<'_>,
    n: usize,
    mut grads: Option<&mut Gradients>,
) {
    let (layer, threads) = (products.layer, products.draws.threads);
    let (d, width) = (layer.linear(gate).cols(), layer.linear(down).cols());
    let output = [products.own_output(down, &e.dy[..n * d])];
    products.prepare_dgrad(forms, &output);
    products.dgrad(forms, &output, 0..n, &mut e.inner[..n * width], false, threads);
    let (gate_grad, up_grad) = (&mut e.gate[..n * width], &mut e.up[..n * width]);
    products.profile.time(StepPart::GateBackward, || {
        layer.flow.activate_backward([0.0; 4], gate_grad, up_grad, &mut e.inner[..n * width]);
    });
    if let Some(grads) = grads.as_deref_mut() {
        products.wgrad(forms, Input::own(&e.inner[..n * width]), &output, grads);
    }
    let outputs = [products.own_output(gate, gate_grad), products.own_output(up, up_grad)];
    if let Some(grads) = grads {
        products.wgrad(forms, Input::own(&e.x[..n * d]), &outputs, grads);
    }
    products.prepare_dgrad(forms, &outputs);
    products.dgrad(forms, &outputs, 0..n, &mut e.result[..n * d], false, threads);
}
