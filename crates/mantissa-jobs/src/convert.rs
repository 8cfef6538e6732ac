//! Conversion of a quantized model to another checkpoint format.

use std::path::PathBuf;

use mantissa_num::Scheme;
use mantissa_quant::{Changes, Check, Options, Outcome, Plan, Start, decoded_tables_source};
use mantissa_ranks::Team;
use mantissa_store::DEFAULT_SHARD_BYTES;
use mantissa_store::convention::{Container, ModelFiles, gguf};
use serde::{Deserialize, Serialize};

use crate::adapt;
use crate::destination::Destination;
use crate::error::Result;
use crate::execute;
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::measured_text::Measure;
use crate::model::{self, ModelPath};
use crate::names::{AsText, Format};
use crate::quantize::{is_default, is_empty_path};
use crate::record::Recordable;

/// Arguments of a conversion.
#[derive(Clone, Debug)]
pub struct ConvertArguments {
    /// Model to convert.
    pub model: ModelPath,
    /// Checkpoint format of the output.
    pub format: Container,
    /// Output folder, or GGUF file if it ends in `.gguf`.
    pub out: PathBuf,
    /// Scheme to decode the weights and round them to.
    pub requantize: Option<Scheme>,
    /// True if the run-time quantization of activations is dropped.
    pub drop_inputs: bool,
    /// True if the output is verified before it is put in place.
    pub verify: bool,
    /// Maximum size of a weight file in bytes.
    pub max_shard_size: Option<u64>,
    /// Text and tasks to measure the output on.
    pub measure: Measure,
}

impl ConvertArguments {
    /// Finds the place of the output.
    ///
    /// # Errors
    /// A folder format for a file named `.gguf`.
    pub fn resolve(self) -> Result<Convert> {
        let label = self.requantize.as_ref().map_or_else(|| "converted".to_owned(), ToString::to_string);
        let Destination { path, container } =
            Destination::of_format(&self.model, &label, self.format, &self.out)?;
        Ok(Convert {
            source: self.model,
            out: path,
            format: Format(container),
            requantize: self.requantize.map(AsText),
            drop_inputs: self.drop_inputs,
            max_shard_size: self.max_shard_size,
            measure: self.measure,
            unverified: !self.verify,
        })
    }
}

/// Stores the codes and scales of a model in another format, or rounds its weights again under another scheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Convert {
    /// Model to convert. Not recorded with an output.
    #[serde(default, skip_serializing_if = "ModelPath::is_unnamed")]
    pub source: ModelPath,
    /// Output folder or GGUF file. Not recorded with an output.
    #[serde(default, skip_serializing_if = "is_empty_path")]
    pub out: PathBuf,
    /// Checkpoint format of the output.
    pub format: Format,
    /// Scheme to decode the weights and round them to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requantize: Option<AsText<Scheme>>,
    /// True if the run-time quantization of activations is dropped.
    #[serde(default)]
    pub drop_inputs: bool,
    /// Maximum size of a weight file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_shard_size: Option<u64>,
    /// Text and tasks to measure the output on.
    #[serde(default, skip_serializing_if = "is_default")]
    pub measure: Measure,
    /// True if the output is only opened, not verified, before it is put in place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unverified: bool,
}

impl Default for Convert {
    fn default() -> Self {
        Convert {
            source: ModelPath::default(),
            out: PathBuf::new(),
            format: Format(gguf::CONTAINER),
            requantize: None,
            drop_inputs: false,
            max_shard_size: None,
            measure: Measure::default(),
            unverified: false,
        }
    }
}

/// Conversion that is planned and fits into memory: nothing is written yet.
pub struct PreparedConvert<'a> {
    job: &'a Convert,
    /// Source.
    pub source: ModelFiles,
    /// Plan of the output.
    pub plan: Plan,
}

impl Convert {
    /// Opens the source, tokenizes the texts, and plans the output within the memory of `host`.
    ///
    /// # Errors
    /// Unreadable input; weights that the format cannot hold; [`OverMemory`](crate::OverMemory).
    pub fn prepare(&self, host: &Host) -> Result<PreparedConvert<'_>> {
        let source = model::open(&self.source, host)?;
        adapt::require_tokenizer(&source, "convert", host)?;
        let source = match self.requantize {
            Some(_) => decoded_tables_source(source)?,
            None => source,
        };
        let options = Options {
            threads: host.threads,
            max_shard_bytes: self.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
            max_gguf_bytes: self.max_shard_size,
            rebuild: Some(self.record()?),
            ..Options::default()
        };
        let requantize = self.requantize.as_ref().map(|scheme| &scheme.0);
        let changes = Changes { requantize, drop_inputs: self.drop_inputs };
        let plan = Plan::conversion(&source, self.format.0, changes, options)?;
        let plan = plan.with_tasks(self.measure.tasks(&self.source, &source, host)?);
        let plan = plan.with_evaluation(self.measure.evaluation(&self.source, &source, false, host)?);
        let verify = !self.unverified;
        let (plan, _) = adapt::fit_plan(plan, "convert", verify, host)?;
        let plan = plan.with_check(if verify { Check::Verify(None) } else { Check::Load });
        Ok(PreparedConvert { job: self, source, plan })
    }
}

impl PreparedConvert<'_> {
    /// Divides the layers among the workers of `team`.
    ///
    /// # Errors
    /// [`OverMemory`](crate::OverMemory): layers that are exchanged are held whole.
    pub fn share(&mut self, team: &Team, host: &Host) -> Result<()> {
        let shared = self.plan.clone().with_team(team.clone());
        (self.plan, _) = adapt::fit_plan(shared, "convert", !self.job.unverified, host)?;
        Ok(())
    }

    /// Converts the weights, verifies and measures the output, and puts it in place.
    ///
    /// # Errors
    /// I/O; a stop; an output that exceeds a limit or does not verify.
    pub fn run(&self, host: &Host) -> Result<Outcome> {
        host.warn_all(&self.plan.notes)?;
        execute::run(&self.plan, &self.source, &host.output(&self.job.out)?, Start::Resume, host)
    }
}

impl Job for Convert {
    const NAME: &'static str = "convert";
    const VERSION: u32 = 1;
    type Report = Outcome;

    fn inputs(&self) -> Vec<PathBuf> {
        self.source.inputs().into_iter().chain(self.measure.inputs()).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        vec![JobOutput { option: "--out", path: self.out.clone(), kind: self.format.output_kind() }]
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.prepare(host)?.plan.peak_bytes(!self.unverified))
    }

    fn run(&self, host: &Host) -> Result<Outcome> {
        self.prepare(host)?.run(host)
    }
}

impl Recordable for Convert {
    fn without_places(&self) -> Self {
        Convert {
            source: ModelPath::default(),
            out: PathBuf::new(),
            measure: Measure::default(),
            unverified: false,
            ..self.clone()
        }
    }
}
