//! Post-training quantization: recipes, methods and the streaming pipeline.
//!
//! The methods are pure functions on matrices in `mantissa-methods`. The pipeline orders them: [`Recipe`] → [`Plan`]
//! (all decisions, nothing written) → [`run`] → [`verify`](verify::verify), which shares no code with the writer.
#![forbid(unsafe_code)]

// Layer: Reports, errors and access to the source.
mod error;
mod fold;
mod load;
mod progress;
pub mod quality;
mod report;
mod row_order;
mod sidecars;
mod source;
mod unquantized;
mod unused;
mod values;

// Layer: Calibration and measurement.
pub mod calibrate;
pub mod importance;
pub mod input_scales;
mod measure;
pub mod rotate;

// Layer: Recipes and plans.
pub mod allocate;
mod cache_scales;
mod coverage;
mod dense_source;
mod gguf;
mod journal;
mod plan;
pub mod recipe;
mod share;
mod stacks;
mod tensors;

// Layer: Transforms and solvers of layers.
mod convert;
mod e2e;
mod error_gate;
mod exl2;
mod layers;
mod rounding;
mod sequential;
mod shared;
mod solved_bytes;
pub mod spin;
mod tables;
mod transform;
mod units;

// Layer: Verification and memory.
mod arithmetic;
mod assess;
mod finished;
pub mod memory;
pub mod verify;

// Layer: Jobs.
mod jobs;

pub use mantissa_methods::method::Arithmetic;
use mantissa_methods::metric;
pub use mantissa_methods::{autoround, awq, clip, gptq, hqq, qtip, range, registry, rtn, smooth, spqr};
use mantissa_methods::{dequantize, error_stats, orthogonal};

pub use cache_scales::of_source as stored_kv_scheme;

pub use convert::Changes;
pub use dense_source::{decoded_tables_source, dense_source, dequantized_source};
pub use error::{Exceeded, GateFailure, MixError, NotVerified, QuantError, Result, Unfinished};
pub use error_gate::{Judgement, Output, Windows};
pub use error_stats::{ErrorReport, ErrorStats};
pub use gguf::as_in_gguf;
pub use importance::Importance;
pub use jobs::recalibrate::Recalibration;
pub use jobs::several::{run_all, sharing};
pub use jobs::{Outcome, require_modules, run, take_part};
pub use journal::{Start, key as plan_key};
pub use measure::figures::Evaluation;
pub use measure::tasks::{TaskRun, TaskRuns};
pub use plan::{Check, MethodShare, Options, Plan, PlannedLinear, TableSize, WeightJob};
pub use progress::{Progress, RESUMED};
pub use quality::{
    CommandLine, Coverage, Digests, Figures, InputCoverage, Kept, QUALITY_NAME, Quality, QuantizedShare,
    Recorded, SchemeShare, TaskScore, TokenSet, Traffic, quality_path, signature_path,
};
pub use recipe::{Recipe, RecipeError};
pub use report::LayerReport;

pub use source::{WeightReader, amax};
pub use unquantized::Unquantized;
