//! Learned scales of quantized weights (LSQ: Esser et al. 2020, "Learned Step Size Quantization", arXiv 1902.08153).
//!
//! A weight W `[rows, cols]` under a scheme of integers from -Qn to Qp has a scale s for each block of a row, one per
//! channel or per group: `ŵ = s round(clip(w / s, -Qn, Qp))`. Scales are parameters `[rows, blocks]` called
//! `MODULE.weight_scale`. Their gradient is (equation 3)
//!
//! `dL/ds = (N Qp)^(-1/2) Σ g ∂ŵ/∂s`, `∂ŵ/∂s = round(v) - v` for `v = w / s` between -Qn and Qp, else -Qn or Qp,
//!
//! over the N weights of the block with gradients g of ŵ. The gradient of w is g between the bounds, else 0 (equation
//! 5). A scale begins at `2 mean|w| / sqrt(Qp)` (section 2.1). The forward divides by the scale as the format stores it;
//! its magnitude counts, so that an update beyond zero gives no other format.

use mantissa_model::{LinearInfo, ModelConfig, Role, TensorInfo};
use mantissa_num::{Code, Format, Scheme};

use crate::policy::{OperandPolicy, Policy, int_range};

/// Last part of the name of a weight's scales.
const SUFFIX: &str = ".weight_scale";

/// Name of the scales of the linear layer `module`.
pub(crate) fn scales_name(module: &str) -> String {
    format!("{module}{SUFFIX}")
}

/// True if a parameter holds learned scales.
pub(crate) fn is_scales(name: &str) -> bool {
    name.ends_with(SUFFIX)
}

/// Returns the scale that stands for the parameter `x`: its magnitude, above 0.
pub(crate) fn usable(x: f32) -> f32 {
    x.abs().max(f32::MIN_POSITIVE)
}

/// Returns the gradient of a scale before its factor, `Σ g ∂ŵ/∂s` over the values of its block: `g` are their
/// gradients, `slopes` their derivatives by the scale.
pub(crate) fn scale_gradient(g: &[f32], slopes: impl Iterator<Item = f32>) -> f64 {
    g.iter().zip(slopes).map(|(g, slope)| f64::from(*g) * f64::from(slope)).sum()
}

/// Learned scales of one weight.
#[derive(Clone, Debug)]
pub(crate) struct LearnedScales<'a> {
    scheme: &'a Scheme,
    /// Smallest and largest element, -Qn and Qp.
    range: (f32, f32),
}

impl<'a> LearnedScales<'a> {
    /// Returns `None` if `operand` does not learn its scales.
    pub(crate) fn of(operand: &'a OperandPolicy) -> Option<Self> {
        let Format::Affine(affine) = &operand.scheme.format else { return None };
        let Code::Int(bits) = affine.code else { return None };
        let range = int_range(&operand.scheme, bits);
        operand.learns_scales().then_some(LearnedScales { scheme: &operand.scheme, range })
    }

    /// Returns name, shape and role of the scales of a linear layer.
    fn tensor(&self, info: &LinearInfo) -> TensorInfo {
        let blocks = self.scheme.format.blocks().count(info.rows, info.cols) / info.rows.max(1);
        let role = Role::Bias { layer: info.layer, kind: info.kind };
        TensorInfo { name: scales_name(&info.module), shape: vec![info.rows, blocks], role }
    }

    /// Returns the first scales of a weight with rows of `cols`.
    pub(crate) fn initial(&self, weight: &[f32], cols: usize) -> Vec<f32> {
        let width = self.scheme.format.blocks().len(1, cols).max(1);
        let blocks = weight.chunks_exact(cols.max(1)).flat_map(|row| row.chunks(width));
        let block_values = |block: &[f32]| {
            let sum: f64 = block.iter().map(|w| f64::from(w.abs())).sum();
            (2.0 * sum / block.len() as f64 / f64::from(self.range.1).sqrt()) as f32
        };
        blocks.map(block_values).collect()
    }

    /// Backward of fake quantization for one row: turns `gradient` from ∂L/∂ŵ into ∂L/∂w in place and adds ∂L/∂s to
    /// `scale_grads`.
    pub(crate) fn pull_back(
        &self,
        row: &[f32],
        scales: &[f32],
        gradient: &mut [f32],
        scale_grads: &mut [f32],
    ) {
        let width = self.scheme.format.blocks().len(1, row.len()).max(1);
        let (low, high) = self.range;
        let blocks = row.chunks(width).zip(gradient.chunks_mut(width)).zip(scales.iter().zip(scale_grads));
        for ((row, gradient), (scale, scale_grad)) in blocks {
            let stored = self.stored(*scale);
            let slope = |w: &f32| match w / stored {
                v if v <= low => low,
                v if v >= high => high,
                v => v.round_ties_even() - v,
            };
            let factor = (row.len() as f64 * f64::from(high)).sqrt().recip();
            let sum = scale_gradient(gradient, row.iter().map(slope));
            *scale_grad += (sum * factor) as f32 * scale.signum();
            let clipped = row.iter().map(|w| w / stored <= low || w / stored >= high);
            gradient.iter_mut().zip(clipped).filter(|(_, clipped)| *clipped).for_each(|(g, _)| *g = 0.0);
        }
    }

    /// Returns the value of a scale as the format stores it.
    fn stored(&self, scale: f32) -> f32 {
        let block = self.scheme.block_with_scale(usable(scale));
        self.scheme.format.decoder(block.scale, 0, None).scale()
    }
}

