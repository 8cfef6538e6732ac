//! Quantization of a dense model by a recipe, to one or several formats.

mod arguments;
mod prepared;
mod recipe;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mantissa_quant::recipe::Glob;
use mantissa_quant::{Outcome, Recipe};
use mantissa_store::convention::Container;
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::lint::AsStated;
use crate::measured_text::Measure;
use crate::model::ModelPath;
use crate::names::{Format, TargetName};
use crate::record::{Recordable, file_name};
use crate::tables::Tables;

pub use arguments::{QuantizeArguments, ResolvedQuantize};
pub use prepared::PreparedQuantize;
pub use recipe::RecipeText;

/// Rounding between two codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoundChoice {
    /// To the nearest code.
    #[default]
    Nearest,
    /// By the seed of the job.
    Stochastic,
}

/// Dtype of matmul operands during calibration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CalibrationDtype {
    /// No rounding.
    #[default]
    F32,
    /// Faster on processors with AMX tiles.
    Bf16,
}

/// Accepted patterns of layers, for messages.
const PATTERN: &str = "a module or a pattern with *, such as *.down_proj";

/// Options of a quantization that decide the bytes of the weights.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightOptions {
    /// Recipe.
    pub recipe: RecipeText,
    /// Checkpoint format, if it is not the recipe's; with several formats it is that of one output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<Format>,
    /// Quantization of embedding and head.
    #[serde(default)]
    pub tables: Tables,
    /// Patterns of layers that stay unquantized, beside those of the recipe.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keep: Vec<String>,
    /// Calibration samples.
    #[serde(default)]
    pub calibration: Calibration,
    /// Separator of documents in the calibration texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// Number of held-out calibration samples, on which methods are compared with RTN.
    #[serde(default)]
    pub hold_out: u32,
    /// Importance matrix in place of a calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imatrix: Option<PathBuf>,
    /// Dtype of matmul operands during calibration.
    #[serde(default)]
    pub calibration_dtype: CalibrationDtype,
    /// True if every calibration token runs through every expert.
    #[serde(default)]
    pub route_all_experts: bool,
    /// Rounding between two codes.
    #[serde(default)]
    pub round: RoundChoice,
    /// Maximum size of a weight file in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_shard_size: Option<u64>,
    /// Seed of all random numbers.
    #[serde(default)]
    pub seed: u64,
}

impl WeightOptions {
    /// Parses the patterns of layers that stay unquantized.
    ///
    /// # Errors
    /// A pattern that is none.
    fn kept(&self) -> Result<Vec<Glob>> {
        let parsed = |text: &String| -> Result<Glob> {
            let wrong = |found| {
                let wrong = BadInput::new("--keep", format!("\"{text}\" ({found})"), PATTERN);
                match Glob::of_expression(text) {
                    Some(pattern) => wrong.with_fix(format!("--keep '{pattern}'")),
                    None => wrong,
                }
            };
            Ok(Glob::parse(text).map_err(wrong)?)
        };
        self.keep.iter().map(parsed).collect()
    }

    /// Returns the files that are read.
    fn inputs(&self) -> Vec<PathBuf> {
        let recipe = Recipe::is_file(&self.recipe.name).then(|| PathBuf::from(&self.recipe.name));
        self.calibration.inputs().into_iter().chain(self.imatrix.clone()).chain(recipe).collect()
    }

    /// Refuses values that no arguments have, as a record from elsewhere may; `place` names it.
    ///
    /// # Errors
    /// The first field at fault.
    pub(crate) fn check(&self, place: &str) -> Result<(), BadInput> {
        let fault = |field: &str, found: String, allowed: &str| {
            Err(BadInput::new(format!("{place}: weights.{field}"), found, allowed))
        };
        let Calibration { texts, samples, generated, .. } = &self.calibration;
        if let Some(text) = texts.iter().find(|text| !text.weight.is_finite() || text.weight <= 0.0) {
            return fault("calibration.texts.weight", text.weight.to_string(), "a weight above 0");
        }
        if *samples == Some(0) {
            return fault("calibration.samples", "0".to_owned(), "at least 1");
        }
        if *generated > MOST_GENERATED {
            return fault("calibration.generated", generated.to_string(), "at most 100000");
        }
        if self.split.as_deref() == Some("") {
            return fault("split", "nothing".to_owned(), "at least one character");
        }
        if let Some(pattern) = self.keep.iter().find(|pattern| Glob::parse(pattern).is_err()) {
            return fault("keep", format!("\"{pattern}\""), PATTERN);
        }
        if self.recipe.name.is_empty() {
            return fault("recipe", "none".to_owned(), "the recipe that made the weights");
        }
        Ok(())
    }
}

