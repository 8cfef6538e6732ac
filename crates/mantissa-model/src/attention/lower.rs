//! Operations of attention.

use super::Attention;
use crate::config::{HeadNorms, QkvForm};
use crate::frame::{Frame, scaled};
use crate::program::{Buffer, Columns, Op, Output, View};
use mantissa_arch::kinds::{LinearInput, LinearKind, NormKind};

impl Attention {
    fn queries(&self) -> View {
        View::new(Buffer::Queries, self.widths().0)
    }

    fn keys(&self) -> View {
        View::new(Buffer::Keys, self.widths().1)
    }

    fn values(&self) -> View {
        View::new(Buffer::Values, self.widths().1)
    }

    /// Joined heads, with padding.
    pub(crate) fn joined(&self) -> View {
        View::new(Buffer::Attended, self.widths().0)
    }

    /// Projects queries, keys and values, before norms and RoPE; the queries alone where a cache holds latents.
    pub(crate) fn project(&self, frame: &Frame, cached: bool, ops: &mut Vec<Op>) {
        let x = frame.normed();
        if let Some(latent) = &self.latent {
            return latent.project(&self.shape, x, cached, ops);
        }
        match self.qkv {
            QkvForm::Separate if self.gated => self.project_gated(x, ops),
            QkvForm::Separate => self.project_separate(x, ops),
            _ => self.project_joined(x, ops),
        }
        let all = [self.queries(), self.keys(), self.values()];
        if let Some(limit) = self.clip {
            let own = if self.own_kv { 3 } else { 1 };
            ops.extend(all.into_iter().take(own).map(|x| Op::Clip { x, limit }));
        }
        if self.interleaved {
            // Scores do not depend on the order of a head's values. `attended` is free until attention runs.
            let (head, rotated) = (self.shape.head_dim, 2 * (self.half + self.half_before_norms));
            let scratch = View::new(Buffer::Attended, rotated);
            let own = if self.own_kv { 2 } else { 1 };
            ops.extend(all.into_iter().take(own).map(|x| Op::SplitPairs { x, head, rotated, scratch }));
        }
    }

    fn project_separate(&self, x: View, ops: &mut Vec<Op>) {
        let own = match (self.own_kv, self.keys_are_values) {
            (false, _) => 1,
            (true, true) => 2,
            (true, false) => 3,
        };
        let all =
            [(LinearKind::Q, self.queries()), (LinearKind::K, self.keys()), (LinearKind::V, self.values())];
        let outputs = all.into_iter().take(own).map(|(linear, out)| Output { linear, out, add: false });
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs: outputs.collect() });
        if own == 2 {
            ops.push(Op::Copy { x: self.keys(), out: self.values() });
        }
    }

    /// Projects each query together with the gate of its head.
    fn project_gated(&self, x: View, ops: &mut Vec<Op>) {
        let (heads, d) = (self.shape.heads, self.shape.head_dim);
        let gates = self.gates();
        let all = [(LinearKind::Q, gates), (LinearKind::K, self.keys()), (LinearKind::V, self.values())];
        let outputs = all.map(|(linear, out)| Output { linear, out, add: false }).to_vec();
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs });
        ops.push(Op::CopyColumns(Columns::new(gates, (0, 2 * d), self.queries(), (0, d), [heads, d])));
    }

    /// Queries and gates of the heads.
    fn gates(&self) -> View {
        View::new(Buffer::Wide, 2 * self.widths().0)
    }

    /// Projects queries, keys and values by one matrix, for all heads or head by head.
    fn project_joined(&self, x: View, ops: &mut Vec<Op>) {
        let (q_width, kv_width) = self.widths();
        let joined = View::new(Buffer::Wide, q_width + 2 * kv_width);
        let outputs = vec![Output { linear: LinearKind::Qkv, out: joined, add: false }];
        ops.push(Op::Matmuls { input: LinearInput::Qkv, x, outputs });
        let groups = if self.qkv == QkvForm::ByHead { self.shape.heads } else { 1 };
        let mut from = 0;
        for out in [self.queries(), self.keys(), self.values()] {
            let count = out.width / groups;
            let stride = joined.width / groups;
            ops.push(Op::CopyColumns(Columns::new(joined, (from, stride), out, (0, count), [groups, count])));
            from += count;
        }
    }

    /// Norms queries, keys and values, attends, and gates the heads.
    pub(crate) fn heads(&self, cached: bool, ops: &mut Vec<Op>) {
        if self.half_before_norms > 0 {
            let (head, half) = (self.shape.head_dim, self.half_before_norms);
            let own = if self.own_kv { 2 } else { 1 };
            ops.extend([self.queries(), self.keys()].into_iter().take(own).map(|x| Op::Rotate {
                x,
                head,
                half,
            }));
        }
        if self.head_norms != HeadNorms::Absent {
            let all = [
                (NormKind::Query, self.queries()),
                (NormKind::Key, self.keys()),
                (NormKind::Value, self.values()),
            ];
            let own = if self.value_norm { 3 } else { 2 };
            for (norm, x) in all.into_iter().take(if self.own_kv { own } else { 1 }) {
                // `attended` is free until attention runs, and at least as wide as the keys.
                let out = View::new(Buffer::Attended, x.width);
                ops.extend([Op::Norm { norm, x, out }, Op::Copy { x: out, out: x }]);
            }
        }
        ops.extend(self.growth.map(|growth| Op::Grow { x: self.queries(), growth }));
        ops.push(if cached { Op::AttendLatents } else { Op::Attend });
        if self.gated {
            ops.push(Op::GateHeads { gates: self.gates(), x: self.joined(), head: self.shape.head_dim });
        }
        ops.extend(scaled(self.factor, self.joined()));
    }

    /// Projects the joined heads and adds the result to the residual stream.
    pub(crate) fn output(&self, frame: &Frame, ops: &mut Vec<Op>) {
        let mut x = self.joined();
        if self.sub_norms {
            let out = View::new(Buffer::NormedHeads, x.width);
            ops.push(Op::Norm { norm: NormKind::AttentionSub, x, out });
            x = out;
        } else if let Some(latent) = &self.latent {
            // Drops the padding of the values.
            let (heads, d, count) = (self.shape.heads, self.shape.head_dim, latent.value);
            let out = View::new(Buffer::Queries, heads * count);
            ops.push(Op::CopyColumns(Columns::new(x, (0, d), out, (0, count), [heads, count])));
            x = out;
        }
        let scratch = View::new(Buffer::Wide, frame.hidden);
        frame.add_result((LinearKind::O, LinearInput::O), x, NormKind::AfterAttention, scratch, ops);
    }
}
