//! Storage of trained weights: an arena of floats, or floats and INT8 codes.
//!
//! INT8 weights (torchao's INT8 quantized training): the matrices of the decoder's linear layers are codes
//! `[rows, cols]` with an f32 scale per row, `w = code * scale`; other parameters are f32. A code is in -127 to 127.

use std::ops::Range;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::{Role, zeros};
use mantissa_num::round::philox4x32_10;

use crate::array::{Array, ArrayMut};
use crate::param_table::{ParamInfo, ParamTable};
use crate::store::{Int8Ref, Precision, Store, StoreRef};

/// Largest code.
const MOST: f32 = 127.0;

/// Values of the parameters, addressed by the ranges of their table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Weights {
    Float(Store),
    Int8(Int8Weights),
}

/// Parameters of which some are INT8.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Int8Weights {
    /// Parts of the arena, in order and without gaps.
    parts: Vec<Part>,
    values: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    /// f32 values of the matrix that is being updated, as long as the largest one.
    stage: Vec<f32>,
}

/// Part of the arena: one INT8 matrix, or f32 values.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    range: Range<usize>,
    /// First element in `codes`, or in `values`.
    at: usize,
    /// First scale and row length of a matrix; `None` for f32 values.
    matrix: Option<(usize, usize)>,
}

/// Columns, decoded values, codes and scales of a matrix.
type MatrixMut<'a> = (usize, &'a mut [f32], &'a mut [i8], &'a mut [f32]);

impl Weights {
    /// Returns the stored values of a range, which must not reach beyond an INT8 matrix.
    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        match self {
            Weights::Float(store) => store.get(range),
            Weights::Int8(weights) => weights.get(range),
        }
    }

    /// Stores `values` from offset `first` on, rounded to nearest.
    pub(crate) fn set(&mut self, first: usize, values: &[f32]) {
        match self {
            Weights::Float(store) => store.set(first, values),
            Weights::Int8(weights) => weights.set(first, values),
        }
    }

    /// Sets values to 0 and gives their memory back; INT8 weights stay whole.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        if let Weights::Float(store) = self {
            store.release(range);
        }
    }

    /// Dtype of values that are not INT8.
    pub(crate) fn precision(&self) -> Precision {
        match self {
            Weights::Float(store) => store.precision(),
            Weights::Int8(_) => Precision::F32,
        }
    }

    /// Returns the arrays of the parameter at `range` for a checkpoint: its values, or codes and scales per row.
    pub(crate) fn arrays(&self, range: Range<usize>) -> (Array<'_>, Option<&[f32]>) {
        match self.get(range) {
            StoreRef::F32(values) => (Array::F32(values), None),
            StoreRef::Bf16(bits) => (Array::Bf16(bits), None),
            StoreRef::F16(bits) => (Array::F16(bits), None),
            StoreRef::Int8(values) => (Array::I8(values.codes), Some(values.scales)),
        }
    }

    /// Returns the same arrays for restoring.
    pub(crate) fn arrays_mut(&mut self, range: Range<usize>) -> (ArrayMut<'_>, Option<&mut [f32]>) {
        match self {
            Weights::Float(Store::F32(values)) => (ArrayMut::F32(&mut values[range]), None),
            Weights::Float(Store::Bf16(bits)) => (ArrayMut::Bf16(&mut bits[range]), None),
            Weights::Float(Store::F16(bits)) => (ArrayMut::F16(&mut bits[range]), None),
            Weights::Int8(weights) => {
                let part = &weights.parts[weights.part(range.start)];
                let at = part.at + range.start - part.range.start;
                match part.matrix {
                    None => (ArrayMut::F32(&mut weights.values[at..][..range.len()]), None),
                    Some((row, cols)) => (
                        ArrayMut::I8(&mut weights.codes[at..][..range.len()]),
                        Some(&mut weights.scales[row..][..range.len() / cols]),
                    ),
                }
            }
        }
    }

    /// Prepares the update of a parameter: decodes an INT8 matrix.
    pub(crate) fn open(&mut self, param: &ParamInfo, threads: usize) {
        const PIECE: usize = 1 << 16;
        let Weights::Int8(weights) = self else { return };
        let mut stage = std::mem::take(&mut weights.stage);
        if let StoreRef::Int8(codes) = weights.get(param.range.clone()) {
            for_each(threads, stage[..codes.len()].chunks_mut(PIECE).enumerate(), |(i, out)| {
                codes.slice(i * PIECE..i * PIECE + out.len()).widen(out);
            });
        }
        weights.stage = stage;
    }

    /// Ends the update of a parameter in step `step`: rounds an INT8 matrix stochastically.
    pub(crate) fn close(&mut self, param: &ParamInfo, seed: u64, step: u64, threads: usize) {
        let Weights::Int8(weights) = self else { return };
        let Some((cols, stage, codes, scales)) = weights.matrix_mut(&param.range) else { return };
        let first = param.range.start as u64;
        let rows = stage.chunks(cols).zip(codes.chunks_mut(cols).zip(scales)).enumerate();
        for_each(threads, rows, |(row, (values, (codes, scale)))| {
            *scale = stochastic(values, codes, seed, step, first + (row * cols) as u64);
        });
    }
}

