//! Rebuild: makes the weights of an artifact again from its source and the job that its `quality.json` records.

mod files;
mod line;
mod options;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use mantissa_quant::{Quality, Recorded};
use mantissa_store::convention::Container;
use mantissa_store::{FileDigest, Shown};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::convert::Convert;
use crate::error::{BadInput, GateFailed, RecordError, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput, from_json, to_json};
use crate::measured_text::Measure;
use crate::model::{self, ModelPath};
use crate::quantize::Quantize;

use files::Files;

/// Arguments of a rebuild.
#[derive(Clone, Debug)]
pub struct RebuildArguments {
    /// `quality.json`, or the artifact that has it.
    pub quality: PathBuf,
    /// Model that was quantized.
    pub source: ModelPath,
    /// Output folder or `.gguf` file.
    pub out: PathBuf,
    /// Places of recorded files, by their names.
    pub files: Vec<(String, PathBuf)>,
}

/// Job that an artifact records.
#[derive(Clone, Debug, PartialEq)]
pub enum RecordedJob {
    /// Quantization.
    Quantize(Box<Quantize>),
    /// Conversion.
    Convert(Box<Convert>),
}

/// Names of the jobs that an artifact records.
const RECORDED: [&str; 2] = [Quantize::NAME, Convert::NAME];

impl RecordedJob {
    /// Returns the name of the job.
    pub fn name(&self) -> &'static str {
        match self {
            RecordedJob::Quantize(_) => Quantize::NAME,
            RecordedJob::Convert(_) => Convert::NAME,
        }
    }

    /// Returns the options of a command line that makes the same job: `--name` or `--name=value`.
    pub fn options(&self) -> Vec<String> {
        match self {
            RecordedJob::Quantize(job) => options::of_weights(&job.weights),
            RecordedJob::Convert(job) => options::of_conversion(job),
        }
    }

    /// Returns the job on the model `source`, into `out`, with the files that `files` finds.
    fn placed(self, source: &ModelPath, out: &Path, files: &Files<'_>) -> Result<Self> {
        let (source, out) = (source.clone(), out.to_owned());
        Ok(match self {
            RecordedJob::Quantize(job) => {
                let Quantize { mut weights, .. } = *job;
                weights.calibration =
                    weights.calibration.map_files(|name| files.find("--calibration", name))?;
                if let Some(path) = &mut weights.imatrix {
                    *path = files.find("--imatrix", &path.to_string_lossy())?.into();
                }
                RecordedJob::Quantize(Box::new(Quantize { source, out, weights, ..Quantize::default() }))
            }
            RecordedJob::Convert(job) => {
                let unmeasured = Convert { measure: Measure::default(), unverified: false, ..*job };
                RecordedJob::Convert(Box::new(Convert { source, out, ..unmeasured }))
            }
        })
    }

    fn inputs(&self) -> Vec<PathBuf> {
        match self {
            RecordedJob::Quantize(job) => job.inputs(),
            RecordedJob::Convert(job) => job.inputs(),
        }
    }

    fn outputs(&self) -> Vec<JobOutput> {
        match self {
            RecordedJob::Quantize(job) => job.outputs(),
            RecordedJob::Convert(job) => job.outputs(),
        }
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        match self {
            RecordedJob::Quantize(job) => job.memory(host),
            RecordedJob::Convert(job) => job.memory(host),
        }
    }

    fn run(&self, host: &Host) -> Result<()> {
        match self {
            RecordedJob::Quantize(job) => job.run(host).map(drop),
            RecordedJob::Convert(job) => job.run(host).map(drop),
        }
    }
}

