//! GPTQ (Frantar, Ashkboos, Hoefler & Alistarh 2022, "GPTQ: Accurate Post-Training Quantization for Generative
//! Pre-trained Transformers", arXiv 2210.17323, algorithm 1).
//!
//! Given a weight `W[n, k]` and the Hessian `H[k, k] = XᵀX / t` of its inputs `X[t, k]`, GPTQ chooses codes with
//! values `Q[n, k]` that make `tr((W - Q) H (W - Q)ᵀ)` small: the mean squared error of the layer's output. It
//! quantizes one column after another and compensates each column's error in the columns not quantized yet:
//!
//! ```text
//! (H + λI)⁻¹ = Uᵀ U,  U upper triangular,  λ = damp · mean(diag H)
//! for j in 0..k:   Q[:, j] = quantize(W[:, j])
//!                  e       = (W[:, j] - Q[:, j]) / U[j, j]              so that the damped loss is the sum of e²
//!                  W[:, j+1..] -= e · U[j, j+1..]
//! ```
//!
//! Rows are independent and run on any number of threads. Updates beyond the current block are delayed to its end and
//! become one matrix product. All arithmetic is f64, and each weight is one chain of fused multiply-adds in column
//! order. So the codes do not depend on blocks, threads or the processor.
//!
//! `U` takes one factorization and one triangular inverse instead of two factorizations and a full inverse: with `J`
//! the reversal of order, `J (H + λI) J = L Lᵀ` gives `U = J L⁻¹ J`.
//!
//! A column whose input was zero in every token (`H[j, j] = 0`) is dead. As in the published code, its weights become
//! zero and it takes no further part. (The published code sets its diagonal to 1 and counts it in λ, which makes λ
//! depend on the scale of H. Here λ is computed from the live columns only.)

mod drift;
mod hessian;
pub mod method;
mod outliers;
mod solve;

use crate::dequantize::dequantize_by_group;
use mantissa_kernels::device::Cpu;
use mantissa_kernels::{Kernels, NotPositiveDefinite, kernels};
use mantissa_num::stored::Extra;
use mantissa_num::{Blocks, Codes, Quantized, Scheme, TensorError};
use mantissa_options::{Accepts, Count, Flag, Number, OneOf, Value, options};

pub use drift::{Drift, correction_bytes};
pub use hessian::Hessian;
pub use method::Gptq;
pub(crate) use outliers::{count, largest, sparse};
pub(crate) use solve::as_f16;

/// Weights from which a group's scale is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupOrder {
    /// Original weights of adjacent columns, for any quantization order. The stored layout is
    /// the same as for RTN.
    #[default]
    Static,
    /// Columns that are quantized consecutively, with the updates of the blocks before their first column, as in the
    /// published code. The result depends on the block size.
    Original,
    /// Columns that are quantized consecutively, with all updates so far.
    Current,
}

/// Group orders by name.
const GROUP_ORDERS: [(&str, GroupOrder); 3] =
    [("static", GroupOrder::Static), ("original", GroupOrder::Original), ("current", GroupOrder::Current)];

/// Share of its weights' range covered by a group's scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupRange {
    /// Share with the least `Σ diag(H) (w - q)²` under RTN. Rounding errors count half, because other columns
    /// compensate more of them than of clipping errors. The published code has a similar search (`mse`), with
    /// exponent 2.4 and unweighted errors.
    #[default]
    Mse,
    /// The whole range, as published.
    Amax,
}

/// Weight of a rounding error in the search for a scale; clipping errors count 1. Other columns compensate more of
/// rounding errors.
pub const OF_ROUNDING: f64 = 0.5;

/// Group ranges by name.
const GROUP_RANGES: [(&str, GroupRange); 2] = [("mse", GroupRange::Mse), ("amax", GroupRange::Amax)];

options! {
    /// Options of [`gptq`]. The defaults err less than column order with whole ranges, and the stored layout is the same.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct GptqOptions {
        /// Damping λ, as a fraction of the mean of the Hessian's diagonal; multiplied by 10, up to 1, while the Hessian is
        /// singular.
        damp: f64 = 0.01, Number(1.0);
        /// Block size: columns between two updates of the rest of the weight.
        block: usize = 128, BlockSize;
        /// Act-order: columns by decreasing diagonal of the Hessian, ties in original order, instead of from left to right.
        act_order: bool = true, Flag;
        /// Weights from which a group's scale is computed.
        groups: GroupOrder = GroupOrder::Static, OneOf(&GROUP_ORDERS);
        /// Range of a group's scale: mse (searched), amax (whole).
        range: GroupRange = GroupRange::Mse, OneOf(&GROUP_RANGES);
        /// Share of the input drift that is corrected: 0.0 in GPTQ, 1.0 for the full correction (GPTAQ).
        asymmetric: f32 = 0.0, Number(1.0);
        /// Share of FOEM's first-order term ([`foem`](crate::foem)): 0 in GPTQ.
        first_order: f64 = 0.0;
    }
}

