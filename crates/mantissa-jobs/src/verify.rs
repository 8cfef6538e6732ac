//! Verification of a model by a reader that shares no code with the writer, and of the signature of its figures.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use mantissa_quant::verify::{Against, Verification, verify_against, verify_bytes};
use serde::{Deserialize, Serialize};

use crate::error::{GateFailed, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::loaded::ModelUse;
use crate::measured_text::MeasuredText;
use crate::model::{ModelPath, no_adapter, open_quietly};
use crate::progress::Unit;
use crate::signature;

/// Checks a model against its manifest, its figures, its source and a second decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verify {
    /// Model folder or .gguf file.
    pub model: ModelPath,
    /// Unquantized source model.
    pub reference: Option<ModelPath>,
    /// Public key that must have signed `quality.json`: a file of minisign, or the key in base64.
    pub key: Option<String>,
    /// Text of the recorded figures, to measure them again.
    pub text: MeasuredText,
}

/// Fails if a verification found a fault.
///
/// # Errors
/// [`GateFailed`] with the faults.
pub fn require_verified(found: &Verification) -> Result<(), GateFailed> {
    if found.ok {
        return Ok(());
    }
    Err(GateFailed::new(format!("verify: {}", found.faults.join("; "))))
}

impl Verify {
    fn models(&self) -> impl Iterator<Item = &ModelPath> {
        std::iter::once(&self.model).chain(&self.reference)
    }

    /// Predicts the peak memory without a text; `None` if the models cannot be opened, which the verification reports.
    fn needed(&self, host: &Host) -> Option<u64> {
        let files = open_quietly(&self.model).ok()?;
        let source = self.reference.as_ref().map(|path| open_quietly(path)).transpose().ok()?;
        verify_bytes(&files, source.as_ref(), host.threads).ok()
    }

    /// Describes the models that run on `sequences`, and predicts their memory in bytes.
    fn needed_on(&self, sequences: &[mantissa_eval::Sequence], host: &Host) -> Result<(String, u64)> {
        let files = self.models().map(|model| open_quietly(model)).collect::<Result<Vec<_>>>()?;
        ModelUse::evaluation(sequences, host.threads).needed(&files.iter().collect::<Vec<_>>())
    }
}

impl Job for Verify {
    const NAME: &'static str = "verify";
    const VERSION: u32 = 1;
    type Report = Verification;

    fn inputs(&self) -> Vec<PathBuf> {
        let key = self.key.iter().filter(|key| signature::is_file(key)).map(PathBuf::from);
        self.models().flat_map(ModelPath::inputs).chain(self.text.inputs()).chain(key).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let sequences = self.text.sequences(&self.model, false, host)?;
        let on_text = match &sequences {
            Some(sequences) => self.needed_on(sequences, host)?.1,
            None => 0,
        };
        Ok(on_text.max(self.needed(host).unwrap_or(0)))
    }

    /// Checks the model; what is wrong with it is among the faults of the report ([`require_verified`]).
    ///
    /// # Errors
    /// Unreadable input; a text other than that of the recorded figures; a key that is none.
    fn run(&self, host: &Host) -> Result<Verification> {
        if let Some(error) = self.models().find_map(|model| no_adapter(model)) {
            return Err(error.into());
        }
        // What is not there is no fault of a model; the error names what is near.
        if let Some(missing) = self.models().find(|model| !model.exists()) {
            open_quietly(missing)?;
        }
        let sequences = self.text.sequences(&self.model, false, host)?;
        if let Some(needs) = self.needed(host) {
            host.require_memory("verify", needs)?;
        }
        if let Some(sequences) = &sequences {
            let (what, needs) = self.needed_on(sequences, host)?;
            host.require_memory(&what, needs)?;
        }
        let reference: Option<&Path> = self.reference.as_ref().map(ModelPath::location);
        let against = Against { reference, recorded: true, text: sequences.as_deref() };
        let tokens = sequences.iter().flatten().map(|s| s.tokens.len() as u64).sum();
        let progress = host.progress(tokens, Unit::Items("tokens"));
        let found = verify_against(&self.model, &against, host.threads, &|done| {
            progress.set(done);
            ControlFlow::Continue(())
        })?;
        progress.finish();
        let found = match &self.key {
            Some(key) => signature::checked(found, &self.model, key)?,
            None => found,
        };
        Ok(if host.is_strict() { found.strictly() } else { found })
    }
}
