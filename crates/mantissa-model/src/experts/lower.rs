//! Operations of a mixture of experts.

use super::Experts;
use crate::config::{DenseMlp, SharedExperts};
use crate::frame::Frame;
use crate::program::{Buffer, Gating, Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind, SideKind};

impl Experts {
    /// Runs router, experts and shared experts on the normed states and adds their result to the residual stream.
    pub(crate) fn lower(&self, gating: Gating, frame: &Frame, ops: &mut Vec<Op>) {
        let d = frame.hidden;
        let (residual, normed) = (frame.residual(), frame.normed());
        let (sum, result, scratch) =
            (View::part(Buffer::Sum, d), View::part(Buffer::Result, d), View::part(Buffer::Wide, d));
        let apart = self.dense == DenseMlp::Normed;
        let logits = View::part(Buffer::Logits, self.count);
        if apart {
            ops.push(Op::Norm { norm: NormKind::Router, x: residual, out: normed });
        }
        ops.push(Op::Side { side: SideKind::Router, x: normed, out: logits });
        if apart {
            ops.push(Op::Norm { norm: NormKind::Experts, x: residual, out: normed });
        }
        let (x, out) = match self.latent {
            None => (normed, sum),
            Some(latent) => {
                let out = View::part(Buffer::Wide, latent);
                ops.push(Op::Side { side: SideKind::ToExperts, x: normed, out });
                (out, View::part(Buffer::Sum, latent))
            }
        };
        ops.extend([Op::Route { logits }, Op::Fill { out: sum, value: 0.0 }, Op::Experts { x, out }]);
        if self.latent.is_some() {
            ops.push(Op::Side { side: SideKind::FromExperts, x: out, out: result });
            ops.push(Op::Copy { x: result, out: sum });
        }
        if let Some(shared) = self.shared {
            self.add_shared(shared, gating, normed, [result, sum], ops);
        }
        if apart {
            // `scratch` holds the result of the dense MLP.
            ops.extend([
                Op::Norm { norm: NormKind::AfterExperts, x: sum, out: normed },
                Op::Add { x: normed, out: scratch },
                Op::Norm { norm: NormKind::AfterMlp, x: scratch, out: normed },
                Op::Add { x: normed, out: residual },
            ]);
        } else if frame.norms_results() {
            ops.push(Op::Norm { norm: NormKind::AfterMlp, x: sum, out: scratch });
            ops.push(Op::Add { x: scratch, out: residual });
        } else {
            ops.push(Op::Add { x: sum, out: residual });
        }
    }

    /// Runs the experts that every token passes through: `down(act(gate(x)) · up(x))`, or without a gate
    /// `down(act(up(x)))`, added to the sum of the others or averaged with it.
    fn add_shared(
        &self,
        SharedExperts { width, gated, averaged }: SharedExperts,
        gating: Gating,
        x: View,
        [result, sum]: [View; 2],
        ops: &mut Vec<Op>,
    ) {
        let [gate, up, inner] =
            [Buffer::Gate, Buffer::Up, Buffer::Inner].map(|buffer| View::part(buffer, width));
        let output = |linear, out| Output { linear, out, add: false };
        let outputs = match self.gated {
            true => vec![output(LinearKind::SharedGate, gate), output(LinearKind::SharedUp, up)],
            false => {
                ops.push(Op::Fill { out: up, value: 1.0 });
                vec![output(LinearKind::SharedUp, gate)]
            }
        };
        ops.extend([
            Op::Matmuls { input: LinearInput::GateUp, x, outputs },
            Op::ActMul { gating, gate, up: Some(up), out: inner },
            Op::Matmuls {
                input: LinearInput::SharedDown,
                x: inner,
                outputs: vec![output(LinearKind::SharedDown, result)],
            },
        ]);
        if gated {
            let gates = View::part(Buffer::Logits, 1);
            ops.push(Op::Side { side: SideKind::SharedGate, x, out: gates });
            ops.push(Op::AddGated { gates, x: result, out: sum });
        } else {
            ops.push(Op::Add { x: result, out: sum });
        }
        if averaged {
            ops.push(Op::Scale { x: sum, factor: 0.5 });
        }
    }
}
