//! The scales of EXL2: within a group of columns all rows share an f16, and each has the square of 1 to 16 times it.
//!
//! Rounded to nearest, a row takes the smallest of these under which no code is cut: at least that of
//! [`Rule::Full`](mantissa_num::Rule::Full), and for small rows of a group up to four times it (root 2 for root 1). GPTQ takes
//! those that lose least, chosen before its columns are quantized. exllamav2 searches sizes of groups and widths within a
//! layer as well (`conversion/adaptivegptq.py`); here all groups of a layer have those of its scheme, and widths differ
//! from layer to layer.

use std::ops::Range;

use mantissa_kernels::for_each;
use mantissa_num::format::{Affine, Format};
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rounding, Scheme};
use mantissa_store::convention::exl2::square_scale;

use crate::gptq::OF_ROUNDING;

/// The largest root of a scale.
const MAX_ROOT: u8 = 16;

/// Shares of the largest row's range that the largest scale of a group is tried at.
const SHARES: [f32; 8] = [1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.62, 0.54];

/// Scales that a row tries, as shares of that of its whole range.
const TRIED: Range<f32> = 0.4..1.2;

/// Symmetric integers in groups, which is what EXL2 holds.
#[derive(Clone, Copy)]
struct Grid {
    /// The largest code; the least is one further out.
    top: i32,
    /// Steps from 0 to the end of a range.
    half: f32,
    /// Columns of a group.
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

    /// Columns of group `g`.
    fn span(self, g: usize, cols: usize) -> Range<usize> {
        g * self.group..cols.min((g + 1) * self.group)
    }

    /// The scale of each row of a group under which no code is cut.
    fn wanted(self, w: &[f32], cols: usize, span: &Range<usize>) -> Vec<f32> {
        let amax = |row: &[f32]| row[span.clone()].iter().fold(0f32, |amax, v| amax.max(v.abs()));
        w.chunks_exact(cols.max(1)).map(|row| amax(row) / self.half).collect()
    }

    /// Error of a row of a group under `step`: squares weighed by `weights`, those of rounding counting
    /// [less](OF_ROUNDING).
    fn loss(self, w: &[f32], weights: &[f64], step: f32) -> f64 {
        let (low, high) = ((-self.top - 1) as f32 * step, self.top as f32 * step);
        w.iter().zip(weights).fold(0.0, |sum, (&w, h)| {
            let error = f64::from(w - self.code(w, step) as f32 * step);
            let counts = if low <= w && w <= high { OF_ROUNDING } else { 1.0 };
            sum + counts * h * error * error
        })
    }
}

/// The scheme with scales as EXL2 stores them.
pub(crate) fn with_f16_scales(scheme: &Scheme) -> Scheme {
    let mut scheme = scheme.clone();
    scheme.format = scheme.format.with_scale_code(Code::Float(F16));
    scheme
}

/// A weight `w` (`[rows, cols]`) as codes and scales; `None` of other schemes than symmetric integers in groups, of values that are no
/// numbers, and of scales beyond f16.
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

/// The scales `[rows, groups]` under which `w`, rounded to nearest, loses least when a squared error in a column counts its
/// one of `weights`; `None` as of [`quantize`].
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

/// The scales of a group, one per row: of several units the one under which all rows together lose least, each with the best
/// of its squares.
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
            let (of_row, scale) =
                best_square(grid, &row[span.clone()], &weights[span.clone()], wanted, &table);
            loss += of_row;
            scales.push(scale);
        }
        if loss < best.0 {
            best = (loss, Some(scales));
        }
    }
    best.1
}

/// The square under which a row of a group loses least, and what it loses: of those near the row's whole range, the smallest
/// that reaches it or the largest of all among them.
fn best_square(grid: Grid, w: &[f32], weights: &[f64], wanted: f32, table: &[u16]) -> (f64, u16) {
    let value = |scale: u16| F16.decode(scale.into());
    let covers = table.iter().position(|&scale| value(scale) >= wanted).unwrap_or(table.len() - 1);
    let near = TRIED.start * wanted..TRIED.end * wanted;
    let tried = |&(i, &scale): &(usize, &u16)| i == covers || near.contains(&value(scale));
    let losses = table.iter().enumerate().filter(tried);
    let losses = losses.map(|(_, &scale)| (grid.loss(w, weights, value(scale)), scale));
    losses.fold((f64::INFINITY, table[covers]), |best, next| if next.0 < best.0 { next } else { best })
}

/// The scales of a group, by their roots.
fn squares_of(unit: u16) -> Vec<u16> {
    (1..=MAX_ROOT).map(|root| square_scale(root, unit)).collect()
}

/// The f16 pattern of the smallest unit whose 256-fold, as it is decoded, is at least `largest`; at least the smallest f16.
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
        // Rows of very different sizes, one of zeros.
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
