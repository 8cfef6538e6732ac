//! Rows of a quantized tensor back to f32 by kernels: the bits of [`Quantized::dequantize_rows`], many elements at a time.

use mantissa_kernels::kernels;
use mantissa_num::format::{Affine, Format};
use mantissa_num::{Blocks, Code, Codes, Quantized};

/// A tensor and what its rows need to be decoded. One per thread.
pub(crate) struct Dequantizer<'a> {
    q: &'a Quantized,
    /// The element of every code of at most 8 bits; `None` for integers, which are their own elements.
    elements: Option<Box<[f32; 256]>>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl<'a> Dequantizer<'a> {
    /// Of a tensor that has passed [`Quantized::check`].
    pub(crate) fn new(q: &'a Quantized) -> Self {
        let integer = matches!(q.format, Format::Affine(Affine { code: Code::Int(_), .. }));
        let elements = (!integer && q.format.code_bits() <= 8)
            .then(|| Box::new(std::array::from_fn(|code| q.format.element(code as u32))));
        Dequantizer { q, elements, scales: Vec::new(), zeros: Vec::new() }
    }

    /// Dequantizes row `row` into `out` (`[cols]`).
    pub(crate) fn row(&mut self, row: usize, out: &mut [f32]) {
        let cols = self.q.cols;
        match self.q.format.blocks() {
            Blocks::Group(group) | Blocks::Tile { cols: group, .. } => {
                let first = self.q.format.blocks().index(cols, row, 0);
                let blocks = first..first + cols.div_ceil(group as usize);
                self.line(row * cols, blocks, group as usize, out);
            }
            blocks => {
                for (block, start, end) in blocks.runs(cols, row) {
                    self.line(row * cols + start, block..block + 1, end - start, &mut out[start..end]);
                }
            }
        }
    }

    /// Decodes `out.len()` elements from flat index `first` on, which lie in consecutive `blocks` of `group` elements.
    fn line(&mut self, first: usize, blocks: std::ops::Range<usize>, group: usize, out: &mut [f32]) {
        let Codes::U8(codes) = &self.q.codes else { return self.wide(first, out) };
        let codes = &codes[first..first + out.len()];
        let tail = self.decode_blocks(blocks);
        match &self.elements {
            Some(elements) => kernels().dequant_lut8(codes, elements, &self.scales, group, out),
            None => kernels().dequant_i8_zero(codes, &self.zeros, &self.scales, group, out),
        }
        if let Some(tail) = tail {
            out.iter_mut().for_each(|v| *v *= tail);
        }
    }

    /// Scales and zero points of `blocks`, and the factor that is left for all of them.
    fn decode_blocks(&mut self, blocks: std::ops::Range<usize>) -> Option<f32> {
        let q = self.q;
        self.scales.clear();
        self.zeros.clear();
        let mut last = None;
        for block in blocks {
            let scale = if q.scales.is_empty() { 0 } else { q.scales.get(block) };
            let zero = q.zeros.get(block).copied().unwrap_or(0);
            let (zero, inner, tail) = q.format.decoder(scale, zero, q.outer).parts();
            self.scales.push(inner);
            self.zeros.push(zero);
            last = tail;
        }
        last
    }

    /// Plain casts to 16 bits and more.
    fn wide(&self, first: usize, out: &mut [f32]) {
        for (i, v) in out.iter_mut().enumerate() {
            *v = self.q.format.element(self.q.codes.get(first + i));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::{Given, Scheme, grammar::catalogue};

    #[test]
    fn rows_have_the_bits_of_the_reference() {
        let (rows, cols) = (6, 136);
        let w: Vec<f32> =
            (0..rows * cols).map(|i| ((i * i) as f32 * 0.013).sin() * (1 + i % 17) as f32).collect();
        let mut schemes = catalogue();
        let more = [
            "nvfp4:te",
            "int4-g32-asym",
            "int8-tensor",
            "int8-channel-asym",
            "fp8-e4m3-t4x16",
            "nf4-g48",
            "int5-t4x8",
        ];
        schemes.extend(more.iter().map(|text| text.parse::<Scheme>().unwrap()));
        for scheme in schemes {
            let q = mantissa_num::quantize(&scheme, &w, rows, cols, Given::default()).unwrap();
            let expected = q.dequantize().unwrap();
            let mut dequantizer = Dequantizer::new(&q);
            for (r, expected) in expected.chunks_exact(cols).enumerate() {
                let mut row = vec![f32::NAN; cols];
                dequantizer.row(r, &mut row);
                let same = row.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{scheme} row {r}: {row:?} {expected:?}");
            }
        }
    }
}
