//! Scales of EXL2. Within a group of columns all rows share one f16 unit. The scale of a row is the unit times the
//! square of a root from 1 to 16.
//!
//! RTN gives each row the smallest of these scales that clips no code. That is at least the scale of
//! [`Rule::Full`](mantissa_num::Rule::Full), and for small rows of a group up to four times it (root 2 instead of 1).
//! GPTQ takes the scales of least error, chosen before its columns are quantized. exllamav2 also searches group sizes
//! and widths within a layer (`conversion/adaptivegptq.py`). Here a layer has one group size, and widths differ between
//! layers.

use std::ops::Range;

use mantissa_kernels::for_each;
use mantissa_num::format::{Affine, Format};
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rounding, Scheme};
use mantissa_store::convention::exl2::square_scale;

use crate::gptq::OF_ROUNDING;

/// Largest root.
const MAX_ROOT: u8 = 16;

/// Ratios of the largest row's range that are tried for the largest scale of a group.
const SHARES: [f32; 8] = [1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.62, 0.54];

/// Scales that are tried for a row, relative to the scale of its whole range.
const TRIED: Range<f32> = 0.4..1.2;

/// Grid of symmetric integers in groups, the only codes of EXL2.
#[derive(Clone, Copy)]
struct Grid {
    /// Largest code; the smallest is `-top - 1`.
    top: i32,
    /// Steps from 0 to the end of a range.
    half: f32,
    /// Columns per group.
    group: usize,
}

impl Grid {
    fn of(scheme: &Scheme) -> Option<Self> {
        let Format::Affine(Affine { code: Code::Int(bits), blocks: Blocks::Group(group), .. }) =
            scheme.format
        else {
            return None;
        };
        let (top, half) = ((1i32 << (bits - 1)) - 1, ((1u32 << bits) - 1) as f32 / 2.0);
        Some(Grid { top, half, group: group as usize })
    }

    fn code(self, w: f32, step: f32) -> i32 {
        ((w / step).round_ties_even() as i32).clamp(-self.top - 1, self.top)
    }

    /// Returns the columns of group `g`.
    fn span(self, g: usize, cols: usize) -> Range<usize> {
        g * self.group..cols.min((g + 1) * self.group)
    }

    /// Returns for each row of a group the smallest scale that clips no code.
    fn wanted(self, w: &[f32], cols: usize, span: &Range<usize>) -> Vec<f32> {
        let amax = |row: &[f32]| row[span.clone()].iter().fold(0f32, |amax, v| amax.max(v.abs()));
        w.chunks_exact(cols.max(1)).map(|row| amax(row) / self.half).collect()
    }

    /// Returns the error of a row of a group under `step`: squares weighted by `weights`. Rounding errors count
    /// [less](OF_ROUNDING) than clipping.
    fn loss(self, w: &[f32], weights: &[f64], step: f32) -> f64 {
        let (low, high) = ((-self.top - 1) as f32 * step, self.top as f32 * step);
        w.iter().zip(weights).fold(0.0, |sum, (&w, h)| {
            let error = f64::from(w - self.code(w, step) as f32 * step);
            let counts = if low <= w && w <= high { OF_ROUNDING } else { 1.0 };
            sum + counts * h * error * error
        })
    }
}

/// Returns the scheme with the f16 scales of EXL2.
pub(crate) fn with_f16_scales(scheme: &Scheme) -> Scheme {
    let mut scheme = scheme.clone();
    scheme.format = scheme.format.with_scale_code(Code::Float(F16));
    scheme
}

