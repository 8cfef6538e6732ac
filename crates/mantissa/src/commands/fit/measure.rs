//! Measures the KL of every unit alone under every candidate.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_advise::sensitivity::{Baseline, Unit};
use mantissa_eval::Sequence;
use mantissa_eval::stats::Estimate;
use mantissa_quant::allocate::Allocation;
use mantissa_quant::{Plan, Start};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Journal, Output, WorkFolder, disk, verify_manifest};
use serde::{Deserialize, Serialize};

use super::super::outcome::carry_out;
use crate::context::Context;
use crate::progress::{Unit as Progressed, short};

/// Unit with its KL under each scheme.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) unit: String,
    pub(super) modules: Vec<String>,
    /// Chosen scheme.
    pub(super) scheme: String,
    /// Bits per weight under the chosen scheme.
    pub(super) bits_per_weight: f64,
    pub(super) candidates: Vec<Candidate>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Candidate {
    pub(super) scheme: String,
    pub(super) bits: u64,
    /// Mean KL (nats/token) of the model with this unit alone under the scheme.
    pub(super) kl: f64,
    pub(super) kl_se: f64,
}

/// Candidate schemes under one method.
pub(super) struct Family {
    pub(super) method: String,
    pub(super) plans: Vec<Plan>,
    pub(super) units: Vec<Unit>,
    /// For each unit its candidates, in the order of `plans`; empty until measured.
    pub(super) costs: Vec<Vec<Candidate>>,
}

impl Family {
    /// Makes the family of these plans, at least one.
    pub(super) fn new(method: &str, plans: Vec<Plan>) -> Self {
        let units = plans.first().map(Unit::of_plan).unwrap_or_default();
        Family { method: method.to_owned(), plans, units, costs: Vec::new() }
    }

    /// Returns the candidates of every unit with sizes but no costs.
    pub(super) fn sizes(&self) -> Vec<Vec<Candidate>> {
        let of = |unit| self.plans.iter().map(|plan| candidate(plan, unit, 0.0, 0.0)).collect();
        self.units.iter().map(of).collect()
    }

    /// Returns the units with the schemes chosen.
    pub(super) fn rows(&self, found: &Allocation) -> Vec<Row> {
        let units = self.units.iter().zip(&self.costs).zip(&found.choices);
        units.map(|((unit, candidates), &at)| row(unit, candidates.clone(), at)).collect()
    }
}

fn row(unit: &Unit, candidates: Vec<Candidate>, chosen: usize) -> Row {
    let weights: u64 = unit.linears.iter().map(|l| (l.rows * l.cols) as u64).sum();
    let Candidate { scheme, bits, .. } = candidates[chosen].clone();
    Row {
        unit: unit.name(),
        modules: unit.linears.iter().map(|l| l.module.clone()).collect(),
        scheme,
        bits_per_weight: bits as f64 / weights.max(1) as f64,
        candidates,
    }
}

/// Makes the candidate of a unit under the scheme of `plan`.
fn candidate(plan: &Plan, unit: &Unit, kl: f64, kl_se: f64) -> Candidate {
    let weights = &plan.weights;
    let bits = unit.linears.iter().map(|l| weights.format.total_bits(l.rows, l.cols)).sum();
    Candidate { scheme: weights.to_string(), bits, kl, kl_se }
}

/// Journal line in the work folder: costs of every unit under one scheme.
#[derive(Serialize, Deserialize)]
struct Measured {
    method: String,
    scheme: String,
    costs: Vec<Candidate>,
}

/// Work folder and input of the measurements.
pub(super) struct Search<'a> {
    pub(super) work: &'a WorkFolder,
    pub(super) context: &'a Context,
    pub(super) source: &'a ModelFiles,
    pub(super) windows: &'a [Sequence],
    /// Minutes after which no further scheme is measured.
    pub(super) limit: Option<f64>,
}

