//! Value statistics of tensors.
//!
//! Moments are computed per panel in f64 and merged in panel order (Pébay 2008, "Formulas for Robust,
//! One-Pass Parallel Computation of Covariances and Arbitrary-Order Statistical Moments", SAND2008-6212,
//! equations 1.5 and 2.1), so that results do not depend on the number of threads. Panels are whole rows.

use std::ops::Range;

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::Quantized;
use mantissa_num::stored::Extra;
use mantissa_store::convention::{ModelFiles, Weight};
use serde::Serialize;

use super::experts::Experts;
use super::inventory::Entry;
use super::model::Model;
use crate::error::Result;
use crate::float_tensor::FloatTensor;

/// Approximate number of elements per panel.
const PANEL: usize = 1 << 16;

/// Statistics of one tensor. All but the counts are over finite values, and `None` if there are none.
#[derive(Clone, Debug, Serialize)]
pub struct Stats {
    /// Least value.
    pub min: Option<f32>,
    /// Largest value.
    pub max: Option<f32>,
    /// Mean.
    pub mean: Option<f64>,
    /// Population standard deviation.
    pub std: Option<f64>,
    /// Largest magnitude.
    pub amax: Option<f32>,
    /// Fourth standardized moment; 3 for a Gaussian. `None` if all values are equal.
    pub kurtosis: Option<f64>,
    /// Share of zeros among all elements.
    pub zeros: Option<f64>,
    /// Number of NaNs.
    pub nan: u64,
    /// Number of infinities.
    pub inf: u64,
    /// Ratio of amax to the root mean square.
    pub outlier_ratio: Option<f64>,
    /// Spread of the row amax (leading axes folded); `None` below rank 2.
    pub row_amax: Option<RowAmax>,
}

/// Spread of the amax over rows.
#[derive(Clone, Debug, Serialize)]
pub struct RowAmax {
    /// Least value.
    pub min: f32,
    /// Median.
    pub median: f32,
    /// Largest value.
    pub max: f32,
}

/// Predicts the peak memory of [`of_entry`] in bytes.
pub fn memory(entry: &Entry, threads: usize) -> u64 {
    let columns = entry.shape.last().map_or(1, |&cols| cols as u64);
    // A panel as read and as f32.
    let panels =
        threads as u64 * columns.max(PANEL as u64).saturating_mul(8).min(entry.parameters.saturating_mul(8));
    let whole = match (&entry.quantized, &entry.experts) {
        (Some(_), _) => entry.parameters.saturating_add(2 * entry.bytes),
        // One expert at a time, plus the amax of all rows.
        (None, Some(experts)) => {
            let (rows, weights) =
                ((experts.len() * experts.rows) as u64, (experts.rows * experts.cols) as u64);
            3 * weights + 2 * 4 * rows
        }
        (None, None) => 4 * entry.shape.iter().rev().skip(1).fold(1, |n: u64, &d| n.saturating_mul(d as u64)),
    };
    (8u64 << 20).saturating_add(panels).saturating_add(whole)
}

/// Computes the statistics of `entry`, dequantized if needed; `None` if it holds no floats.
///
/// # Errors
/// Its tensors cannot be read or do not fit together.
pub fn of_entry(model: &Model, entry: &Entry, threads: usize) -> Result<Option<Stats>> {
    if let (Model::Known(files), Some(layer)) = (model, &entry.quantized) {
        let linear = files.linear(&layer.module, layer.rows, layer.cols, false)?;
        if let Weight::Quantized(q) = &linear.weight {
            return of_quantized(q, &linear.transforms.extras, threads).map(Some);
        }
    }
    if let (Model::Known(files), Some(experts)) = (model, &entry.experts) {
        return of_experts(files, experts, threads);
    }
    let located = model.checkpoint().locate(&entry.name);
    let tensor = located.and_then(|(file, meta)| FloatTensor::new(file, meta));
    tensor.map(|tensor| of_stored(&tensor, threads)).transpose()
}

fn of_stored(tensor: &FloatTensor<'_>, threads: usize) -> Result<Stats> {
    let rank = tensor.meta().shape.len();
    let read = |rows: Range<usize>| tensor.read(rows.start * tensor.cols..rows.end * tensor.cols);
    of_rows(tensor.rows, tensor.cols, rank >= 2, threads, read)
}

