//! Products of 8-bit floats accumulated as in a matrix unit, by a [`mantissa_num::Accumulator`].

use mantissa_num::Accumulator;
use mantissa_store::convention::ActivationQuant;

use crate::factored::{Factored, is_float8};
use crate::input::InputQuantizer;

/// Weight of a linear layer of 8-bit floats whose products are not accumulated in f32.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Simulated {
    accumulator: Accumulator,
    weight: Factored,
}

impl Simulated {
    /// Prepares a weight; `None` unless weight and input are 8-bit floats with blocks within rows.
    pub(crate) fn new(
        input: Option<&InputQuantizer>,
        weight: Option<Factored>,
        accumulator: Accumulator,
    ) -> Option<Self> {
        let fits = |quant: &ActivationQuant| is_float8(&quant.scheme.format) && quant.keep_above.is_none();
        input.filter(|input| fits(input.quant()))?;
        Some(Simulated { accumulator, weight: weight? })
    }

    /// Computes `out = x Wᵀ`, or `out += x Wᵀ`; `x` `[t, cols]`, `out` `[t, rows]`. A chain of products ends where
    /// the scale factor of either operand changes. Its sum is multiplied by both factors, and the results of a row
    /// are added in f32.
    pub(crate) fn product(&self, x: &Factored, out: &mut [f32], accumulate: bool) {
        let rows = self.weight.elements.len() / self.weight.cols.max(1);
        for (t, out) in out.chunks_exact_mut(rows.max(1)).enumerate() {
            for (r, y) in out.iter_mut().enumerate() {
                let sum = self.dot(x, t, r);
                *y = if accumulate { *y + sum } else { sum };
            }
        }
    }

    fn dot(&self, x: &Factored, t: usize, r: usize) -> f32 {
        let (w, cols) = (&self.weight, self.weight.cols);
        let (a, b) = (x.row(t), w.row(r));
        let (mut sum, mut col) = (0.0, 0);
        while col < cols {
            let end = |group: usize| (col / group + 1) * group;
            let end = end(x.group()).min(end(w.group())).min(cols);
            sum += self.accumulator.dot(&a[col..end], &b[col..end]) * (x.factor(t, col) * w.factor(r, col));
            col = end;
        }
        sum
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::{Given, Scheme, parse_activation, quantize};
    use mantissa_store::convention::{LinearWeight, Weight};

    use super::*;
    use crate::linear::{Linear, LinearMatmul, forward_fused};

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.517 + phase).sin() + 0.5).collect()
    }

    fn linear(weight: &str, input: &str, rows: usize, cols: usize) -> Linear {
        let scheme: Scheme = weight.parse().unwrap();
        let q = quantize(&scheme, &wave(rows * cols, 0.0), rows, cols, Given::default()).unwrap();
        let outer = input.ends_with("@static").then_some(0.01);
        let input = Some(ActivationQuant::new(parse_activation(input).unwrap(), outer));
        let bias = Some(wave(rows, 3.0));
        let weight = Weight::Quantized(q);
        Linear::new("m", LinearWeight { rows, cols, weight, bias, input, transforms: Default::default() })
            .unwrap()
    }

    fn run(linear: &Linear, x: &[f32], accumulate: bool) -> Vec<f32> {
        let mut out = vec![0.25; x.len() / linear.cols() * linear.rows()];
        let mut scratch = vec![0.0; Linear::scratch_len(linear.rows(), linear.cols())];
        let job = LinearMatmul { linear, out: &mut out, accumulate };
        forward_fused([job], x, &mut vec![0.0; x.len()], &mut scratch).unwrap();
        out
    }

    /// Elements and factors equal those of the f32 product: short chains of a promoting unit are close to it, long
    /// ones lose accuracy.
    #[test]
    fn a_simulated_product_is_near_f32_and_less_precise() {
        let (rows, cols) = (5, 4096);
        let x = wave(3 * cols, 1.0);
        for (weight, input) in [
            ("fp8-e4m3-channel", "fp8-e4m3-token"),
            ("fp8-e4m3-tensor", "fp8-e4m3-tensor@static"),
            ("fp8-e4m3-t128x128", "fp8-e4m3-g128"),
            ("fp8-e5m2-channel", "fp8-e4m3-g96"),
        ] {
            let mut linear = linear(weight, input, rows, cols);
            for accumulate in [false, true] {
                let exact = run(&linear, &x, accumulate);
                let mut errors = Vec::new();
                for accumulator in ["hopper", "hopper-32"] {
                    assert!(linear.set_accumulator(accumulator.parse().unwrap()), "{weight} {input}");
                    let found = run(&linear, &x, accumulate);
                    let error = |(a, b): (&f32, &f32)| ((a - b) / b).abs();
                    errors.push(found.iter().zip(&exact).map(error).fold(0f32, f32::max));
                }
                assert!(errors[0] < 0.1 && errors[1] < 5e-4, "{weight} {input}: {errors:?}");
                assert!(
                    errors[0] > 1e-5 && errors[1] > 0.0 && errors[0] > errors[1],
                    "{weight} {input}: {errors:?}"
                );
                assert!(linear.set_accumulator(Accumulator::F32));
                assert_eq!(run(&linear, &x, accumulate), exact);
            }
        }
    }

    #[test]
    fn other_products_are_unchanged() {
        for (weight, input) in [
            ("int8-channel", "fp8-e4m3-token"),
            ("fp8-e4m3-channel", "int8-token"),
            ("int4-g32", "int8-token"),
        ] {
            let mut linear = linear(weight, input, 4, 64);
            assert!(!linear.set_accumulator("hopper".parse().unwrap()), "{weight} {input}");
        }
    }
}
