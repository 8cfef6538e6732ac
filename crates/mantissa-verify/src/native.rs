//! mantissa's own format, in which a scheme's text describes the bytes.

use mantissa_num::codebook::{DYN4, DYN8, DYN8_UNSIGNED, FP4_BNB, LIN8, LIN8_UNSIGNED, NF4};

use crate::elements::{float_values, int_values};
use crate::gguf::{BlockType, Blocks};
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;
use crate::weight::{Layout, Weight};

/// Scales that share a nested scale, under double quantization.
const NESTED: usize = 256;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Scheme's text in the metadata of the native format; empty in other formats.
    pub(crate) fn native_scheme(&self) -> &str {
        let n = self.name("weight");
        let text = self.tensors.metadata(&format!("{n}.packed"), &n).unwrap_or_default();
        text.split(' ').next().unwrap_or_default()
    }

    /// Computes `level · amax + mean` for each scale, as two f32 operations.
    pub(crate) fn nested_scales(&self, suffix: &str) -> Result<Vec<f32>, T::Error> {
        let codes = self.bytes(suffix)?;
        let amaxes = self.floats("weight.nested_scale")?;
        let mean = self.scalar("weight.nested_offset")?;
        if amaxes.len() < codes.len().div_ceil(NESTED) {
            return Err(self.short("weight.nested_scale"));
        }
        let scale = |(i, code): (usize, u8)| DYN8[usize::from(code)] * amaxes[i / NESTED] + mean;
        Ok(codes.into_iter().enumerate().map(scale).collect())
    }

    pub(crate) fn native(&self) -> Result<Weight, T::Error> {
        let scheme = self.native_scheme();
        let element = Element::of(scheme).ok_or_else(|| {
            self.wrong("weight", "a scheme of the native format", &format!("scheme \"{scheme}\""))
        })?;
        let packed = self.bytes("weight.packed")?;
        if packed.len() * 8 < element.bits_needed(self.rows, self.cols) {
            return Err(self.short("weight.packed"));
        }
        let stored = Weight {
            high_first: element.is_nibble_book(),
            row_bits: element.row_bits(self.cols),
            layout: element.layout(),
            outliers: self.outliers()?,
            ..self.stored(packed, element.bits(), 8, element.values())
        };
        if !self.has("weight.scale") {
            return Ok(stored);
        }
        let scales = self.scales("weight.scale")?;
        let mut biases = Vec::new();
        let mut zeros = self.zeros()?;
        if self.has("weight.bias") {
            biases = self.floats("weight.bias")?;
            // The lowest code means the bias itself.
            zeros = vec![element.lowest(); biases.len()];
        }
        let count = scales.values.len();
        if [zeros.len(), biases.len()].iter().any(|&n| n != 0 && n != count) {
            return Err(self.short("weight.zero"));
        }
        let (scales, tail) = self.with_global(scheme, &element, scales)?;
        Ok(Weight { scales: Some(scales), zeros, biases, tail, ..stored })
    }

    fn zeros(&self) -> Result<Vec<f32>, T::Error> {
        if !self.has("weight.zero") {
            return Ok(Vec::new());
        }
        let words = self.bytes("weight.zero")?;
        if self.dtype("weight.zero") == Some("I8") {
            return Ok(words.iter().map(|&z| f32::from(z as i8)).collect());
        }
        Ok(words.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as f32).collect())
    }

    /// Scales multiplied by the global scale, and the remaining factor. The producer determines the meaning of the
    /// global scale: 2688/amax, amax/2688, or the amax itself, over 6 · 448 or, with four over six, 6 · 256.
    fn with_global(
        &self,
        scheme: &str,
        element: &Element,
        scales: Scales,
    ) -> Result<(Scales, Option<f32>), T::Error> {
        if let Some(block) = element.flat_block() {
            return Ok((Scales { flat: Some((block, self.cols)), ..scales }, None));
        }
        if !self.has("weight.global") {
            return Ok((scales, None));
        }
        let global = self.scalar("weight.global")?;
        Ok(match scheme.split_once(':').map_or("", |(_, rule)| rule) {
            "te" | "te-2d" => (scales, Some(global / 2688.0)),
            "4over6" => (scales, Some(global / 1536.0)),
            "torchao" => (scales.map(|scale| scale * global), None),
            _ => (scales.map(|scale| scale / global), None),
        })
    }
}

