//! Inspection of a checkpoint: its tensors and schemes from the headers, and statistics of their values.

mod architecture;
mod experts;
mod inventory;
mod job;
mod model;
mod report;
mod stats;

pub use architecture::Architecture;
pub use inventory::Entry;
pub use job::Inspect;
pub use report::{InspectReport, InspectedTensor, SchemeTotal};
pub use stats::{RowAmax, Stats};
