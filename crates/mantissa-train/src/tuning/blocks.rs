//! Scales and offsets of blocks.

use mantissa_num::{Code, Codes, Quantized, ScaleLevel, e8m0};

use super::continuous::{Continuous, scaled};
use crate::learned::scale_gradient;

/// Block scales of a weight, and the biases of its blocks if the format has them. A global scale above the block
/// scales (NVFP4) and integer zero points stay as they are.
#[derive(Debug)]
pub(super) struct BlockScales {
    quantized: Quantized,
    /// Code of the stored scales.
    code: Code,
    /// Scales and biases at the start, one per block.
    scales: Vec<f32>,
    biases: Vec<f32>,
    /// Value of one unit of each block at the start.
    units: Vec<f32>,
}

impl BlockScales {
    /// Returns `None` if scales are not stored one by one, or not as numbers.
    pub(super) fn new(quantized: Quantized) -> Option<Self> {
        let tree = quantized.format.scale()?;
        let numbers = matches!(tree.code, Code::F32 | Code::Float(_) | Code::E8m0);
        if !numbers || tree.nested().is_some() || quantized.check().is_err() {
            return None;
        }
        let (code, blocks) = (tree.code, quantized.scales.len());
        let scales = (0..blocks).map(|block| code.decode(quantized.scales.get(block))).collect();
        let units = (0..blocks).map(|block| quantized.block_decoder(block).scale()).collect();
        let biases = quantized.biases().to_vec();
        Some(BlockScales { quantized, code, scales, biases, units })
    }
}

impl Continuous for BlockScales {
    fn len(&self) -> usize {
        self.scales.len() + self.biases.len()
    }

    fn decode(&mut self, x: &[f32], out: &mut [f32]) {
        let (scale_moves, bias_moves) = x.split_at(self.scales.len());
        let empty = Codes::with_capacity(self.code.unit_bytes(), self.scales.len());
        let mut level = ScaleLevel { codes: empty, ..self.quantized.scales.clone() };
        for (start, x) in self.scales.iter().zip(scale_moves) {
            level.push(encode(self.code, scaled(*start, *x)));
        }
        let moved = self.biases.iter().zip(&self.units).zip(bias_moves);
        // Formats store biases in the dtype of the scales.
        let moved = moved.map(|((bias, unit), x)| self.code.decode(encode(self.code, bias + unit * x)));
        level.offsets.biases_mut().iter_mut().zip(moved).for_each(|(to, from)| *to = from);
        self.quantized.scales = level;
        self.quantized.dequantize_rows(0..self.quantized.rows, out);
    }

    fn pull_back(&self, dw: &[f32], out: &mut [f32]) {
        let q = &self.quantized;
        let (mut scale_grad, mut bias_grad) =
            (vec![0.0f64; self.scales.len()], vec![0.0f64; self.biases.len()]);
        let blocks = q.format.blocks();
        for (row, dw) in dw.chunks_exact(q.cols.max(1)).enumerate() {
            for (block, start, end) in blocks.runs(q.cols, row) {
                let (zero, ..) = q.block_decoder(block).parts();
                let (g, first) = (&dw[start..end], row * q.cols);
                let slopes = (first + start..first + end).map(|at| q.format.element(q.codes.get(at)) - zero);
                scale_grad[block] += scale_gradient(g, slopes);
                if let Some(sum) = bias_grad.get_mut(block) {
                    *sum += g.iter().map(|g| f64::from(*g)).sum::<f64>();
                }
            }
        }
        let units = self.units.iter().chain(self.units.iter().take(bias_grad.len()));
        let sums = scale_grad.iter().chain(&bias_grad).zip(units);
        out.iter_mut().zip(sums).for_each(|(out, (sum, unit))| *out = (sum * f64::from(*unit)) as f32);
    }

    fn quantized(&self) -> &Quantized {
        &self.quantized
    }

    fn bytes(&self) -> u64 {
        // Scales, biases and units; sums of a step in f64.
        4 * (2 * self.scales.len() + self.biases.len()) as u64 + 8 * self.len() as u64
    }
}

/// Returns the code of the scale nearest to `scale`.
fn encode(code: Code, scale: f32) -> u32 {
    match code {
        Code::Float(float) => float.encode_saturating(scale),
        Code::E8m0 => e8m0::nearest(scale).into(),
        _ => scale.to_bits(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use mantissa_num::{Given, Scheme, quantize};

    use super::*;

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.731 + phase).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    fn of(scheme: &str, rows: usize, cols: usize) -> BlockScales {
        let scheme: Scheme = scheme.parse().unwrap();
        let q = quantize(&scheme, &wave(rows * cols, 0.3), rows, cols, Given::default()).unwrap();
        BlockScales::new(q).unwrap()
    }

    /// At the start the weight is the stored one, bit for bit, for every kind of scale.
    #[test]
    fn the_start_is_the_stored_weight() {
        for scheme in
            ["int2-g32", "int3-g32-asym", "int4-g32-asym:minmax", "nf4", "nvfp4", "mxfp4", "fp8-e4m3-channel"]
        {
            let mut weight = of(scheme, 8, 96);
            let stored = weight.quantized().clone();
            let mut out = vec![0.0; 8 * 96];
            weight.decode(&vec![0.0; weight.len()], &mut out);
            assert_eq!(out, stored.dequantize().unwrap(), "{scheme}");
            assert_eq!(weight.quantized(), &stored, "{scheme}");
        }
        assert!(BlockScales::new(of_nested()).is_none(), "double quantization");
    }

    fn of_nested() -> Quantized {
        let scheme: Scheme = "nf4-dq".parse().unwrap();
        quantize(&scheme, &wave(8 * 96, 0.3), 8, 96, Given::default()).unwrap()
    }

    /// The gradient matches differences of a linear loss `Σ g ŵ`.
    #[test]
    fn the_gradient_matches_differences() {
        for scheme in ["int2-g32", "int3-g32-asym", "int4-g32-asym:minmax", "nf4", "fp8-e4m3-channel"] {
            let (rows, cols) = (4, 96);
            let mut weight = of(scheme, rows, cols);
            let dw = wave(rows * cols, 2.0);
            let mut gradient = vec![0.0; weight.len()];
            weight.pull_back(&dw, &mut gradient);
            let mut loss = |x: &[f32]| {
                let mut out = vec![0.0; rows * cols];
                weight.decode(x, &mut out);
                out.iter().zip(&dw).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum::<f64>()
            };
            let n = gradient.len();
            for (at, gradient) in gradient.into_iter().enumerate() {
                let (mut up, mut down) = (vec![0.0; n], vec![0.0; n]);
                (up[at], down[at]) = (0.125, -0.125);
                let slope = (loss(&up) - loss(&down)) / 0.25;
                let close = (slope - f64::from(gradient)).abs() <= 2e-3 * slope.abs().max(1.0);
                assert!(close, "{scheme} {at}: {gradient} for {slope}");
            }
        }
    }

    /// Scales stay within their bounds and keep their sign.
    #[test]
    fn scales_are_bounded() {
        let mut weight = of("int4-g32", 2, 32);
        let mut out = vec![0.0; 64];
        weight.decode(&[-3.0, 100.0], &mut out);
        let scales: Vec<f32> = (0..2).map(|i| f32::from_bits(weight.quantized().scales.get(i))).collect();
        assert!((scales[0] / weight.scales[0] - 0.0625).abs() < 1e-6);
        assert!((scales[1] / weight.scales[1] - 16.0).abs() < 1e-5);
    }
}
