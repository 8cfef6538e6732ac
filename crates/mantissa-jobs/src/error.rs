//! Errors of jobs, and what they mean for a caller.

use std::io;
use std::path::PathBuf;

use mantissa_advise::AdviseError;
use mantissa_eval::tasks::TaskError;
use mantissa_eval::{DiffError, EvalError, TokenError};
use mantissa_model::{GenerateError, KvCalibrationError, LoadError, TokenizerError};
use mantissa_num::TensorError;
use mantissa_quant::{QuantError, RecipeError};
use mantissa_ranks::RankError;
use mantissa_store::ErrorClass;
use mantissa_train::TrainError;
use mantissa_train::data::DataError;

use crate::memory::Limit;
use crate::pull_fault::PullFault;
use crate::run_fault::RunFault;
use crate::text::bytes;

/// A quality gate failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct GateFailed(String);

impl GateFailed {
    /// Makes the error; `message` names the expected and the actual value.
    pub fn new(message: impl Into<String>) -> Self {
        GateFailed(message.into())
    }
}

/// An option or a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{what}: expected {allowed}, got {found}{}", fix.as_ref().map_or_else(String::new, |fix| format!("; fix: {fix}")))]
pub struct BadInput {
    what: String,
    found: String,
    allowed: String,
    fix: Option<String>,
}

impl BadInput {
    /// Makes the error; `what` names the option, or the file and the tensor or field.
    pub fn new(what: impl Into<String>, found: impl Into<String>, allowed: impl Into<String>) -> Self {
        BadInput { what: what.into(), found: found.into(), allowed: allowed.into(), fix: None }
    }

    /// Adds options or a command that work.
    pub fn with_fix(self, fix: impl Into<String>) -> Self {
        BadInput { fix: Some(fix.into()), ..self }
    }
}

/// A chat template could not render a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{model}: chat_template: {what}")]
pub struct ChatFailed {
    /// Name of the model.
    pub model: String,
    /// Expected and actual value.
    pub what: String,
}

/// The work needs more memory than allowed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: expected at most {} of memory ({}), got a need of {}; fix: {}", bytes(*.allowed), .limit.name(), bytes(*.needs), .fix.clone().unwrap_or_else(|| .limit.fix().to_owned()))]
pub struct OverMemory {
    /// Name of the work.
    pub what: String,
    /// Predicted bytes.
    pub needs: u64,
    /// Bytes allowed.
    pub allowed: u64,
    /// Source of the limit.
    pub limit: Limit,
    /// Fix, if it is not that of the limit.
    pub fix: Option<String>,
}

/// A training run stopped after a checkpoint, because its host asked for it.
#[derive(Debug, thiserror::Error)]
#[error("{run}: step {steps}: {}", resumes(*.restarts))]
pub struct Stopped {
    /// Number of steps done.
    pub steps: u64,
    /// Folder of the run.
    pub run: String,
    /// True if the same command would start over.
    pub restarts: bool,
}

/// Returns the message of an interrupted run that can be resumed; `restarts` is true if the same command would start over.
pub fn resumes(restarts: bool) -> &'static str {
    match restarts {
        true => "Interrupted. Rerun with --resume instead of --restart to resume.",
        false => "Interrupted. Rerun the same command to resume.",
    }
}

/// A serialized job is none of this version.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The text is no job at all.
    #[error("{place}: expected a job {name}, got `{message}`")]
    Malformed {
        /// File or field of the job.
        place: String,
        /// Name of the expected job.
        name: &'static str,
        /// Message of the parser.
        message: String,
    },
    /// The job has another name.
    #[error("{place}: job: expected {expected}, got {got}; fix: run it with the command {got}")]
    Name {
        /// File or field of the job.
        place: String,
        /// Name of the expected job.
        expected: &'static str,
        /// Name found.
        got: String,
    },
    /// The job was written by another version.
    #[error(
        "{place}: version: expected {expected}, got {got}; fix: resolve the job {name} again with this version of mantissa"
    )]
    Version {
        /// File or field of the job.
        place: String,
        /// Name of the job.
        name: &'static str,
        /// Version of this program.
        expected: u32,
        /// Version found.
        got: u32,
    },
}