/// Largest number of generated calibration samples.
const MOST_GENERATED: u32 = 100_000;

/// Name of a GGUF file among several outputs.
const GGUF_NAME: &str = "model";

/// Quantizes a dense model, verifies and measures the output, and puts it in place.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantize {
    /// Model to quantize. Not recorded with an output.
    #[serde(default, skip_serializing_if = "ModelPath::is_unnamed")]
    pub source: ModelPath,
    /// Output: a folder, a GGUF file, or the folder of several outputs. Not recorded with an output.
    #[serde(default, skip_serializing_if = "is_empty_path")]
    pub out: PathBuf,
    /// Options that decide the bytes of the weights.
    pub weights: WeightOptions,
    /// Formats, if there are several outputs; empty for one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<Format>,
    /// Text and tasks to measure the output on.
    #[serde(default, skip_serializing_if = "is_default")]
    pub measure: Measure,
    /// True if the output is measured on the built-in text, where memory allows, if no other is given.
    #[serde(default, skip_serializing_if = "is_default")]
    pub measure_on_default: bool,
    /// In-domain sample that the calibration is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<PathBuf>,
    /// Engines that must run the output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<TargetName>,
    /// True if the output is only opened, not verified, before it is put in place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unverified: bool,
    /// True if what an unfinished run left is removed instead of resumed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub restart: bool,
}

/// True for a path that is not given.
pub(crate) fn is_empty_path(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

/// True for the default of a field.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Result of a quantization.
pub struct QuantizeReport {
    /// Outcomes, in the order of [`Quantize::places`].
    pub outcomes: Vec<Outcome>,
    /// Time from the first read of weights until all outputs are in place.
    pub time: Duration,
}

impl Quantize {
    /// Returns the checkpoint formats of the outputs.
    ///
    /// # Errors
    /// A faulty recipe.
    pub fn containers(&self) -> Result<Vec<Container>> {
        Ok(match (self.formats.as_slice(), self.weights.format) {
            ([], Some(format)) => vec![format.0],
            ([], None) => vec![self.weights.recipe.load()?.container()],
            (several, _) => several.iter().map(|format| format.0).collect(),
        })
    }

    /// Returns the places of the outputs with their formats.
    ///
    /// # Errors
    /// As [`containers`](Self::containers).
    pub fn places(&self) -> Result<Vec<(PathBuf, Container)>> {
        let several = !self.formats.is_empty();
        let place = |container: Container| match several {
            true if container.is_one_file() => self.out.join(container.output_name(GGUF_NAME)),
            true => self.out.join(container.name()),
            false => self.out.clone(),
        };
        Ok(self.containers()?.into_iter().map(|container| (place(container), container)).collect())
    }

    /// True if the finished outputs are verified.
    pub fn verifies(&self) -> bool {
        !self.unverified
    }
}

impl Job for Quantize {
    const NAME: &'static str = "quantize";
    const VERSION: u32 = 1;
    type Report = QuantizeReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let mut inputs = self.source.inputs();
        inputs.extend(self.weights.inputs());
        inputs.extend(self.measure.inputs());
        inputs.extend(self.traffic.clone());
        inputs
    }

    fn outputs(&self) -> Vec<JobOutput> {
        // A faulty recipe, whose format is not known, is refused when the job runs.
        let places = self.places().unwrap_or_else(|_| Vec::new());
        let output = |(path, container): (PathBuf, Container)| JobOutput {
            option: "--out",
            path,
            kind: container.output_kind(),
        };
        places.into_iter().map(output).collect()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.prepare(&AsStated, host)?.peak_bytes())
    }

    fn run(&self, host: &Host) -> Result<QuantizeReport> {
        let mut prepared = self.prepare(&AsStated, host)?;
        prepared.warn(host)?;
        let coverage = prepared.coverage(host)?;
        if let Some(coverage) = &coverage {
            host.warn_all(&coverage.warnings())?;
        }
        prepared.run(coverage, host)
    }
}

impl Recordable for Quantize {
    fn without_places(&self) -> Self {
        let recipe = self.weights.recipe.without_place();
        let calibration = self.weights.calibration.clone();
        let Ok(calibration) = calibration.map_files(|name| Ok::<_, Infallible>(file_name(name)));
        let imatrix = self.weights.imatrix.as_ref().map(|path| file_name(&path.to_string_lossy()).into());
        // Without a calibration text it only splits the text that is measured on.
        let split = self.weights.split.clone().filter(|_| calibration.is_text());
        let weights = WeightOptions { recipe, calibration, imatrix, split, ..self.weights.clone() };
        Quantize { weights, ..Quantize::default() }
    }
}
