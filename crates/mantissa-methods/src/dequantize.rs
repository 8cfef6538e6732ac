//! Dequantizes rows to f32 with kernels. Gives the same bits as [`Quantized::dequantize_rows`], faster.

use mantissa_kernels::kernels;
use mantissa_num::format::{Affine, Format};
use mantissa_num::minifloat::{BF16, F16};
use mantissa_num::{Blocks, Code, Codes, Quantized, TensorError};

/// Tensor with lookup tables for decoding its rows. One per thread.
pub struct Dequantizer<'a> {
    q: &'a Quantized,
    /// Element of every code of at most 8 bits; `None` for integers, where the code is the element.
    elements: Option<Box<[f32; 256]>>,
    /// The factor of every scale code of at most 8 bits.
    factors: Option<Box<[f32; 256]>>,
    /// Remaining factor, equal for all blocks.
    tail: Option<f32>,
    scales: Vec<f32>,
    zeros: Vec<f32>,
}

impl<'a> Dequantizer<'a> {
    /// Prepares the rows of a tensor that has passed [`Quantized::check`].
    pub fn new(q: &'a Quantized) -> Self {
        let integer = matches!(q.format, Format::Affine(Affine { code: Code::Int(_), .. }));
        let elements = (!integer && q.format.code_bits() <= 8)
            .then(|| Box::new(std::array::from_fn(|code| q.format.element(code as u32))));
        let decoder = |scale: u32| q.format.decoder(scale, 0, q.outer()).parts();
        let coded = q.nested().is_none() && q.format.scale().is_some_and(|s| s.code.bits() <= 8);
        let factors = coded.then(|| Box::new(std::array::from_fn(|code| decoder(code as u32).1)));
        Dequantizer { q, elements, factors, tail: decoder(0).2, scales: Vec::new(), zeros: Vec::new() }
    }

    /// Dequantizes row `row` into `out` (`[cols]`).
    pub fn row(&mut self, row: usize, out: &mut [f32]) {
        let cols = self.q.cols;
        if self.q.format.has_bias() || self.q.format.codec().is_some() {
            return self.q.dequantize_rows(row..row + 1, out);
        }
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

    /// Decodes `out.len()` elements from flat index `first` on, in consecutive `blocks` of `group` elements.
    fn line(&mut self, first: usize, blocks: std::ops::Range<usize>, group: usize, out: &mut [f32]) {
        let Codes::U8(codes) = &self.q.codes else { return self.wide(first, out) };
        let codes = &codes[first..first + out.len()];
        self.decode_blocks(blocks);
        match &self.elements {
            Some(elements) => kernels().dequant_lut8(codes, elements, &self.scales, group, out),
            None => kernels().dequant_i8_zero(codes, &self.zeros, &self.scales, group, out),
        }
        if let Some(tail) = self.tail {
            out.iter_mut().for_each(|v| *v *= tail);
        }
    }

    fn decode_blocks(&mut self, blocks: std::ops::Range<usize>) {
        let q = self.q;
        self.scales.clear();
        self.zeros.clear();
        match (&self.factors, &q.scales.codes) {
            (Some(factors), Codes::U8(scales)) => {
                self.scales.extend(scales[blocks.clone()].iter().map(|&code| factors[usize::from(code)]));
            }
            _ => self.scales.extend(blocks.clone().map(|block| q.block_decoder(block).parts().1)),
        }
        self.zeros.extend(blocks.map(|block| q.zeros().get(block).copied().unwrap_or(0) as f32));
    }

    /// Decodes plain casts to 16 bits and more.
    fn wide(&self, first: usize, out: &mut [f32]) {
        let format = &self.q.format;
        let end = first + out.len();
        match &self.q.codes {
            Codes::U16(codes) if *format == Format::plain(Code::Float(BF16)) => {
                kernels().bf16_to_f32(&codes[first..end], out);
            }
            Codes::U16(codes) if *format == Format::plain(Code::Float(F16)) => {
                kernels().f16_to_f32(&codes[first..end], out);
            }
            codes => out.iter_mut().zip(first..).for_each(|(v, i)| *v = format.element(codes.get(i))),
        }
    }
}

/// Dequantized values `[rows, cols]`. Column groups follow `g_idx`, or are adjacent without it.
pub(crate) fn dequantize_by_group(q: &Quantized, g_idx: Option<&[u32]>) -> Result<Vec<f32>, TensorError> {
    let Some(g_idx) = g_idx else { return q.dequantize() };
    q.check()?;
    let groups = q.format.blocks().count(q.rows, q.cols) / q.rows.max(1);
    let scale = |block: usize| if q.scales.is_empty() { 0 } else { q.scales.get(block) };
    let zero = |block: usize| q.zeros().get(block).copied().unwrap_or(0);
    let mut out = Vec::with_capacity(q.rows * q.cols);
    for row in 0..q.rows {
        let blocks = row * groups..(row + 1) * groups;
        let decoders: Vec<_> = blocks.map(|b| q.format.decoder(scale(b), zero(b), q.outer())).collect();
        let codes = (row * q.cols..).map(|i| q.codes.get(i));
        out.extend(
            g_idx.iter().zip(codes).map(|(&g, code)| decoders[g as usize].value(q.format.element(code))),
        );
    }
    Ok(out)
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
            // Codec blocks that do not divide the rows are skipped.
            let Ok(q) = mantissa_num::quantize(&scheme, &w, rows, cols, Given::default()) else { continue };
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
