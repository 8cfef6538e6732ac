//! A conversion as a method: a bridge until conversions are jobs of their own.

use mantissa_methods::method::{SolveWeight, WeightTask, Work};
use mantissa_methods::{Method, MethodError, Solved};

/// Name of a conversion without rounding in reports.
pub(crate) const REPACKED: &str = "repacked";

/// Codes and scales of the source in another format: no recipe has it.
#[derive(Debug)]
pub(crate) struct Repacked;

impl Method for Repacked {
    fn name(&self) -> &'static str {
        REPACKED
    }

    fn work(&self) -> Work<'_> {
        Work::Weight(self)
    }
}

impl SolveWeight for Repacked {
    fn solve(&self, _: &WeightTask<'_>) -> Result<Solved, MethodError> {
        Err(MethodError::Scheme("weights that are quantized already"))
    }
}
