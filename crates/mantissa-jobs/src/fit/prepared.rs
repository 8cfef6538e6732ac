//! Fit that is planned and fits into memory: nothing is measured yet.

use std::path::Path;

use mantissa_advise::sensitivity::Baseline;
use mantissa_advise::shape;
use mantissa_eval::Sequence;
use mantissa_num::parse_activation;
use mantissa_plan::precision::KVS;
use mantissa_plan::shape::ModelShape;
use mantissa_quant::allocate::{AllocateError, Allocation};
use mantissa_quant::{Check, Options, Outcome, Plan, Recipe, Recorded, Start, TaskRuns, dequantized_source};
use mantissa_ranks::Team;
use mantissa_store::convention::{Container, ModelFiles};
use mantissa_store::{FileDigest, WorkFolder, write_file_atomic};

use super::budget::Budget;
use super::families::{Candidates, candidates, groups_taken, recipe_text};
use super::family::{Cache, Candidate, Family, Row, Uniform};
use super::front::front;
use super::search::{self, Measured, Search};
use super::{Fit, FitReport, PLAIN_CACHE, RECIPE, windows};
use crate::adapt;
use crate::error::{BadInput, Class, InPlace, JobError, Result};
use crate::execute::{self, left_by_another};
use crate::host::Host;
use crate::lint::{self, Remedies};
use crate::model;
use crate::names::Format;
use crate::quantize::{Quantize, RecipeText, WeightOptions};
use crate::record::Recordable;

/// Fit that is planned: the source is open, texts are tokenized, and every candidate has a plan within the budget.
pub struct PreparedFit<'a> {
    job: &'a Fit,
    source: ModelFiles,
    options: Options,
    families: Vec<Family>,
    left_out: Vec<String>,
    apart: Vec<String>,
    shape: ModelShape,
    kv: Vec<Cache>,
    /// Budget in bits of what is chosen.
    limit: u64,
    /// Windows to choose on.
    measured_on: Vec<Sequence>,
    /// Windows to evaluate on.
    rest: Vec<Sequence>,
    tasks: Option<TaskRuns>,
    /// Predicted peak memory in bytes.
    pub needs: u64,
}

/// Allocation of a family, with what was written by it.
struct Found {
    method: String,
    rows: Vec<Row>,
    allocation: Allocation,
    kv: Option<Candidate>,
    front: Vec<super::FitPoint>,
    plan: Plan,
    outcome: Outcome,
}

