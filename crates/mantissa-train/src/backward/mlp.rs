//! Backward of the MLP: down projection, activation, gate and up.

use mantissa_kernels::{for_each, kernels};
use mantissa_model::LinearKind;
use mantissa_model::config::MlpForm;
use mantissa_model::flow::parts;
use mantissa_model::graph::{NormKind, VectorKind};

use super::LayerBackward;
use crate::forms::Forms;
use crate::health::Operator;
use crate::operand::Operand;
use crate::products::{Input, OutputGradient};
use crate::profile::StepPart;
use crate::rows::{PART, rows_mut};

/// Gate and up `[tokens, intermediate]`, which become their gradients.
struct GateUp<'b> {
    gate: &'b mut [f32],
    up: &'b mut [f32],
    /// Their rounded copies.
    rounded: [&'b mut Operand; 2],
    /// Scratch, `[rows, wide]`.
    wide: &'b mut [f32],
}

impl LayerBackward<'_> {
    pub(super) fn mlp(&mut self) {
        let (d, tokens, products) = (self.hidden, self.tokens, self.products());
        let ffn = self.layer.linear(LinearKind::Down).cols();
        let d_out = self.branch(NormKind::AfterMlp);
        self.remake(NormKind::Post);
        // Moved out, because the rest of scratch and activations is borrowed mutably below.
        let [mut out_operand, mut gate_operand, mut up_operand] = std::mem::take(&mut self.s.rounded);
        let (mut forms, mut wide) = (std::mem::take(&mut self.s.forms), std::mem::take(&mut self.s.wide));
        let (mut gate, mut up) = (std::mem::take(&mut self.saved.gate), std::mem::take(&mut self.saved.up));
        let down = [products.output(LinearKind::Down, &d_out[..tokens * d], &mut out_operand)];
        products.prepare_dgrad(&mut forms, &down);
        let gate_up_operands = [&mut gate_operand, &mut up_operand];
        let inner = GateUp { gate: &mut gate, up: &mut up, rounded: gate_up_operands, wide: &mut wide };
        self.inner(&forms, &down, inner);
        let (gate_grad, up_grad) = (&gate[..tokens * ffn], &up[..tokens * ffn]);
        let outputs = match self.layer.mlp {
            MlpForm::Gated => vec![
                products.rounded_output(LinearKind::Gate, gate_grad, &gate_operand),
                products.rounded_output(LinearKind::Up, up_grad, &up_operand),
            ],
            MlpForm::GatedJoined => {
                let joined = &mut wide[..2 * tokens * ffn];
                let parts = gate_grad.chunks_exact(ffn).zip(up_grad.chunks_exact(ffn));
                for (joined, (gate, up)) in joined.chunks_exact_mut(2 * ffn).zip(parts) {
                    joined[..ffn].copy_from_slice(gate);
                    joined[ffn..].copy_from_slice(up);
                }
                vec![products.output(LinearKind::GateUp, joined, &mut gate_operand)]
            }
            // The one projection is where a gate would be.
            MlpForm::Plain => vec![products.output(LinearKind::Up, gate_grad, &mut gate_operand)],
        };
        if self.wanted.weights() {
            let [_, _, normed, inner] = &self.saved.inputs;
            let inner = Input::new(&self.s.inner[..tokens * ffn], inner);
            products.wgrad(&mut forms, inner, &down, self.grads);
            let normed = Input::new(&self.s.normed[..tokens * d], normed);
            products.wgrad(&mut forms, normed, &outputs, self.grads);
        }
        products.prepare_dgrad(&mut forms, &outputs);
        self.give_back(d_out);
        self.enter_backward(NormKind::Post, &forms, &outputs);
        (self.s.rounded, self.s.forms, self.s.wide) = ([out_operand, gate_operand, up_operand], forms, wide);
        (self.saved.gate, self.saved.up) = (gate, up);
    }

    /// Propagates from the down projection to gate and up, and makes the down projection's input in `inner`.
    fn inner(&mut self, forms: &Forms, down: &[OutputGradient<'_>], of: GateUp<'_>) {
        let (layer, products, profile) = (self.layer, self.products(), self.profile);
        let ffn = layer.linear(LinearKind::Down).cols();
        let norm = layer.norm(NormKind::MlpSub);
        let values = norm.map(|norm| norm.values(self.params));
        let GateUp { gate, up, rounded: [gate_operand, up_operand], wide } = of;
        let cut = parts(self.tokens, PART);
        let pieces = cut.clone().zip(rows_mut(gate, ffn, cut.clone())).zip(rows_mut(up, ffn, cut.clone()));
        let pieces = pieces.zip(rows_mut(&mut self.s.inner, ffn, cut.clone()));
        let pieces = pieces.zip(gate_operand.parts(ffn, cut.clone()).zip(up_operand.parts(ffn, cut.clone())));
        // Without a norm, its partial gradients and scratch have no values.
        let partial = norm.map_or(0, crate::norm::NormOp::partial);
        let partials = rows_mut(&mut self.s.partials, partial, cut.clone().map(|_| 0..1));
        let both = if norm.is_some() { 2 * ffn } else { 0 };
        let pieces = pieces.zip(partials.zip(rows_mut(wide, both, cut.clone())));
        let (watch, at) = (self.watch, Operator::Gate(layer.index));
        let numbers = layer.activation_numbers(self.params);
        // Of the learned parameters of the activation, part by part, so that threads change no bit.
        let activation = layer.flow.activation();
        let learned = activation.parameters().iter().enumerate().filter(|(_, one)| one.learned);
        let learned = learned
            .filter_map(|(which, one)| Some((which, one, layer.vector(VectorKind::Activation(one.name))?)));
        let learned: Vec<_> = learned.collect();
        let mut sums = vec![[0.0; 4]; cut.clone().count()];
        let pieces = pieces.zip(&mut sums);
        for_each(
            self.threads,
            pieces,
            |((((((part, gate), up), inner), rounded), (partial, wide)), sums)| {
                products.dgrad(forms, down, part, inner, false, 1);
                if !learned.is_empty() {
                    kernels().act_sums(activation, numbers, gate, inner, sums);
                }
                profile.time(StepPart::GateBackward, || match &values {
                    None => layer.flow.activate_backward(numbers, gate, up, inner),
                    Some(values) => {
                        let (before, d_before) = wide.split_at_mut(inner.len());
                        layer.flow.activate(numbers, ffn, gate, up, before);
                        d_before.fill(0.0);
                        values.backward(before, inner, d_before, partial);
                        layer.flow.activate_backward(numbers, gate, up, d_before);
                        values.forward(d_before, inner);
                    }
                });
                watch.result(at, "gradient", gate);
                watch.result(at, "gradient", up);
                if layer.mlp == MlpForm::Gated {
                    profile.time(StepPart::Rounding, || {
                        rounded.0.round(gate);
                        rounded.1.round(up);
                    });
                }
            },
        );
        for (which, parameter, range) in learned {
            let sum: f64 = sums.iter().map(|sums| sums[which]).sum();
            let stored = f64::from(self.params.f32(range).first().copied().unwrap_or(0.0));
            let slope = if parameter.softplus { sum / (1.0 + (-stored).exp()) } else { sum };
            self.grads.add(range.clone(), |grad| grad.iter_mut().for_each(|grad| *grad += slope as f32));
        }
        if let Some(norm) = norm {
            norm.add_partials(&self.s.partials, cut.count(), self.grads);
        }
    }
}
