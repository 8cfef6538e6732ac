//! QTIP as a method of recipes.

use mantissa_num::Scheme;
use mantissa_options::{Named, NamedMut, Number, OneOf, options};

use super::{RotatedInput, check_scheme, solve_bytes};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::gptq::{GptqError, Hessian, factor_bytes};
use crate::method::{
    Arithmetic, Buffer, Extent, Feature, Fisher, InputSolver, InputTask, Method, Needs, Phase, Prepared,
    SolveInput, Solver, WeightTask, Work,
};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::solved::Solved;

options! {
    /// QTIP (arXiv 2406.11235).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Qtip {
        /// Metric of errors of a layer's outputs: their factor of the Fisher information, if the architecture has a backward
        /// pass, or squared errors as published.
        metric: ErrorMetric = ErrorMetric::Fisher, OneOf(&ERROR_METRICS);
        /// Damping, as a fraction of the mean of the Hessian's diagonal; multiplied by 10, up to 1, while the Hessian is
        /// singular.
        damp: f64 = 0.01, Number(1.0);
    }
}

/// States of a trellis, of 16 bits.
const STATES: u32 = 1 << 16;

impl Method for Qtip {
    fn name(&self) -> &'static str {
        "qtip"
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.name(), self)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.name(), self)]
    }

    fn needs(&self) -> Needs {
        let fisher = (self.metric == ErrorMetric::Fisher).then_some(Fisher::Outputs);
        // RTN cannot store a trellis, so there is nothing to compare with.
        Needs { text: true, fisher, ..Needs::default() }
    }

    fn takes(&self, scheme: &Scheme, (rows, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        check_scheme(scheme, rows, cols).map(drop).map_err(MethodError::Scheme)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::Transform => Some("QTIP rotates each weight itself: it takes no transform before it"),
            Feature::StochasticRounding => Some("it does not support stochastic rounding"),
            _ => None,
        }
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let hessian = extent.inputs * Hessian::bytes_needed(extent.cols);
        let held_out = if extent.held_out { hessian } else { 0 };
        let square = 8 * (extent.cols * extent.cols) as u64;
        let bits = extent.scheme.format.trellis().and_then(|trellis| trellis.whole_bits());
        match phase {
            // The Hessian, and two rotated copies.
            Phase::Prepare => vec![
                ("Hessian", 3 * hessian + held_out),
                ("factor and its scratch", factor_bytes(extent.cols) + (extent.inputs - 1) * square),
            ],
            Phase::Solve => vec![
                ("factor", extent.inputs * square + hessian),
                (
                    "values and paths at work",
                    bits.map_or(0, |bits| solve_bytes(bits, extent.rows, extent.cols, extent.threads)),
                ),
            ],
            _ => Vec::new(),
        }
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        // Each weight extends the path of every state; the seam of a ring is passed twice more.
        let transitions = STATES as f64 * extent.weights() as f64;
        Arithmetic { columns: extent.columns(), transitions, ..Arithmetic::default() }
    }
}

impl SolveInput for Qtip {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        let InputTask { hessian, place: (layer, place), threads, .. } = task;
        let (cols, seed) = (hessian.cols(), seed(layer, 2 * place));
        let found = match hessian.tokens() {
            0 => Err(GptqError::NoTokens),
            _ => RotatedInput::new(hessian, self.damp, seed, threads),
        };
        let (input, fallback) = match found {
            Err(GptqError::NoTokens) => {
                let why = "no calibration token was routed to it".to_owned();
                (RotatedInput::plain(cols, seed, threads)?, Some(why))
            }
            Err(error @ GptqError::Singular { .. }) => {
                (RotatedInput::plain(cols, seed, threads)?, Some(error.to_string()))
            }
            found => (found?, None),
        };
        Ok(Prepared { solver: Solver::Ready(Box::new(Paths { input, fallback })), moments: None })
    }
}

/// Rotated input; `fallback` is the reason if it has no statistics.
#[derive(Debug)]
struct Paths {
    input: RotatedInput,
    fallback: Option<String>,
}

impl InputSolver for Paths {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, w, outputs, threads, place: (layer, place), .. } = *task;
        let found = self.input.quantize(scheme, w, outputs, seed(layer, 2 * place + 1), threads)?;
        let values = found.quantized.dequantize()?;
        let stats = ErrorStats::of_rows(w, &values, task.cols);
        let rounded = Solved::rounded((found.quantized, stats));
        let fallback = self.fallback.clone();
        let output_error = Some(found.loss).filter(|_| fallback.is_none());
        Ok(Solved { fallback, output_error, notes: found.notes, ..rounded })
    }
}

/// Seed of the signs of a vector of `layer`. `place` is `2 i` for the input of linear layer `i` and `2 i + 1` for its
/// output.
fn seed(layer: usize, place: usize) -> u64 {
    (layer as u64) << 32 | place as u64
}
