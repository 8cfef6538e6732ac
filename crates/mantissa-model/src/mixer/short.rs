//! Gated short convolution (Liquid AI 2025, "LFM2 Technical Report", arXiv 2511.23404, sec. 2): `out_proj(C ·
//! conv(B · x))` with `(B, C, x) = in_proj(h)`, `[hidden]` each, and a causal depthwise convolution over a few tokens.
//! The state is the last `kernel - 1` inputs of the convolution.

use super::convolution::Convolution;
use super::frame::{MOST_LINEARS, MixRows, Mixer, MixerLinear, StateShape, matmuls, take};
use super::gguf::{GgufAround, Uncomputed};
use super::halves::all_have_mlp;
use super::rules::{MAX_KERNEL, MixerRules, by_layer_type, recurs_but_at};
use crate::operators::Operators;
use crate::program::{Op, View};
use mantissa_arch::kinds::{LinearKind, SideInfo, VectorKind};

/// Sizes of a gated short convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShortConvolution {
    /// Width of the residual stream, the channels of the convolution.
    pub hidden: usize,
    /// Tokens that the convolution covers.
    pub kernel: usize,
    /// True if convolution and projections have biases.
    pub bias: bool,
}

/// Short convolution in layers whose `layer_types` is `conv`, or else in those not in `full_attn_idxs`.
pub(crate) const SHORT_CONVOLUTION: MixerRules<ShortConvolution> = MixerRules {
    mixer: |fields, around| {
        let kernel = fields.optional_size("conv_L_cache", 1..=MAX_KERNEL)?.unwrap_or(3);
        let bias = fields.flag("conv_bias", false)?;
        Ok(ShortConvolution { hidden: around.hidden, kernel, bias })
    },
    halves: |fields, layers| {
        let mixing = by_layer_type(fields, "conv", layers, || {
            let Some(_) = fields.get("full_attn_idxs") else { return Ok(vec![false; layers]) };
            recurs_but_at(fields, "full_attn_idxs", layers)
        })?;
        Ok(all_have_mlp(mixing))
    },
    layers: None,
};

impl Mixer for ShortConvolution {
    fn name(&self) -> &'static str {
        "short convolution"
    }

    fn linears(&self) -> [Option<MixerLinear>; MOST_LINEARS] {
        let linear = |kind, rows| Some(MixerLinear { kind, rows, cols: self.hidden, bias: self.bias });
        [linear(LinearKind::MixIn, 3 * self.hidden), None, None, linear(LinearKind::MixOut, self.hidden)]
    }

    fn sides(&self) -> Vec<SideInfo> {
        Vec::new()
    }

    fn vectors(&self) -> Vec<(VectorKind, Vec<usize>)> {
        let weight = (VectorKind::Convolution, vec![self.hidden, 1, self.kernel]);
        let bias = self.bias.then(|| (VectorKind::ConvolutionBias, vec![self.hidden]));
        [Some(weight), bias].into_iter().flatten().collect()
    }

    fn state(&self, _: usize) -> StateShape {
        StateShape { tail: (self.kernel - 1) * self.hidden, ..StateShape::default() }
    }

    fn width(&self) -> usize {
        self.hidden
    }

    fn scratch(&self) -> usize {
        4 * self.hidden
    }

    fn project(&self, x: View, ops: &mut Vec<Op>) {
        let [projected, _] = View::scratch([3 * self.hidden, self.hidden]);
        ops.push(matmuls(x, [(LinearKind::MixIn, projected)]));
    }

    fn mix(&self, operators: &mut dyn Operators, rows: MixRows<'_>) {
        let MixRows { seqs, mut states, threads, mut scratch, out, .. } = rows;
        let (tokens, width) = (seqs.tokens(), self.hidden);
        let (out, padding) = out[..seqs.rows * width].split_at_mut(tokens * width);
        padding.fill(0.0);
        let projected = take(&mut scratch, 3 * seqs.rows * width);
        let inputs = &mut scratch[..tokens * width];
        for (from, to) in projected.chunks_exact(3 * width).zip(inputs.chunks_exact_mut(width)) {
            let (b, x) = (&from[..width], &from[2 * width..]);
            to.iter_mut().zip(b).zip(x).for_each(|((to, b), x)| *to = b * x);
        }
        Convolution::of(operators, width).run(seqs, states.as_mut(), threads, inputs, out);
        for (from, out) in projected.chunks_exact(3 * width).zip(out.chunks_exact_mut(width)) {
            out.iter_mut().zip(&from[width..2 * width]).for_each(|(out, c)| *out *= c);
        }
    }

    fn gguf_numbers(&self) -> Vec<(&'static str, usize)> {
        vec![("shortconv.l_cache", self.kernel)]
    }

    fn check_gguf(&self, _: &GgufAround) -> Result<(), Uncomputed> {
        match self.bias {
            true => Err(Uncomputed::new("conv_bias", true, "false: llama.cpp has no such biases")),
            false => Ok(()),
        }
    }
}