impl Int8Weights {
    /// Allocates weights for `table`, all 0; `None` if memory is missing.
    pub(crate) fn zeros(table: &ParamTable) -> Option<Self> {
        let (mut parts, mut end) = (Vec::new(), 0);
        let [mut values, mut codes, mut rows, mut longest] = [0; 4];
        let mut plain = |range: Range<usize>, parts: &mut Vec<Part>| {
            if !range.is_empty() {
                parts.push(Part { range: range.clone(), at: values, matrix: None });
                values += range.len();
            }
        };
        for (param, cols) in table.iter().filter_map(matrix) {
            let range = param.range.clone();
            plain(end..range.start, &mut parts);
            parts.push(Part { range: range.clone(), at: codes, matrix: Some((rows, cols)) });
            (codes, rows, end) = (codes + range.len(), rows + range.len() / cols, range.end);
            longest = longest.max(range.len());
        }
        plain(end..table.len(), &mut parts);
        Some(Int8Weights {
            parts,
            values: zeros(values)?,
            codes: zeros(codes)?,
            scales: zeros(rows)?,
            stage: zeros(longest)?,
        })
    }

    /// Bytes of the weights of `table`, and of the buffer of an update.
    pub(crate) fn bytes(table: &ParamTable) -> u64 {
        let (mut bytes, mut longest) = ((table.len() as u64).saturating_mul(4), 0);
        for (param, cols) in table.iter().filter_map(matrix) {
            let n = param.range.len() as u64;
            let (saved, scales) = (n.saturating_mul(3), (n / cols as u64).saturating_mul(4));
            bytes = bytes.saturating_sub(saved).saturating_add(scales);
            longest = longest.max(n);
        }
        bytes.saturating_add(4u64.saturating_mul(longest))
    }

    /// Number of the part with element `at`.
    fn part(&self, at: usize) -> usize {
        self.parts.partition_point(|part| part.range.end <= at).min(self.parts.len().saturating_sub(1))
    }

    fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        if range.is_empty() {
            return StoreRef::F32(&[]);
        }
        let part = &self.parts[self.part(range.start)];
        let first = range.start - part.range.start;
        match part.matrix {
            None => StoreRef::F32(&self.values[part.at + first..][..range.len()]),
            Some((row, cols)) => StoreRef::Int8(Int8Ref {
                codes: &self.codes[part.at + first..][..range.len()],
                scales: &self.scales[row + first / cols..row + (first + range.len()).div_ceil(cols)],
                cols,
                skip: first % cols,
            }),
        }
    }

    /// Returns all values as f32.
    pub(crate) fn widened(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.parts.last().map_or(0, |part| part.range.end)];
        self.parts.iter().for_each(|part| self.get(part.range.clone()).widen(&mut all[part.range.clone()]));
        all
    }

    fn set(&mut self, first: usize, values: &[f32]) {
        let (mut at, end) = (first, first + values.len());
        while at < end {
            let part = self.parts[self.part(at)].clone();
            let own = at..end.min(part.range.end);
            let (from, place) = (&values[own.start - first..own.end - first], at - part.range.start);
            match part.matrix {
                None => self.values[part.at + place..][..from.len()].copy_from_slice(from),
                Some((row, cols)) => self.set_rows(&part, (row, cols), place, from),
            }
            at = own.end;
        }
    }

    /// Stores `values` from element `place` of a matrix on. Rows that are overwritten in part are rounded again.
    fn set_rows(&mut self, part: &Part, (row, cols): (usize, usize), place: usize, values: &[f32]) {
        let rows = place / cols..(place + values.len()).div_ceil(cols);
        let whole = rows.start * cols..rows.end * cols;
        let mut all = vec![0.0; whole.len()];
        self.get(part.range.start + whole.start..part.range.start + whole.end).widen(&mut all);
        all[place - whole.start..][..values.len()].copy_from_slice(values);
        let codes = self.codes[part.at + whole.start..part.at + whole.end].chunks_mut(cols);
        let scales = &mut self.scales[row + rows.start..row + rows.end];
        for ((values, codes), scale) in all.chunks(cols).zip(codes).zip(scales) {
            *scale = nearest(values, codes);
        }
    }

    /// Returns the columns, decoded values, codes and scales of the matrix at `range`; `None` for f32 values.
    fn matrix_mut(&mut self, range: &Range<usize>) -> Option<MatrixMut<'_>> {
        let part = self.parts.get(self.part(range.start)).filter(|part| part.range == *range)?;
        let (row, cols) = part.matrix?;
        Some((
            cols,
            &mut self.stage[..range.len()],
            &mut self.codes[part.at..][..range.len()],
            &mut self.scales[row..][..range.len() / cols],
        ))
    }

    /// Returns the f32 values at `range`, of an INT8 matrix as [`Weights::open`] decoded them.
    pub(crate) fn opened(&mut self, range: Range<usize>) -> &mut [f32] {
        let part = &self.parts[self.part(range.start)];
        match part.matrix {
            Some(_) => &mut self.stage[..range.len()],
            None => &mut self.values[part.at + range.start - part.range.start..][..range.len()],
        }
    }
}

/// Returns a parameter with its row length if it is stored as INT8: the weight of a linear layer of the decoder.
fn matrix(param: &ParamInfo) -> Option<(&ParamInfo, usize)> {
    let cols = *param.tensor.shape.last()?;
    let held = matches!(param.tensor.role, Role::Linear { .. }) && !param.range.is_empty();
    held.then_some((param, cols))
}

/// Largest magnitude of a row; NaN if a value is not finite.
fn finite_amax(row: &[f32]) -> f32 {
    if row.iter().all(|x| x.is_finite()) { kernels().amax(row) } else { f32::NAN }
}

/// Encodes a row that has no scale: zeros, values whose scale would be 0, or a value that is not finite, which makes all
/// of the row NaN. Returns the scale.
fn without_scale(amax: f32, codes: &mut [i8]) -> f32 {
    codes.fill(i8::from(amax.is_nan()));
    if amax.is_nan() { f32::NAN } else { 0.0 }
}

/// Rounds a row to nearest under the scale amax / 127; returns the scale. A row that is the product of codes and a scale
/// keeps its bits: its scale is then within an ulp of that, or of amax / 126.
fn nearest(row: &[f32], codes: &mut [i8]) -> f32 {
    let amax = finite_amax(row);
    let first = amax / MOST;
    if first.is_nan() || first <= 0.0 {
        return without_scale(amax, codes);
    }
    let encode = |x: f32, scale: f32| (x / scale).round_ties_even().clamp(-MOST, MOST);
    let near = |scale: f32| [scale, scale.next_down(), scale.next_up()];
    let candidates = near(first).into_iter().chain(near(amax / (MOST - 1.0)));
    let exact = |scale: &f32| row.iter().all(|x| encode(*x, *scale) * scale == *x);
    let scale = candidates.into_iter().find(exact).unwrap_or(first);
    row.iter().zip(codes).for_each(|(x, code)| *code = encode(*x, scale) as i8);
    scale
}

