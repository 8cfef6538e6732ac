//! Checkpoint formats: how each tool lays quantized weights out on disk, one module each.
//!
//! [`ModelFiles`] opens a model in any format and reads its tensors. A [`Container`] names a writable format. Both
//! use one trait, [`Convention`], and one table with a row per format (`ROWS`).
//!
//! Commands, recipes, conversion, memory plans and help read a format from the trait. Engines that load the format
//! are rules of the serving contract (`mantissa-plan`). Steps to add one: ARCHITECTURE.md, "To add something".

mod alike;
pub mod awq;
pub mod bitsandbytes;
pub mod cache;
pub mod compressed_tensors;
mod computed;
mod container;
mod dense;
pub mod exl2;
pub mod exl3;
mod experts;
mod files;
pub mod fp8;
pub mod gguf;
pub mod gpt_oss;
pub mod gptq;
mod headers;
pub mod hqq;
pub mod levels;
pub mod mlx;
pub mod modelopt;
pub mod native;
pub mod onnx;
mod pattern;
mod plan;
pub mod quanto;
mod registry;
mod scale_dtype;
mod sound;
mod stacked;
mod tied;
mod weight;

pub use computed::ComputedTensor;
pub use container::{
    CheckpointFolder, Container, Convention, Experts, Facts, LayerKind, NamedBytes, SideTensors,
    StoredTensors, Support,
};
pub use files::{ModelFiles, Opened, ShapeSource};
pub use levels::{KeyLevels, KvLevels};
pub use mantissa_arch::StackForm;
pub use plan::{LinearPlan, ModelPlan, ModuleGroup, NotStorable, PlannedLayer, Storable};
pub use registry::side_files;
pub use stacked::Stack;
pub use weight::{ActivationQuant, KvQuant, LinearWeight, StoredLinear, Weight};

/// All checkpoint formats. The first that recognises a model reads it. MLX comes before formats identified by
/// `quant_method`, which it lacks. Quanto comes before ModelOpt, whose older checkpoints name it only in a file.
/// Plain weights come last.
const ROWS: [&dyn Convention; 16] = [
    &gguf::Gguf,
    &mlx::Mlx,
    &compressed_tensors::CompressedTensors,
    &gptq::Gptq,
    &awq::Awq,
    &bitsandbytes::Bitsandbytes,
    &fp8::DeepseekFp8,
    &gpt_oss::GptOss,
    &exl2::Exl2,
    &exl3::Exl3,
    &onnx::Onnx,
    &hqq::Hqq,
    &quanto::Quanto,
    &modelopt::Modelopt,
    &native::Native,
    &dense::Dense,
];
