//! Arguments of a quantization, which may leave recipe, format and output to be chosen.

use std::path::PathBuf;

use mantissa_plan::contract::EngineTarget;
use mantissa_quant::recipe::spelled_out;
use mantissa_store::convention::{Container, ModelFiles};

use super::recipe::RecipeText;
use super::{CalibrationDtype, Quantize, RoundChoice, WeightOptions};
use crate::calibration::Calibration;
use crate::choose::{self, RecipeChoice};
use crate::destination::{Destination, default_out};
use crate::error::{BadInput, Result};
use crate::measured_text::Measure;
use crate::model::{ModelPath, open_quietly};
use crate::names::{Format, TargetName};
use crate::tables::Tables;

/// Arguments of a quantization.
#[derive(Clone, Debug)]
pub struct QuantizeArguments {
    /// Unquantized model.
    pub model: ModelPath,
    /// Recipe name or file; `None` chooses a measured one for the engines.
    pub recipe: Option<String>,
    /// Bits per weight to choose for; `None` is the default.
    pub bits: Option<u32>,
    /// Output; `None` names it after model and recipe.
    pub out: Option<PathBuf>,
    /// Checkpoint formats; empty is the recipe's.
    pub formats: Vec<Container>,
    /// Quantization of embedding and head.
    pub tables: Tables,
    /// Patterns of layers that stay unquantized.
    pub keep: Vec<String>,
    /// Calibration samples.
    pub calibration: Calibration,
    /// Importance matrix in place of a calibration.
    pub imatrix: Option<PathBuf>,
    /// Number of held-out calibration samples.
    pub hold_out: u32,
    /// Dtype of matmul operands during calibration.
    pub calibration_dtype: CalibrationDtype,
    /// True if every calibration token runs through every expert.
    pub route_all_experts: bool,
    /// In-domain sample that the calibration is compared with.
    pub traffic: Option<PathBuf>,
    /// Engines that must run the output.
    pub targets: Vec<EngineTarget>,
    /// True if the output is verified before it is put in place.
    pub verify: bool,
    /// True if an unfinished run is removed instead of resumed.
    pub restart: bool,
    /// Rounding between two codes.
    pub round: RoundChoice,
    /// Maximum size of a weight file in bytes.
    pub max_shard_size: Option<u64>,
    /// Text and tasks to measure the output on.
    pub measure: Measure,
}

/// Quantization with everything that was chosen.
#[derive(Clone, Debug)]
pub struct ResolvedQuantize {
    /// Job.
    pub job: Quantize,
    /// Full name of a recipe that was given by a short one.
    pub stands_for: Option<String>,
    /// Choice of a recipe that was not given.
    pub chosen: Option<RecipeChoice>,
}

impl QuantizeArguments {
    /// Reads the recipe, or chooses one for the model; finds format and output. `source` is the opened model, if it is
    /// open.
    ///
    /// # Errors
    /// An invalid recipe; no measured recipe that fits; an output that cannot hold the format.
    pub fn resolve(self, source: Option<&ModelFiles>) -> Result<ResolvedQuantize> {
        let chosen = self.choice(source)?;
        let name = chosen.as_ref().map_or(self.recipe.as_deref().unwrap_or_default(), |choice| choice.recipe);
        let text = RecipeText::read(name)?;
        let recipe = text.load()?;
        let asked = chosen.as_ref().map(|choice| choice.format).or(self.formats.first().copied());
        let several = self.formats.len() > 1;
        different(&self.formats)?;
        if several && chosen.is_some() {
            let calibrated = if recipe.needs_calibration() { " --calibration default" } else { "" };
            let fix = format!("--recipe {}{calibrated}", recipe.label());
            let found = "several formats for a recipe to be chosen";
            return Err(BadInput::new("--format", found, "a --recipe, or one --format").with_fix(fix).into());
        }
        let (format, out) = match &self.out {
            // With several formats it is the folder of their outputs.
            Some(out) if several => (asked, out.clone()),
            Some(out) => {
                let destination = Destination::of_recipe(&self.model, &recipe, asked, out)?;
                (destination.format(&recipe, asked), destination.path)
            }
            None => {
                let container = asked.unwrap_or_else(|| recipe.container());
                (asked, default_out(&self.model, &recipe, container))
            }
        };
        let container = format.unwrap_or_else(|| recipe.container());
        // A chosen recipe that is better with a calibration gets the built-in text, if no other is given.
        let importance = container.facts().importance && self.imatrix.is_none();
        let needed = match several {
            true => self.formats.iter().any(|format| recipe.needs_calibration_in(*format)),
            false => recipe.needs_calibration_in(container),
        };
        let defaults = match chosen {
            Some(_) => needed || importance,
            // So does a recipe that cannot do without, if the model can read it.
            None => needed && self.imatrix.is_none() && self.model.has_tokenizer(),
        };
        let calibration = if defaults { self.calibration.or_default() } else { self.calibration };
        let stands_for = self.recipe.as_deref().and_then(spelled_out);
        let weights = WeightOptions {
            recipe: text,
            format: format.map(Format),
            tables: self.tables,
            keep: self.keep,
            split: self.measure.text.split.clone(),
            calibration,
            hold_out: self.hold_out,
            imatrix: self.imatrix,
            calibration_dtype: self.calibration_dtype,
            route_all_experts: self.route_all_experts,
            round: self.round,
            max_shard_size: self.max_shard_size,
            seed: 0,
        };
        let formats = if several { self.formats.into_iter().map(Format).collect() } else { Vec::new() };
        let job = Quantize {
            source: self.model,
            out,
            weights,
            formats,
            measure: self.measure,
            measure_on_default: chosen.is_some(),
            traffic: self.traffic,
            targets: self.targets.into_iter().map(TargetName).collect(),
            unverified: !self.verify,
            restart: self.restart,
        };
        Ok(ResolvedQuantize { job, stands_for, chosen })
    }

    /// Chooses a recipe, if none is given.
    fn choice(&self, source: Option<&ModelFiles>) -> Result<Option<RecipeChoice>> {
        if self.recipe.is_some() {
            return Ok(None);
        }
        let format = self.formats.first().copied();
        let choose = |source: &ModelFiles| choose::choose(source, &self.targets, self.bits, format);
        Ok(Some(match source {
            Some(source) => choose(source)?,
            None => choose(&open_quietly(&self.model)?)?,
        }))
    }
}

impl ResolvedQuantize {
    /// Completes the job with the seed of all random numbers, which decides neither recipe nor place.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.job.weights.seed = seed;
        self
    }
}

/// Refuses a format that is given twice.
fn different(formats: &[Container]) -> Result<()> {
    let twice = (1..formats.len()).find(|&i| formats[..i].contains(&formats[i]));
    let found = |i: usize| format!("{} twice", formats[i].name());
    twice.map_or(Ok(()), |i| Err(BadInput::new("--format", found(i), "each format once").into()))
}