/// Quantizes a weight `w` (`[rows, cols]`) by RTN. `None` if the scheme is not symmetric integers in groups, values are
/// not finite, or scales exceed f16.
pub(crate) fn quantize(scheme: &Scheme, w: &[f32], rows: usize, cols: usize) -> Option<Quantized> {
    let grid = Grid::of(scheme)?;
    let groups = cols.div_ceil(grid.group);
    let (mut codes, mut scales) = (vec![0u8; rows * cols], vec![0u16; rows * groups]);
    for g in 0..groups {
        let span = grid.span(g, cols);
        let wanted = grid.wanted(w, cols, &span);
        let table = squares_of(unit(wanted.iter().fold(0f32, |all, &scale| all.max(scale)))?);
        for (row, wanted) in wanted.into_iter().enumerate() {
            let enough = |&&scale: &&u16| F16.decode(scale.into()) >= wanted;
            let scale = *table.iter().find(enough)?;
            scales[row * groups + g] = scale;
            let step = F16.decode(scale.into());
            for column in span.clone() {
                codes[row * cols + column] = grid.code(w[row * cols + column], step) as u8;
            }
        }
    }
    let empty = Quantized::empty(with_f16_scales(scheme).format, rows, cols);
    Some(Quantized { codes: Codes::U8(codes), scales: Codes::U16(scales).into(), ..empty })
}

/// Searches the scales `[rows, groups]` of least error for rounding `w` to nearest; `weights` weight the squared error
/// of each column. `None` as in [`quantize`].
pub(crate) fn searched_scales(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    weights: &[f64],
    threads: usize,
) -> Option<Codes> {
    let grid = Grid::of(scheme)?;
    let groups = cols.div_ceil(grid.group);
    let mut found: Vec<Option<Vec<u16>>> = vec![None; groups];
    for_each(threads, found.iter_mut().enumerate(), |(g, found)| {
        *found = scales_of_group(grid, w, cols, weights, grid.span(g, cols));
    });
    let found: Vec<Vec<u16>> = found.into_iter().collect::<Option<_>>()?;
    let by_row = |row: usize| found.iter().map(move |group| group[row]);
    Some(Codes::U16((0..rows).flat_map(by_row).collect()))
}

/// Searches the scales of a group, one per row: tries several units, each with the best root of every row, and keeps
/// the unit of least total error.
fn scales_of_group(
    grid: Grid,
    w: &[f32],
    cols: usize,
    weights: &[f64],
    span: Range<usize>,
) -> Option<Vec<u16>> {
    let wanted = grid.wanted(w, cols, &span);
    let largest = wanted.iter().fold(0f32, |all, &scale| all.max(scale));
    let mut best: (f64, Option<Vec<u16>>) = (f64::INFINITY, None);
    let mut last = None;
    for share in SHARES {
        let unit = unit(largest * share)?;
        if last.replace(unit) == Some(unit) {
            continue;
        }
        let table = squares_of(unit);
        let (mut loss, mut scales) = (0.0, Vec::with_capacity(wanted.len()));
        for (row, &wanted) in w.chunks_exact(cols.max(1)).zip(&wanted) {
            let (row_loss, scale) =
                best_square(grid, &row[span.clone()], &weights[span.clone()], wanted, &table);
            loss += row_loss;
            scales.push(scale);
        }
        if loss < best.0 {
            best = (loss, Some(scales));
        }
    }
    best.1
}

/// Returns the least error of a row of a group and its scale. Scales near the row's whole range are tried, including
/// the smallest that covers it.
fn best_square(grid: Grid, w: &[f32], weights: &[f64], wanted: f32, table: &[u16]) -> (f64, u16) {
    let value = |scale: u16| F16.decode(scale.into());
    let covers = table.iter().position(|&scale| value(scale) >= wanted).unwrap_or(table.len() - 1);
    let near = TRIED.start * wanted..TRIED.end * wanted;
    let tried = |&(i, &scale): &(usize, &u16)| i == covers || near.contains(&value(scale));
    let losses = table.iter().enumerate().filter(tried);
    let losses = losses.map(|(_, &scale)| (grid.loss(w, weights, value(scale)), scale));
    losses.fold((f64::INFINITY, table[covers]), |best, next| if next.0 < best.0 { next } else { best })
}

