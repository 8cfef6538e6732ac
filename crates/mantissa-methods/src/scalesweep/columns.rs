//! ScaleSweep inside GPTQ: chooses each block's scale by its error after compensation in later columns.
//!
//! With `(H + λI)⁻¹ = Uᵀ U` GPTQ's loss is `Σ e²` with `e_j = (w_j - q_j) / U_jj`, where `w` includes the
//! compensation of earlier columns ([`gptq`](mod@crate::gptq)). So the loss of a block depends only on its own
//! columns and the diagonal block of U. For each scale of the sweep, the block's columns are quantized one after
//! another, and the codes with the least `Σ e²` are kept. GPTQ with static scales chooses them before the updates, by
//! the diagonal of H.
//!
//! The paper initializes GPTQ's scales by the sweep weighted with the diagonal of H; using the loss itself is our own
//! variant. This loss has no known bound, so the sweep is the paper's for weighted errors: E4M3 scales from half of
//! `M / 6` to 7 codes above; powers of two one to either side.
//!
//! The columns of a block must be consecutive. Blocks are taken by decreasing sum of the diagonal of H, and the
//! columns of a block by decreasing diagonal. The stored layout is the same as for RTN.

use std::fmt;
use std::ops::{Range as Span, RangeInclusive};
use std::sync::{Arc, Mutex, PoisonError};

use mantissa_kernels::{kernels, map_reduce_fixed};
use mantissa_num::{Codes, Quantized, ScaleLevel, Scheme, TensorError, check_finite, code_unit};
use mantissa_options::{Named, NamedMut, Number, options};

use super::{Levels, STEPS, Scales, check_scheme, refuses};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::gptq::method::{self, GPTAQ_SHARE, on_gap};
use crate::gptq::{GptqError, GptqOptions, Hessian, InverseFactor, factor_bytes};
use crate::method::{
    Arithmetic, Buffer, CalibrationGap, Extent, Feature, InputSolver, InputTask, Method, Needs, Phase,
    Prepared, SolveInput, Solver, WeightTask, Work,
};
use crate::rtn::{append, outer_scale_of};
use crate::solved::Solved;

/// Rows solved together; they share one read of U.
const PANEL_ROWS: usize = 128;

options! {
    /// Options of methods that sweep scales inside GPTQ.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct SweepOptions {
        /// Damping λ, as a fraction of the mean of the Hessian's diagonal.
        damp: f64 = GptqOptions::default().damp, Number(1.0);
        /// Share of the input drift that is corrected: 0.0 in GPTQ, 1.0 for the full correction (GPTAQ).
        asymmetric: f32 = 0.0, Number(1.0);
    }
}

impl SweepOptions {
    /// Equivalent options of GPTQ.
    fn gptq(&self) -> GptqOptions {
        let SweepOptions { damp, asymmetric } = *self;
        GptqOptions { damp, asymmetric, act_order: false, ..GptqOptions::default() }
    }
}