impl Fit {
    /// Opens the source, tokenizes the texts, and plans every candidate within the memory of `host`. A budget that no
    /// choice meets is refused before anything is measured.
    ///
    /// # Errors
    /// Input that cannot be quantized; a budget that no choice meets; [`OverMemory`](crate::OverMemory).
    pub fn prepare(&self, host: &Host) -> Result<PreparedFit<'_>> {
        let source = dequantized_source(model::open(&self.source, host)?)?;
        adapt::require_tokenizer(&source, "fit", host)?;
        let tasks = self.measure.tasks(&self.source, &source, host)?;
        let (measured_on, rest) = windows::windows(self, host)?;
        let options = Options {
            threads: host.threads,
            container: self.format_asked(),
            calibration: self.calibration.load(&source, None, self.seed, host)?,
            ..Options::default()
        };
        groups_taken(self, &source)?.iter().for_each(|note| host.note(note));
        let plan = |recipe: Recipe| self.plan(&source, recipe, &options);
        let Candidates { mut families, mut left_out, apart } = candidates(self, &source, &plan)?;
        let plans: Vec<&Plan> = families.iter().flat_map(Family::all_plans).collect();
        let needs = self.needs((&source, host.threads), &plans, &measured_on, (&rest, &tasks))?;
        host.require_memory("fit", needs)?;
        let shape = shape::of_config(&self.source.named().display().to_string(), &plans[0].config);
        let limit = self.budget.limit(plans[0], &shape)?;
        let kv = caches((self, options.calibration.is_some()), &shape, &families, &mut left_out)?;
        for family in &mut families {
            family.kv = kv.iter().map(|cache| cache.candidate(0.0, 0.0)).collect();
        }
        best(&families, |family| choose(family, &family.sizes(), limit, &self.budget))?;
        Ok(PreparedFit {
            job: self,
            source,
            options,
            families,
            left_out,
            apart,
            shape,
            kv,
            limit,
            measured_on,
            rest,
            tasks,
            needs,
        })
    }

    /// Plans the quantization by a recipe, with the tables of the job.
    fn plan(&self, source: &ModelFiles, mut recipe: Recipe, options: &Options) -> Result<Plan> {
        let container = self.format_asked().unwrap_or_else(|| recipe.container());
        self.tables.apply(&mut recipe, source, container)?;
        Ok(Plan::new(source, recipe, options.clone())?)
    }

    /// Predicts the peak memory. The source stays in memory while candidates are made and measured; the output is
    /// also evaluated and verified.
    fn needs(
        &self,
        (source, threads): (&ModelFiles, usize),
        plans: &[&Plan],
        measured_on: &[Sequence],
        (rest, tasks): (&[Sequence], &Option<TaskRuns>),
    ) -> Result<u64> {
        let making = plans.iter().map(|plan| plan.peak_bytes(false)).max().unwrap_or(0);
        let baseline = Baseline::bytes(source, measured_on, threads)?;
        let mut last = 0;
        for plan in plans {
            let evaluation = self.measure.evaluation_on(source, "", rest.to_vec())?;
            let plan = (*plan).clone().with_evaluation(Some(evaluation)).with_tasks(tasks.clone());
            last = plan.peak_bytes(true).max(last);
        }
        // With several methods each candidate also runs whole, beside the source.
        let whole = match self.methods.len() > 1 {
            true => {
                let candidate = plans.iter().map(|plan| plan.output_bytes()).max().unwrap_or(0);
                source.checkpoint().total_bytes().saturating_add(candidate)
            }
            false => 0,
        };
        let needs = last.max(baseline.saturating_add(making.max(whole)));
        Ok(model::BASE.saturating_add(needs).saturating_add(needs / 10))
    }

    /// Returns the record of a quantization by the recipe that was found, with the calibration of the job.
    fn record(&self, recipe: String, format: Container) -> Result<Recorded> {
        let weights = WeightOptions {
            recipe: RecipeText { name: RECIPE.to_owned(), text: Some(recipe) },
            format: Some(Format(format)),
            tables: self.tables.clone(),
            calibration: self.calibration.clone(),
            seed: self.seed,
            ..WeightOptions::default()
        };
        Quantize { weights, ..Quantize::default() }.record()
    }
}

