//! Channel scales of trellis codes: `W = diag(v) · H C H · diag(u)` (`mantissa_num::trellis`).

use mantissa_num::minifloat::F16;
use mantissa_num::trellis::{self, Trellis};
use mantissa_num::{Codes, Format, Quantized};

use super::continuous::{Continuous, scaled};

/// Scales of inputs (u) and outputs (v). Formats without channel scales have one per block of outputs that are
/// rotated together.
#[derive(Debug)]
pub(super) struct ChannelScales {
    quantized: Quantized,
    trellis: Trellis,
    /// `H C H`, `[rows, cols]`.
    inner: Vec<f32>,
    /// u and v at the start.
    start: Vec<f32>,
    /// u and v of the last decoding.
    now: Vec<f32>,
}

impl ChannelScales {
    /// Returns `None` for another format, and for scales or an `inner` `H C H` of another length.
    pub(super) fn new(quantized: Quantized, inner: Vec<f32>) -> Option<Self> {
        let Format::Trellis(trellis) = quantized.format else { return None };
        let (rows, cols) = (quantized.rows, quantized.cols);
        if quantized.scales.len() != rows + cols || inner.len() != rows * cols {
            return None;
        }
        let start: Vec<f32> = (0..rows + cols).map(|i| F16.decode(quantized.scales.get(i))).collect();
        Some(ChannelScales { quantized, trellis, inner, now: start.clone(), start })
    }

    /// Index of the trained value of scale `i` in the order u, v; `None` if it is only a sign.
    fn value_of(&self, i: usize) -> Option<usize> {
        let cols = self.quantized.cols;
        match self.trellis.channels {
            true => Some(i),
            false => Some(i.checked_sub(cols)? / trellis::order(self.quantized.rows).max(1)),
        }
    }
}

impl Continuous for ChannelScales {
    fn len(&self) -> usize {
        self.value_of(self.start.len().saturating_sub(1)).map_or(0, |last| last + 1)
    }

    fn decode(&mut self, x: &[f32], out: &mut [f32]) {
        let moved = |i: usize| self.value_of(i).map_or(self.start[i], |at| scaled(self.start[i], x[at]));
        let codes: Vec<u16> = (0..self.start.len()).map(|i| F16.encode_saturating(moved(i)) as u16).collect();
        self.now = codes.iter().map(|code| F16.decode((*code).into())).collect();
        self.quantized.scales = Codes::U16(codes).into();
        let cols = self.quantized.cols.max(1);
        let (u, v) = self.now.split_at(self.quantized.cols);
        for ((out, inner), v) in out.chunks_exact_mut(cols).zip(self.inner.chunks_exact(cols)).zip(v) {
            out.iter_mut().zip(inner).zip(u).for_each(|((out, inner), u)| *out = v * (inner * u));
        }
    }

    fn pull_back(&self, dw: &[f32], out: &mut [f32]) {
        let cols = self.quantized.cols.max(1);
        let (u, v) = self.now.split_at(self.quantized.cols);
        let mut sums = vec![0.0f64; self.start.len()];
        let rows = dw.chunks_exact(cols).zip(self.inner.chunks_exact(cols)).zip(v);
        for (row, ((dw, inner), v)) in rows.enumerate() {
            let mut row_sum = 0.0;
            for (col, ((g, inner), u)) in dw.iter().zip(inner).zip(u).enumerate() {
                let product = f64::from(*g) * f64::from(*inner);
                sums[col] += product * f64::from(*v);
                row_sum += product * f64::from(*u);
            }
            sums[self.quantized.cols + row] = row_sum;
        }
        out.fill(0.0);
        for (i, (sum, start)) in sums.iter().zip(&self.start).enumerate() {
            if let Some(at) = self.value_of(i) {
                out[at] += (sum * f64::from(*start)) as f32;
            }
        }
    }

    fn quantized(&self) -> &Quantized {
        &self.quantized
    }

    fn bytes(&self) -> u64 {
        4 * (self.inner.len() + 2 * self.start.len()) as u64 + 8 * self.start.len() as u64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::Scheme;
    use mantissa_num::round::random_u32;

    use super::*;

    fn random(scheme: &str, rows: usize, cols: usize) -> Quantized {
        let format = scheme.parse::<Scheme>().unwrap().format;
        let trellis = format.trellis().unwrap();
        let bytes = (0..trellis.code_bytes(rows, cols) as u64).map(|i| random_u32(1, i) as u8).collect();
        let scale = |i: u64| (0x2c00 | random_u32(2, i) & 0x83ff) as u16;
        Quantized {
            codes: Codes::Packed(bytes),
            scales: Codes::U16((0..(rows + cols) as u64).map(scale).collect()).into(),
            ..Quantized::empty(format, rows, cols)
        }
    }

    #[test]
    fn the_start_is_the_stored_weight_and_gradients_match_differences() {
        for (scheme, values) in [("trellis2", 3), ("trellis2-channel", 80)] {
            let (rows, cols) = (48, 32);
            let q = random(scheme, rows, cols);
            let ones = Codes::U16(vec![0x3c00; rows + cols]).into();
            let inner = Quantized { scales: ones, ..q.clone() }.dequantize().unwrap();
            let mut weight = ChannelScales::new(q.clone(), inner).unwrap();
            assert_eq!(weight.len(), values, "{scheme}");
            let mut out = vec![0.0; rows * cols];
            weight.decode(&vec![0.0; values], &mut out);
            assert_eq!(weight.quantized(), &q);
            let stored = q.dequantize().unwrap();
            assert!(
                out.iter().zip(&stored).all(|(a, b)| (a - b).abs() <= 2e-6 * b.abs().max(0.1)),
                "{scheme}"
            );
            let dw: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).cos()).collect();
            let mut gradient = vec![0.0; values];
            weight.pull_back(&dw, &mut gradient);
            let mut loss = |x: &[f32]| {
                weight.decode(x, &mut out);
                out.iter().zip(&dw).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum::<f64>()
            };
            for (at, gradient) in gradient.into_iter().enumerate() {
                let (mut up, mut down) = (vec![0.0; values], vec![0.0; values]);
                (up[at], down[at]) = (0.125, -0.125);
                let slope = (loss(&up) - loss(&down)) / 0.25;
                assert!((slope - f64::from(gradient)).abs() < 1e-2 * slope.abs().max(0.5), "{scheme} {at}");
            }
        }
    }
}