impl Search<'_> {
    /// Measures every unit of each family under every scheme, the smallest first. Quantized models are kept in the work
    /// folder while they are measured. Each result is appended to a journal there, so that a rerun after a kill resumes.
    /// After the time limit the schemes that are not measured are left out.
    ///
    /// # Errors
    /// I/O; a model that cannot be quantized or run; warnings under `--strict`.
    pub(super) fn measure(&self, families: Vec<Family>) -> Result<Vec<Family>> {
        let at = self.work.path();
        let mut journal = match Journal::read(at) {
            Some(_) => Journal::reopen(at)?,
            None => Journal::create(at)?,
        };
        let known: Vec<Measured> = Journal::read(at)
            .unwrap_or_default()
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        let start = Instant::now();
        let limit = self
            .limit
            .map(|minutes| Duration::try_from_secs_f64(60.0 * minutes.max(0.0)).unwrap_or(Duration::MAX));
        let over = || limit.is_some_and(|limit| start.elapsed() > limit);
        let (mut baseline, mut done, mut left_out) = (None, Vec::with_capacity(families.len()), Vec::new());
        for Family { method, mut plans, units, .. } in families {
            plans.sort_by_key(Plan::linear_bits);
            let mut measured: Vec<(Plan, Vec<Candidate>)> = Vec::with_capacity(plans.len());
            for plan in plans {
                let scheme = plan.weights.to_string();
                let line = known.iter().find(|line| {
                    (&line.method, &line.scheme, line.costs.len()) == (&method, &scheme, units.len())
                });
                let costs = match line {
                    Some(line) => line.costs.clone(),
                    None if over() && !(done.is_empty() && measured.is_empty()) => {
                        left_out.push(format!("{method}-{scheme}"));
                        continue;
                    }
                    None => {
                        let costs = self.measure_under(&plan, (&method, &units), &mut baseline)?;
                        let line = Measured { method: method.clone(), scheme, costs };
                        journal.append(&serde_json::to_string(&line)?)?;
                        journal.sync()?;
                        line.costs
                    }
                };
                measured.push((plan, costs));
            }
            if measured.is_empty() {
                continue;
            }
            let of_unit = |unit: usize| measured.iter().map(|(_, costs)| costs[unit].clone()).collect();
            let costs = (0..units.len()).map(of_unit).collect();
            done.push(Family {
                method,
                units,
                costs,
                plans: measured.into_iter().map(|(plan, _)| plan).collect(),
            });
        }
        if !left_out.is_empty() {
            self.context.warn_all(&[format!("--time-limit: not measured: {}", left_out.join(", "))])?;
        }
        Ok(done)
    }

    /// Measures every unit under the scheme of `plan`.
    fn measure_under(
        &self,
        plan: &Plan,
        (method, units): (&str, &[Unit]),
        baseline: &mut Option<Baseline>,
    ) -> Result<Vec<Candidate>> {
        let at = self.work.path().join(format!("{method}-{}", plan.weights));
        let model = self.quantized(plan, &at)?;
        let baseline = match baseline {
            Some(baseline) => baseline,
            none => none.insert(Baseline::new(self.source, self.windows, self.context.threads)?),
        };
        let (progress, mut done) = (self.context.progress(units.len() as u64, Progressed::Items("units")), 0);
        let measured = baseline.measure(&model, units, &mut |unit| {
            done += 1;
            progress.message(format!("{method}-{} {}", plan.weights, short(&unit.name())));
            progress.set(done);
        })?;
        progress.finish();
        // Removed at once: there may be many candidates.
        disk::remove_all(&at).map_err(|error| mantissa_store::Error::Io {
            path: at,
            operation: "remove",
            error,
        })?;
        let costs = units.iter().zip(measured);
        Ok(costs.map(|(unit, Estimate { mean, se })| candidate(plan, unit, mean, se)).collect())
    }

    /// Quantizes by `plan` into the folder `at`, or reuses the result of an earlier run.
    fn quantized(&self, plan: &Plan, at: &Path) -> Result<ModelFiles> {
        let (model, whole) = match plan.container.facts().one_file {
            true => (at.join("model.gguf"), false),
            false => (at.to_owned(), verify_manifest(at).is_ok_and(|differences| differences.is_empty())),
        };
        if !whole {
            carry_out(plan, self.source, &Output::owned(&model), Start::Resume, self.context)?;
        }
        Ok(ModelFiles::open(&model)?)
    }
}
