//! Diagnoses with a model in hand.
//!
//! [`subject`] describes a model, or one that is only planned, for the rules of [`mantissa_plan::contract`]. [`doctor`] looks for
//! what is wrong with a checkpoint that computes the wrong thing: it tries the ways in which readers and writers disagree, and
//! shows which of them repairs it. [`sensitivity`] measures what each part of a model costs in fewer bits.
#![forbid(unsafe_code)]

pub mod doctor;
mod error;
mod observe;
mod run;
pub mod sensitivity;
pub mod subject;
mod values;

pub use error::AdviseError;
