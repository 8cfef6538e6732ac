//! Training of language models with an explicit precision policy.
//!
//! [`TrainModel`] holds parameters and gradients in one flat arena each (places in [`ParamTable`]). Its
//! forward runs `mantissa-model`'s decoder layers over the parameters and saves activations; its backward is
//! written by hand, layer by layer. A [`LinearPolicy`] sets the operand dtypes of every matmul. An
//! [`Optimizer`] updates the parameters.
//!
//! Memory is planned: everything is allocated when a model is made, [`MemoryPlan`] predicts the bytes, and steps
//! allocate nothing that grows with the model. Saved per layer are its two residual inputs, q and k after
//! RoPE, v, the attention output with the log-sum-exp of its scores, gate and up, and the inputs of linear
//! layers if rounded to 16 bits. Norms, the MLP activation and attention weights are recomputed.
//!
//! A step gives the same bits at every thread count: rows, heads and output features are split over threads;
//! sums over tokens are not split, or in fixed parts. Matmuls have one arithmetic at every instruction set
//! level; bf16 matmuls do where `VDPBF16PS` is not used and, at level amx, no value is subnormal.
#![forbid(unsafe_code)]

// Layer: Training data, stored values and errors.
mod array;
pub mod blockwise;
pub mod data;
mod error;
mod loss;
mod operand;
mod pages;
mod pattern;
mod profile;
mod rows;
pub mod scaling;
pub mod schedule;
mod stop;
mod store;
mod support;

// Layer: Precision policies, parameters and telemetry.
mod arena;
mod frozen;
mod gradients;
mod health;
mod initial;
mod learned;
mod lora;
mod param_table;
mod policy;
mod shards;
mod weights;

// Layer: Exchange between ranks.
mod exchange;

// Layer: Operators of a decoder layer.
mod adapter;
mod form;
mod forms;
mod gemm_error;
mod linear;
mod norm;
mod ops;
mod products;

// Layer: Model with its forward and backward.
mod backward;
mod balance;
mod forward;
mod head;
mod layer;
mod model;
mod plan;
mod sampled;

// Layer: Optimizers and objectives.
mod distill;
mod optim;
mod teacher;
mod tuning;

// Layer: Ranks.
mod parallel;

// Layer: Training runs.
pub mod autopsy;
mod checkpoint;
pub mod config;
mod export;
mod signals;
mod trainer;
mod validate;

pub use arena::Parameters;
pub use array::{Array, ArrayMut};
pub use distill::TeacherHead;
pub use error::TrainError;
pub use exchange::MessageFormat;
pub use export::TokenizerFiles;
pub use frozen::Formats;
pub use gradients::Gradients;
pub use health::{
    ExpertHealth, GemmHealth, GemmState, LOST_DB, LOST_SHARE, LostOperand, OperandHealth, StepHealth,
    WeightHealth,
};
pub use layer::LayerTrainer;
pub use lora::{Init, Lora, Tuning};
pub use loss::{IGNORE_TARGET, Loss, next_token_targets};
pub use model::TrainModel;
pub use operand::range_slope;
pub use optim::{
    AdamW, AdamWOptions, DecayGroups, MomentFormat, NoSuchTensor, Optimizer, OptimizerSpec, RateScales, Sgd,
    SgdOptions, StateMap, clip_factor, optimizer_uses, optimizers,
};
pub use pages::Paged;
pub use parallel::{Group, HeldByRank, ParallelOptions, follow};
pub use param_table::{ParamInfo, ParamTable};
pub use plan::{MemoryPlan, Options};
pub use policy::{
    GemmPolicy, Keep, LinearPolicy, Master, OperandPolicy, OperandSource, Policy, PolicyTable, Rotation,
    Signs, TableFault, recipes,
};
pub use profile::{Profile, StepPart};
pub use sampled::SampledHead;
pub use signals::{LostUpdates, StepSignals};
pub use stop::Stop;
pub use store::Precision;
pub use teacher::{SoftTargets, Teacher};
pub use trainer::{Progress, StepReport, Trainer, TrainerOptions, UpdateSize};
pub use tuning::{Coded, Dense, Tuner};
pub use validate::{HeldOut, SampleOptions};
