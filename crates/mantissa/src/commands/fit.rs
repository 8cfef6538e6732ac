//! `mantissa fit`: chooses scheme and method of every layer by measured KL, under a budget.

mod args;
mod budget;
mod done;
mod families;
mod front;
mod layers;
mod measure;
mod page;
mod windows;

use anyhow::Result;
use mantissa_advise::sensitivity::Baseline;
use mantissa_advise::shape;
use mantissa_eval::Sequence;
use mantissa_jobs::destination::Destination;
use mantissa_jobs::names::Format;
use mantissa_jobs::record::Recordable;
use mantissa_jobs::{Quantize, RecipeText, WeightOptions};
use mantissa_num::parse_activation;
use mantissa_plan::precision::KVS;
use mantissa_plan::shape::ModelShape;
use mantissa_quant::allocate::{AllocateError, Allocation};
use mantissa_quant::{Check, Options, Outcome, Plan, Recipe, Recorded, Start, TaskRuns, dequantized_source};
use mantissa_store::convention::{Container, ModelFiles, native};
use mantissa_store::{FileDigest, Kind, Paths, WorkFolder, write_file_atomic};

pub use self::args::Args;

use self::args::{PLAIN_CACHE, RECIPE};
use self::budget::Budget;
use self::done::{Done, human};
use self::families::{Candidates, candidates, recipe_text};
use self::measure::{Cache, Candidate, Family, Row, Search, Uniform};
use super::execute::Execute;
use super::lint;
use super::model::{self};
use super::outcome::{carry_out, left_by_another};
use crate::context::Context;
use crate::error::{BadInput, Exit, exit_of};
use crate::help::Group;
use crate::interrupt;
use crate::output::written;

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// Invalid recipe arguments.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.calibration.paths(paths);
        self.measure.paths(paths);
        let destination = destination(self)?;
        paths.write("--out", &destination.path, destination.kind());
        self.save_recipe.iter().for_each(|path| paths.write("--save-recipe", path, Kind::File));
        self.measurements.iter().for_each(|path| paths.write_about("--measurements", path, &*self.model));
        self.html.iter().for_each(|path| paths.write("--html", path, Kind::File));
        Ok(())
    }

    /// # Errors
    /// A budget that no choice meets; input that cannot be quantized; I/O;
    /// [`GateFailed`](crate::error::GateFailed) if an engine would refuse the result or it does not verify.
    fn run(&self, context: &Context) -> Result<()> {
        let out = destination(self)?.path;
        let source = dequantized_source(model::open(&self.model, context)?)?;
        let tasks = self.measure.tasks(&self.model, &source, context)?;
        let (measured_on, rest) = windows::windows(self, context)?;
        let options = Options {
            threads: context.threads,
            container: self.format,
            calibration: self.calibration.load(&source, None, context)?,
            ..Options::default()
        };
        let calibrated = options.calibration.is_some();
        let plan = |mut recipe: Recipe| -> Result<Plan> {
            let container = self.format.unwrap_or_else(|| recipe.container());
            self.tables.value().apply(&mut recipe, &source, container)?;
            Ok(Plan::new(&source, recipe, options.clone())?)
        };
        let Candidates { mut families, mut left_out, apart } = candidates(self, &source, &plan)?;
        let plans: Vec<&Plan> = families.iter().flat_map(Family::all_plans).collect();
        context
            .require_memory("fit", needed(self, context, &source, &plans, &measured_on, (&rest, &tasks))?)?;
        let shape = shape::of_config(&self.model.named().display().to_string(), &plans[0].config);
        let limit = self.budget.limit(plans[0], &shape)?;
        let kv = caches((self, calibrated), &shape, &families, &mut left_out)?;
        // A budget that no choice meets is refused before anything is measured.
        for family in &mut families {
            family.kv = kv.iter().map(|cache| cache.candidate(0.0, 0.0)).collect();
        }
        best(&families, |family| choose(family, &family.sizes(), limit, &self.budget))?;
        let known = self.measurements.as_deref().map_or(Ok(Vec::new()), measure::read)?;
        apart.iter().for_each(|why| context.note(why));
        let work = WorkFolder::begin(&out, "fit", &key(&families, &source, &measured_on)?)?;
        context.warn_all(&left_out)?;
        work.others().iter().for_each(|path| context.warn(&left_by_another(path)));
        let left =
            format!("measurements are kept in {}; rerun the same command to resume", work.path().display());
        let leaving = interrupt::leaving(format!("Interrupted: {left}"));
        let container = families[0].plans[0].plan.container;
        let search = Search {
            work: &work,
            context,
            source: &source,
            windows: &measured_on,
            known,
            kv,
            limit: self.time_limit,
            several: self.method.len() > 1,
        };
        let searched = search.measure(families).and_then(|(families, all)| {
            if let Some(path) = &self.measurements {
                write_file_atomic(&context.output(path)?, measure::text(&all)?.as_bytes())?;
            }
            let front = front::front(&families);
            let (at, found) = best(&families, |family| choose(family, &family.costs, limit, &self.budget))?;
            let family = &families[at];
            let (rows, outcome) = write(self, context, &source, family, &found, (plan, rest, tasks))?;
            let kv = family.kv_chosen(&found).cloned();
            Ok((family.methods_of(&found), rows, (found, kv), front, outcome))
        });
        drop(leaving);
        let (method, rows, (found, kv), front, outcome) = match searched {
            Ok(done) => done,
            // The same command would fail again, so nothing is kept.
            Err(error) if exit_of(&error) == Exit::Input => {
                work.remove()?;
                return Err(error);
            }
            Err(error) => return Err(error.context(left)),
        };
        // Removed only now, so that a rerun after a kill need not measure again.
        work.remove()?;
        let done = Done {
            output: written(&out, container, &outcome),
            method,
            units: &rows,
            predicted_kl: found.cost,
            predicted_kl_bound: found.bound,
            front: &front,
            left_out: &left_out,
            apart: &apart,
            windows: measured_on.len(),
            scaled: self.method.len() > 1,
            quality: &outcome.quality,
            verification: outcome.verification.as_ref().map(|(verification, _)| verification),
            served: self.budget.served(kv, &shape, outcome.quality.bytes),
            page: self.html.as_ref(),
        };
        if let Some(file) = &self.html {
            page::page(self.model.named(), &done).write(&context.output(file)?)?;
        }
        context.report(&done, |out| human(out, &done, self.layers))
    }
}