/// Computes the statistics over all experts of a stacked tensor, by expert rows. `None` if one is not
/// quantized.
fn of_experts(files: &ModelFiles, experts: &Experts, threads: usize) -> Result<Option<Stats>> {
    let (mut moments, mut amax) = (Moments::default(), Vec::new());
    for at in 0..experts.len() {
        let Some(q) = experts.weight(files, at)? else { return Ok(None) };
        let (other, more) = moments_of(&q, threads)?;
        moments = moments.merge(&other);
        amax.extend(more);
    }
    Ok(Some(Stats::of(moments, amax)))
}

/// Computes the statistics of decoded codes, with extra sparse weights added.
fn of_quantized(q: &Quantized, extras: &[Extra], threads: usize) -> Result<Stats> {
    q.check()?;
    if !extras.is_empty() {
        let mut values = q.dequantize()?;
        extras.iter().for_each(|extra| extra.fold(&mut values, q.rows, q.cols));
        let read = |rows: Range<usize>| Ok(values[rows.start * q.cols..rows.end * q.cols].to_vec());
        return of_rows(q.rows, q.cols, true, threads, read);
    }
    let (moments, amax) = moments_of(q, threads)?;
    Ok(Stats::of(moments, amax))
}

/// Computes moments and row amax of decoded codes.
fn moments_of(q: &Quantized, threads: usize) -> Result<(Moments, Vec<f32>)> {
    q.check()?;
    let read = |rows: Range<usize>| {
        let mut values = vec![0.0; rows.len() * q.cols];
        q.dequantize_rows(rows, &mut values);
        Ok(values)
    };
    moments_of_rows(q.rows, q.cols, true, threads, read)
}

fn of_rows(
    rows: usize,
    cols: usize,
    by_row: bool,
    threads: usize,
    read: impl Fn(Range<usize>) -> Result<Vec<f32>> + Sync,
) -> Result<Stats> {
    let (moments, amax) = moments_of_rows(rows, cols, by_row, threads, read)?;
    Ok(Stats::of(moments, amax))
}

/// Computes moments and, if `by_row`, the amax of each row.
fn moments_of_rows(
    rows: usize,
    cols: usize,
    by_row: bool,
    threads: usize,
    read: impl Fn(Range<usize>) -> Result<Vec<f32>> + Sync,
) -> Result<(Moments, Vec<f32>)> {
    if rows == 0 || cols == 0 {
        return Ok((Moments::default(), Vec::new()));
    }
    let panel = |rows: Range<usize>| -> Result<(Moments, Vec<f32>)> {
        let x = read(rows)?;
        let amax = |row: &[f32]| row.iter().filter(|v| v.is_finite()).fold(0f32, |a, v| a.max(v.abs()));
        let rows = if by_row { x.chunks_exact(cols).map(amax).collect() } else { Vec::new() };
        Ok((Moments::of(&x), rows))
    };
    let merge = |all: Result<(Moments, Vec<f32>)>, part: Result<(Moments, Vec<f32>)>| {
        let ((moments, mut amax), (other, more)) = (all?, part?);
        amax.extend(more);
        Ok((moments.merge(&other), amax))
    };
    let grain = (PANEL / cols).max(1);
    map_reduce_fixed(threads, rows, grain, panel, Ok((Moments::default(), Vec::new())), merge)
}

/// Counts, extremes and central moments.
#[derive(Clone, Copy, Debug)]
struct Moments {
    /// Number of finite values.
    n: u64,
    mean: f64,
    /// Sums of the second, third and fourth powers of the deviation from the mean.
    m2: f64,
    m3: f64,
    m4: f64,
    min: f32,
    max: f32,
    zeros: u64,
    nan: u64,
    inf: u64,
}

impl Default for Moments {
    fn default() -> Self {
        let (min, max) = (f32::INFINITY, f32::NEG_INFINITY);
        Moments { n: 0, mean: 0.0, m2: 0.0, m3: 0.0, m4: 0.0, min, max, zeros: 0, nan: 0, inf: 0 }
    }
}

impl Moments {
    fn of(x: &[f32]) -> Self {
        let mut all = Moments::default();
        let mut sum = 0.0;
        for &v in x {
            if v.is_finite() {
                all.n += 1;
                sum += f64::from(v);
                all.zeros += u64::from(v == 0.0);
                all.min = all.min.min(v);
                all.max = all.max.max(v);
            } else if v.is_nan() {
                all.nan += 1;
            } else {
                all.inf += 1;
            }
        }
        all.mean = sum / all.n.max(1) as f64;
        for v in x.iter().filter(|v| v.is_finite()) {
            let d = f64::from(*v) - all.mean;
            let d2 = d * d;
            all.m2 += d2;
            all.m3 += d2 * d;
            all.m4 += d2 * d2;
        }
        all
    }

