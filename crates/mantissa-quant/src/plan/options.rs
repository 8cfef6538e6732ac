//! Options of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use mantissa_model::Products;
use mantissa_num::Rounding;
use mantissa_ranks::Team;
use mantissa_store::DEFAULT_SHARD_BYTES;
use mantissa_store::convention::Container;

use crate::calibrate::{CalibrationSet, IN_MEMORY};
use crate::importance::Importance;
use crate::quality::Recorded;

/// Options of a run; none changes the meaning of a scheme.
#[derive(Clone, Debug)]
pub struct Options {
    /// Number of threads.
    pub threads: usize,
    /// Container that replaces the recipe's.
    pub container: Option<Container>,
    /// Maximum size of a weight file of a folder, in bytes.
    pub max_shard_bytes: u64,
    /// Maximum tensor bytes of a GGUF file; `None` writes one file of any size.
    pub max_gguf_bytes: Option<u64>,
    /// Rounding of values to codes.
    pub rounding: Rounding,
    /// Calibration set for methods and importance.
    pub calibration: Option<CalibrationSet>,
    /// Held-out windows of the calibration, on which solutions are compared with RTN.
    pub held_out: Vec<Vec<u32>>,
    /// Matmul operand dtype of calibration.
    pub products: Products,
    /// True if every calibration token runs through every expert, so that all experts are calibrated. The states of the
    /// model do not change.
    pub route_all_experts: bool,
    /// Importance matrix for searched blocks.
    pub importance: Option<Importance>,
    /// Block scales of linear layers by module, learned in training, in place of RTN's. Other layers stay
    /// unquantized.
    pub scales: Option<Arc<BTreeMap<String, Vec<f32>>>>,
    /// Bytes of calibration states that are kept in memory; more states go to a temporary file.
    pub states_in_memory: u64,
    /// Work to record in `quality.json`.
    pub rebuild: Option<Recorded>,
    /// Workers that solve the layers.
    pub team: Team,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            threads: mantissa_kernels::available_threads(),
            container: None,
            max_shard_bytes: DEFAULT_SHARD_BYTES,
            max_gguf_bytes: None,
            rounding: Rounding::NearestEven,
            calibration: None,
            held_out: Vec::new(),
            products: Products::F32,
            route_all_experts: false,
            importance: None,
            scales: None,
            states_in_memory: IN_MEMORY,
            rebuild: None,
            team: Team::alone(),
        }
    }
}

impl Options {
    /// True if searched blocks are weighted by importance.
    pub(crate) fn has_importance(&self) -> bool {
        self.importance.is_some() || self.calibration.is_some()
    }
}

/// Check of a finished output before it is put in place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Check {
    /// Opens the output as every command does.
    #[default]
    Load,
    /// Also verifies the output with the independent reader, against the dense model at this path if given.
    Verify(Option<PathBuf>),
}
