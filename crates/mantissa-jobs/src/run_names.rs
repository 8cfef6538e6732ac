//! Names in the folder of a training run that tell it from a model.

/// Manifest: the run's files and the hash of its data.
pub const MANIFEST: &str = "mantissa-run.json";

/// Folder of the trained model.
pub const MODEL: &str = "model";

/// Folder of the trained adapter.
pub const ADAPTER: &str = "adapter";
