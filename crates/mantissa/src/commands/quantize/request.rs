//! Recipe, format, output and texts of `quantize` where the command line leaves them to be chosen.

use std::path::PathBuf;

use anyhow::Result;
use mantissa_quant::recipe::spelled_out;
use mantissa_quant::{Plan, Rebuild, Recipe};
use mantissa_store::convention::{Container, ModelFiles};

use super::super::adapt;
use super::super::calibration::CalibrationArgs;
use super::super::choose::{self, Choice, predict};
use super::super::default_text;
use super::super::destination::{Destination, default_out};
use super::super::record;
use super::super::text::read_settings;
use super::args::Args;
use crate::context::Context;
use crate::output::bytes;

/// Recipe, format and output: those of the command line, or chosen.
pub(super) struct Request {
    /// Recipe.
    pub(super) recipe: Recipe,
    /// Full name of a recipe that was given by a short one.
    pub(super) stands_for: Option<String>,
    /// Checkpoint format, if given or chosen.
    pub(super) format: Option<Container>,
    /// Output: `--out`, or the name of model and recipe.
    pub(super) out: PathBuf,
    /// Choice of a recipe that was not given.
    pub(super) chosen: Option<Choice>,
}

impl Request {
    /// Reads the recipe, or chooses one for `source`; returns what an earlier call found.
    ///
    /// # Errors
    /// An invalid recipe; no measured recipe that fits.
    pub(super) fn of<'a>(args: &'a Args, source: Option<&ModelFiles>) -> Result<&'a Self> {
        match args.request.get() {
            Some(found) => Ok(found),
            None => {
                let made = Self::new(args, source)?;
                Ok(args.request.get_or_init(|| made))
            }
        }
    }

    fn new(args: &Args, source: Option<&ModelFiles>) -> Result<Self> {
        let chosen = match (&args.recipe, source) {
            (None, Some(source)) => {
                let bits = args.bits.unwrap_or(choose::BITS);
                Some(choose::choose(source, &args.targets, bits, args.formats.first().copied())?)
            }
            _ => None,
        };
        let name = chosen.as_ref().map_or(args.recipe.as_deref().unwrap_or_default(), |choice| choice.recipe);
        let recipe = match &args.recipe_text {
            Some(text) => Recipe::from_toml(name, text)?,
            None => Recipe::load(name)?,
        };
        let format = chosen.as_ref().map(|choice| choice.format).or(args.formats.first().copied());
        let (format, out) = match &args.out {
            // With several formats it is the folder of their outputs.
            Some(out) if args.formats.len() > 1 => (format, out.clone()),
            Some(out) => {
                let destination = Destination::of_recipe(&args.model, &recipe, format, out)?;
                (destination.format(&recipe, format), destination.path)
            }
            None => {
                let container = format.unwrap_or_else(|| recipe.container());
                (format, default_out(&args.model, &recipe, container))
            }
        };
        let stands_for = args.recipe.as_deref().and_then(spelled_out);
        Ok(Request { recipe, stands_for, format, out, chosen })
    }

    /// Returns the checkpoint format of the output.
    pub(super) fn container(&self) -> Container {
        self.format.unwrap_or_else(|| self.recipe.container())
    }

    /// Returns the calibration options: the built-in text for a chosen recipe that is better with one, if no other is given.
    pub(super) fn calibration(&self, args: &Args) -> CalibrationArgs {
        let importance = self.container().facts().importance && args.imatrix.is_none();
        let used = self.chosen.is_some() && (self.recipe.needs_calibration() || importance);
        if used { args.calibration.or_default() } else { args.calibration.clone() }
    }

    /// Returns the command line that makes the same weights again.
    ///
    /// # Errors
    /// A recipe file that cannot be read.
    pub(super) fn rebuild(&self, args: &Args, context: &Context) -> Result<Rebuild> {
        let mut rebuild = record::with(context.job.clone(), &format!("--recipe={}", self.recipe.label()));
        rebuild = record::with(rebuild, &format!("--format={}", self.container().name()));
        if args.calibration.is_empty() && !self.calibration(args).is_empty() {
            rebuild = record::with(rebuild, &format!("--calibration={}", default_text::NAME));
        }
        rebuild.recipe =
            match (&args.recipe_text, args.recipe.as_deref().filter(|name| Recipe::is_file(name))) {
                (Some(text), _) => Some(text.clone()),
                (None, Some(file)) => Some(read_settings(file.as_ref())?),
                (None, None) => None,
            };
        Ok(rebuild)
    }

    /// Prints what a short name stands for and what was chosen, with the predictions for `plan`.
    pub(super) fn announce(
        &self,
        args: &Args,
        plan: &Plan,
        (seconds, peak): (Option<f64>, u64),
        context: &Context,
    ) {
        args.recipe.iter().for_each(|recipe| choose::note_name(recipe, context));
        let (Some(choice), Some(seconds)) = (&self.chosen, seconds) else { return };
        context.note(&format!("recipe {} in {}: {}", choice.recipe, choice.format.name(), choice.why));
        let (out, size) = (self.out.display(), bytes(plan.output_bytes()));
        let time = predict::duration(seconds);
        context.note(&format!("output {out}: {size}; {time} and {} of memory (predicted)", bytes(peak)));
    }
}

/// Measures the output on the held-out part of the built-in text, if memory holds both models.
///
/// # Errors
/// No tokenizer; windows that the model cannot run.
pub(super) fn measure_on_default(
    plan: &mut Plan,
    source: &ModelFiles,
    verified: bool,
    context: &Context,
) -> Result<()> {
    plan.evaluation = Some(default_text::evaluation(source, None, context)?);
    let mut smallest = plan.clone();
    smallest.adapt_memory(verified, |_| false);
    let least = adapt::with_margin(smallest.peak_bytes(verified));
    if !context.has_memory(least) {
        plan.evaluation = None;
        context.note(&format!("KL not measured: it would need {} of memory", bytes(least)));
    }
    Ok(())
}