/// Resolves the output by the first candidate.
fn destination(args: &Args) -> Result<Destination> {
    let container = match (args.format, args.schemes.is_empty()) {
        (Some(format), _) => format,
        (None, true) => native::CONTAINER,
        (None, false) => {
            let names = args.method.iter().flat_map(|m| args.schemes.iter().map(move |s| format!("{m}-{s}")));
            let mut recipes = names.map(|name| Recipe::load(&name));
            let first = recipes.next().unwrap_or_else(|| Recipe::load(""));
            // Another method may take the schemes that the first does not.
            first.or_else(|error| recipes.find_map(Result::ok).ok_or(error))?.container()
        }
    };
    Ok(Destination::of_format(args.model.job_path(), "fit", container, &args.out)?)
}

/// Returns the family with the smallest cost, and its allocation; the error of the first if no family has one.
fn best(families: &[Family], choose: impl Fn(&Family) -> Result<Allocation>) -> Result<(usize, Allocation)> {
    let mut found: Option<(usize, Allocation)> = None;
    let mut error = None;
    for (at, family) in families.iter().enumerate() {
        match choose(family) {
            Ok(new) if found.as_ref().is_none_or(|(_, old)| new.cost < old.cost) => found = Some((at, new)),
            Ok(_) => {}
            Err(refused) => error = error.or(Some(refused)),
        }
    }
    found.ok_or_else(|| {
        error.unwrap_or_else(|| BadInput::new("--method", "none", "at least one method").into())
    })
}

/// Writes the recipe that `found` chose and the output, which is evaluated on `rest` and `tasks`.
fn write(
    args: &Args,
    context: &Context,
    source: &ModelFiles,
    family: &Family,
    found: &Allocation,
    (plan, rest, tasks): (impl Fn(Recipe) -> Result<Plan>, Vec<Sequence>, Option<TaskRuns>),
) -> Result<(Vec<Row>, Outcome)> {
    let rows = family.rows(found);
    let text = recipe_text(family, args.format, found);
    if let Some(path) = &args.save_recipe {
        write_file_atomic(&context.output(path)?, text.as_bytes())?;
    }
    let plan = plan(Recipe::from_toml(RECIPE, &text)?)?;
    lint::check_plan(&plan, source, &args.targets, context)?;
    let evaluation = args.measure.evaluation_on(source, " (held-out windows)", rest)?;
    context.warn_all(&plan.notes)?;
    let record = record(args, text, plan.container, context)?;
    let plan = plan.with_record(record).with_evaluation(Some(evaluation)).with_tasks(tasks);
    let plan = plan.with_check(Check::Verify(Some(args.model.to_path_buf())));
    let outcome =
        carry_out(&plan, source, &context.output(&destination(args)?.path)?, Start::Resume, context)?;
    Ok((rows, outcome))
}