/// Meaning of an error for the caller of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The job ran, but a quality gate failed.
    Gate,
    /// Bad input: the same job fails again.
    Input,
    /// I/O, memory, disk, or an internal bug.
    Environment,
    /// The host asked for a stop.
    Stopped,
}

impl From<ErrorClass> for Class {
    fn from(class: ErrorClass) -> Self {
        match class {
            ErrorClass::Input => Class::Input,
            ErrorClass::Environment => Class::Environment,
        }
    }
}

/// Result of the fallible functions of this crate.
pub type Result<T, E = JobError> = std::result::Result<T, E>;

/// Error of a job.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// An option or a file cannot be used.
    #[error(transparent)]
    Input(#[from] BadInput),
    /// A quality gate failed.
    #[error(transparent)]
    Gate(#[from] GateFailed),
    /// The work needs more memory than allowed.
    #[error(transparent)]
    Memory(#[from] OverMemory),
    /// A training run stopped after a checkpoint.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// A chat template could not render a conversation.
    #[error(transparent)]
    Chat(#[from] ChatFailed),
    /// A serialized job is none of this version.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A file cannot be read or written.
    #[error(transparent)]
    Store(Box<mantissa_store::Error>),
    /// A model cannot be loaded.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// A KV cache policy cannot be calibrated.
    #[error(transparent)]
    KvCalibration(Box<KvCalibrationError>),
    /// The tokenizer of a model cannot be loaded or fails.
    #[error(transparent)]
    Tokenizer(Box<TokenizerError>),
    /// A model cannot generate text.
    #[error(transparent)]
    Generate(Box<GenerateError>),
    /// An evaluation failed.
    #[error(transparent)]
    Eval(Box<EvalError>),
    /// A comparison of models failed.
    #[error(transparent)]
    Diff(Box<DiffError>),
    /// A text cannot be cut into windows.
    #[error(transparent)]
    Tokens(Box<TokenError>),
    /// A task cannot be read.
    #[error(transparent)]
    Task(Box<TaskError>),
    /// A quantized tensor is malformed.
    #[error(transparent)]
    Tensor(Box<TensorError>),
    /// A tensor cannot be cast to a scheme.
    #[error("{place}: {error} (scheme {scheme})")]
    Cast {
        /// File and tensor.
        place: String,
        /// Reason.
        error: Box<TensorError>,
        /// Scheme.
        scheme: String,
    },
    /// The folder of a training run cannot be used.
    #[error(transparent)]
    Run(#[from] RunFault),
    /// A value cannot be written as JSON: a bug.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A download failed.
    #[error(transparent)]
    Pull(Box<PullFault>),
    /// Training failed.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// Training data cannot be used.
    #[error(transparent)]
    Data(Box<DataError>),
    /// A recipe is wrong.
    #[error(transparent)]
    Recipe(Box<RecipeError>),
    /// Quantization failed.
    #[error(transparent)]
    Quant(Box<QuantError>),
    /// A search or a diagnosis failed.
    #[error(transparent)]
    Advise(Box<AdviseError>),
    /// Another process or the system failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An error at a named place. It has no source: the message is whole, as that of every other error of this crate.
    #[error("{place}: {error}")]
    At {
        /// File, task or work.
        place: String,
        /// Error there.
        error: Box<JobError>,
    },
    /// A job writes a path that it did not declare: a bug.
    #[error("internal: {} is not among the outputs of the job", .0.display())]
    Undeclared(PathBuf),
}

/// Boxes library errors: most have 120 bytes, and an error is returned once per job.
macro_rules! boxed {
    ($($name:ident: $error:ty,)*) => {
        $(impl From<$error> for JobError {
            fn from(error: $error) -> Self {
                JobError::$name(Box::new(error))
            }
        })*
    };
}

boxed! {
    Store: mantissa_store::Error,
    Load: LoadError,
    KvCalibration: KvCalibrationError,
    Tokenizer: TokenizerError,
    Generate: GenerateError,
    Eval: EvalError,
    Diff: DiffError,
    Tokens: TokenError,
    Task: TaskError,
    Data: DataError,
    Recipe: RecipeError,
    Quant: QuantError,
    Advise: AdviseError,
    Tensor: TensorError,
    Pull: PullFault,
}

impl From<RankError> for JobError {
    fn from(error: RankError) -> Self {
        QuantError::from(error).into()
    }
}

impl JobError {
    /// Returns what the error means for the caller.
    pub fn class(&self) -> Class {
        match self {
            JobError::Gate(_) => Class::Gate,
            JobError::Stopped(_) | JobError::Train(TrainError::Stopped) => Class::Stopped,
            JobError::Eval(error) if matches!(**error, EvalError::Stopped) => Class::Stopped,
            JobError::Memory(_) | JobError::Io(_) => Class::Environment,
            JobError::Input(_)
            | JobError::Chat(_)
            | JobError::Run(_)
            | JobError::Json(_)
            | JobError::Tensor(_)
            | JobError::Cast { .. }
            | JobError::Record(_)
            | JobError::Tokenizer(_)
            | JobError::KvCalibration(_)
            | JobError::Recipe(_)
            | JobError::Undeclared(_) => Class::Input,
            JobError::Quant(error) => of_quant(error),
            JobError::Pull(error) if error.is_stop() => Class::Stopped,
            JobError::Pull(_) => Class::Environment,
            JobError::Store(error) => error.class().into(),
            JobError::Load(error) => error.class().into(),
            JobError::Generate(error) => error.class().into(),
            JobError::Eval(error) => error.class().into(),
            JobError::Diff(error) => error.class().into(),
            JobError::Tokens(error) => error.class().into(),
            JobError::Task(error) => error.class().into(),
            JobError::Train(error) => error.class().into(),
            JobError::Data(error) => error.class().into(),
            JobError::Advise(error) => error.class().into(),
            JobError::At { error, .. } => error.class(),
        }
    }

    /// True if the host's wish to stop ended the job.
    pub fn is_stop(&self) -> bool {
        self.class() == Class::Stopped
    }

    /// Returns the error without the places around it.
    pub fn innermost(&self) -> &JobError {
        match self {
            JobError::At { error, .. } => error.innermost(),
            error => error,
        }
    }
}

/// Returns what an error of quantization means for the caller.
fn of_quant(error: &QuantError) -> Class {
    match error {
        QuantError::Gate(_) | QuantError::NotVerified(_) => Class::Gate,
        error if error.is_interruption() => Class::Stopped,
        error => error.class().into(),
    }
}

/// Names the place of an error.
pub trait InPlace<T> {
    /// Adds `place`, a file, a task or work, in front of the error's message.
    ///
    /// # Errors
    /// The error, at that place.
    fn at(self, place: impl Into<String>) -> Result<T, JobError>;
}

impl<T, E: Into<JobError>> InPlace<T> for Result<T, E> {
    fn at(self, place: impl Into<String>) -> Result<T, JobError> {
        self.map_err(|error| JobError::At { place: place.into(), error: Box::new(error.into()) })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn a_message_is_whole_and_not_repeated_by_a_source() {
        let inner = BadInput::new("line 3: prompt", "none", "a text");
        let placed = Err::<(), _>(inner).at("cloze").at("tasks").err();
        let error = placed.as_ref().map(ToString::to_string);
        assert_eq!(error.as_deref(), Some("tasks: cloze: line 3: prompt: expected a text, got none"));
        assert!(placed.is_some_and(|error| error.source().is_none()));
    }
}
