//! Master weights: data stored in addition to the working copy, and the update of both.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::{LoadError, zeros};
use mantissa_num::round::philox4x32_10;

use crate::arena::Parameters;
use crate::array::{Array, ArrayMut};
use crate::param_table::ParamInfo;
use crate::policy::Master;
use crate::store::Store;
use crate::weights::Weights;

/// Part of the weights that the working copy does not hold.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MasterCopy {
    None,
    Stochastic {
        seed: u64,
    },
    Int8 {
        seed: u64,
    },
    F32(Kept<f32>),
    /// Low 16 bits of the f32 value; added to the working copy's bits they give the value.
    Remainder(Kept<u16>),
}

/// Values of the arena from place `first` on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Kept<T> {
    first: usize,
    values: Vec<T>,
}

impl<T: Copy> Kept<T> {
    fn chunks_mut(&mut self, range: Range<usize>, piece: usize) -> std::slice::ChunksMut<'_, T> {
        self.values[range.start - self.first..range.end - self.first].chunks_mut(piece)
    }
}

/// Part of a master copy.
pub(crate) enum MasterMut<'a> {
    None,
    Stochastic { seed: u64 },
    F32(&'a mut [f32]),
    Remainder(&'a mut [u16]),
}

/// Part of the working copy.
pub(crate) enum WorkingMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    F16(&'a mut [u16]),
}

impl MasterCopy {
    /// Makes the master copy of the part `shard` of the f32 weights `params`.
    pub(crate) fn new(master: Master, params: &Parameters, shard: Range<usize>) -> Result<Self, LoadError> {
        let (first, n) = (shard.start, shard.len());
        let memory = LoadError::Memory { what: "master weights", bytes: Self::bytes(master, n) };
        Ok(match master {
            Master::None => MasterCopy::None,
            Master::Stochastic { seed } => MasterCopy::Stochastic { seed },
            Master::Int8 { seed } => MasterCopy::Int8 { seed },
            Master::F32 => {
                let mut values = zeros(n).ok_or(memory)?;
                values.copy_from_slice(&params.f32(&shard));
                MasterCopy::F32(Kept { first, values })
            }
            Master::Remainder => {
                let mut values = zeros(n).ok_or(memory)?;
                for (low, value) in values.iter_mut().zip(&*params.f32(&shard)) {
                    *low = split(*value).1;
                }
                MasterCopy::Remainder(Kept { first, values })
            }
        })
    }

    /// Bytes of the master copy of `n` weights.
    pub(crate) fn bytes(master: Master, n: usize) -> u64 {
        n as u64
            * match master {
                Master::None | Master::Stochastic { .. } | Master::Int8 { .. } => 0,
                Master::F32 => 4,
                Master::Remainder => 2,
            }
    }

    /// Returns the f32 weights of `range`; `None` unless the copy is of that kind.
    pub(crate) fn f32(&self, range: &Range<usize>) -> Option<&[f32]> {
        match self {
            MasterCopy::F32(copy) => copy.values.get(range.start - copy.first..range.end - copy.first),
            _ => None,
        }
    }

    /// Splits the master copy of `range` into pieces.
    pub(crate) fn pieces(&mut self, range: Range<usize>, piece: usize) -> Vec<MasterMut<'_>> {
        let count = range.len().div_ceil(piece);
        match self {
            MasterCopy::None | MasterCopy::Int8 { .. } => (0..count).map(|_| MasterMut::None).collect(),
            MasterCopy::Stochastic { seed } => {
                (0..count).map(|_| MasterMut::Stochastic { seed: *seed }).collect()
            }
            MasterCopy::F32(copy) => copy.chunks_mut(range, piece).map(MasterMut::F32).collect(),
            MasterCopy::Remainder(low) => low.chunks_mut(range, piece).map(MasterMut::Remainder).collect(),
        }
    }

    /// Ends the update of a parameter in step `step`: rounds INT8 weights.
    pub(crate) fn settle(&self, param: &ParamInfo, working: &mut Weights, step: u64, threads: usize) {
        if let MasterCopy::Int8 { seed } = self {
            working.close(param, *seed, step, threads);
        }
    }

    /// Returns the array for a checkpoint.
    pub(crate) fn array(&self) -> Option<Array<'_>> {
        match self {
            MasterCopy::F32(copy) => Some(Array::F32(&copy.values)),
            MasterCopy::Remainder(low) => Some(Array::U16(&low.values)),
            _ => None,
        }
    }

    /// Returns the array for restoring a checkpoint.
    pub(crate) fn array_mut(&mut self) -> Option<ArrayMut<'_>> {
        match self {
            MasterCopy::F32(copy) => Some(ArrayMut::F32(&mut copy.values)),
            MasterCopy::Remainder(low) => Some(ArrayMut::U16(&mut low.values)),
            _ => None,
        }
    }
}