/// Returns the record of a quantization by the recipe that was found, with the calibration of the command.
fn record(args: &Args, recipe: String, format: Container, context: &Context) -> Result<Recorded> {
    let weights = WeightOptions {
        recipe: RecipeText { name: RECIPE.to_owned(), text: Some(recipe) },
        format: Some(Format(format)),
        tables: args.tables.value(),
        calibration: args.calibration.value(),
        seed: context.seed,
        ..WeightOptions::default()
    };
    Ok(Quantize { weights, ..Quantize::default() }.record()?)
}

/// Predicts the peak memory. The source stays in memory while candidates are made and measured; the output is
/// also evaluated and verified.
fn needed(
    args: &Args,
    context: &Context,
    source: &ModelFiles,
    plans: &[&Plan],
    measured_on: &[Sequence],
    (rest, tasks): (&[Sequence], &Option<TaskRuns>),
) -> Result<u64> {
    let making = plans.iter().map(|plan| plan.peak_bytes(false)).max().unwrap_or(0);
    let baseline = Baseline::bytes(source, measured_on, context.threads)?;
    let mut last = 0;
    for plan in plans {
        let evaluation = args.measure.evaluation_on(source, "", rest.to_vec())?;
        let plan = (*plan).clone().with_evaluation(Some(evaluation)).with_tasks(tasks.clone());
        last = plan.peak_bytes(true).max(last);
    }
    // With several methods each candidate also runs whole, beside the source.
    let whole = match args.method.len() > 1 {
        true => {
            let candidate = plans.iter().map(|plan| plan.output_bytes()).max().unwrap_or(0);
            source.checkpoint().total_bytes().saturating_add(candidate)
        }
        false => 0,
    };
    let needs = last.max(baseline.saturating_add(making.max(whole)));
    Ok(model::BASE.saturating_add(needs).saturating_add(needs / 10))
}

/// Returns the key of all measurements: a hash of everything that decides them.
fn key(families: &[Family], source: &ModelFiles, windows: &[Sequence]) -> Result<String> {
    let of = |family: &Family| -> Result<Vec<String>> {
        let key = |uniform: &Uniform| measure::key(&uniform.plan, &family.units, source, windows);
        family.plans.iter().map(key).collect()
    };
    let keys = families.iter().map(of).collect::<Result<Vec<_>>>()?;
    Ok(format!("mantissa fit 3 {}", FileDigest::of(format!("{keys:?}").as_bytes()).hex()))
}

/// Chooses among the candidates `units` of a family.
fn choose(family: &Family, units: &[Vec<Candidate>], limit: u64, budget: &Budget) -> Result<Allocation> {
    family.allocate(&family.choices(units), limit).map_err(|error| match error {
        AllocateError::Budget { budget: limit, least } => {
            budget.exceeded(&family.plans[0].plan, limit, least).into()
        }
        error => BadInput::new("--schemes", error.to_string(), "schemes under which the KL is finite").into(),
    })
}

/// Returns the schemes of the KV cache that every candidate's format stores, with their bits; none if its bytes do not
/// count. Those left out are added to `left_out`. A static scheme needs a calibration; it is measured with a scale of each
/// head and token.
fn caches(
    (args, calibrated): (&Args, bool),
    shape: &ModelShape,
    families: &[Family],
    left_out: &mut Vec<String>,
) -> Result<Vec<Cache>> {
    let Budget::Serving(serving) = &args.budget else { return Ok(Vec::new()) };
    let plans = || families.iter().flat_map(|family| &family.plans).map(|uniform| &uniform.plan);
    let mut found = Vec::new();
    for kv in KVS {
        let stored = |scheme: &str| -> Result<(), String> {
            let parsed = parse_activation(scheme).map_err(|error| error.to_string())?;
            plans().try_for_each(|plan| plan.container.check_kv(&parsed)).map_err(|error| error.to_string())
        };
        let fixed = format!("{}@static", kv.scheme);
        let scheme = if kv.by_head == PLAIN_CACHE {
            Ok(PLAIN_CACHE.to_owned())
        } else if stored(kv.by_head).is_ok() {
            Ok(kv.by_head.to_owned())
        } else {
            match stored(&fixed) {
                Ok(()) if calibrated => Ok(fixed),
                Ok(()) => Err("its scales need --calibration".to_owned()),
                Err(error) => Err(error),
            }
        };
        match scheme {
            Ok(scheme) => {
                let bits = 8 * serving.kv_bytes(&kv, shape);
                found.push(Cache { policy: kv.by_head.parse()?, scheme, bits });
            }
            Err(error) => left_out.push(format!("KV cache {}: left out: {error}", kv.name)),
        }
    }
    Ok(found)
}