/// Numbers of columns, from 1.
struct BlockSize;

impl Accepts<usize> for BlockSize {
    fn read(&self, value: &Value) -> Option<usize> {
        Count(usize::MAX).read(value)
    }

    fn print(&self, columns: &usize) -> Option<Value> {
        Count(usize::MAX).print(columns)
    }

    fn allowed(&self) -> String {
        "a whole number of columns, at least 1".to_owned()
    }
}

impl GptqOptions {
    /// True if groups are of columns that are quantized one after another and are not adjacent.
    pub fn follows_order(&self) -> bool {
        self.act_order && self.groups != GroupOrder::Static
    }
}

/// A quantized weight.
#[derive(Clone, Debug, PartialEq)]
pub struct GptqResult {
    /// Codes in the column order of W. With [`g_idx`](Self::g_idx) a row's groups are not adjacent columns, and only
    /// [`dequantize`](Self::dequantize) decodes them.
    pub quantized: Quantized,
    /// Group of each column, `[k]`, if it is not `column / group`.
    pub g_idx: Option<Vec<u32>>,
    /// Outliers, an [`Extra::Sparse`]: the difference of each from its code, as f16.
    pub outliers: Option<Extra>,
    /// Loss `tr((W - Q) H (W - Q)ᵀ)` under the given H without damping, with dead columns of W set to zero.
    pub loss: f64,
    /// Damping that made H positive definite, at least the requested one.
    pub damp_used: f64,
    /// Columns whose input was always zero, and whose weights are now zero.
    pub dead_columns: usize,
    /// Notes for the user: larger damping, dead columns.
    pub notes: Vec<String>,
}

/// Why a weight could not be quantized.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GptqError {
    /// Lengths that do not agree.
    #[error("{what}: expected {expected}, got {found}")]
    Length {
        /// The quantity.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
    },
    /// The weight holds NaN or infinity.
    #[error(transparent)]
    Weight(#[from] TensorError),
    /// An option out of range.
    #[error("{option}: expected {allowed}, got {found}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Value of the option.
        found: f64,
        /// The values allowed.
        allowed: &'static str,
    },
    /// The scheme cannot be quantized column by column, or the result cannot be stored.
    #[error("gptq: expected a supported scheme, got {scheme}: {why}")]
    Scheme {
        /// The scheme.
        scheme: String,
        /// Why, and what to do.
        why: &'static str,
    },
    /// A scale's block holds elements of several rows.
    #[error(
        "scheme {scheme} for [{rows}, {cols}]: expected blocks within a row, got blocks across rows; fix: use groups or channels"
    )]
    Blocks {
        /// The scheme.
        scheme: String,
        /// Rows of the weight.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
    },
    /// No token was seen.
    #[error("Hessian: expected at least 1 token of calibration, got 0; fix: use a longer calibration text")]
    NoTokens,
    /// The Hessian holds NaN, infinity or a negative square.
    #[error(
        "Hessian: expected finite values, not negative on the diagonal, got {value} for column {column}: the calibration overflows this layer"
    )]
    Value {
        /// First column with such a value.
        column: usize,
        /// The value.
        value: f32,
    },
    /// The Hessian stays singular.
    #[error(
        "Hessian: expected a positive pivot, got {value:e} at column {column} with damping {damp}; fix: round this layer to nearest"
    )]
    Singular {
        /// The column.
        column: usize,
        /// The pivot.
        value: f64,
        /// The largest damping tried.
        damp: f64,
    },
    /// Not enough memory.
    #[error("Hessian: expected {bytes} bytes of free memory, got less")]
    Memory {
        /// Number of bytes requested.
        bytes: u64,
    },
}

/// Quantizes `w` (`[n, k]`, row-major; `k` is the width of `hessian`) by `scheme`. `outer` is the global scale if
/// fused layers share one; `None` computes it from `w`. For several weights with the same input, use one
/// [`InverseFactor`].
///
/// # Errors
/// [`GptqError`]. On [`GptqError::Singular`] the caller should fall back to RTN.
pub fn gptq(
    scheme: &Scheme,
    w: &[f32],
    hessian: &Hessian,
    options: GptqOptions,
    outer: Option<f32>,
    threads: usize,
) -> Result<GptqResult, GptqError> {
    InverseFactor::new(hessian, options, threads)?.quantize(scheme, w, outer, threads)
}