/// Element of the native format, from the first part of the scheme's text.
enum Element {
    Int(usize),
    Ternary,
    Float { exponent: u32, mantissa: u32, bias: i32 },
    Book(&'static [f32], usize),
    Fixed64,
    F32,
    F64,
    Blocks(BlockType),
}

impl Element {
    fn of(scheme: &str) -> Option<Self> {
        let base = scheme.split([':', '@']).next()?;
        if let Some(rest) = base.strip_prefix("int") {
            return rest.get(..1)?.parse().ok().map(Element::Int);
        }
        if let Some(book) = Self::book(base) {
            return Some(book);
        }
        let float = |exponent, mantissa, bias| Some(Element::Float { exponent, mantissa, bias });
        match base {
            "f64" => Some(Element::F64),
            // tf32 is an f32 with zero low bits.
            "f32" | "tf32" => Some(Element::F32),
            "mxint8" => Some(Element::Fixed64),
            "f16" => float(5, 10, 15),
            "bf16" => float(8, 7, 127),
            "nvfp4" | "mxfp4" => float(2, 1, 1),
            _ if base.starts_with("ternary") => Some(Element::Ternary),
            _ if base.contains("e4m3fnuz") => float(4, 3, 8),
            _ if base.contains("e5m2fnuz") => float(5, 2, 16),
            _ if base.contains("e4m3") => float(4, 3, 7),
            _ if base.contains("e5m2") => float(5, 2, 15),
            _ if base.contains("e2m3") => float(2, 3, 1),
            _ if base.contains("e3m2") => float(3, 2, 3),
            _ if base.contains("e2m1") => float(2, 1, 1),
            _ => Self::block_type(base),
        }
    }

    /// Code book and block size: `nf4`, `nf4-tensor`, `nf4-g128`, `nf4-dq`, `nf4-g128-dq`.
    fn book(base: &str) -> Option<Self> {
        let books: [(&str, &'static [f32], usize); 7] = [
            ("nf4", &NF4, 64),
            ("fp4-bnb", &FP4_BNB, 64),
            ("dyn8-unsigned", &DYN8_UNSIGNED, 256),
            ("dyn8", &DYN8, 256),
            ("dyn4", &DYN4, 256),
            ("lin8-unsigned", &LIN8_UNSIGNED, 256),
            ("lin8", &LIN8, 256),
        ];
        let (levels, usual, rest) = books
            .into_iter()
            .find_map(|(name, levels, usual)| Some((levels, usual, base.strip_prefix(name)?)))?;
        if rest == "-tensor" {
            return Some(Element::Book(levels, usize::MAX));
        }
        match rest.strip_suffix("-dq").unwrap_or(rest).strip_prefix("-g") {
            Some(size) => Some(Element::Book(levels, size.parse().ok()?)),
            None => Some(Element::Book(levels, usual)),
        }
    }

    fn block_type(base: &str) -> Option<Self> {
        let name = base.strip_prefix("gguf-").unwrap_or(base);
        BlockType::from_name(name).filter(|ty| ty.is_decoded()).map(Element::Blocks)
    }

    fn layout(&self) -> Layout {
        match self {
            Element::Blocks(ty) => Layout::Blocks(Blocks::new(), *ty),
            _ => Layout::Rows,
        }
    }

    fn flat_block(&self) -> Option<usize> {
        match self {
            Element::Book(_, block) => Some(*block),
            _ => None,
        }
    }

    fn is_nibble_book(&self) -> bool {
        matches!(self, Element::Book(levels, _) if levels.len() == 16)
    }

    /// Bits of a code; not used for blocks.
    fn bits(&self) -> usize {
        match self {
            Element::Int(bits) => *bits,
            Element::Ternary => 2,
            Element::Float { exponent, mantissa, .. } => 1 + (exponent + mantissa) as usize,
            Element::Book(levels, _) => levels.len().ilog2() as usize,
            Element::Fixed64 | Element::Blocks(_) => 8,
            Element::F32 => 32,
            Element::F64 => 64,
        }
    }

    /// Bits from one row to the next: integers fill whole int32 words, other codes whole bytes.
    fn row_bits(&self, cols: usize) -> usize {
        match self {
            Element::Int(bits) => (cols * bits).div_ceil(32) * 32,
            Element::Book(..) => cols * self.bits(),
            Element::Blocks(ty) => ty.row_bytes(cols).map_or(usize::MAX, |bytes| bytes * 8),
            _ => (cols * self.bits()).div_ceil(8) * 8,
        }
    }

    fn bits_needed(&self, rows: usize, cols: usize) -> usize {
        rows.saturating_mul(self.row_bits(cols))
    }

    /// The lowest integer.
    fn lowest(&self) -> f32 {
        match self {
            Element::Int(bits) => -f32::from(1u8 << (bits - 1)),
            _ => 0.0,
        }
    }

    /// Value of every code; empty for wide floats, which have too many codes.
    fn values(&self) -> Vec<f32> {
        match self {
            Element::Int(bits) => int_values(*bits),
            Element::Ternary => vec![0.0, 1.0, -2.0, -1.0],
            Element::Book(levels, _) => levels.to_vec(),
            Element::Fixed64 => (0..=255u8).map(|code| f32::from(code as i8) / 64.0).collect(),
            Element::F32 | Element::F64 | Element::Blocks(_) => Vec::new(),
            Element::Float { exponent, mantissa, bias } => float_values(*exponent, *mantissa, *bias),
        }
    }
}
