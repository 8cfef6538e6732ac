//! Measurements of a model for its `quality.json`: the quality loss on a text, the accuracy on tasks, and digests of
//! files.

pub(crate) mod figures;
pub(crate) mod hashes;
pub(crate) mod tasks;
