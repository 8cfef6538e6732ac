//! Scales and minima of a panel: as stored, and widened to f32 for a product.

use super::ROWS;
use super::dot::Dot;

/// Columns that share the factor of integer scales and minima, as in GGUF's super-blocks.
pub const SUPER: usize = 256;

/// Storage of the scales, or of the minima, of 16 rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleCode {
    /// No values; scales are 1 and minima 0.
    Absent,
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// The exponent of a power of two in f32 (E8M0 without its smallest and its NaN code).
    Exponent,
    /// Magnitudes of E4M3, multiplied by the factor of the tensor.
    E4m3,
    /// Signed 8-bit integers, multiplied by an f16 for every [`SUPER`] columns.
    Integer,
    /// For minima: zero points of 0 to 255, which stand for `-scale · zero`.
    Zero,
}

impl ScaleCode {
    /// Bytes of a value.
    pub const fn bytes(self) -> usize {
        match self {
            ScaleCode::Absent => 0,
            ScaleCode::F32 => 4,
            ScaleCode::F16 | ScaleCode::Bf16 => 2,
            ScaleCode::Exponent | ScaleCode::E4m3 | ScaleCode::Integer | ScaleCode::Zero => 1,
        }
    }

    /// Returns the smallest code that holds all of `values` exactly: f16, bf16 or f32, or the exponent alone.
    pub fn fitting(values: &[f32]) -> Self {
        let is_power = |x: f32| x.to_bits() & 0x807f_ffff == 0 && x.is_normal();
        if values.iter().all(|&x| is_power(x)) {
            ScaleCode::Exponent
        } else if values.iter().all(|&x| f16_exactly(x).is_some()) {
            ScaleCode::F16
        } else if values.iter().all(|x| x.to_bits() & 0xffff == 0) {
            ScaleCode::Bf16
        } else {
            ScaleCode::F32
        }
    }

    /// Writes the values of 16 rows to `out`. Values that the code does not hold exactly are the caller's error; they
    /// are rounded.
    pub(crate) fn put(self, values: &[f32; ROWS], out: &mut [u8]) {
        let halves = |values: &[f32; ROWS]| {
            let mut bits = [0u16; ROWS];
            crate::kernels().f32_to_f16(values, &mut bits);
            bits
        };
        let pairs = |bits: [u16; ROWS], out: &mut [u8]| {
            out.as_chunks_mut().0.iter_mut().zip(bits).for_each(|(out, bits)| *out = bits.to_le_bytes());
        };
        let bytes = |value: fn(f32) -> u8, out: &mut [u8]| {
            out.iter_mut().zip(values).for_each(|(out, x)| *out = value(*x));
        };
        match self {
            ScaleCode::Absent => {}
            ScaleCode::F32 => {
                out.as_chunks_mut().0.iter_mut().zip(values).for_each(|(out, x)| *out = x.to_le_bytes());
            }
            ScaleCode::F16 => pairs(halves(values), out),
            ScaleCode::Bf16 => pairs(values.map(|x| (x.to_bits() >> 16) as u16), out),
            ScaleCode::Exponent => bytes(|x| (x.to_bits() >> 23) as u8, out),
            // Its bits equal an f16 of 2^-8 the value, without the last 7.
            ScaleCode::E4m3 => {
                let bits = halves(&values.map(|x| x / 256.0));
                out.iter_mut().zip(bits).for_each(|(out, bits)| *out = (bits >> 7) as u8);
            }
            ScaleCode::Integer => bytes(|x| x as i8 as u8, out),
            ScaleCode::Zero => bytes(|x| x as u8, out),
        }
    }
}

/// Returns the f16 that equals `x`, if there is one.
fn f16_exactly(x: f32) -> Option<u16> {
    let bits = f16_bits(x);
    let mut back = [0.0];
    crate::generic::f16_to_f32(&[bits], &mut back);
    (back[0].to_bits() == x.to_bits()).then_some(bits)
}

pub(crate) fn f16_bits(x: f32) -> u16 {
    let mut bits = [0];
    crate::generic::f32_to_f16(&[x], &mut bits);
    bits[0]
}

/// Values of a panel as stored: `bytes` `[groups, 16]` codes, `supers` `[ceil(cols / 256), 16]` f16 for integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stored<'a> {
    pub(crate) code: ScaleCode,
    pub(crate) bytes: &'a [u8],
    pub(crate) supers: &'a [u8],
    /// Groups of a super-block.
    pub(crate) groups_per_super: usize,
    pub(crate) factor: f32,
}

/// Widens the bytes of every group. A loop, not a function with a closure: instructions of a level are not inlined into
/// a closure that passes through an iterator, and a call for each takes ten times as long.
macro_rules! widen_each {
    ($out:expr, $bytes:expr, $one:ident => $wide:expr, $d:ident) => {
        for (out, $one) in $out.iter_mut().zip($bytes.as_chunks().0) {
            $d.store_f32($wide, out);
        }
    };
}

/// Widens the values of a panel to `out` `[groups]`; `scales` are the panel's scales, if the values are minima.
#[inline(always)]
pub(crate) fn widen<D: Dot>(d: D, stored: &Stored<'_>, scales: &[[f32; ROWS]], out: &mut [[f32; ROWS]]) {
    let factor = d.splat(stored.factor);
    let bytes = stored.bytes;
    match stored.code {
        ScaleCode::Absent => {}
        ScaleCode::F32 => {
            widen_each!(out, bytes, one => d.mul(d.wide_f32(one), factor), d);
        }
        ScaleCode::F16 => widen_each!(out, bytes, one => d.mul(d.wide_f16(one), factor), d),
        ScaleCode::Bf16 => widen_each!(out, bytes, one => d.mul(d.wide_bf16(one), factor), d),
        ScaleCode::Exponent => {
            widen_each!(out, bytes, one => d.mul(d.powers(one), factor), d);
        }
        ScaleCode::E4m3 => {
            let factor = d.splat(256.0 * stored.factor);
            widen_each!(out, bytes, one => d.mul(d.wide_e4m3(one), factor), d);
        }
        ScaleCode::Zero => {
            for ((out, bytes), scale) in out.iter_mut().zip(bytes.as_chunks().0).zip(scales) {
                let negative = d.mul(d.load_f32(scale), d.splat(-1.0));
                d.store_f32(d.mul(negative, d.wide_u8(bytes)), out);
            }
        }
        ScaleCode::Integer => {
            let groups = out.chunks_mut(stored.groups_per_super);
            let bytes = bytes.chunks(ROWS * stored.groups_per_super);
            let supers = stored.supers.as_chunks::<{ 2 * ROWS }>().0;
            for ((out, bytes), supers) in groups.zip(bytes).zip(supers) {
                let large = d.mul(d.wide_f16(supers), factor);
                widen_each!(out, bytes, one => d.mul(large, d.wide_i8(one)), d);
            }
        }
    }
}
