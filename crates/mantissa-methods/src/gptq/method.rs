//! GPTQ and GPTAQ as methods of recipes.

use mantissa_num::Scheme;
use mantissa_options::{Named, NamedMut};

use super::outliers::count;
use super::solve::SHARES;
use super::{
    Drift, GptqError, GptqOptions, GroupOrder, GroupRange, Hessian, InverseFactor, check_scheme,
    correction_bytes, factor_bytes, solve_bytes,
};
use crate::error::MethodError;
use crate::error_gate::ErrorGate;
use crate::error_stats::ErrorStats;
use crate::method::{
    Arithmetic, Buffer, CalibrationGap, Extent, Feature, InputSolver, InputTask, Method, Needs, Phase,
    Prepared, SolveInput, Solver, WeightTask, Work, refused_by_most,
};
use crate::solved::Solved;

/// Table of GPTQ's options, also used by other column-by-column methods.
pub(crate) const TABLE: &str = "gptq";

/// Default share of the drift correction in GPTAQ. The full correction was no better on the models measured.
pub const GPTAQ_SHARE: f32 = 0.5;

/// GPTQ (arXiv 2210.17323), or GPTAQ (arXiv 2504.02692) with a drift correction above 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gptq {
    /// Options.
    pub options: GptqOptions,
}

impl Gptq {
    /// GPTQ with the options of GPTAQ.
    pub fn gptaq() -> Self {
        Gptq { options: GptqOptions { asymmetric: GPTAQ_SHARE, ..GptqOptions::default() } }
    }
}

impl Method for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn recipe_name(&self) -> &'static str {
        if *self == Self::gptaq() { "gptaq" } else { self.name() }
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(TABLE, &self.options)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(TABLE, &mut self.options)]
    }

    fn needs(&self) -> Needs {
        Needs { drift: self.options.asymmetric > 0.0, ..self.work().needs() }
    }

    fn takes(&self, scheme: &Scheme, shape: (usize, usize), group_order: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, shape.0, shape.1, self.options, group_order)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::GivenScales if self.options.groups == GroupOrder::Static => None,
            _ => refused_by_most(feature),
        }
    }

    fn follows_order(&self) -> bool {
        self.options.follows_order()
    }

    fn damping(&self) -> Option<f64> {
        Some(self.options.damp)
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        Some(on_gap(gap))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let solve = solve_bytes(extent.rows, extent.cols, extent.threads);
        buffers(phase, extent, ("codes and rows at work", solve))
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        arithmetic(self.options, extent)
    }
}

impl SolveInput for Gptq {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        prepare(task, self.options, 0.0)
    }
}

/// Arithmetic of a weight that is solved column by column, with the range of each group searched if `options` say so.
pub(crate) fn arithmetic(options: GptqOptions, extent: &Extent<'_>) -> Arithmetic {
    let weights = extent.weights() as f64;
    let tried = if options.range == GroupRange::Mse { SHARES as f64 } else { 0.0 };
    // The correction for the drift solves another system of the same size.
    let solves = if extent.drift { 2.0 } else { 1.0 };
    Arithmetic { columns: solves * extent.columns(), steps: (1.0 + tried) * weights, ..Arithmetic::default() }
}

/// Behaviour of column-by-column methods for a gap in the calibration.
pub(crate) fn on_gap(gap: CalibrationGap) -> &'static str {
    match gap {
        CalibrationGap::Tokens | CalibrationGap::AllChannels => "its layers are rounded to nearest",
        CalibrationGap::Few => "the Hessian is singular but for its damping",
        CalibrationGap::Channels => "their weights become zero",
    }
}