/// Returns the tensors of a model with learned scales behind the weights that have them.
pub(crate) fn tensors(config: &ModelConfig, policy: &Policy) -> Vec<TensorInfo> {
    let layers = config.num_hidden_layers;
    let mut all = Vec::new();
    for tensor in config.tensors() {
        let role = tensor.role;
        all.push(tensor);
        let Role::Linear { layer, kind } = role else { continue };
        let linear = policy.linear_of(layer, layers);
        let scales = LearnedScales::of(&linear.fprop.right);
        all.extend(scales.map(|scales| scales.tensor(&config.linear(layer, kind))));
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::policy::ScaleChoice;

    fn operand(scheme: &str) -> OperandPolicy {
        OperandPolicy { scales: ScaleChoice::Learned, ..OperandPolicy::new(scheme.parse().unwrap()) }
    }

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.731 + phase).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    /// LSQ as its appendix states it, in f64, for one block.
    fn published(w: &[f32], s: f32, (qn, qp): (f64, f64), g: &[f32]) -> (Vec<f64>, f64) {
        let (mut weight_grads, mut scale_grad) = (Vec::new(), 0.0);
        for (w, g) in w.iter().zip(g) {
            let (v, g) = (f64::from(w / s), f64::from(*g));
            let inside = v > -qn && v < qp;
            let rounded = v.clamp(-qn, qp).round_ties_even();
            weight_grads.push(if inside { g } else { 0.0 });
            scale_grad += g * (rounded - if inside { v } else { 0.0 });
        }
        (weight_grads, scale_grad / (w.len() as f64 * qp).sqrt())
    }

    #[test]
    fn gradients_are_the_published_ones() {
        for (scheme, width, bounds) in [
            ("int3-g32", 32, (4.0, 3.0)),
            ("int2-channel", 96, (2.0, 1.0)),
            ("int8-channel:restricted", 96, (127.0, 127.0)),
            ("int4-g64", 64, (8.0, 7.0)),
        ] {
            let operand = operand(scheme);
            let scales = LearnedScales::of(&operand).unwrap();
            let (w, g) = (wave(96, 0.3), wave(96, 2.0));
            let first = scales.initial(&w, 96);
            let (mut weight_grads, mut scale_grads) = (g.clone(), vec![0.25; first.len()]);
            scales.pull_back(&w, &first, &mut weight_grads, &mut scale_grads);
            let blocks = w.chunks(width).zip(g.chunks(width)).zip(weight_grads.chunks(width));
            for (((w, g), found), (s, scale_grad)) in blocks.zip(first.iter().zip(&scale_grads)) {
                let mean = w.iter().map(|w| f64::from(w.abs())).sum::<f64>() / w.len() as f64;
                assert!((f64::from(*s) - 2.0 * mean / f64::sqrt(bounds.1)).abs() < 1e-6, "{scheme}: {s}");
                let (expected, published_scale_grad) = published(w, *s, bounds, g);
                assert!(found.iter().zip(&expected).all(|(a, b)| f64::from(*a) == *b), "{scheme}");
                assert!(
                    (f64::from(scale_grad - 0.25) - published_scale_grad).abs() < 1e-5,
                    "{scheme}: {scale_grad} for {published_scale_grad}"
                );
            }
        }
    }

    /// A linear loss changes with the scale by `Σ g q` where codes stay: rounding is constant there, and the
    /// straight-through slope adds `-Σ g v`.
    #[test]
    fn the_gradient_of_clipped_weights_matches_differences() {
        let operand = operand("int2-channel");
        let scales = LearnedScales::of(&operand).unwrap();
        let w: Vec<f32> = wave(64, 0.1).iter().map(|w| w + 3.0 * w.signum()).collect();
        let g = wave(64, 2.0);
        let s = 1.5f32;
        let loss = |s: f32| {
            let q = mantissa_num::quantize_with_scales(&operand.scheme, &w, 1, 64, &[s]).unwrap();
            q.dequantize().unwrap().iter().zip(&g).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum::<f64>()
        };
        let (mut weight_grads, mut scale_grad) = (g.clone(), [0.0]);
        scales.pull_back(&w, &[s], &mut weight_grads, &mut scale_grad);
        let slope = (loss(s + 0.01) - loss(s - 0.01)) / 0.02 / 8.0;
        assert!(weight_grads.iter().all(|g| *g == 0.0), "all are clipped");
        assert!(
            (f64::from(scale_grad[0]) - slope).abs() < 1e-3 * slope.abs().max(1.0),
            "{scale_grad:?} for {slope}"
        );
    }

    #[test]
    fn a_scale_below_zero_counts_by_its_magnitude() {
        let operand = operand("int4-g32");
        let scales = LearnedScales::of(&operand).unwrap();
        let (w, g) = (wave(32, 0.3), wave(32, 2.0));
        let run = |s: f32| {
            let (mut weight_grads, mut scale_grad) = (g.clone(), [0.0]);
            scales.pull_back(&w, &[s], &mut weight_grads, &mut scale_grad);
            (weight_grads, scale_grad[0])
        };
        assert_eq!(run(-0.5).0, run(0.5).0);
        assert_eq!(run(-0.5).1, -run(0.5).1);
        assert!(usable(0.0) > 0.0 && run(0.0).1.is_finite());
    }
}