/// Decisions made before the columns of a weight are quantized.
#[derive(Clone, Copy, Default)]
struct Fixed<'a> {
    /// Scales `[rows, groups]`; implies static groups.
    scales: Option<&'a Codes>,
    /// Marks the outliers `[rows, cols]`, which are stored outside the codes.
    kept: Option<&'a [bool]>,
}

/// Column order and factor of the inverse Hessian, shared by all weights with the same input.
#[derive(Clone, Debug)]
pub struct InverseFactor {
    kernels: Kernels,
    options: GptqOptions,
    /// Column at each position.
    order: Vec<usize>,
    /// True for dead columns, by column.
    dead: Vec<bool>,
    /// Diagonal of the Hessian, by column.
    diagonal: Vec<f64>,
    damp_used: f64,
    lambda: f64,
    /// `U[k, k]` by position.
    upper: Vec<f64>,
}

impl InverseFactor {
    /// Factors the inverse of `hessian` in `k³ / 3` multiply-adds in f64.
    ///
    /// # Errors
    /// [`GptqError`] for invalid options or an invalid Hessian.
    pub fn new(hessian: &Hessian, options: GptqOptions, threads: usize) -> Result<Self, GptqError> {
        Self::at(*kernels(), hessian, options, threads)
    }

    fn at(
        kernels: Kernels,
        hessian: &Hessian,
        options: GptqOptions,
        threads: usize,
    ) -> Result<Self, GptqError> {
        check_options(options)?;
        let diagonal = hessian.diagonal()?;
        let dead: Vec<bool> = diagonal.iter().map(|&d| d == 0.0).collect();
        let order = column_order(&diagonal, options.act_order);
        let live = diagonal.iter().filter(|&&d| d > 0.0);
        let mean = live.clone().sum::<f64>() / live.count().max(1) as f64;
        let (damp_used, upper) = damped(&order, options.damp, |damp| {
            hessian.inverse_factor(&Cpu::at(&kernels, threads), &order, damp * mean)
        })?;
        let lambda = damp_used * mean;
        Ok(InverseFactor { kernels, options, order, dead, diagonal, damp_used, lambda, upper })
    }

    /// Quantizes one weight, like [`gptq`].
    ///
    /// # Errors
    /// [`GptqError`] for an invalid weight or scheme.
    pub fn quantize(
        &self,
        scheme: &Scheme,
        w: &[f32],
        outer: Option<f32>,
        threads: usize,
    ) -> Result<GptqResult, GptqError> {
        let outer = self.outer(scheme, w, outer);
        self.solve((scheme, outer), w, Fixed::default(), threads)
    }

