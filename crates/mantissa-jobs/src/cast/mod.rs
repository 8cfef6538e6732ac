//! Casts of the float tensors of a file to one scheme, panel by panel, with their error.

mod job;
mod panels;

pub use job::{Cast, CastArguments, CastReport, CastTensor, SkippedTensor};
