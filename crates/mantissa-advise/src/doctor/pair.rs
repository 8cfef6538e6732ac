//! Two models under comparison, and the threshold of a fault.

use mantissa_eval::Sequence;
use mantissa_model::{Layer, ModelConfig};
use mantissa_store::convention::ModelFiles;

/// A deviation is a fault if it exceeds `TIMES` times the RTN error under the same scheme, plus `SLACK`.
const TIMES: f64 = 3.0;
const SLACK: f64 = 0.02;

/// True if `error` exceeds what rounding to nearest explains, given its error `expected`.
pub(super) fn beyond(error: f64, expected: f64) -> bool {
    error.is_nan() || error > TIMES * expected + SLACK
}

/// Model and source, with the windows to run them on.
pub(super) struct Comparing<'a> {
    pub(super) files: &'a ModelFiles,
    pub(super) reference: &'a ModelFiles,
    pub(super) config: &'a ModelConfig,
    pub(super) theirs: &'a ModelConfig,
    pub(super) threads: usize,
    pub(super) windows: &'a [Sequence],
}

/// One layer of three models: the source, the model, and the source rounded under the model's schemes.
pub(super) struct Layers {
    pub(super) reference: Layer,
    pub(super) ours: Layer,
    pub(super) rounded: Layer,
}

/// Name of the alternative that only a comparison with the source can try.
pub(super) const DIAGONAL: &str = "column scales undone";
