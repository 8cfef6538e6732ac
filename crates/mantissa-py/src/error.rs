//! Exceptions: the classes of `mantissa.errors`, with the parts of the message as attributes.

use mantissa::{Exit, Failed};
use mantissa_jobs::{Class, JobError};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Makes an instance of the exception `class` of `mantissa.errors`.
fn raised(class: &str, message: &str) -> PyErr {
    raised_with(class, message, "")
}

/// As [`raised`], with the JSON report of what ran.
fn raised_with(class: &str, message: &str, report: &str) -> PyErr {
    Python::attach(|py| {
        let module = py.import("mantissa.errors");
        let made = module.and_then(|module| module.getattr(class)?.call1((message, report)));
        match made {
            Ok(value) => PyErr::from_value(value),
            Err(_) => PyRuntimeError::new_err(message.to_owned()),
        }
    })
}

/// Error of work, as an exception.
pub trait Raise {
    /// Returns the exception.
    fn raise(self) -> PyErr;
}

impl Raise for JobError {
    fn raise(self) -> PyErr {
        let class = match self.class() {
            Class::Gate => "GateError",
            Class::Input => "InputError",
            Class::Environment => "EnvironmentError_",
            Class::Stopped => "Interrupted",
        };
        raised(class, &self.to_string())
    }
}

impl Raise for Failed {
    fn raise(self) -> PyErr {
        let class = match self.exit {
            Exit::Gate => "GateError",
            Exit::Done | Exit::Input => "InputError",
            Exit::Environment => "EnvironmentError_",
            Exit::Interrupted | Exit::Terminated => "Interrupted",
        };
        raised_with(class, &self.message, &self.report)
    }
}

/// Returns the exception of an argument that cannot be used.
pub fn input(what: &str, got: &str, expected: &str) -> PyErr {
    raised("InputError", &format!("{what}: expected {expected}, got {got}"))
}

/// Returns the exception of a bug.
pub fn internal(message: &str) -> PyErr {
    raised("InternalError", &format!("internal: {message}"))
}