impl Serialize for RecordedJob {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let value = match self {
            RecordedJob::Quantize(job) => to_json(&**job),
            RecordedJob::Convert(job) => to_json(&**job),
        };
        value.map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RecordedJob {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        read("job", Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

/// Reads a serialized job of those that can be recorded.
fn read(place: &str, value: Value) -> std::result::Result<RecordedJob, RecordError> {
    match value["job"].as_str() {
        Some(Convert::NAME) => Ok(RecordedJob::Convert(Box::new(from_json(place, value)?))),
        _ => Ok(RecordedJob::Quantize(Box::new(from_json(place, value)?))),
    }
}

impl RebuildArguments {
    /// Reads the recorded job and finds its files.
    ///
    /// # Errors
    /// No record, or one of another version; a value that could lead to a file that the user did not name; a file that is
    /// not found.
    pub fn resolve(self) -> Result<Rebuild> {
        let shown = self.quality.display().to_string();
        let quality = Quality::read_at(&self.quality)?;
        let Some(recorded) = quality.rebuild.clone() else {
            let allowed = "a record of the command (rebuild)";
            let fix = "quantize the source again: this file was written by an earlier version, or by train";
            return Err(BadInput::new(shown, "none", allowed).with_fix(fix).into());
        };
        let one_file = Container::named(&quality.container).is_some_and(|format| format.is_one_file());
        if one_file && self.out.extension().is_none_or(|extension| extension != "gguf") {
            let allowed = "a path that ends in .gguf, as the artifact is a GGUF file";
            return Err(BadInput::new("--out", self.out.display().to_string(), allowed).into());
        }
        let place = format!("{shown}: rebuild");
        let job = match recorded {
            Recorded::Line(line) => line::job(&place, &line)?,
            Recorded::Job(fields) => {
                let job = read(&place, Value::Object(fields)).map_err(|error| safe(&place, &error))?;
                let file = match &job {
                    RecordedJob::Quantize(job) => job.weights.recipe.text.is_some(),
                    RecordedJob::Convert(_) => false,
                };
                job.options().iter().try_for_each(|option| files::require_plain(&place, option, file))?;
                job
            }
        };
        let files = Files { given: &self.files, folder: self.quality.parent().unwrap_or(Path::new("")) };
        let job = job.placed(&self.source, &self.out, &files)?;
        if let RecordedJob::Quantize(job) = &job {
            job.weights.check(&place)?;
        }
        Ok(Rebuild { quality: self.quality, source: self.source, out: self.out, recorded: job })
    }
}

/// Makes the error of a record that is none of this version; it may hold any text.
fn safe(place: &str, error: &RecordError) -> BadInput {
    let found = error.to_string();
    let found = found.strip_prefix(&format!("{place}: ")).unwrap_or(&found);
    BadInput::new(place, Shown(found).to_string(), format!("a job {} of this version", RECORDED.join(" or ")))
}

/// Makes the weights of an artifact again and compares them with the recorded ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rebuild {
    /// `quality.json`, or the artifact that has it.
    pub quality: PathBuf,
    /// Model that was quantized.
    pub source: ModelPath,
    /// Output folder or `.gguf` file.
    pub out: PathBuf,
    /// Recorded job, with the places of its files.
    pub recorded: RecordedJob,
}

/// A weight file with both SHA-256.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RebuiltFile {
    /// Name in the artifact.
    pub file: String,
    /// Recorded SHA-256.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// SHA-256 of the file that was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
}

impl RebuiltFile {
    /// True if the file is the recorded one.
    pub fn is_identical(&self) -> bool {
        self.expected == self.got
    }
}

/// Weight files that were made, compared with the recorded ones.
#[derive(Clone, Debug)]
pub struct RebuildReport {
    /// Files of either.
    pub files: Vec<RebuiltFile>,
    /// Reasons why bytes may differ.
    reasons: String,
}

impl RebuildReport {
    /// True if all weight files are the recorded ones.
    pub fn is_identical(&self) -> bool {
        self.files.iter().all(RebuiltFile::is_identical)
    }

    /// Refuses weights that are not the recorded ones.
    ///
    /// # Errors
    /// [`GateFailed`] with the files that differ.
    pub fn require_identical(&self) -> Result<(), GateFailed> {
        if self.is_identical() {
            return Ok(());
        }
        let differs = self.files.iter().filter(|file| !file.is_identical()).map(|file| &*file.file);
        let differs = differs.collect::<Vec<_>>().join(", ");
        Err(GateFailed::new(format!("expected the recorded bytes, got others in {differs}{}", self.reasons)))
    }

    fn new(recorded: &Quality, made: &Quality) -> Self {
        let mut reasons = String::new();
        if recorded.calibration != made.calibration {
            reasons += "; the calibration windows differ";
        }
        if recorded.tool != made.tool {
            reasons += &format!("; the artifact was made by {}, this is {}", recorded.tool, made.tool);
        }
        RebuildReport { files: compared(recorded, made), reasons }
    }
}

/// Pairs the recorded weight files with those made. A single file may have another name.
fn compared(recorded: &Quality, made: &Quality) -> Vec<RebuiltFile> {
    let (old, new) = (&recorded.hashes.weights, &made.hashes.weights);
    let text = |digest: &FileDigest| digest.hex();
    if let ([(name, a)], [(_, b)]) =
        (&old.iter().collect::<Vec<_>>()[..], &new.iter().collect::<Vec<_>>()[..])
    {
        return vec![RebuiltFile { file: (*name).clone(), expected: Some(text(a)), got: Some(text(b)) }];
    }
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let of = |name: &String| RebuiltFile {
        file: name.clone(),
        expected: old.get(name).map(text),
        got: new.get(name).map(text),
    };
    names.into_iter().map(of).collect()
}

impl Job for Rebuild {
    const NAME: &'static str = "rebuild";
    const VERSION: u32 = 1;
    type Report = RebuildReport;

    fn inputs(&self) -> Vec<PathBuf> {
        [self.quality.clone()].into_iter().chain(self.source.inputs()).chain(self.recorded.inputs()).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        self.recorded.outputs()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        self.recorded.memory(host)
    }

    /// # Errors
    /// A source with other files than the recorded ones; errors of the recorded job.
    fn run(&self, host: &Host) -> Result<RebuildReport> {
        let recorded = Quality::read_at(&self.quality)?;
        let source = model::open(&self.source, host)?;
        if let Some(fault) = recorded.faults_of_source(&source)?.into_iter().next() {
            let named = self.source.named().display().to_string();
            return Err(BadInput::new(named, fault, "the model that was quantized").into());
        }
        drop(source);
        host.note(&format!("mantissa {} {}", self.recorded.name(), self.recorded.options().join(" ")));
        self.recorded.run(host)?;
        let made = Quality::read(&self.out)?.ok_or_else(|| {
            let out = self.out.display().to_string();
            BadInput::new(out, "no quality.json", "the one that the command writes")
        })?;
        Ok(RebuildReport::new(&recorded, &made))
    }
}