/// Way of choosing block scales inside GPTQ.
pub(crate) struct BlockScaleSearch {
    /// Names in recipes, with GPTQ and with GPTAQ.
    pub(crate) names: [&'static str; 2],
    /// Table of its options.
    pub(crate) table: &'static str,
    /// Sweeps over the scales of a weight.
    pub(crate) sweeps: f64,
    /// Memory of choosing the scales of a weight, in addition to the memory of the columns.
    pub(crate) buffer: Option<fn(&Extent<'_>) -> Buffer>,
    /// Quantizes the weight of a task by [`Columns::solve`], under the scales that it chooses.
    pub(crate) solve: fn(&Columns, &WeightTask<'_>) -> Result<Solved, MethodError>,
}

/// Shows the names, which say all: as that of [`crate::registry::Registered`], without an address.
impl fmt::Debug for BlockScaleSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockScaleSearch").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Sweep of all scales that can be best, for each block when it is quantized.
static SWEEP: BlockScaleSearch = BlockScaleSearch {
    names: ["scalesweep-gptq", "scalesweep-gptaq"],
    table: "scalesweep",
    sweeps: 1.0,
    buffer: None,
    solve: |columns, task| {
        let scales = Scales::new(task.scheme, outer_scale_of(task.scheme, task.target, task.outer));
        columns.solve(task, &scales, &|sweep| scales.weighed(sweep.amax()))
    },
};

/// GPTQ, or GPTAQ, with block scales chosen by a search: ScaleSweep's, or SOAR's ([`soar`](crate::soar)).
#[derive(Clone, Copy, Debug)]
pub struct SweptGptq {
    choice: &'static BlockScaleSearch,
    /// Options.
    pub options: SweepOptions,
}

impl SweptGptq {
    /// GPTQ with a scale sweep for each block.
    pub fn scalesweep() -> Self {
        SweptGptq::of(&SWEEP)
    }

    /// GPTQ with the scales of `choice`.
    pub(crate) fn of(choice: &'static BlockScaleSearch) -> Self {
        SweptGptq { choice, options: SweepOptions::default() }
    }

    /// The same with the options of GPTAQ.
    pub fn gptaq(self) -> Self {
        SweptGptq { options: SweepOptions { asymmetric: GPTAQ_SHARE, ..SweepOptions::default() }, ..self }
    }
}

impl Method for SweptGptq {
    fn name(&self) -> &'static str {
        self.choice.names[0]
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn recipe_name(&self) -> &'static str {
        self.choice.names[usize::from(self.options == self.gptaq().options)]
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.choice.table, &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.choice.table, &mut self.options)]
    }

    fn needs(&self) -> Needs {
        Needs { drift: self.options.asymmetric > 0.0, ..self.work().needs() }
    }

    fn takes(&self, scheme: &Scheme, _: (usize, usize), _: bool) -> Result<(), MethodError> {
        check_scheme(scheme).map_err(MethodError::Scheme)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        refuses(feature)
    }

    fn damping(&self) -> Option<f64> {
        Some(self.options.damp)
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        Some(on_gap(gap))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let mut buffers = buffers(phase, extent);
        let choosing = self.choice.buffer.filter(|_| phase == Phase::Solve);
        buffers.extend(choosing.map(|buffer| buffer(extent)));
        buffers
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let steps = self.choice.sweeps * STEPS * extent.weights() as f64;
        Arithmetic { steps, ..method::arithmetic(self.options.gptq(), extent) }
    }
}

impl SolveInput for SweptGptq {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        let SweptGptq { choice, options } = *self;
        let Prepared { solver, moments } = method::prepare(task, options.gptq(), 0.0)?;
        let solver = match (solver, &moments) {
            (Solver::Ready(gptq), Some(hessian)) => {
                let (hessian, ordered) = (hessian.clone(), Mutex::new(None));
                Solver::Ready(Box::new(Swept {
                    columns: Columns { gptq, hessian, damp: options.damp, ordered },
                    choice,
                }))
            }
            (round, _) => round,
        };
        Ok(Prepared { solver, moments })
    }
}

/// Memory of a weight that is solved block by block.
fn buffers(phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
    let cols = extent.cols;
    let rows = extent.rows.min(extent.threads.max(1) * PANEL_ROWS) as u64;
    let work = 2 * (extent.codes + extent.scales) + rows * (8 + 8) * cols as u64;
    let mut buffers = method::buffers(phase, extent, ("codes and rows at work", work));
    let own = extent.inputs * Hessian::bytes_needed(cols);
    match phase {
        Phase::Prepare | Phase::Correct => buffers.push(("moments in the order of blocks", own)),
        Phase::Solve => {
            let factor = 2 * Hessian::bytes_needed(cols) + factor_bytes(cols);
            buffers.push(("moments and factor in the order of blocks", own + factor));
        }
        Phase::Learn => {}
    }
    buffers
}

