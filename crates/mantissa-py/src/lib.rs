//! The extension module of the Python package: commands, and models of `mantissa-runtime`, as Python calls them.
//! It decides nothing: a function of `python/mantissa` is a command with its flags, and its report crosses as JSON.

// Layer: exceptions and waiting.
mod error;
mod host;

// Layer: tensors.
mod dlpack;
mod tensor;

// Layer: models.
mod linear;
mod model;
mod weights;

use std::ffi::OsString;

use mantissa_jobs::embedded;
use mantissa_num::grammar::catalogue;
use mantissa_quant::recipe::{ALIASES, BUILT_IN, FILE_TYPES};
use pyo3::prelude::*;

/// Runs a whole command line in this process, as the program does; returns its exit code.
#[pyfunction]
fn main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| mantissa::main_with(arguments)) as i32
}

/// Makes these words what starts the program in a process of its own.
#[pyfunction]
fn starts_with(words: Vec<OsString>) {
    mantissa::starts_with(words);
}

/// Removes the embedded model where it was unpacked.
#[pyfunction]
fn remove_embedded() {
    embedded::remove();
}

/// Returns the names of recipes.
#[pyfunction]
fn recipes() -> Vec<String> {
    let names = ALIASES.iter().map(|(name, _)| *name).chain(BUILT_IN.iter().map(|(name, _)| *name));
    names.chain(FILE_TYPES.iter().map(|ty| ty.name)).map(str::to_owned).collect()
}

/// Returns the names of number formats, one for each family.
#[pyfunction]
fn schemes() -> Vec<String> {
    catalogue().iter().map(ToString::to_string).collect()
}

/// Compiled part of the package mantissa.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::host::{command, forked, settle};
    #[pymodule_export]
    use super::linear::CoreLinear;
    #[pymodule_export]
    use super::model::CoreModel;
    #[pymodule_export]
    use super::tensor::{CoreArray, CoreTensor, quantize_tensor};
    #[pymodule_export]
    use super::weights::CoreWeights;
    #[pymodule_export]
    use super::{main, recipes, remove_embedded, schemes, starts_with};

    /// Version of the package.
    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