/// Rounds a row to `q s` with `s = amax / 127` and `q = floor(w / s + u)` for a uniform u: torchao's requantization of an
/// updated INT8 weight; returns s. Random bits: Philox4x32-10 with key `seed` and counter (group of four elements, step);
/// `index` is the place of the row in the arena.
fn stochastic(row: &[f32], codes: &mut [i8], seed: u64, step: u64, index: u64) -> f32 {
    let amax = finite_amax(row);
    let scale = amax / MOST;
    if scale.is_nan() || scale <= 0.0 {
        return without_scale(amax, codes);
    }
    let key = [seed as u32, (seed >> 32) as u32];
    let mut words = [0; 4];
    let mut group = u64::MAX;
    for (i, (value, code)) in row.iter().zip(codes).enumerate() {
        let at = index + i as u64;
        if at / 4 != group {
            group = at / 4;
            words =
                philox4x32_10([group as u32, (group >> 32) as u32, step as u32, (step >> 32) as u32], key);
        }
        // 24 bits, so that u stays below 1 in f32.
        let uniform = (words[(at % 4) as usize] >> 8) as f32 / 16_777_216.0;
        *code = (*value / scale + uniform).floor().clamp(-MOST, MOST) as i8;
    }
    scale
}

/// Rounds the values of the INT8 matrices in `arena` as [`Weights::close`] does, in f32 without codes: the reference of
/// the tests.
#[cfg(test)]
pub(crate) fn emulate(table: &ParamTable, arena: &mut [f32], seed: u64, step: u64) {
    for (param, cols) in table.iter().filter_map(matrix) {
        for (row, values) in arena[param.range.clone()].chunks_mut(cols).enumerate() {
            let first = param.range.start + row * cols;
            let scale = kernels().amax(values) / MOST;
            for (i, value) in values.iter_mut().enumerate() {
                let at = (first + i) as u64;
                let group = at / 4;
                let counter = [group as u32, (group >> 32) as u32, step as u32, (step >> 32) as u32];
                let words = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
                let uniform = (words[(at % 4) as usize] >> 8) as f32 / 16_777_216.0;
                if scale > 0.0 {
                    *value = (*value / scale + uniform).floor().clamp(-MOST, MOST) * scale;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(row: &[f32], step: u64) -> Vec<f32> {
        let mut codes = vec![0; row.len()];
        let scale = stochastic(row, &mut codes, 5, step, 12);
        codes.iter().map(|code| f32::from(*code) * scale).collect()
    }

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.7).sin() * 0.01).collect()
    }

    #[test]
    fn rows_of_int8_are_right_on_average_and_stay_on_their_grid() {
        let start = wave(300);
        let (mut sum, draws) = (vec![0f64; 300], 2000);
        for step in 0..draws {
            let row = rounded(&start, step);
            sum.iter_mut().zip(&row).for_each(|(sum, x)| *sum += f64::from(*x));
        }
        let scale = start.iter().fold(0f32, |most, x| most.max(x.abs())) / 127.0;
        let row = rounded(&start, 1);
        for ((sum, x), q) in sum.iter().zip(&start).zip(&row) {
            // A single draw is off by at most a step, so the mean's deviation is below half a step over the root.
            let error = (sum / draws as f64 - f64::from(*x)).abs() / f64::from(scale);
            assert!(error < 5.0 * 0.5 / (draws as f64).sqrt(), "{error}");
            let code = q / scale;
            assert!(
                (code - code.round()).abs() < 1e-4 && code.abs() < 127.5 && (q - x).abs() <= 1.0001 * scale
            );
        }
        assert!(row.iter().zip(&start).any(|(a, b)| a != b));
        assert_eq!(rounded(&[0.0; 8], 1), [0.0; 8]);
    }

    /// Rows that were rounded stochastically have the same values again when they are stored as f32 values.
    #[test]
    fn values_on_a_grid_are_stored_exactly() {
        for (n, steps) in [(300, 200), (3, 2000)] {
            for step in 0..steps {
                let factor = 1.0 + step as f32 / 77.0;
                let row: Vec<f32> = wave(n + 1)[1..].iter().map(|x| x * factor).collect();
                let row = rounded(&row, step);
                let mut codes = vec![0; n];
                let scale = nearest(&row, &mut codes);
                assert!(
                    codes.iter().zip(&row).all(|(code, x)| f32::from(*code) * scale == *x),
                    "step {step}"
                );
            }
        }
        let mut codes = [0; 3];
        let scale = nearest(&[1.0, -0.3, 0.004], &mut codes);
        assert_eq!((scale, codes), (1.0 / 127.0, [127, -38, 1]));
        assert!(nearest(&[1.0, f32::INFINITY, 0.0], &mut codes).is_nan() && codes == [1; 3]);
        assert!(nearest(&[0.0; 3], &mut codes) == 0.0 && codes == [0; 3]);
    }
}