/// Solver of an input's columns with the scales of a choice.
#[derive(Debug)]
struct Swept {
    columns: Columns,
    choice: &'static BlockScaleSearch,
}

impl InputSolver for Swept {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        (self.choice.solve)(&self.columns, task)
    }

    fn corrects(&self) -> bool {
        self.columns.gptq.corrects()
    }

    fn corrected(&mut self, w: &[f32], last: bool, threads: usize) -> Result<Option<Vec<f32>>, MethodError> {
        self.columns.gptq.corrected(w, last, threads)
    }
}

/// Block whose scale is being chosen.
pub(crate) struct Sweep<'a> {
    /// Row of the weight.
    pub(crate) row: usize,
    /// Index of the block in its row.
    pub(crate) block: usize,
    /// Its weights with the updates so far, in quantization order.
    pub(crate) w: &'a [f64],
}

impl Sweep<'_> {
    /// Greatest magnitude of the weights.
    pub(crate) fn amax(&self) -> f32 {
        self.w.iter().fold(0.0, |amax: f64, w| amax.max(w.abs())) as f32
    }
}

/// GPTQ on blocks of consecutive columns, for weights that share an input.
#[derive(Debug)]
pub(crate) struct Columns {
    /// Corrects weights for the drift of the input.
    gptq: Box<dyn InputSolver>,
    hessian: Hessian,
    damp: f64,
    /// Factor for the last block size used.
    ordered: Mutex<Option<Arc<Ordered>>>,
}

/// Factor of the inverse Hessian for columns in block order.
#[derive(Debug)]
struct Ordered {
    group: usize,
    /// Column at each position.
    order: Vec<usize>,
    factor: InverseFactor,
}

impl Ordered {
    fn new(hessian: &Hessian, group: usize, damp: f64, threads: usize) -> Result<Self, GptqError> {
        let k = hessian.cols();
        let dense = hessian.to_dense();
        let diagonal = |column: usize| f64::from(dense[column * k + column]);
        let order = order_of_blocks(k, group, diagonal);
        let permuted = order.iter().flat_map(|&i| order.iter().map(move |&j| (i, j)));
        let permuted = permuted.map(|(i, j)| dense[i * k + j]).collect();
        // Counts as one token, because it is a mean already; only zero tokens would differ.
        let permuted = Hessian::from_sum(permuted, k, 1)?;
        let options = GptqOptions { damp, act_order: false, ..GptqOptions::default() };
        Ok(Ordered { group, order, factor: InverseFactor::new(&permuted, options, threads)? })
    }
}

/// Columns in blocks of `group`, by decreasing sum of `diagonal`, and within a block by decreasing `diagonal`.
fn order_of_blocks(cols: usize, group: usize, diagonal: impl Fn(usize) -> f64) -> Vec<usize> {
    let columns = |block: usize| block * group..((block + 1) * group).min(cols);
    let mut blocks: Vec<(f64, usize)> =
        (0..cols.div_ceil(group)).map(|block| (columns(block).map(&diagonal).sum(), block)).collect();
    blocks.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut order = Vec::with_capacity(cols);
    for (_, block) in blocks {
        let first = order.len();
        order.extend(columns(block));
        order[first..].sort_by(|&a, &b| diagonal(b).total_cmp(&diagonal(a)));
    }
    order
}

/// Codes and scales of some rows.
struct Panel {
    codes: Codes,
    scales: Codes,
}

impl Columns {
    /// Diagonal of the Hessian.
    ///
    /// # Errors
    /// [`GptqError::NoTokens`] and [`GptqError::Value`].
    pub(crate) fn diagonal(&self) -> Result<Vec<f64>, GptqError> {
        self.hessian.diagonal()
    }

