//! Training of language models with an explicit precision policy.
//!
//! [`TrainModel`] holds parameters and gradients in one flat arena each (places in [`ParamTable`]). Its
//! forward runs `mantissa-model`'s decoder layers over the parameters and saves activations; its backward is
//! written by hand, layer by layer. A [`LinearPolicy`] sets the operand dtypes of every matmul. An
//! [`Optimizer`] updates the parameters.
//!
//! Memory is planned: everything is allocated when a model is made, [`Plan`] predicts the bytes, and steps
//! allocate nothing that grows with the model. Saved per layer are its two residual inputs, q and k after
//! RoPE, v, the attention output with the log-sum-exp of its scores, gate and up, and the inputs of linear
//! layers if rounded to 16 bits. Norms, the MLP activation and attention weights are recomputed.
//!
//! A step gives the same bits at every thread count: rows, heads and output features are split over threads;
//! sums over tokens are not split, or in fixed parts. Matmuls have one arithmetic at every instruction set
//! level; those of bf16 do where `VDPBF16PS` is not used and, at level amx, no value is subnormal.
#![forbid(unsafe_code)]

mod adapter;
mod arena;
pub mod autopsy;
mod backward;
mod balance;
pub mod blockwise;
mod checkpoint;
pub mod config;
pub mod data;
mod distill;
mod error;
mod export;
mod form;
mod forward;
mod gradients;
mod head;
mod health;
mod layer;
mod learned;
mod linear;
mod model;
mod norm;
mod operand;
mod ops;
mod optim;
mod plan;
mod policy;
mod products;
mod profile;
mod rows;
mod sampled;
pub mod scaling;
pub mod schedule;
mod store;
mod support;
mod teacher;
mod trainer;
mod tuning;
mod validate;
mod weights;

pub use adapter::{Formats, Init, Lora, Tuning};
pub use arena::{ParamInfo, ParamTable, Parameters};
pub use distill::TeacherHead;
pub use error::TrainError;
pub use export::TokenizerFiles;
pub use gradients::Gradients;
pub use health::{ExpertHealth, GemmHealth, OperandHealth, StepHealth, WeightHealth};
pub use layer::LayerTrainer;
pub use model::{IGNORE_TARGET, Loss, TrainModel, next_token_targets};
pub use operand::range_slope;
pub use optim::{
    AdamW, AdamWOptions, Array, ArrayMut, DecayGroups, MomentFormat, NoSuchTensor, Optimizer, Paged,
    RateScales, Recipe, Sgd, SgdOptions, StateMap, clip_factor, optimizer_uses, optimizers,
};
pub use plan::{Options, Plan};
pub use policy::{
    GemmPolicy, Keep, LinearPolicy, Master, OperandPolicy, OperandSource, Policy, PolicyTable, Rotation,
    Signs, TableFault, recipes,
};
pub use profile::{Part, Profile};
pub use sampled::SampledHead;
pub use store::Precision;
pub use teacher::{SoftTargets, Teacher};
pub use trainer::{Progress, StepReport, Trainer, TrainerOptions};
pub use tuning::{Coded, Dense, Tuner};
pub use validate::{HeldOut, SampleOptions};
