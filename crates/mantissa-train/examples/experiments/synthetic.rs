//! Measurements on random tensors: long sums (E12), and outliers (E5, E6b).

use std::error::Error;

use mantissa_num::minifloat::E4M3;
use mantissa_num::round::random_u32;
use mantissa_num::{Accumulator, Given, Hadamard, fake_quantize, parse_activation};

use crate::lab::Figures;

/// Products of a measured sum, per seed: their mean is near what one accumulator loses on average.
const SUMS: u64 = 16;

/// A matrix with outliers, `[rows, cols]`.
#[derive(Debug)]
pub struct Outliers<'a> {
    /// Scheme of activations.
    pub scheme: &'a str,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// One of so many values of a row is an outlier.
    pub every: usize,
    /// Factor of outliers.
    pub factor: f64,
    /// True if outliers are in the same columns of every row, false if each row has its own.
    pub channels: bool,
    /// Order of a Hadamard transform along the row before rounding, undone after it; 1 for none.
    pub hadamard: usize,
}

/// Measures the loss of sums of `k` products of E4M3, magnitudes of normal values, in `accumulator`. Figure: `error`,
/// the mean relative error.
pub fn sum(accumulator: &str, k: usize, seed: u64) -> Result<Figures, Box<dyn Error>> {
    let accumulator: Accumulator = accumulator.parse()?;
    let error = |sum: u64| {
        let value =
            |i: usize| E4M3.decode(E4M3.encode_saturating(normal(seed * SUMS + sum, i as u64).abs() as f32));
        let (a, b): (Vec<f32>, Vec<f32>) = ((0..k).map(value).collect(), (k..2 * k).map(value).collect());
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        (f64::from(accumulator.dot(&a, &b)) / exact - 1.0).abs()
    };
    Ok([("error".to_owned(), (0..SUMS).map(error).sum::<f64>() / SUMS as f64)].into())
}

/// Rounds normal values with outliers. Figures in dB: `others`, the SQNR of the values that are not outliers, and
/// `all`, that of all values.
pub fn outliers(of: &Outliers<'_>, seed: u64) -> Result<Figures, Box<dyn Error>> {
    let Outliers { rows, cols, every, .. } = *of;
    let scheme = parse_activation(of.scheme)?;
    let is_outlier = |row: usize, col: usize| {
        let line = if of.channels { 0 } else { row };
        let offset = random_u32(seed ^ 0x5eed, (line * cols + col) as u64 / every as u64) as usize % every;
        col % every == offset
    };
    let place = |i: usize| (i / cols, i % cols);
    let exact: Vec<f32> = (0..rows * cols)
        .map(|i| {
            let (row, col) = place(i);
            (normal(seed, i as u64) * if is_outlier(row, col) { of.factor } else { 1.0 }) as f32
        })
        .collect();
    let mut rounded = exact.clone();
    let turn = match of.hadamard {
        1 => None,
        order => Some(Hadamard::new(order).ok_or("hadamard: no matrix of this order")?.randomized(seed)),
    };
    if let Some(turn) = &turn {
        rounded.chunks_exact_mut(of.hadamard).for_each(|part| turn.forward(part));
    }
    fake_quantize(&scheme, &mut rounded, rows, cols, Given::default())?;
    if let Some(turn) = &turn {
        rounded.chunks_exact_mut(of.hadamard).for_each(|part| turn.transpose(part));
    }
    let sqnr = |counts: &dyn Fn(usize) -> bool| {
        let pairs = || exact.iter().zip(&rounded).enumerate().filter(|(i, _)| counts(*i));
        let power: f64 = pairs().map(|(_, (x, _))| f64::from(*x).powi(2)).sum();
        let noise: f64 = pairs().map(|(_, (x, y))| (f64::from(*x) - f64::from(*y)).powi(2)).sum();
        10.0 * (power / noise).log10()
    };
    let others = |i: usize| {
        let (row, col) = place(i);
        !is_outlier(row, col)
    };
    Ok([("others".to_owned(), sqnr(&others)), ("all".to_owned(), sqnr(&|_| true))].into())
}

/// Normal value by the Box–Muller transform.
fn normal(seed: u64, i: u64) -> f64 {
    let uniform = |i: u64| (f64::from(random_u32(seed, i)) + 0.5) / 2f64.powi(32);
    (-2.0 * uniform(2 * i).ln()).sqrt() * (std::f64::consts::TAU * uniform(2 * i + 1)).cos()
}
