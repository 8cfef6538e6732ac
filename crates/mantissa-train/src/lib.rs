//! Training of language models at stated precision.
//!
//! [`TrainModel`] holds the parameters and their gradients in one flat arena each ([`ParamTable`] says where each
//! tensor lies) and computes both: its forward is the flow of `mantissa-model`'s decoder layers over those
//! parameters, keeping what the backward needs, and its backward is written out, layer by layer. Every product of
//! a linear layer has its operands as a [`LinearPolicy`] says. An [`Optimizer`] updates the parameters.
//!
//! Memory is planned: everything is allocated when a model is made, [`Plan`] gives the bytes before, and steps
//! allocate nothing that grows with the model. What is saved of a layer is its two residual inputs, the rotated queries and keys, the
//! values, the joined heads with the log-sum-exp of their scores, the MLP's two inner projections, and, where they are
//! rounded to 16 bits, the inputs of the linear layers; else norms and the gate's product are computed again, as
//! attention weights are.
//!
//! The same step gives the same bits at every thread count: rows, heads and output features are split, sums
//! over tokens are not, or in fixed parts. Products have one arithmetic at every level of the instruction set,
//! those of bf16 where `VDPBF16PS` is not taken and, at level amx, nothing is subnormal.
#![forbid(unsafe_code)]

mod arena;
mod backward;
pub mod blockwise;
mod checkpoint;
pub mod config;
pub mod data;
mod distill;
mod error;
mod export;
mod forward;
mod gradients;
mod head;
mod health;
mod layer;
mod linear;
mod model;
mod operand;
mod optim;
mod plan;
mod policy;
mod profile;
mod rows;
mod sampled;
pub mod scaling;
pub mod schedule;
mod store;
mod trainer;

pub use arena::{ParamInfo, ParamTable, Parameters};
pub use error::TrainError;
pub use gradients::Gradients;
pub use health::{OperandHealth, StepHealth, WeightHealth};
pub use layer::LayerTrainer;
pub use model::{IGNORE_TARGET, Loss, Options, TrainModel, next_token_targets};
pub use operand::range_slope;
pub use optim::{
    AdamW, AdamWOptions, Array, ArrayMut, DecayGroups, MomentFormat, NoSuchTensor, Optimizer, Sgd,
    SgdOptions, StateMap, clip_factor,
};
pub use plan::Plan;
pub use policy::{GemmPolicy, LinearPolicy, Master, Policy};
pub use profile::{Part, Profile};
pub use sampled::SampledHead;
pub use store::Precision;
pub use trainer::{Progress, StepReport, Trainer, TrainerOptions};
