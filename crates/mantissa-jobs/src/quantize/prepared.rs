//! Quantization that is planned and fits into memory: nothing is written yet.

use std::time::Instant;

use mantissa_model::Products;
use mantissa_num::Rounding;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::{
    Check, Coverage, Importance, Options, Plan, Start, TaskRuns, as_in_gguf, dequantized_source,
};
use mantissa_ranks::Team;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{DEFAULT_SHARD_BYTES, disk};

use super::{CalibrationDtype, Quantize, QuantizeReport, RoundChoice};
use crate::adapt;
use crate::coverage;
use crate::default_text;
use crate::error::{BadInput, InPlace, Result};
use crate::execute;
use crate::host::Host;
use crate::lint::{self, Remedies};
use crate::model;
use crate::names::Format;
use crate::record::Recordable;
use crate::text::bytes;

/// Quantization that is planned: the source is open, texts are tokenized, every layer has its scheme.
pub struct PreparedQuantize<'a> {
    job: &'a Quantize,
    /// Source as the plans read it.
    pub source: ModelFiles,
    /// Plan of each output.
    pub plans: Vec<Plan>,
    /// Smallest memory ceiling that accepts each plan, in bytes.
    pub least_memory: Vec<u64>,
    /// Number of calibration tokens.
    pub calibration_tokens: usize,
}

impl Quantize {
    /// Opens the source, tokenizes the texts, and plans every output within the memory of `host`; `remedies` words the
    /// fixes of what an engine would refuse.
    ///
    /// # Errors
    /// Input that cannot be quantized; [`GateFailed`](crate::GateFailed) for what an engine would not run;
    /// [`OverMemory`](crate::OverMemory).
    pub fn prepare(&self, remedies: &dyn Remedies, host: &Host) -> Result<PreparedQuantize<'_>> {
        let source = dequantized_source(model::open(&self.source, host)?)?;
        let containers = self.containers()?;
        let source = match containers.as_slice() {
            [one] if one.is_one_file() => as_in_gguf(source)?,
            _ => source,
        };
        adapt::require_tokenizer(&source, "quantize", host)?;
        // A bad task file is refused before a calibration text is read.
        let tasks = self.measure.tasks(&self.source, &source, host)?;
        let options = self.options(&source, host)?;
        let calibration_tokens = options.calibration.as_ref().map_or(0, CalibrationSet::tokens);
        let plans = match self.formats.is_empty() {
            true => vec![self.plan(&source, self.weights.format, &options, remedies, host)?],
            false => {
                let plan = |format: &Format| self.plan(&source, Some(*format), &options, remedies, host);
                self.formats.iter().map(plan).collect::<Result<_>>()?
            }
        };
        let plans = self.measured(plans, &source, tasks, host)?;
        let (mut fitting, mut least_memory) = (Vec::with_capacity(plans.len()), Vec::new());
        for plan in plans {
            let (plan, least) = adapt::fit_plan(plan, "quantize", self.verifies(), host)?;
            let check = match self.verifies() {
                true => Check::Verify(Some(self.source.to_path_buf())),
                false => Check::Load,
            };
            fitting.push(plan.with_check(check));
            least_memory.push(least);
        }
        Ok(PreparedQuantize { job: self, source, plans: fitting, least_memory, calibration_tokens })
    }

    /// Makes the options of all plans.
    fn options(&self, source: &ModelFiles, host: &Host) -> Result<Options> {
        let weights = &self.weights;
        let rounding = match weights.round {
            RoundChoice::Nearest => Rounding::NearestEven,
            RoundChoice::Stochastic => Rounding::Stochastic { seed: weights.seed },
        };
        let apart = (weights.hold_out, weights.seed);
        let loaded = weights.calibration.load_apart(source, weights.split.as_deref(), apart, host)?;
        if loaded.is_none() && (weights.hold_out > 0 || self.traffic.is_some()) {
            let option = if weights.hold_out > 0 { "--hold-out" } else { "--traffic" };
            let allowed = "--calibration or --calibration-tokens with it";
            return Err(BadInput::new(option, "neither", allowed).into());
        }
        let (calibration, held_out) = loaded.unzip();
        Ok(Options {
            threads: host.threads,
            max_shard_bytes: weights.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
            max_gguf_bytes: weights.max_shard_size,
            rounding,
            calibration,
            held_out: held_out.unwrap_or_default(),
            products: match weights.calibration_dtype {
                CalibrationDtype::F32 => Products::F32,
                CalibrationDtype::Bf16 => Products::Bf16,
            },
            route_all_experts: weights.route_all_experts,
            importance: weights.imatrix.as_deref().map(Importance::read).transpose()?,
            ..Options::default()
        })
    }

    /// Makes the plan of one output, and refuses one that an engine would not run.
    fn plan(
        &self,
        source: &ModelFiles,
        format: Option<Format>,
        options: &Options,
        remedies: &dyn Remedies,
        host: &Host,
    ) -> Result<Plan> {
        let mut recipe = self.weights.recipe.load()?;
        let container = format.map_or_else(|| recipe.container(), |format| format.0);
        self.weights.tables.apply(&mut recipe, source, container)?;
        let whole = recipe.clone();
        let kept = self.weights.kept()?;
        mantissa_quant::require_modules(source, &kept)?;
        recipe.keep(kept);
        let mut recorded = self.clone();
        recorded.weights.format = Some(Format(container));
        let options = Options {
            container: format.map(|format| format.0),
            rebuild: Some(recorded.record()?),
            ..options.clone()
        };
        let targets = || self.targets.iter().map(|target| &target.0);
        let loads = |plan: &Plan| lint::loads(plan, source, targets());
        let plan = Plan::new_for(source, recipe.clone(), options.clone(), &loads);
        let plan = plan.map_err(|error| lint::advised(error, source, (recipe, options), targets()))?;
        lint::check_plan(&plan, source, targets(), remedies, host)?;
        // Named engines are checked above; without one, those that an option costs are named.
        if self.targets.is_empty() && !self.weights.keep.is_empty() {
            let lost = plan.with_recipe(source, whole, container).ok();
            let lost = lost.and_then(|whole| lint::lost(&plan, &whole, source, remedies));
            host.warn_all(&lost.into_iter().collect::<Vec<_>>())?;
        }
        Ok(plan)
    }

    /// Completes the plans with evaluation and tasks.
    fn measured(
        &self,
        plans: Vec<Plan>,
        source: &ModelFiles,
        tasks: Option<TaskRuns>,
        host: &Host,
    ) -> Result<Vec<Plan>> {
        let another = self.weights.calibration.is_text();
        let evaluation = self.measure.evaluation(&self.source, source, another, host)?;
        let on_default = self.measure_on_default && evaluation.is_none();
        let complete = |plan: Plan| plan.with_evaluation(evaluation.clone()).with_tasks(tasks.clone());
        let plans = plans.into_iter().map(complete);
        match on_default {
            true => plans.map(|plan| self.measured_on_default(plan, source, host)).collect(),
            false => Ok(plans.collect()),
        }
    }

    /// Adds a measurement on the held-out part of the built-in text, if memory holds both models.
    fn measured_on_default(&self, plan: Plan, source: &ModelFiles, host: &Host) -> Result<Plan> {
        let measured = plan.clone().with_evaluation(Some(default_text::evaluation(source, None, host)?));
        let least = adapt::smallest_peak(&measured, self.verifies());
        if host.has_memory(least) {
            return Ok(measured);
        }
        host.note(&format!("KL not measured: it would need {} of memory", bytes(least)));
        Ok(plan)
    }
}