    /// Like [`quantize`](Self::quantize), but stores the `count` weights with the largest loss outside the codes
    /// (SpQR, [`crate::spqr`]).
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize); [`GptqError::Scheme`] if groups are not adjacent columns.
    pub fn quantize_with_outliers(
        &self,
        scheme: &Scheme,
        w: &[f32],
        outer: Option<f32>,
        count: usize,
        threads: usize,
    ) -> Result<GptqResult, GptqError> {
        if self.options.follows_order() {
            let why = "outliers need groups of adjacent columns; use groups = \"static\"";
            return Err(GptqError::Scheme { scheme: scheme.to_string(), why });
        }
        let outer = self.outer(scheme, w, outer);
        let kept = self.problem((scheme, outer), w, Fixed::default())?.outliers(count, threads);
        self.solve((scheme, outer), w, Fixed { kept: Some(&kept), scales: None }, threads)
    }

    /// Like [`quantize`](Self::quantize), with scales `[rows, groups]` given by the caller, for formats that cannot
    /// store every scale. Groups are adjacent columns, whatever the options.
    ///
    /// # Errors
    /// As [`quantize`](Self::quantize); [`GptqError::Length`] for the scales.
    pub fn quantize_under(
        &self,
        scheme: &Scheme,
        w: &[f32],
        scales: &Codes,
        threads: usize,
    ) -> Result<GptqResult, GptqError> {
        self.solve((scheme, None), w, Fixed { scales: Some(scales), kept: None }, threads)
    }

    /// Global scale of a scheme that has one: `given`, or computed from the weight.
    fn outer(&self, scheme: &Scheme, w: &[f32], given: Option<f32>) -> Option<f32> {
        given.or_else(|| scheme.outer_scale(self.kernels.amax(w))).filter(|_| scheme.has_outer_scale())
    }

    fn problem<'a>(
        &'a self,
        (scheme, outer): (&'a Scheme, Option<f32>),
        w: &'a [f32],
        fixed: Fixed<'a>,
    ) -> Result<solve::Problem<'a>, GptqError> {
        let cols = self.order.len();
        let rows = check_weight(w, cols)?;
        let group = group_columns(scheme, rows, cols)?;
        let expected = rows * cols.div_ceil(group);
        if let Some(found) = fixed.scales.map(Codes::len).filter(|&found| found != expected) {
            return Err(GptqError::Length { what: "scales", found, expected });
        }
        Ok(solve::Problem { factor: self, scheme, outer, fixed, w, rows, cols, group })
    }

    fn solve(
        &self,
        (scheme, outer): (&Scheme, Option<f32>),
        w: &[f32],
        fixed: Fixed<'_>,
        threads: usize,
    ) -> Result<GptqResult, GptqError> {
        let problem = self.problem((scheme, outer), w, fixed)?;
        let (quantized, residuals, loss) = problem.solve(threads);
        let (cols, group) = (problem.cols, problem.group);
        let moved = fixed.scales.is_none() && self.options.follows_order() && group < cols;
        Ok(GptqResult {
            quantized,
            g_idx: moved.then(|| group_indices(&self.order, group)),
            outliers: fixed.kept.map(|kept| sparse(kept, cols, residuals)),
            loss,
            damp_used: self.damp_used,
            dead_columns: self.dead_columns(),
            notes: self.notes(),
        })
    }

    /// Number of columns whose input was always zero.
    pub fn dead_columns(&self) -> usize {
        self.dead.iter().filter(|&&dead| dead).count()
    }

    /// Number of columns of the weights.
    pub fn cols(&self) -> usize {
        self.order.len()
    }

    /// `U[k, k]`, upper triangular with `(H + λI)⁻¹ = Uᵀ U`, by position.
    pub(crate) fn upper(&self) -> &[f64] {
        &self.upper
    }

    /// Loss of a unit squared error in each column after compensation by later columns, `1 / U[j, j]²`, by column.
    fn costs(&self) -> Vec<f64> {
        let k = self.order.len();
        let mut costs = vec![0.0; k];
        for (position, &column) in self.order.iter().enumerate().filter(|(_, column)| !self.dead[**column]) {
            let pivot = self.upper[position * k + position];
            costs[column] = 1.0 / (pivot * pivot);
        }
        costs
    }

    /// Diagonal of the Hessian: the loss of a unit squared error in each column, without compensation.
    pub fn diagonal(&self) -> &[f64] {
        &self.diagonal
    }

    pub(crate) fn notes(&self) -> Vec<String> {
        let (asked, used, dead) = (self.options.damp, self.damp_used, self.dead_columns());
        let mut notes = Vec::new();
        if used > asked {
            notes.push(format!("the Hessian is singular with damping {asked}; {used} was used"));
        }
        if dead > 0 {
            let cols = self.order.len();
            notes.push(format!(
                "{dead} of {cols} columns have no input in the calibration; their weights are zero"
            ));
        }
        notes
    }
}

/// Anonymous memory of [`InverseFactor::new`] beside the Hessian: U and scratch of the factorization, in bytes.
pub fn factor_bytes(cols: usize) -> u64 {
    let k = cols as u64;
    8 * k * k + (2 * 8 * 128 + 8) * k
}

/// Anonymous memory of [`InverseFactor::quantize`] beside the weight `[rows, cols]` and the factor, in bytes: the
/// codes twice and the threads' scratch.
pub fn solve_bytes(rows: usize, cols: usize, threads: usize) -> u64 {
    let (n, k, threads) = (rows as u64, cols as u64, threads.max(1) as u64);
    let panel_rows = n.min(threads * solve::PANEL_ROWS as u64);
    2 * n * k + panel_rows * (8 + 4) * k
}

impl GptqResult {
    /// Dequantized values `Q[n, k]`.
    ///
    /// # Errors
    /// [`TensorError::Length`] if the parts have inconsistent lengths.
    pub fn dequantize(&self) -> Result<Vec<f32>, TensorError> {
        let mut values = dequantize_by_group(&self.quantized, self.g_idx.as_deref())?;
        let (rows, cols) = (self.quantized.rows, self.quantized.cols);
        self.outliers.iter().for_each(|outliers| outliers.fold(&mut values, rows, cols));
        Ok(values)
    }
}