impl Weights {
    /// Splits the values of `range` into pieces; an INT8 matrix must be [open](Weights::open).
    pub(crate) fn pieces(&mut self, range: Range<usize>, piece: usize) -> Vec<WorkingMut<'_>> {
        match self {
            Weights::Float(Store::F32(values)) => {
                values[range].chunks_mut(piece).map(WorkingMut::F32).collect()
            }
            Weights::Float(Store::Bf16(bits)) => {
                bits[range].chunks_mut(piece).map(WorkingMut::Bf16).collect()
            }
            Weights::Float(Store::F16(bits)) => bits[range].chunks_mut(piece).map(WorkingMut::F16).collect(),
            Weights::Int8(weights) => weights.opened(range).chunks_mut(piece).map(WorkingMut::F32).collect(),
        }
    }
}

/// Reads the f32 weights of a piece from offset `first` on.
pub(crate) fn read(working: &WorkingMut<'_>, master: &MasterMut<'_>, first: usize, out: &mut [f32]) {
    let span = first..first + out.len();
    match (working, master) {
        (_, MasterMut::F32(copy)) => out.copy_from_slice(&copy[span]),
        (WorkingMut::Bf16(high), MasterMut::Remainder(low)) => {
            let bits = high[span.clone()].iter().zip(&low[span]);
            out.iter_mut().zip(bits).for_each(|(out, (high, low))| *out = join(*high, *low));
        }
        (WorkingMut::F32(values), _) => out.copy_from_slice(&values[span]),
        (WorkingMut::Bf16(bits), _) => kernels().bf16_to_f32(&bits[span], out),
        (WorkingMut::F16(bits), _) => kernels().f16_to_f32(&bits[span], out),
    }
}

/// Writes `values` at offset `first` of a piece whose element 0 is element `index` of the arena; `step`
/// counts updates.
pub(crate) fn write(
    working: &mut WorkingMut<'_>,
    master: &mut MasterMut<'_>,
    first: usize,
    values: &[f32],
    (index, step): (u64, u64),
) {
    let span = first..first + values.len();
    if let MasterMut::F32(copy) = master {
        copy[span.clone()].copy_from_slice(values);
    }
    match (working, master) {
        (WorkingMut::Bf16(high), MasterMut::Remainder(low)) => {
            let places = high[span.clone()].iter_mut().zip(&mut low[span]);
            values.iter().zip(places).for_each(|(value, (high, low))| (*high, *low) = split(*value));
        }
        (WorkingMut::Bf16(bits), MasterMut::Stochastic { seed }) => {
            stochastic_bf16(values, &mut bits[span], *seed, step, index + first as u64);
        }
        (WorkingMut::F32(to), _) => to[span].copy_from_slice(values),
        (WorkingMut::Bf16(bits), _) => kernels().f32_to_bf16(values, &mut bits[span]),
        (WorkingMut::F16(bits), _) => kernels().f32_to_f16(values, &mut bits[span]),
    }
}