impl PreparedQuantize<'_> {
    /// Returns the predicted peak memory in bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.plans.iter().map(|plan| plan.peak_bytes(self.job.verifies())).max().unwrap_or(0)
    }

    /// Divides the layers among the workers of `team`.
    ///
    /// # Errors
    /// [`OverMemory`](crate::OverMemory): layers that are exchanged are held whole.
    pub fn share(&mut self, team: &Team, host: &Host) -> Result<()> {
        let verifies = self.job.verifies();
        for plan in &mut self.plans {
            let shared = plan.clone().with_team(team.clone());
            (*plan, _) = adapt::fit_plan(shared, "quantize", verifies, host)?;
        }
        Ok(())
    }

    /// Shows the notes of the plans as warnings.
    ///
    /// # Errors
    /// As [`Host::warn_all`].
    pub fn warn(&self, host: &Host) -> Result<()> {
        Ok(self.plans.iter().try_for_each(|plan| host.warn_all(&plan.notes))?)
    }

    /// Measures the coverage of the calibration, if there is one.
    ///
    /// # Errors
    /// As [`coverage::find`].
    pub fn coverage(&self, host: &Host) -> Result<Option<Coverage>> {
        match self.plans.first() {
            Some(first) => coverage::find(first, &self.source, self.job.traffic.as_deref(), host),
            None => Ok(None),
        }
    }

    /// Quantizes, and puts the outputs in place when all are complete. Their reports have the `coverage`.
    ///
    /// # Errors
    /// I/O; a stop; [`QuantError::Gate`](mantissa_quant::QuantError::Gate) if the loss exceeds a limit,
    /// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if an output does not verify. An old output
    /// then stays in place.
    pub fn run(&mut self, coverage: Option<Coverage>, host: &Host) -> Result<QuantizeReport> {
        let covered = |plan: Plan| plan.with_coverage(coverage.clone());
        self.plans = std::mem::take(&mut self.plans).into_iter().map(covered).collect();
        if !self.job.formats.is_empty() {
            disk::create_folders(&self.job.out).at(self.job.out.display().to_string())?;
        }
        let places = self.job.places()?;
        let outs = places.iter().map(|(path, _)| host.output(path)).collect::<Result<Vec<_>>>()?;
        let begin = if self.job.restart { Start::Restart } else { Start::Resume };
        let start = Instant::now();
        let outcomes = match (self.plans.as_slice(), outs.as_slice()) {
            ([plan], [out]) => vec![execute::run(plan, &self.source, out, begin, host)?],
            (plans, outs) => execute::run_all(plans, &self.source, outs, begin, host)?,
        };
        Ok(QuantizeReport { outcomes, time: start.elapsed() })
    }
}
