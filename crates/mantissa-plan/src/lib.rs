//! Arithmetic that needs no weights: what a model takes, how fast it can be, which precision to choose, and what engines load.
//!
//! [`shape`] has the sizes of a model, [`hardware`] devices with their figures and fallbacks, [`precision`] the candidates
//! with their measured quality, [`parallel`] what each of several devices holds, [`memory`] bytes of inference, [`training`] bytes of training, [`roofline`] speeds,
//! [`recommend`] the choice with its reasons,
//! [`explain`] answers to standing questions.
//!
//! [`contract`] holds the rules of each engine as data, each with its source, and evaluates them on a
//! [`contract::Subject`], which describes a written or planned model.
#![forbid(unsafe_code)]

// Layer: measured figures, models, precisions and devices as data.
pub mod figures;
pub mod hardware;
pub mod parallel;
pub mod precision;
pub mod shape;

// Layer: bytes and speeds.
pub mod memory;
pub mod roofline;
pub mod training;

// Layer: rules of serving engines.
pub mod contract;

// Layer: answers.
pub mod explain;
pub mod recommend;
