//! Operations of latent attention.

use mantissa_kernels::CausalAttention;

use crate::config::Latent;
use crate::program::{Buffer, Columns, Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind};

impl Latent {
    /// Outputs of the projections, in scratch: queries `[heads · head]`, keys and values projected from the latents
    /// `[heads · (unrotated + value)]`, latents and rotated parts of keys `[kv_rank + rotated]`, and normed latents
    /// `[kv_rank]`.
    pub(crate) fn views(&self, heads: usize) -> [View; 4] {
        let spread = heads * (self.unrotated + self.value);
        View::scratch([heads * self.head(), spread, self.kv_rank + self.rotated, self.kv_rank])
    }

    /// Projects queries, keys and values from states `x`, before RoPE; where a cache holds latents, the queries alone.
    pub(crate) fn project(&self, shape: &CausalAttention, x: View, cached: bool, ops: &mut Vec<Op>) {
        let [queries, spread, compressed, kv_latent] = self.views(shape.heads);
        let rank = self.q_rank.unwrap_or(0);
        let q_latent = kv_latent.then(rank);
        let (linear, out) = match self.q_rank {
            Some(_) => (LinearKind::QA, q_latent),
            None => (LinearKind::Q, queries),
        };
        let outputs = [(linear, out), (LinearKind::KvA, compressed)].map(overwritten).to_vec();
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs });
        if self.q_rank.is_some() {
            let normed = q_latent.then(rank);
            let outputs = vec![overwritten((LinearKind::QB, queries))];
            ops.extend([
                Op::Norm { norm: NormKind::QLatent, x: q_latent, out: normed },
                Op::Matmuls { input: LinearInput::QLatent, x: normed, outputs },
                Op::ProjectIndex { x, latent: normed },
            ]);
        }
        // The latent is the first part of each compressed row; the rotated part of the keys follows it.
        ops.push(Op::NormColumns { norm: NormKind::KvLatent, x: compressed, out: kv_latent });
        self.lay_out_queries(shape, queries, ops);
        if !cached {
            let outputs = vec![overwritten((LinearKind::KvB, spread))];
            ops.push(Op::StoreLatents { x: kv_latent });
            ops.push(Op::Matmuls { input: LinearInput::KvLatent, x: kv_latent, outputs });
            self.lay_out(shape, spread, compressed, ops);
        }
    }

    /// Lays queries out as [`crate::latent`] describes.
    fn lay_out_queries(&self, shape: &CausalAttention, x: View, ops: &mut Vec<Op>) {
        let (heads, d, whole) = (shape.heads, shape.head_dim, self.head());
        let out = View::new(Buffer::Queries, heads * d);
        let part = |from, to, count| Columns::new(x, (from, whole), out, (to, d), [heads, count]);
        let rotated = part(self.unrotated, 0, self.rotated).with_pairs(self.interleaved);
        ops.extend([rotated, part(0, self.rotated, self.unrotated)].map(Op::CopyColumns));
        ops.push(Op::ClearColumns { out, groups: heads, from: whole });
    }

    /// Lays keys and values out as [`crate::latent`] describes.
    fn lay_out(&self, shape: &CausalAttention, spread: View, compressed: View, ops: &mut Vec<Op>) {
        let (heads, d, each) = (shape.heads, shape.head_dim, self.unrotated + self.value);
        let [keys, values] = [Buffer::Keys, Buffer::Values].map(|buffer| View::new(buffer, heads * d));
        let rotated = Columns::new(compressed, (self.kv_rank, 0), keys, (0, d), [heads, self.rotated]);
        let part = |from, out, to, count| Columns::new(spread, (from, each), out, (to, d), [heads, count]);
        let all = [
            rotated.with_pairs(self.interleaved),
            part(0, keys, self.rotated, self.unrotated),
            part(self.unrotated, values, 0, self.value),
        ];
        ops.extend(all.map(Op::CopyColumns));
        ops.push(Op::ClearColumns { out: keys, groups: heads, from: self.head() });
        ops.push(Op::ClearColumns { out: values, groups: heads, from: self.value });
    }
}

fn overwritten((linear, out): (LinearKind, View)) -> Output {
    Output { linear, out, add: false }
}
