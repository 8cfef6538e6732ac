//! Errors of the command line and their exit codes.

use std::io;
use std::process::ExitCode;

use mantissa_advise::AdviseError;
use mantissa_eval::tasks::TaskError;
use mantissa_eval::{DiffError, EvalError, TokenError};
use mantissa_jobs::{Class, JobError};
use mantissa_model::{GenerateError, LoadError};
use mantissa_quant::QuantError;
use mantissa_store::ErrorClass;
use mantissa_train::TrainError;
use mantissa_train::data::DataError;

pub use mantissa_jobs::{BadInput, ChatFailed, GateFailed, OverMemory, Stopped, resumes};

use crate::interrupt;
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

/// Standard output cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("standard output: expected a writable stream, got I/O error `{0}`")]
pub struct StdoutError(pub io::Error);

/// An answer was ended by SIGINT; what there was of it is printed.
#[derive(Debug, thiserror::Error)]
#[error("interrupted by SIGINT: the answer ends early")]
pub struct AnswerCut;

/// Returns the exit code of `error`: that of the first error in its chain that decides it, else bad input,
/// the kind of all other library errors.
pub fn exit_of(error: &anyhow::Error) -> Exit {
    error.chain().find_map(class).unwrap_or(Exit::Input)
}

fn class(error: &(dyn std::error::Error + 'static)) -> Option<Exit> {
    if let Some(error) = error.downcast_ref::<JobError>() {
        return Some(of_job(error.class()));
    }
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
    if error.is::<AnswerCut>() {
        return Some(Exit::Interrupted);
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

/// Returns the exit code of a job's error.
fn of_job(class: Class) -> Exit {
    match class {
        Class::Gate => Exit::Gate,
        Class::Input => Exit::Input,
        Class::Environment => Exit::Environment,
        Class::Stopped => interrupt::received().unwrap_or(Exit::Interrupted),
    }
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
    use mantissa_jobs::memory::Limit;
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
        let job = |error: JobError| anyhow::Error::from(error);
        let placed = JobError::At { place: "p".into(), error: Box::new(EvalError::Stopped.into()) };
        let cases: [(anyhow::Error, Exit); 21] = [
            (AnswerCut.into(), Exit::Interrupted),
            (job(GateFailed::new("kl").into()), Exit::Gate),
            (job(QuantError::Store(disk()).into()), Exit::Environment),
            (job(unfinished(QuantError::Interrupted).into()), Exit::Interrupted),
            (job(placed), Exit::Interrupted),
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
