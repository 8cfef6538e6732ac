//! Diagnoses and measurements on a model.
//!
//! [`subject`] describes a written or planned model for the rules of [`mantissa_plan::contract`]. [`doctor`]
//! finds the fault of a checkpoint with garbled output: it tries known disagreements between writers and
//! readers, and reports the one that repairs the model. [`sensitivity`] measures the KL divergence of
//! quantizing each part of a model alone. [`diagnose`] examines a model on a text and names remedies. [`shape`] gives the
//! planner the sizes of a model. [`remedy`] finds the recipe or format with which an engine loads a model.
#![forbid(unsafe_code)]

// Layer: errors and comparison of values.
mod error;
mod values;

// Layer: runs and descriptions of a model.
mod observe;
mod run;
pub mod shape;
pub mod subject;

// Layer: advice.
pub mod diagnose;
pub mod doctor;
pub mod remedy;
pub mod sensitivity;

pub use error::AdviseError;