/// Splits a value into bf16 bits, rounded to nearest (halves up), and the signed low 16 bits.
fn split(value: f32) -> (u16, u16) {
    let bits = value.to_bits();
    let low = bits as u16;
    // A negative remainder belongs to the next bf16 up; values that are or would become infinite are
    // truncated instead.
    let high = (bits >> 16) as u16;
    match high.checked_add(u16::from(low >= 0x8000)) {
        Some(up) if value.is_finite() && f32::from_bits(u32::from(up) << 16).is_finite() => (up, low),
        _ => (high, low & 0x7fff),
    }
}

/// Joins both parts to the f32 value.
pub(crate) fn join(high: u16, low: u16) -> f32 {
    f32::from_bits((u32::from(high) << 16).wrapping_add_signed(i32::from(low.cast_signed())))
}

/// Rounds to bf16 stochastically by adding 16 random bits to the 16 that are cut off. Random bits:
/// Philox4x32-10 with key `seed` and counter (group of four elements, step). Non-finite values are rounded to
/// nearest.
fn stochastic_bf16(values: &[f32], out: &mut [u16], seed: u64, step: u64, index: u64) {
    let key = [seed as u32, (seed >> 32) as u32];
    let mut words = [0; 4];
    let mut group = u64::MAX;
    for (i, (value, out)) in values.iter().zip(out).enumerate() {
        let at = index + i as u64;
        if at / 4 != group {
            group = at / 4;
            words =
                philox4x32_10([group as u32, (group >> 32) as u32, step as u32, (step >> 32) as u32], key);
        }
        let bits = value.to_bits();
        *out = if value.is_finite() {
            (bits.wrapping_add(words[(at % 4) as usize] & 0xffff) >> 16) as u16
        } else {
            // Keeps a NaN quiet, so that truncation cannot turn it into infinity.
            (bits >> 16) as u16 | if value.is_nan() { 0x40 } else { 0 }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_halves_make_the_value_again() {
        let mut bits = 1u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            if value.is_nan() {
                continue;
            }
            let (high, low) = split(value);
            let close = f32::from_bits(u32::from(high) << 16);
            if value.is_infinite() {
                assert_eq!(close, value);
                continue;
            }
            if close.abs() < 3.3e38 {
                assert_eq!(join(high, low).to_bits(), value.to_bits(), "{value:e}");
                let mut nearest = [0];
                kernels().f32_to_bf16(&[value], &mut nearest);
                // Halves round up here, and to even in the other.
                let tie = bits & 0xffff == 0x8000;
                assert!(tie || nearest[0] == high, "{value:e}");
            }
        }
    }

    #[test]
    fn stochastic_rounding_is_right_on_average() {
        // A quarter of the way between two adjacent bf16 numbers.
        let (low, high) = (1.0f32, 1.007_812_5f32);
        let value = 0.75 * low + 0.25 * high;
        let n = 40_000;
        let mut out = vec![0; n];
        stochastic_bf16(&vec![value; n], &mut out, 7, 3, 5);
        let up = out.iter().filter(|bits| f32::from_bits(u32::from(**bits) << 16) == high).count();
        let down = out.iter().filter(|bits| f32::from_bits(u32::from(**bits) << 16) == low).count();
        assert_eq!(up + down, n);
        // Five standard deviations of a binomial.
        assert!((up as f64 - 0.25 * n as f64).abs() < 5.0 * (n as f64 * 0.25 * 0.75).sqrt(), "{up}");
        let mut again = vec![0; n - 3];
        stochastic_bf16(&vec![value; n - 3], &mut again, 7, 3, 8);
        assert_eq!(again, out[3..], "a function of place, step and seed");
        stochastic_bf16(&vec![value; n - 3], &mut again, 7, 4, 8);
        assert_ne!(again, out[3..]);
    }

    #[test]
    fn exact_and_special_values_stay() {
        let values = [0.0, -0.0, 1.5, -2.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let mut out = [0; 7];
        stochastic_bf16(&values, &mut out, 1, 1, 0);
        for (value, bits) in values.iter().zip(out) {
            let found = f32::from_bits(u32::from(bits) << 16);
            assert!(found.to_bits() == value.to_bits() || (found.is_nan() && value.is_nan()));
        }
    }
}