impl PreparedFit<'_> {
    /// Measures the candidates, chooses, and quantizes by the choice. Measurements are kept until the output is in place;
    /// `remedies` words the fixes of what an engine would refuse.
    ///
    /// # Errors
    /// I/O; a stop; [`GateFailed`](crate::GateFailed) if an engine would refuse the result.
    pub fn run(self, remedies: &dyn Remedies, host: &Host) -> Result<FitReport> {
        self.run_with(&Team::alone(), remedies, host)
    }

    /// Measures candidates that no other worker of `team` measures, until each has a result.
    ///
    /// # Errors
    /// I/O; a stop.
    pub(crate) fn take_part(mut self, team: &Team, host: &Host) -> Result<()> {
        let Some(at) = team.scratch()? else { return Ok(()) };
        let families = std::mem::take(&mut self.families);
        self.search(&at, (team, host), Vec::new()).share(&families, &mut Vec::new())
    }

    /// Measures as [`run`](Self::run) does, with the other workers of `team`, which divide the candidates.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_with(mut self, team: &Team, remedies: &dyn Remedies, host: &Host) -> Result<FitReport> {
        let job = self.job;
        let known = job.measurements.as_deref().map_or(Ok(Vec::new()), search::read)?;
        self.apart.iter().for_each(|why| host.note(why));
        let families = std::mem::take(&mut self.families);
        let container = families[0].plans[0].plan.container;
        let work = WorkFolder::begin(&job.out, "fit", &key(&families, &self.source, &self.measured_on)?)?;
        host.warn_all(&self.left_out)?;
        work.others().iter().for_each(|path| host.warn(&left_by_another(path)));
        let left =
            format!("measurements are kept in {}; rerun the same command to resume", work.path().display());
        let leaving = host.leaving(format!("Interrupted: {left}"));
        let kv = std::mem::take(&mut self.kv);
        let search = Search { kv, ..self.search(work.path(), (team, host), known) };
        let found = search.measure(families).and_then(|(families, all)| {
            if let Some(path) = &job.measurements {
                write_file_atomic(&host.output(path)?, search::text(&all)?.as_bytes())?;
            }
            self.write(&families, remedies, host)
        });
        drop(leaving);
        let found = match found {
            Ok(found) => found,
            // The same job would fail again, so nothing is kept.
            Err(error) if error.class() == Class::Input => {
                work.remove()?;
                return Err(error);
            }
            Err(error) => return Err(error).at(left),
        };
        // Removed only now, so that a rerun after a kill need not measure again.
        work.remove()?;
        let served = job.budget.served(found.kv, &self.shape, found.outcome.quality.bytes);
        Ok(FitReport {
            source: self.source,
            plan: found.plan,
            outcome: found.outcome,
            container,
            method: found.method,
            units: found.rows,
            predicted_kl: found.allocation.cost,
            predicted_kl_bound: found.allocation.bound,
            front: found.front,
            left_out: self.left_out,
            apart: self.apart,
            windows: self.measured_on.len(),
            served,
        })
    }

    /// Makes the search, without schemes of the KV cache.
    fn search<'a>(
        &'a self,
        at: &'a Path,
        (team, host): (&'a Team, &'a Host),
        known: Vec<Measured>,
    ) -> Search<'a> {
        let (source, windows) = (&self.source, &self.measured_on[..]);
        let (limit, several) = (self.job.time_limit, self.job.methods.len() > 1);
        Search { at, team, host, source, windows, known, kv: Vec::new(), limit, several }
    }

    /// Chooses among the measured candidates; writes the recipe and the output.
    fn write(&self, families: &[Family], remedies: &dyn Remedies, host: &Host) -> Result<Found> {
        let (job, source) = (self.job, &self.source);
        let front = front(families);
        let (at, found) = best(families, |family| choose(family, &family.costs, self.limit, &job.budget))?;
        let family = &families[at];
        let rows = family.rows(&found);
        let text = recipe_text(family, job.format_asked(), &found);
        if let Some(path) = &job.save_recipe {
            write_file_atomic(&host.output(path)?, text.as_bytes())?;
        }
        let plan = job.plan(source, Recipe::from_toml(RECIPE, &text)?, &self.options)?;
        lint::check_plan(&plan, source, job.targets.iter().map(|target| &target.0), remedies, host)?;
        let evaluation = job.measure.evaluation_on(source, " (held-out windows)", self.rest.clone())?;
        host.warn_all(&plan.notes.iter().map(|note| by_option(note)).collect::<Vec<_>>())?;
        let record = job.record(text, plan.container)?;
        let plan = plan.with_record(record).with_evaluation(Some(evaluation)).with_tasks(self.tasks.clone());
        let plan = plan.with_check(Check::Verify(Some(job.source.to_path_buf())));
        let outcome = execute::run(&plan, source, &host.output(&job.out)?, Start::Resume, host)?;
        let kv = family.kv_chosen(&found).cloned();
        Ok(Found { method: family.methods_of(&found), rows, allocation: found, kv, front, plan, outcome })
    }
}

/// Rewrites a note whose fix edits the file of the recipe found, which nobody has, as one by an option.
fn by_option(note: &str) -> String {
    let edit = |fix: &str| {
        let method = fix.strip_prefix("method = \"")?.strip_suffix(RECIPE)?.strip_suffix("\" in ")?;
        Some(format!("--method {method}"))
    };
    let split = note.split_once("; fix: ");
    let changed = split.and_then(|(what, fix)| Some(format!("{what}; fix: {}", edit(fix)?)));
    changed.unwrap_or_else(|| note.to_owned())
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

/// Returns the key of all measurements: a hash of everything that decides them.
fn key(families: &[Family], source: &ModelFiles, windows: &[Sequence]) -> Result<String> {
    let of = |family: &Family| -> Result<Vec<String>> {
        let key = |uniform: &Uniform| search::key(&uniform.plan, &family.units, source, windows);
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
    (job, calibrated): (&Fit, bool),
    shape: &ModelShape,
    families: &[Family],
    left_out: &mut Vec<String>,
) -> Result<Vec<Cache>> {
    let Budget::Serving(serving) = &*job.budget else { return Ok(Vec::new()) };
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
                let policy =
                    kv.by_head.parse().map_err(|error: mantissa_model::KvParseError| -> JobError {
                        BadInput::new("--budget", error.to_string(), "a scheme of the KV cache").into()
                    })?;
                found.push(Cache { policy, scheme, bits });
            }
            Err(error) => left_out.push(format!("KV cache {}: left out: {error}", kv.name)),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixes_name_options_instead_of_a_file_that_is_not_there() {
        let note = "t.txt: rtn does not calibrate; fix: method = \"gptq\" in fit.toml";
        assert_eq!(by_option(note), "t.txt: rtn does not calibrate; fix: --method gptq");
        let other = "t.txt: not used; fix: --method gptq";
        assert_eq!(by_option(other), other);
    }
}