/// Checks that [`gptq`] can quantize a weight `[rows, cols]` by `scheme` into a layout that the format stores:
/// without `g_idx`, unless `holds_g_idx`.
///
/// # Errors
/// [`GptqError::Blocks`] and [`GptqError::Scheme`].
pub fn check_scheme(
    scheme: &Scheme,
    rows: usize,
    cols: usize,
    options: GptqOptions,
    holds_g_idx: bool,
) -> Result<(), GptqError> {
    let refused = |why| Err(GptqError::Scheme { scheme: scheme.to_string(), why });
    if scheme.format.codec().is_some() {
        return refused("its blocks have their own search; use rtn");
    }
    if scheme.format.trellis().is_some() {
        return refused("its values are coded together; use qtip");
    }
    if scheme.needs_whole_tensor() {
        return refused("its scales are quantized together after the weight; use rtn");
    }
    if scheme.format.has_bias() {
        return refused("its offsets are for KV caches; use -asym without a rule");
    }
    let group = group_columns(scheme, rows, cols)?;
    if options.follows_order() && group < cols && !holds_g_idx {
        return refused(
            "act-order with groups in that order needs a g_idx, which this format cannot store; use format = \"gptq\", \
             groups = \"static\" or act_order = false",
        );
    }
    Ok(())
}

fn check_options(options: GptqOptions) -> Result<(), GptqError> {
    let GptqOptions { damp, block, asymmetric, .. } = options;
    if !(0.0..=1.0).contains(&damp) {
        return Err(GptqError::Option { option: "damp", found: damp, allowed: "0 to 1" });
    }
    if block == 0 {
        return Err(GptqError::Option { option: "block", found: 0.0, allowed: "at least 1" });
    }
    if !(0.0..=1.0).contains(&asymmetric) {
        let found = f64::from(asymmetric);
        return Err(GptqError::Option { option: "asymmetric", found, allowed: "0 to 1" });
    }
    Ok(())
}

/// Checks that the values of `w` are finite; returns its number of rows.
pub(crate) fn check_weight(w: &[f32], cols: usize) -> Result<usize, GptqError> {
    let rows = w.len() / cols.max(1);
    if rows * cols != w.len() {
        return Err(GptqError::Length { what: "values", found: w.len(), expected: rows * cols });
    }
    let mut bad = w.iter().enumerate().filter(|(_, v)| !v.is_finite());
    match bad.next() {
        None => Ok(rows),
        Some((index, &value)) => Err(TensorError::NonFinite { count: 1 + bad.count(), index, value }.into()),
    }
}

/// Columns of a group; all columns if a row has one scale or none.
fn group_columns(scheme: &Scheme, rows: usize, cols: usize) -> Result<usize, GptqError> {
    match scheme.format.blocks() {
        _ if scheme.format.trellis().is_some() => Err(GptqError::Scheme {
            scheme: scheme.to_string(),
            why: "its values are coded together; use qtip",
        }),
        _ if scheme.format.scale().is_none() => Ok(cols.max(1)),
        Blocks::Row => Ok(cols.max(1)),
        Blocks::Group(group) => Ok((group as usize).min(cols).max(1)),
        Blocks::Flat(block) if cols.is_multiple_of(block as usize) => Ok(block as usize),
        _ => Err(GptqError::Blocks { scheme: scheme.to_string(), rows, cols }),
    }
}

/// Column at each position.
fn column_order(diagonal: &[f64], act_order: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..diagonal.len()).collect();
    if act_order {
        order.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a]));
    }
    order
}

fn group_indices(order: &[usize], group: usize) -> Vec<u32> {
    let mut g_idx = vec![0; order.len()];
    order.iter().enumerate().for_each(|(position, &column)| g_idx[column] = (position / group) as u32);
    g_idx
}

/// Calls `factor` with increasing damping, from `damp` on, until the matrix is positive definite.
fn damped(
    order: &[usize],
    damp: f64,
    factor: impl Fn(f64) -> Result<Result<Vec<f64>, NotPositiveDefinite>, GptqError>,
) -> Result<(f64, Vec<f64>), GptqError> {
    /// First damping tried if none was requested and some is needed.
    const LEAST: f64 = 1e-4;
    let mut damp = damp;
    loop {
        match factor(damp)? {
            Ok(upper) => return Ok((damp, upper)),
            Err(NotPositiveDefinite { pivot, value }) if damp >= 1.0 => {
                let column = order[order.len() - 1 - pivot];
                return Err(GptqError::Singular { column, value, damp });
            }
            Err(_) => damp = (damp * 10.0).clamp(LEAST, 1.0),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;
