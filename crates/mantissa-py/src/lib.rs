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
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<model::CoreModel>()?;
    module.add_class::<tensor::CoreArray>()?;
    module.add_class::<tensor::CoreTensor>()?;
    module.add_class::<linear::CoreLinear>()?;
    module.add_class::<weights::CoreWeights>()?;
    for function in [
        wrap_pyfunction!(host::command, module)?,
        wrap_pyfunction!(host::forked, module)?,
        wrap_pyfunction!(host::settle, module)?,
        wrap_pyfunction!(main, module)?,
        wrap_pyfunction!(starts_with, module)?,
        wrap_pyfunction!(remove_embedded, module)?,
    ] {
        module.add_function(function)?;
    }
    module.add_function(wrap_pyfunction!(tensor::quantize_tensor, module)?)?;
    module.add_function(wrap_pyfunction!(recipes, module)?)?;
    module.add_function(wrap_pyfunction!(schemes, module)?)?;
    Ok(())
}