/// Returns the scales of a group by root.
fn squares_of(unit: u16) -> Vec<u16> {
    (1..=MAX_ROOT).map(|root| square_scale(root, unit)).collect()
}

/// Returns the f16 bits of the smallest unit, at least the smallest f16, whose largest scale decodes to at least
/// `largest`.
fn unit(largest: f32) -> Option<u16> {
    let near = F16.encode(largest / 256.0, Overflow::Special, Rounding::NearestEven, 0) as u16;
    let reaches = |unit: u16| F16.decode(square_scale(MAX_ROOT, unit).into()) >= largest;
    let unit = [near, near.saturating_add(1)].into_iter().find(|&unit| unit > 0 && reaches(unit))?;
    F16.decode(square_scale(MAX_ROOT, unit).into()).is_finite().then_some(unit)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_store::convention::exl2::squares;

    use super::*;

    fn weight(rows: usize, cols: usize) -> Vec<f32> {
        // Rows of very different magnitudes, and one of zeros.
        let value = |i: usize| ((i * i % 997) as f32 * 0.37).sin() * 0.1 / ((i / cols) as f32 + 1.0);
        (0..rows * cols).map(|i| if i / cols == 7 { 0.0 } else { value(i) }).collect()
    }

    #[test]
    fn searched_scales_are_squares_and_lose_less() {
        let (rows, cols) = (40, 96);
        let w = weight(rows, cols);
        let weights: Vec<f64> =
            (0..cols).map(|i| if i % 11 == 3 { 0.0 } else { 1.0 + (i % 7) as f64 }).collect();
        for text in ["int2-g32", "int3-g32", "int4-g96", "int6-g32"] {
            let scheme: Scheme = text.parse().unwrap();
            let grid = Grid::of(&scheme).unwrap();
            let groups = cols / grid.group;
            let found = searched_scales(&scheme, &w, (rows, cols), &weights, 2).unwrap();
            assert_eq!(Some(&found), searched_scales(&scheme, &w, (rows, cols), &weights, 1).as_ref());
            let loss = |scales: &Codes| -> f64 {
                let of = |i: usize| {
                    let (row, span) = (i / groups, grid.span(i % groups, cols));
                    let step = F16.decode(scales.get(i));
                    grid.loss(&w[row * cols..][span.clone()], &weights[span], step)
                };
                (0..rows * groups).map(of).sum()
            };
            let nearest = quantize(&scheme, &w, rows, cols).unwrap();
            assert!(loss(&found) < loss(&nearest.scales.codes), "{text}");
            let Codes::U16(scales) = &found else { unreachable!() };
            for g in 0..groups {
                let column: Vec<u16> = scales.iter().skip(g).step_by(groups).copied().collect();
                assert!(squares(&column).is_some(), "{text} {g}");
            }
        }
    }

    #[test]
    fn scales_are_squares_and_errors_at_most_half_a_step() {
        let (rows, cols) = (40, 96);
        let w = weight(rows, cols);
        for text in ["int2-g32", "int3-g32", "int4-g96", "int5-g32", "int6-g32", "int8-g32"] {
            let scheme: Scheme = text.parse().unwrap();
            let q = quantize(&scheme, &w, rows, cols).unwrap();
            let groups = q.format.blocks().count(1, cols);
            let Codes::U16(scales) = &q.scales.codes else { unreachable!() };
            for g in 0..groups {
                let column: Vec<u16> = scales.iter().skip(g).step_by(groups).copied().collect();
                assert!(squares(&column).is_some(), "{text} {g}");
            }
            for (i, (found, w)) in q.dequantize().unwrap().iter().zip(&w).enumerate() {
                let step = F16.decode(scales[q.format.blocks().index(cols, i / cols, i % cols)].into());
                assert!((found - w).abs() <= 0.5001 * step, "{text} {i}: {found} for {w}");
            }
        }
    }
}
