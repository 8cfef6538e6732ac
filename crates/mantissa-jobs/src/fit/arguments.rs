//! Arguments of a fit.

use std::path::PathBuf;

use mantissa_plan::contract::EngineTarget;
use mantissa_quant::{Recipe, RecipeError};
use mantissa_store::convention::{Container, native};

use super::{BudgetText, CandidateScheme, Fit};
use crate::calibration::Calibration;
use crate::destination::Destination;
use crate::error::Result;
use crate::measured_text::Measure;
use crate::model::ModelPath;
use crate::names::{AsText, Format, TargetName};
use crate::tables::Tables;

/// Arguments of a fit.
#[derive(Clone, Debug)]
pub struct FitArguments {
    /// Unquantized model.
    pub model: ModelPath,
    /// Upper bound of the size.
    pub budget: BudgetText,
    /// Output folder, or GGUF file if it ends in `.gguf`.
    pub out: PathBuf,
    /// Methods, as in recipe names.
    pub methods: Vec<String>,
    /// Candidate schemes; empty for the default of each method.
    pub schemes: Vec<CandidateScheme>,
    /// Checkpoint format; `None` is the first that holds the schemes.
    pub format: Option<Container>,
    /// Quantization of embedding and head.
    pub tables: Tables,
    /// Calibration samples.
    pub calibration: Calibration,
    /// Engines that must run the output.
    pub targets: Vec<EngineTarget>,
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

impl FitArguments {
    /// Finds format and place of the output by the first candidate.
    ///
    /// # Errors
    /// No candidate is a recipe; a folder format for a file named `.gguf`.
    pub fn resolve(self) -> Result<Fit> {
        let container = match (self.format, self.schemes.is_empty()) {
            (Some(format), _) => format,
            (None, true) => native::CONTAINER,
            (None, false) => self.first_candidate()?.container(),
        };
        let calibration = match self.calibrates() && self.model.has_tokenizer() {
            true => self.calibration.or_default(),
            false => self.calibration,
        };
        let Destination { path, container } =
            Destination::of_format(&self.model, "fit", container, &self.out)?;
        Ok(Fit {
            source: self.model,
            out: path,
            container: Format(container),
            format_given: self.format.is_some(),
            budget: self.budget,
            methods: self.methods,
            schemes: self.schemes.into_iter().map(AsText).collect(),
            tables: self.tables,
            calibration,
            targets: self.targets.into_iter().map(TargetName).collect(),
            windows: self.windows,
            time_limit: self.time_limit,
            measurements: self.measurements,
            save_recipe: self.save_recipe,
            measure: self.measure,
            seed: self.seed,
        })
    }

    /// True if a method needs a calibration.
    fn calibrates(&self) -> bool {
        let schemes: Vec<String> = self.schemes.iter().map(|scheme| scheme.scheme.to_string()).collect();
        let usual = ["int4-g128", "trellis2"].map(str::to_owned);
        let needs = |method: &String| {
            let mut recipes =
                schemes.iter().chain(&usual).map(|scheme| Recipe::load(&format!("{method}-{scheme}")));
            recipes.find_map(Result::ok).is_some_and(|recipe| recipe.needs_calibration())
        };
        self.methods.iter().any(needs)
    }

    /// Returns the first recipe of a method and a scheme: another method may take the schemes that the first does not.
    fn first_candidate(&self) -> Result<Recipe, RecipeError> {
        let names =
            self.methods.iter().flat_map(|m| self.schemes.iter().map(move |s| format!("{m}-{}", s.scheme)));
        let mut recipes = names.map(|name| Recipe::load(&name));
        let first = recipes.next().unwrap_or_else(|| Recipe::load(""));
        first.or_else(|error| recipes.find_map(Result::ok).ok_or(error))
    }
}
