//! Models on the command line.

use std::ffi::OsString;
use std::ops::Deref;
use std::str::FromStr;

use clap::builder::{TypedValueParser, ValueParserFactory};
pub use mantissa_jobs::model::{context_length, load_tokenizer, open, open_quietly};
use mantissa_store::Paths;

/// Model as named on the command line: a folder, a file, or the embedded model.
#[derive(Clone, Debug)]
pub struct ModelPath(mantissa_jobs::ModelPath);

impl ModelPath {
    fn find(named: OsString) -> Result<Self, mantissa_store::Error> {
        mantissa_jobs::ModelPath::find(named).map(ModelPath)
    }

    /// Returns the model as a job has it.
    pub fn job_path(&self) -> &mantissa_jobs::ModelPath {
        &self.0
    }

    /// Adds the model's files to the inputs of a command; the embedded model has none.
    pub fn paths(&self, paths: &mut Paths) {
        self.0.inputs().into_iter().for_each(|path| paths.read(path));
    }
}

impl Deref for ModelPath {
    type Target = mantissa_jobs::ModelPath;

    fn deref(&self) -> &mantissa_jobs::ModelPath {
        &self.0
    }
}

impl FromStr for ModelPath {
    type Err = mantissa_store::Error;

    fn from_str(named: &str) -> Result<Self, Self::Err> {
        ModelPath::find(named.into())
    }
}

impl ValueParserFactory for ModelPath {
    type Parser = clap::builder::ValueParser;

    fn value_parser() -> Self::Parser {
        clap::builder::OsStringValueParser::new().try_map(ModelPath::find).into()
    }
}
