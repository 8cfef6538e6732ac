//! Long work as values, which the binary, Python and workers on other machines make and run alike.
//!
//! A [`Job`] is resolved once from arguments, is never changed afterwards, and is serialized with its name and version
//! ([`job::to_json`], [`job::from_json`]). A [`Host`] runs it: it grants threads, memory and outputs, shows progress and
//! asks for a stop ([`Progress`]). This crate has no terminal, no command line and no signal handler.
#![forbid(unsafe_code)]

// Layer: text, memory and the machine.
pub mod escape;
pub mod machine;
pub mod memory;
pub mod notes;
pub mod run_names;
mod text;

// Layer: errors and progress.
mod error;
mod progress;
mod pull_fault;
mod run_fault;

// Layer: hosts and jobs.
mod host;
pub mod job;

// Layer: models and texts.
pub mod adapter;
pub mod calibration;
pub mod chat;
pub mod conversations;
pub mod data_report;
pub mod default_text;
pub mod embedded;
mod float_tensor;
pub mod generated;
pub mod hub;
pub mod json_lines;
pub mod learning;
pub mod load_needs;
pub mod loaded;
pub mod measured_text;
pub mod model;
pub mod names;
pub mod run_files;
pub mod sessions;
pub mod settings;
pub mod tables;
pub mod tasks;

// Layer: plans.
pub mod adapt;
pub mod choose;
pub mod coverage;
pub mod destination;
pub mod execute;
pub mod finished;
pub mod lint;
pub mod record;

// Layer: jobs of quantization.
mod convert;
mod fit;
mod imatrix;
mod quantize;
mod rebuild;
mod recalibrate;

// Layer: measurements and servers.
mod bench;
mod diagnose;
mod diff;
mod doctor;
mod evaluate;
mod serve;
mod signature;
mod verify;

// Layer: workers.
pub mod workers;

// Layer: downloads.
mod pull;

// Layer: training, inspection and casts.
pub mod cast;
pub mod finetune;
pub mod inspect;
pub mod train;

// Layer: comparison of candidates.
mod compare;

pub use bench::{Bench, BenchReport, BenchRun, KernelRow};
pub use compare::{
    Bench as CompareBench, Compare, CompareArguments, CompareCandidate, ComparePair, CompareReport,
    CompareRow, ComparedText, TextFigures, quantize_verified,
};
pub use convert::{Convert, ConvertArguments, PreparedConvert};
pub use diagnose::{Diagnose, DiagnoseReport};
pub use diff::{ComparedPrompt, ContinuedText, Diff, DiffReport, NextToken, Parting, Prompts as DiffPrompts};
pub use doctor::{Doctor, DoctorReport};
pub use error::{
    BadInput, ChatFailed, Class, GateFailed, InPlace, JobError, OverMemory, RecordError, Result, Stopped,
    resumes,
};
pub use evaluate::{Evaluate, EvaluateReport, TaskEvaluation, TaskResult, TextEvaluation};
pub use fit::{
    BudgetText, CandidateScheme, Fit, FitArguments, FitCandidate, FitPoint, FitReport, FitUnit, Served,
};
pub use host::{Allowed, Host, Leaving, RenderChat};
pub use imatrix::{Imatrix, ImatrixReport};
pub use job::{Job, JobOutput};
pub use lint::{Lint, LintReport};
pub use load_needs::LoadNeeds;
pub use loaded::{LoadedModel, ModelUse};
pub use model::ModelPath;
pub use progress::{Gauge, Meter, Polling, Progress, Silent, Unit};
pub use pull::{Pull, PullArguments, PullReport, PulledFile};
pub use pull_fault::PullFault;
pub use quantize::{
    CalibrationDtype, PreparedQuantize, Quantize, QuantizeArguments, QuantizeReport, RecipeText,
    ResolvedQuantize, RoundChoice, WeightOptions,
};
pub use rebuild::{Rebuild, RebuildArguments, RebuildReport, RebuiltFile, RecordedJob};
pub use recalibrate::{Recalibrate, RecalibrateReport, parse_observer};
pub use run_fault::RunFault;
pub use serve::{PreparedServe, Serve, ServeReport, ServeServices, ServedModel, Shadow};
pub use text::{bytes, count, counted, number, parse_bytes, parse_count, short};
pub use verify::{Verify, require_verified};
