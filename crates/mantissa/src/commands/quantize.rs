//! `mantissa quantize`: makes a verified quantized model from a dense one.

mod args;
mod done;
mod planned;
mod preview;
mod request;
mod several;

use std::time::Instant;

use anyhow::Result;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::{Check, Plan, Recipe, SchemeShare, Start, as_in_gguf, dequantized_source};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;

pub use self::args::Args;
pub use self::done::fallback_line;
use self::done::{Done, human, layer_notes};
use self::planned::{options, plan};
use self::preview::{DryRun, share_line};
use self::request::{Request, measure_on_default};
use super::adapt;
use super::choose::predict;
use super::coverage;
use super::execute::Execute;
use super::model;
use super::outcome::carry_out;
use super::parse::kind_of;
use crate::context::Context;
use crate::help::Group;
use crate::output::bytes;

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// Invalid recipe arguments.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.calibration.paths(paths);
        self.measure.paths(paths);
        [&self.imatrix, &self.traffic].into_iter().flatten().for_each(|path| paths.read(path));
        let file = self.recipe.iter().filter(|recipe| Recipe::is_file(recipe) && self.recipe_text.is_none());
        file.for_each(|recipe| paths.read(recipe));
        if !self.dry_run {
            let source = self.recipe.is_none().then(|| model::open_quietly(&self.model)).transpose()?;
            let request = Request::of(self, source.as_ref())?;
            match self.formats.as_slice() {
                several @ [_, _, ..] => several::paths(&request.out, several, paths)?,
                _ => paths.write("--out", &request.out, kind_of(request.container())),
            }
        }
        Ok(())
    }

    /// # Errors
    /// Input that cannot be quantized, before anything is written; I/O;
    /// [`QuantError::Gate`](mantissa_quant::QuantError::Gate) if the loss exceeds --max-kl or
    /// --max-accuracy-drop,
    /// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if the output does not verify. An old
    /// output then stays in place.
    fn run(&self, context: &Context) -> Result<()> {
        let source = dequantized_source(model::open(&self.model, context)?)?;
        let request = Request::of(self, Some(&source))?;
        let source = match self.formats.len() <= 1 && request.container().facts().one_file {
            true => as_in_gguf(source)?,
            false => source,
        };
        // A bad task file is refused before a calibration text is read.
        let tasks = self.measure.tasks(&self.model, &source, context)?;
        if self.formats.len() > 1 {
            return several::run(self, request, (&source, tasks), context);
        }
        let options = options(self, request, &source, context)?;
        let tokens = options.calibration.as_ref().map_or(0, CalibrationSet::tokens);
        let mut plan = plan(self, &source, request.recipe.clone(), options, context)?;
        let another = self.calibration.is_text();
        plan.evaluation = self.measure.evaluation(&self.model, &source, another, context)?;
        plan.tasks = tasks;
        if request.chosen.is_some() && plan.evaluation.is_none() {
            measure_on_default(&mut plan, &source, self.verify, context)?;
        }
        let least = adapt::fit_plan(&mut plan, "quantize", self.verify, context)?;
        let peak = plan.peak_bytes(self.verify);
        // Measures the speed of this machine, so only where it is shown.
        let shown = self.dry_run || request.chosen.is_some();
        let seconds = shown.then(|| predict::seconds(&plan, tokens, context.threads));
        request.announce(self, &plan, (seconds, peak), context);
        if let (true, Some(seconds)) = (self.dry_run, seconds) {
            let report = DryRun::of(&plan, &source, request, (self.verify, least, seconds));
            return context.report(&report, |out| report.human(out));
        }
        context.note(&share_note(&plan, &source));
        context.warn_all(&plan.notes)?;
        if self.verify {
            plan.check = Check::Verify(Some(self.model.to_path_buf()));
        }
        plan.coverage = coverage::find(&plan, &source, self.traffic.as_deref(), context)?;
        let start = Instant::now();
        let begin = if self.restart { Start::Restart } else { Start::Resume };
        let outcome = carry_out(&plan, &source, &context.output(&request.out)?, begin, context)?;
        let done = Done::new((self, request, &source), (&plan, &outcome), &request.out, start.elapsed());
        context.report(&done, |out| human(out, &done, self.layers))?;
        context.warn_all(&layer_notes(&outcome.quality))
    }
}

/// Returns the share of the parameters that the plan quantizes, and the expected bytes of each scheme.
fn share_note(plan: &Plan, source: &ModelFiles) -> String {
    let share = plan.share(source);
    let scheme = |scheme: &SchemeShare| {
        format!("{} {}", scheme.scheme.as_deref().unwrap_or("unquantized"), bytes(scheme.bytes))
    };
    let schemes = share.schemes.iter().map(scheme).collect::<Vec<_>>().join(", ");
    format!("{}; expected {} ({schemes})", share_line(&share), bytes(plan.output_bytes()))
}
