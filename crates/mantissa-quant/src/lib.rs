//! Post-training quantization: recipes, methods and the streaming pipeline.
//!
//! The methods are pure functions on matrices in `mantissa-methods`. The pipeline orders them: [`Recipe`] → [`Plan`]
//! (all decisions, nothing written) → [`run`] → [`verify`](verify::verify), which shares no code with the writer.
#![forbid(unsafe_code)]

pub mod allocate;
mod assess;
mod cache_scales;
pub mod calibrate;
mod config;
mod coverage;
mod dense_source;
mod e2e;
mod error;
mod exl2;
mod fold;
mod gguf;
pub mod importance;
pub mod input_scales;
mod jobs;
mod journal;
mod judge;
mod layers;
pub mod memory;
mod plan;
mod progress;
pub mod quality;
pub mod recipe;
mod report;
pub mod rotate;
mod rounding;
mod sequential;
mod share;
mod shared;
mod sidecars;
mod source;
pub mod spin;
mod stacks;
mod tables;
mod transform;
mod unquantized;
mod unused;
mod values;
pub mod verify;

use mantissa_methods::metric;
pub use mantissa_methods::{autoround, awq, clip, gptq, hqq, qtip, registry, rtn, smooth, spqr};
use mantissa_methods::{dequantize, error_stats, orthogonal};

pub use cache_scales::of_source as stored_kv_scheme;
pub use config::model_config;
pub use coverage::{Coverage, InputCoverage, Traffic};
pub use dense_source::{dense_source, dequantized_source};
pub use error::{Exceeded, GateFailure, MixError, NotVerified, QuantError, Result, Unfinished};
pub use error_stats::{ErrorReport, ErrorStats};
pub use gguf::as_in_gguf;
pub use importance::Importance;
pub use jobs::convert::Changes;
pub use jobs::recalibrate::Recalibration;
pub use jobs::several::{run_all, sharing};
pub use jobs::{Outcome, run};
pub use journal::{Start, key as plan_key};
pub use judge::{Judgement, Output, Windows};
pub use plan::{Check, Job, MethodShare, Options, Plan, PlannedLinear, TableSize};
pub use progress::Progress;
pub use quality::figures::Evaluation;
pub use quality::task_scores::{TaskRun, TaskRuns, TaskScore};
pub use quality::{Digests, Figures, QUALITY_NAME, Quality, Rebuild, TokenSet, quality_path, signature_path};
pub use recipe::{Recipe, RecipeError};
pub use report::LayerReport;
pub use share::{Kept, SchemeShare, Share};
pub use source::{WeightReader, amax};
pub use unquantized::Unquantized;
