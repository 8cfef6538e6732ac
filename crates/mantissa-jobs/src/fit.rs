//! Fit: chooses scheme and method of every layer by measured KL, under a budget.

mod arguments;
mod budget;
mod families;
mod family;
mod front;
mod layers;
mod prepared;
mod scheme;
mod search;
mod windows;

use std::path::PathBuf;

use mantissa_quant::{Outcome, Plan};
use mantissa_store::Kind;
use mantissa_store::convention::{Container, ModelFiles};
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::lint::AsStated;
use crate::measured_text::Measure;
use crate::model::ModelPath;
use crate::names::{AsText, Format, TargetName};
use crate::tables::Tables;

pub use arguments::FitArguments;
pub use budget::{BudgetText, Served};
pub use family::{Candidate as FitCandidate, Row as FitUnit};
pub use front::Point as FitPoint;
pub use scheme::CandidateScheme;

/// Name of the recipe found.
pub(crate) const RECIPE: &str = "fit.toml";

/// Scheme of a KV cache that checkpoints do not name.
const PLAIN_CACHE: &str = "f16";

/// Chooses each layer's scheme and method by measured KL under a budget, and quantizes by that choice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Model to quantize.
    pub source: ModelPath,
    /// Output folder or GGUF file.
    pub out: PathBuf,
    /// Checkpoint format of the output.
    pub container: Format,
    /// True if the format was given, not found from the schemes.
    pub format_given: bool,
    /// Upper bound of the size.
    pub budget: BudgetText,
    /// Methods, as in recipe names.
    pub methods: Vec<String>,
    /// Candidate schemes; empty for the default of each method.
    pub schemes: Vec<AsText<CandidateScheme>>,
    /// Quantization of embedding and head.
    pub tables: Tables,
    /// Calibration samples.
    pub calibration: Calibration,
    /// Engines that must run the output.
    pub targets: Vec<TargetName>,
    /// Maximum number of windows for measuring each layer.
    pub windows: u32,
    /// Minutes after which no further scheme is measured.
    pub time_limit: Option<f64>,
    /// File that keeps measurements.
    pub measurements: Option<PathBuf>,
    /// File for the recipe found.
    pub save_recipe: Option<PathBuf>,
    /// Text whose windows choose and evaluate, and tasks.
    pub measure: Measure,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// Result of a fit.
pub struct FitReport {
    /// Source of the quantization.
    pub source: ModelFiles,
    /// Plan of the quantization by the choice.
    pub plan: Plan,
    /// Outcome of the quantization by the choice.
    pub outcome: Outcome,
    /// Checkpoint format of the output.
    pub container: Container,
    /// Methods of the layers.
    pub method: String,
    /// Units with their candidates and choices.
    pub units: Vec<FitUnit>,
    /// Sum over the units' own KL, nats/token.
    pub predicted_kl: f64,
    /// Lower bound of that sum over all choices within the budget.
    pub predicted_kl_bound: f64,
    /// Best choices of every size, by the sum of the units' own KL.
    pub front: Vec<FitPoint>,
    /// Recipes left out, with the reason.
    pub left_out: Vec<String>,
    /// Reasons why methods are not mixed.
    pub apart: Vec<String>,
    /// Number of windows used for the choice.
    pub windows: usize,
    /// Bytes of what serves, if the budget is memory.
    pub served: Option<Served>,
}

impl Fit {
    /// Fails for work that workers do not divide.
    ///
    /// # Errors
    /// A limit of time: what is measured within it differs from run to run.
    pub fn require_divisible(&self) -> Result<()> {
        match self.time_limit {
            None => Ok(()),
            Some(limit) => {
                Err(BadInput::new("--time-limit", limit.to_string(), "none with --workers or --job")
                    .with_fix("leave it out, and name fewer --schemes or --method")
                    .into())
            }
        }
    }

    /// Returns the checkpoint format, if it was given.
    fn format_asked(&self) -> Option<Container> {
        self.format_given.then_some(self.container.0)
    }
}

impl Job for Fit {
    const NAME: &'static str = "fit";
    const VERSION: u32 = 1;
    type Report = FitReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let mut inputs = self.source.inputs();
        inputs.extend(self.calibration.inputs());
        inputs.extend(self.measure.inputs());
        inputs
    }

    fn outputs(&self) -> Vec<JobOutput> {
        let kind = self.container.output_kind();
        let out = JobOutput { option: "--out", path: self.out.clone(), kind };
        let file = |option, path: &PathBuf| JobOutput { option, path: path.clone(), kind: Kind::File };
        let recipe = self.save_recipe.iter().map(|path| file("--save-recipe", path));
        let measurements = self.measurements.iter().map(|path| file("--measurements", path));
        [out].into_iter().chain(recipe).chain(measurements).collect()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.prepare(host)?.needs)
    }

    fn run(&self, host: &Host) -> Result<FitReport> {
        self.prepare(host)?.run(&AsStated, host)
    }

    fn paths(&self) -> mantissa_store::Paths {
        let mut paths = mantissa_store::Paths::default();
        self.inputs().into_iter().for_each(|path| paths.read(path));
        for JobOutput { option, path, kind } in self.outputs() {
            match Some(&path) == self.measurements.as_ref() {
                // Measurements of a model are replaced by later ones, whatever the budget.
                true => paths.write_about(option, path, &*self.source),
                false => paths.write(option, path, kind),
            }
        }
        paths
    }
}