    /// Quantizes `task.target`, with the best of the scales that `candidates` returns for each block.
    ///
    /// # Errors
    /// [`MethodError`].
    pub(crate) fn solve(
        &self,
        task: &WeightTask<'_>,
        scales: &Scales<'_>,
        candidates: &(dyn Fn(&Sweep<'_>) -> RangeInclusive<u32> + Sync),
    ) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, target, threads, .. } = *task;
        check_finite(target)?;
        if target.len() != rows * cols || cols != self.hessian.cols() {
            let (found, expected) = (target.len(), rows * self.hessian.cols());
            return Err(TensorError::Length { what: "values", found, expected, rows, cols }.into());
        }
        let group = scheme.format.blocks().len(1, cols).clamp(1, cols.max(1));
        let ordered = self.ordered(group, threads)?;
        let row_blocks = cols.div_ceil(group);
        let unit = code_unit(&scheme.format);
        let panel = |span: Span<usize>| panel(&ordered, target, span, scales, candidates);
        let start = Panel {
            codes: Codes::with_capacity(unit, rows * cols),
            scales: Codes::with_capacity(1, rows * row_blocks),
        };
        let grain = rows.div_ceil(threads.max(1)).next_multiple_of(8).min(PANEL_ROWS);
        let Panel { codes, scales: stored } =
            map_reduce_fixed(threads, rows, grain, panel, start, |mut all, part| {
                append(&mut all.codes, part.codes);
                append(&mut all.scales, part.scales);
                all
            });
        let quantized = Quantized {
            codes,
            scales: ScaleLevel::from(stored).with_outer(scales.outer),
            ..Quantized::empty(scheme.format.clone(), rows, cols)
        };
        let stats = ErrorStats::of(w, &quantized);
        Ok(Solved { notes: ordered.factor.notes(), ..Solved::rounded((quantized, stats)) })
    }

    /// Factor for blocks of `group` columns.
    fn ordered(&self, group: usize, threads: usize) -> Result<Arc<Ordered>, GptqError> {
        let mut known = self.ordered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ordered) = known.as_ref().filter(|ordered| ordered.group == group) {
            return Ok(ordered.clone());
        }
        let ordered = Arc::new(Ordered::new(&self.hessian, group, self.damp, threads)?);
        *known = Some(ordered.clone());
        Ok(ordered)
    }
}