/// Memory of a weight that is solved column by column and compared with RTN. `solve` is the memory of the columns
/// alone.
pub(crate) fn buffers(phase: Phase, extent: &Extent<'_>, solve: Buffer) -> Vec<Buffer> {
    let Extent { rows, cols, inputs, threads, .. } = *extent;
    let hessian = inputs * Hessian::bytes_needed(cols);
    let held_out = if extent.held_out { hessian } else { 0 };
    let square = 8 * (cols * cols) as u64;
    let drift_bytes = |bytes: u64| if extent.drift { bytes } else { 0 };
    let drift = ("drift", drift_bytes(Drift::bytes_needed(cols)));
    match phase {
        Phase::Prepare => vec![
            ("Hessian", hessian + held_out),
            drift,
            ("factor and its scratch", factor_bytes(cols) + (inputs - 1) * square),
        ],
        Phase::Correct => vec![
            ("factor and moments", inputs * square + hessian),
            drift,
            (
                "weight as it is read, in f32 and corrected",
                8 * extent.weights() + drift_bytes(correction_bytes(rows, cols, threads)),
            ),
        ],
        Phase::Solve => vec![
            ("factor", inputs * square),
            if extent.last { ("drift", 0) } else { drift },
            ("corrected weight", drift_bytes(4 * extent.weights())),
            ("moments for the comparison with RTN", hessian),
            (
                "rounded to nearest, and errors",
                extent.codes + extent.scales + ErrorGate::bytes_needed(rows, cols),
            ),
            solve,
        ],
        Phase::Learn => Vec::new(),
    }
}

/// Prepares the solver of an input. `outliers` is the share of weights stored outside the codes.
pub(crate) fn prepare(task: InputTask, options: GptqOptions, outliers: f64) -> Result<Prepared, MethodError> {
    let InputTask { hessian, drift, threads, .. } = task;
    let round = |why: String| Solver::RoundToNearest(why);
    let solver = if hessian.tokens() == 0 {
        round("no calibration token was routed to it".to_owned())
    } else {
        match InverseFactor::new(&hessian, options, threads) {
            Ok(factor) if factor.dead_columns() == factor.cols() => {
                round("its input is zero in every calibration token".to_owned())
            }
            Ok(factor) => {
                let drift = drift.filter(|drift| !drift.is_zero());
                let share = options.asymmetric;
                Solver::Ready(Box::new(Columns { factor, drift, share, outliers }))
            }
            Err(error @ GptqError::Singular { .. }) => round(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    };
    Ok(Prepared { solver, moments: Some(hessian) })
}

/// Factor of an input's inverse Hessian, and the drift of the input.
#[derive(Debug)]
struct Columns {
    factor: InverseFactor,
    drift: Option<Drift>,
    share: f32,
    outliers: f64,
}

impl InputSolver for Columns {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, w, target, outer, threads, .. } = *task;
        let count = count(self.outliers, task.rows, task.cols);
        let result = match task.scales {
            Some(choose) => {
                let (scheme, scales) = choose(target, self.factor.diagonal()).ok_or(MethodError::Scales)?;
                self.factor.quantize_under(&scheme, target, &scales, threads)
            }
            None if count == 0 => self.factor.quantize(scheme, target, outer, threads),
            None => self.factor.quantize_with_outliers(scheme, target, outer, count, threads),
        }?;
        let stats = match (&result.g_idx, &result.outliers) {
            (None, None) => ErrorStats::of(w, &result.quantized),
            _ => ErrorStats::of_rows(w, &result.dequantize()?, task.cols),
        };
        Ok(Solved {
            stats,
            quantized: result.quantized,
            input_scale: None,
            g_idx: result.g_idx,
            outliers: result.outliers,
            fallback: None,
            output_error: Some(result.loss),
            judged: None,
            notes: result.notes,
        })
    }

    fn corrects(&self) -> bool {
        self.drift.is_some()
    }

    fn corrected(&mut self, w: &[f32], last: bool, threads: usize) -> Result<Option<Vec<f32>>, MethodError> {
        let Some(drift) = self.drift.take() else { return Ok(None) };
        let corrected = self.factor.corrected(w, &drift, self.share, threads)?;
        if !last {
            self.drift = Some(drift);
        }
        Ok(Some(corrected))
    }
}

impl From<GptqError> for MethodError {
    fn from(error: GptqError) -> Self {
        match error {
            GptqError::Weight(error) => MethodError::Weight(error),
            error @ GptqError::Memory { .. } => MethodError::Environment(error.into()),
            error => MethodError::input(error),
        }
    }
}
