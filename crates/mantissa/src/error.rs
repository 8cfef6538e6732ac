//! Errors of the command line and their exit codes.

use std::io;
use std::process::ExitCode;

use mantissa_advise::AdviseError;
use mantissa_eval::tasks::TaskError;
use mantissa_eval::{DiffError, EvalError, TokenError};
use mantissa_model::{GenerateError, LoadError};
use mantissa_quant::QuantError;
use mantissa_store::ErrorClass;
use mantissa_train::TrainError;
use mantissa_train::data::DataError;

use crate::interrupt;
use crate::memory::Limit;
use crate::output::bytes;
use crate::terminal;

/// Exit code of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Done = 0,
    /// Ran, but a quality gate failed.
    Gate = 1,
    /// Bad input or usage: the same command fails again.
    Input = 2,
    /// I/O, memory, disk, or an internal bug.
    Environment = 3,
    /// Stopped by SIGINT.
    Interrupted = 130,
    /// Stopped by SIGTERM.
    Terminated = 143,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

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

/// A signal stopped a training run after a checkpoint.
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

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output: expected a writable stream, got I/O error `{0}`")]
pub struct StdoutError(pub io::Error);

/// Returns the exit code of `error`: that of the first error in its chain that decides it, else bad input,
/// the kind of all other library errors.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(class).unwrap_or(Exit::Input)
}

fn class(error: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if error.is::<GateFailed>() {
        return Some(Exit::Gate);
    }
    if error.is::<OverMemory>() || error.is::<io::Error>() {
        return Some(Exit::Environment);
    }
    if let Some(StdoutError(error)) = error.downcast_ref() {
        // A closed pipe, as with `| head`, is no failure.
        return Some(if error.kind() == io::ErrorKind::BrokenPipe { Exit::Done } else { Exit::Environment });
    }
    let training = || matches!(error.downcast_ref(), Some(TrainError::Stopped));
    let evaluation = || matches!(error.downcast_ref(), Some(EvalError::Stopped));
    if error.is::<Stopped>() || training() || evaluation() {
        return Some(interrupt::received().unwrap_or(Exit::Interrupted));
    }
    if let Some(error) = error.downcast_ref::<QuantError>() {
        return Some(if matches!(error, QuantError::Gate(_) | QuantError::NotVerified(_)) {
            Exit::Gate
        } else if error.is_interruption() {
            interrupt::received().unwrap_or(Exit::Interrupted)
        } else {
            of_class(error.class())
        });
    }
    library_class(error).map(of_class)
}

/// Returns the class of a library error. Library errors hide their causes from the chain, so each type is asked.
fn library_class(error: &(dyn std::error::Error + 'static)) -> Option<ErrorClass> {
    let store = || error.downcast_ref().map(mantissa_store::Error::class);
    let load = || error.downcast_ref().map(LoadError::class);
    let generate = || error.downcast_ref().map(GenerateError::class);
    let eval = || error.downcast_ref().map(EvalError::class);
    let diff = || error.downcast_ref().map(DiffError::class);
    let tokens = || error.downcast_ref().map(TokenError::class);
    let task = || error.downcast_ref().map(TaskError::class);
    let train = || error.downcast_ref().map(TrainError::class);
    let data = || error.downcast_ref().map(DataError::class);
    let advise = || error.downcast_ref().map(AdviseError::class);
    store()
        .or_else(load)
        .or_else(generate)
        .or_else(eval)
        .or_else(diff)
        .or_else(tokens)
        .or_else(task)
        .or_else(train)
        .or_else(data)
        .or_else(advise)
}

fn of_class(class: ErrorClass) -> Exit {
    match class {
        ErrorClass::Input => Exit::Input,
        ErrorClass::Environment => Exit::Environment,
    }
}

/// Prints an error on one line of standard error.
pub fn print_error(message: &str) {
    terminal::to_stderr(&format!("error: {message}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;
    use mantissa_quant::Unfinished;
    use std::path::Path;

    #[test]
    fn each_kind_of_error_has_its_exit_code() {
        let io = || io::Error::from(io::ErrorKind::StorageFull);
        let store_input = mantissa_store::Error::field(Path::new("config.json"), "a", "b", "c", "");
        let store_io = mantissa_store::Error::Io { path: "p".into(), operation: "read", error: io() };
        let wrapped =
            LoadError::Store(mantissa_store::Error::Io { path: "p".into(), operation: "read", error: io() });
        let disk = || mantissa_store::Error::Io { path: "p".into(), operation: "write", error: io() };
        let over = OverMemory { what: "w".into(), needs: 2, allowed: 1, limit: Limit::Option, fix: None };
        let memory = || LoadError::Memory { what: "KV cache", bytes: 1 };
        let unfinished =
            |error| QuantError::Unfinished(Box::new(Unfinished { error, kept: "p".into(), done: 1 }));
        let cases: [(anyhow::Error, Exit); 16] = [
            (GateFailed::new("kl").into(), Exit::Gate),
            (BadInput::new("a", "b", "c").into(), Exit::Input),
            (over.into(), Exit::Environment),
            (StdoutError(io()).into(), Exit::Environment),
            (StdoutError(io::ErrorKind::BrokenPipe.into()).into(), Exit::Done),
            (store_input.into(), Exit::Input),
            (store_io.into(), Exit::Environment),
            (wrapped.into(), Exit::Environment),
            (QuantError::Store(disk()).into(), Exit::Environment),
            (unfinished(disk().into()).into(), Exit::Environment),
            (unfinished(QuantError::Interrupted).into(), Exit::Interrupted),
            (TrainError::Stopped.into(), Exit::Interrupted),
            (EvalError::Stopped.into(), Exit::Interrupted),
            (GenerateError::Plan(memory()).into(), Exit::Environment),
            (GenerateError::EmptyPrompt.into(), Exit::Input),
            (EvalError::Load(memory()).into(), Exit::Environment),
        ];
        for (error, exit) in cases {
            assert_eq!(exit_of(&error), exit, "{error}");
            let chained = Err::<(), _>(error).context("while working").err();
            assert_eq!(chained.map(|e| exit_of(&e)), Some(exit));
        }
    }
}
