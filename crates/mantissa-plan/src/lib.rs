//! Arithmetic that needs no weights: what a serving engine asks of a model, checked on shapes and schemes.
//!
//! [`contract`] holds the rules of each engine as data, every one with the place it was read in, and judges a
//! [`contract::Subject`]: the description of an artifact, or of one that is only planned. [`hardware`] knows GPU generations.
#![forbid(unsafe_code)]

pub mod contract;
pub mod hardware;