/// Quantizes the rows `span` of `target`.
fn panel(
    ordered: &Ordered,
    target: &[f32],
    span: Span<usize>,
    scales: &Scales<'_>,
    candidates: &(dyn Fn(&Sweep<'_>) -> RangeInclusive<u32> + Sync),
) -> Panel {
    let Ordered { group, order, factor } = ordered;
    let (k, n, moments) = (order.len(), span.len(), factor.diagonal());
    let per_row = k.div_ceil(*group);
    // Dead columns become zero.
    let value = |row: usize, position: usize| {
        if moments[position] == 0.0 { 0.0 } else { f64::from(target[row * k + order[position]]) }
    };
    let mut w: Vec<f64> =
        span.clone().flat_map(|row| (0..k).map(move |at| (row, at))).map(|(r, at)| value(r, at)).collect();
    let (mut codes, mut chosen) = (vec![0; n * k], vec![0; n * per_row]);
    let mut errors = vec![0.0; n * group];
    let mut trial = Trial::default();
    let mut start = 0;
    while start < k {
        let block = order[start] / group;
        let width = (*group).min(k - block * group);
        let upper = &factor.upper()[start * k + start..];
        trial.load(upper, k, width);
        for (i, row) in span.clone().enumerate() {
            let x = &w[i * k + start..i * k + start + width];
            let scale = trial.sweep(scales, x, candidates(&Sweep { row, block, w: x }));
            chosen[i * per_row + block] = scale;
            errors[i * width..(i + 1) * width].copy_from_slice(&trial.best_errors);
            for (place, column) in trial.best.iter().zip(&order[start..]) {
                codes[i * k + column] = scales.code(*place);
            }
        }
        let (from, rest) = (start + width, k - start - width);
        if rest > 0 {
            let right = &upper[width..];
            kernels().gemm_sub_f64((n, rest, width), &errors, width, right, k, &mut w[from..], k);
        }
        start = from;
    }
    let (mut all, mut stored) = (Codes::with_capacity(1, n * k), Codes::with_capacity(1, n * per_row));
    codes.into_iter().for_each(|code| all.push(code));
    chosen.into_iter().for_each(|scale| stored.push(scale));
    Panel { codes: all, scales: stored }
}

/// Trial of one block under several scales.
#[derive(Default)]
struct Trial {
    /// Diagonal block of U `[width, width]`.
    upper: Vec<f64>,
    width: usize,
    x: Vec<f64>,
    places: Vec<usize>,
    errors: Vec<f64>,
    /// Indices of the best values, and their errors `e`.
    best: Vec<usize>,
    best_errors: Vec<f64>,
}

impl Trial {
    /// Loads the diagonal block of U that begins at `upper`, with row stride `stride`.
    fn load(&mut self, upper: &[f64], stride: usize, width: usize) {
        self.width = width;
        self.upper.clear();
        (0..width).for_each(|i| self.upper.extend_from_slice(&upper[i * stride..i * stride + width]));
        self.places.resize(width, 0);
        self.errors.resize(width, 0.0);
    }

    /// Scale in `candidates` with the least `Σ e²` for the weights `x`; the lowest for ties.
    fn sweep(&mut self, scales: &Scales<'_>, x: &[f64], candidates: RangeInclusive<u32>) -> u32 {
        let (mut scale, mut least) = (*candidates.start(), f64::INFINITY);
        for candidate in candidates {
            let loss = self.quantize(scales.levels(candidate), x, least);
            if loss < least || least == f64::INFINITY {
                (scale, least) = (candidate, loss);
                self.best.clone_from(&self.places);
                self.best_errors.clone_from(&self.errors);
            }
        }
        scale
    }

    /// Quantizes `x` column by column; returns the sum of e², or a part of it above `most`.
    fn quantize(&mut self, levels: &Levels, x: &[f64], most: f64) -> f64 {
        self.x.clear();
        self.x.extend_from_slice(x);
        let mut loss = 0.0;
        for i in 0..self.width {
            let upper = &self.upper[i * self.width + i..(i + 1) * self.width];
            let place = levels.nearest(self.x[i]);
            let error = (self.x[i] - levels.value(place)) / upper[0];
            (self.places[i], self.errors[i]) = (place, error);
            loss += error * error;
            if loss >= most {
                break;
            }
            self.x[i + 1..].iter_mut().zip(&upper[1..]).for_each(|(x, u)| *x -= error * u);
        }
        loss
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::super::quantize;
    use super::*;
    use crate::testing::values;

    /// Correlated inputs.
    fn hessian(cols: usize) -> Hessian {
        let mut x = values(1, 500 * cols);
        for row in x.chunks_exact_mut(cols) {
            (1..cols).for_each(|i| row[i] = 0.6 * row[i] + 0.6 * row[i - 1]);
            row[cols / 2] *= 3.0;
        }
        let mut hessian = Hessian::new(cols).unwrap();
        hessian.add(&x, 1);
        hessian
    }

    fn task<'a>(scheme: &'a Scheme, w: &'a [f32], cols: usize, threads: usize) -> WeightTask<'a> {
        let rows = w.len() / cols;
        let (target, outer, outputs, scales, place) = (w, None, None, None, (0, 0));
        WeightTask { scheme, rows, cols, w, target, outer, outputs, scales, place, threads }
    }

    fn solve(text: &str, w: &[f32], hessian: &Hessian, threads: usize) -> Quantized {
        let scheme: Scheme = text.parse().unwrap();
        let task = task(&scheme, w, hessian.cols(), threads);
        let input = InputTask { hessian: hessian.clone(), drift: None, place: (0, 0), threads };
        match SweptGptq::scalesweep().prepare(input).unwrap().solver {
            Solver::Ready(solver) => solver.solve(&task).unwrap().quantized,
            round => panic!("{round:?}"),
        }
    }

    /// The output error is lower than with the sweep alone and than with GPTQ's static scales; the bits do not depend
    /// on threads.
    #[test]
    fn outputs_err_less_than_with_static_scales() {
        let (rows, cols) = (150, 160);
        let (hessian, w) = (hessian(cols), values(3, rows * cols));
        let w: Vec<f32> = w.iter().map(|v| v.powi(3)).collect();
        for text in ["nvfp4", "mxfp4:ct"] {
            let scheme: Scheme = text.parse().unwrap();
            let q = solve(text, &w, &hessian, 1);
            q.check().unwrap();
            assert_eq!(q, solve(text, &w, &hessian, 3), "{text}");
            let loss = |q: &Quantized| hessian.loss(&w, &q.dequantize().unwrap());
            let alone = quantize(&scheme, &w, (rows, cols), None, 1).unwrap().0;
            let gptq = crate::gptq::gptq(&scheme, &w, &hessian, GptqOptions::default(), None, 1).unwrap();
            let (ours, alone, gptq) = (loss(&q), loss(&alone), loss(&gptq.quantized));
            assert!(ours < 0.7 * alone && ours < gptq, "{text}: {ours} {alone} {gptq}");
        }
    }

    /// The trial's loss equals the weight's loss under the damped Hessian.
    #[test]
    fn sums_of_errors_are_the_damped_loss() {
        let (cols, group) = (48, 16);
        let (hessian, w) = (hessian(cols), values(5, cols));
        let ordered = Ordered::new(&hessian, group, 0.01, 1).unwrap();
        let mut seen: Vec<usize> = ordered.order.clone();
        assert!(seen.chunks(group).all(|block| block.iter().all(|c| c / group == block[0] / group)));
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..cols));
        let scheme: Scheme = "nvfp4".parse().unwrap();
        let scales = Scales::new(&scheme, outer_scale_of(&scheme, &w, None));
        let (mut x, mut q, mut sum) = (vec![0.0; cols], vec![0.0; cols], 0.0);
        ordered.order.iter().zip(&mut x).for_each(|(c, x)| *x = f64::from(w[*c]));
        let upper = ordered.factor.upper();
        for start in (0..cols).step_by(group) {
            let mut trial = Trial::default();
            trial.load(&upper[start * cols + start..], cols, group);
            let block = x[start..start + group].to_vec();
            let scale = trial.sweep(&scales, &block, 40..=80);
            for i in 0..group {
                q[ordered.order[start + i]] = scales.levels(scale).value(trial.best[i]) as f32;
                let error = trial.best_errors[i];
                sum += error * error;
                (start + group..cols).for_each(|j| x[j] -= error * upper[(start + i) * cols + j]);
            }
        }
        let mean = (0..cols).map(|i| f64::from(hessian.to_dense()[i * cols + i])).sum::<f64>() / cols as f64;
        let squares: f64 = q.iter().zip(&w).map(|(q, w)| f64::from(q - w).powi(2)).sum();
        let loss = hessian.loss(&w, &q) + 0.01 * mean * squares;
        assert!((sum - loss).abs() < 1e-5 * loss, "{sum} {loss}");
    }

    /// Dead columns take no part, and a short last block is a block by itself.
    #[test]
    fn dead_columns_become_zero() {
        let cols = 72;
        let mut x = values(1, 300 * cols);
        x.iter_mut().skip(5).step_by(cols).for_each(|v| *v = 0.0);
        let mut hessian = Hessian::new(cols).unwrap();
        hessian.add(&x, 1);
        let w = values(2, 10 * cols);
        let values = solve("nvfp4", &w, &hessian, 2).dequantize().unwrap();
        assert!(values.iter().skip(5).step_by(cols).all(|v| *v == 0.0));
        assert!(values.iter().zip(&w).filter(|(q, _)| **q != 0.0).count() > 8 * cols);
    }
}
