//! Models on the command line.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::{TypedValueParser, ValueParserFactory};
pub use mantissa_jobs::model::{BASE, context_length, load_tokenizer, open, open_quietly, vocabulary};
use mantissa_store::Paths;
use serde::Serialize;

use crate::embedded;

/// Model as named on the command line: a folder, a file, or the embedded model.
#[derive(Clone, Debug, Serialize)]
#[serde(transparent)]
pub struct ModelPath(mantissa_jobs::ModelPath);

impl ModelPath {
    fn new(named: OsString) -> Result<Self, mantissa_store::Error> {
        let named = PathBuf::from(named);
        // A folder or file called `demo` takes precedence over the embedded model.
        let embedded =
            named.as_os_str() == embedded::NAME && !named.is_file() && !named.join("config.json").exists();
        Ok(ModelPath(match embedded {
            true => mantissa_jobs::ModelPath::embedded(named, embedded::folder()?),
            false => mantissa_jobs::ModelPath::new(named),
        }))
    }

    /// Returns the name given on the command line.
    pub fn named(&self) -> &Path {
        self.0.named()
    }

    /// Returns the model as a job has it.
    pub fn job_path(&self) -> &mantissa_jobs::ModelPath {
        &self.0
    }

    /// Returns the model's location as a user types it: `demo`, a folder, or a GGUF file.
    pub fn typed(&self) -> &Path {
        self.0.typed()
    }

    /// True for the embedded model.
    pub fn is_embedded(&self) -> bool {
        self.0.is_embedded()
    }

    /// Adds the model's files to the inputs of a command; the embedded model has none.
    pub fn paths(&self, paths: &mut Paths) {
        self.0.inputs().into_iter().for_each(|path| paths.read(path));
    }
}

impl Deref for ModelPath {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.0.location()
    }
}

impl FromStr for ModelPath {
    type Err = mantissa_store::Error;

    fn from_str(named: &str) -> Result<Self, Self::Err> {
        ModelPath::new(named.into())
    }
}

impl ValueParserFactory for ModelPath {
    type Parser = clap::builder::ValueParser;

    fn value_parser() -> Self::Parser {
        clap::builder::OsStringValueParser::new().try_map(ModelPath::new).into()
    }
}