    fn merge(&self, other: &Self) -> Self {
        let extremes = Moments {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            zeros: self.zeros + other.zeros,
            nan: self.nan + other.nan,
            inf: self.inf + other.inf,
            n: self.n + other.n,
            ..Moments::default()
        };
        if extremes.n == 0 {
            return extremes;
        }
        let (na, nb, n) = (self.n as f64, other.n as f64, extremes.n as f64);
        let d = other.mean - self.mean;
        let (a, b) = (na / n, nb / n);
        Moments {
            mean: self.mean + d * b,
            m2: self.m2 + other.m2 + d * d * na * b,
            m3: self.m3 + other.m3 + d.powi(3) * na * b * (a - b) + 3.0 * d * (a * other.m2 - b * self.m2),
            m4: self.m4
                + other.m4
                + d.powi(4) * na * b * (a * a - a * b + b * b)
                + 6.0 * d * d * (a * a * other.m2 + b * b * self.m2)
                + 4.0 * d * (a * other.m3 - b * self.m3),
            ..extremes
        }
    }
}

impl Stats {
    fn of(m: Moments, mut rows: Vec<f32>) -> Self {
        let total = m.n + m.nan + m.inf;
        let some = m.n > 0;
        let n = m.n.max(1) as f64;
        let amax = m.min.abs().max(m.max.abs());
        let rms = (m.mean * m.mean + m.m2 / n).sqrt();
        rows.sort_by(f32::total_cmp);
        Stats {
            min: some.then_some(m.min),
            max: some.then_some(m.max),
            mean: some.then_some(m.mean),
            std: some.then(|| (m.m2 / n).sqrt()),
            amax: some.then_some(amax),
            kurtosis: (m.m2 > 0.0).then(|| n * m.m4 / (m.m2 * m.m2)).filter(|k| k.is_finite()),
            zeros: (total > 0).then(|| m.zeros as f64 / total as f64),
            nan: m.nan,
            inf: m.inf,
            outlier_ratio: (some && rms > 0.0).then(|| f64::from(amax) / rms),
            row_amax: rows.last().map(|&max| RowAmax { min: rows[0], median: rows[rows.len() / 2], max }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * b.abs().max(1.0)
    }

    #[test]
    fn merged_moments_match_the_whole() {
        let x: Vec<f32> =
            (0..1000).map(|i| (i as f32 * 0.7).sin() * (1.0 + i as f32 / 100.0) + 2.0).collect();
        let whole = Moments::of(&x);
        let parts = x.chunks(37).map(Moments::of).fold(Moments::default(), |a, b| a.merge(&b));
        assert_eq!((whole.n, whole.min, whole.max), (parts.n, parts.min, parts.max));
        assert!(near(whole.mean, parts.mean) && near(whole.m2, parts.m2));
        assert!(near(whole.m3, parts.m3) && near(whole.m4, parts.m4), "{} {}", whole.m4, parts.m4);
    }

    #[test]
    fn figures_of_a_small_tensor_by_hand() {
        let x = [1.0, -1.0, 0.0, 3.0, f32::NAN, f32::INFINITY, 1.0, -5.0];
        let stats = Stats::of(Moments::of(&x), vec![3.0, 5.0]);
        assert_eq!((stats.min, stats.max, stats.amax), (Some(-5.0), Some(3.0), Some(5.0)));
        assert_eq!((stats.nan, stats.inf, stats.zeros), (1, 1, Some(0.125)));
        // Finite: 1 -1 0 3 1 -5; mean -1/6, mean square 37/6.
        let mean = -1.0 / 6.0;
        assert!(near(stats.mean.unwrap_or(0.0), mean));
        assert!(near(stats.std.unwrap_or(0.0), (37.0f64 / 6.0 - mean * mean).sqrt()));
        assert!(near(stats.outlier_ratio.unwrap_or(0.0), 5.0 / (37.0f64 / 6.0).sqrt()));
    }

    #[test]
    fn a_constant_or_empty_tensor_has_no_kurtosis() {
        assert_eq!(Stats::of(Moments::of(&[2.0; 9]), Vec::new()).kurtosis, None);
        let empty = Stats::of(Moments::of(&[]), Vec::new());
        assert_eq!((empty.min, empty.mean, empty.zeros), (None, None, None));
    }
}
