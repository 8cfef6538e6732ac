//! Deployment checks that need no weights: engine requirements, evaluated on shapes and schemes.
//!
//! [`contract`] holds the rules of each engine as data, each with its source, and evaluates them on a
//! [`contract::Subject`], which describes a written or planned model. [`hardware`] lists GPU generations.
#![forbid(unsafe_code)]

pub mod contract;
pub mod hardware;
