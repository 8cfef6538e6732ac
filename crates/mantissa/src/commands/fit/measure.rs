//! Measures the KL of every unit alone under every candidate.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_advise::sensitivity::{Baseline, Unit, cache_schemes};
use mantissa_eval::stats::Estimate;
use mantissa_eval::{Sequence, compare};
use mantissa_model::{Decoder, KvPolicy};
use mantissa_quant::allocate::{AllocateError, Allocation, Choice, allocate};
use mantissa_quant::{Plan, QuantError, Recipe, Start, plan_key};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Journal, Output, WorkFolder, disk, regular, verify_manifest};
use serde::{Deserialize, Serialize};

use super::super::outcome::carry_out;
use super::layers::allocate_by_layer;
use crate::context::Context;
use crate::error::BadInput;
use crate::interrupt;
use crate::progress::{Unit as Progressed, short};

/// Unit with its KL under each candidate.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) unit: String,
    pub(super) modules: Vec<String>,
    /// Chosen scheme.
    pub(super) scheme: String,
    /// Chosen method.
    pub(super) method: String,
    /// Bits per weight under the chosen scheme.
    pub(super) bits_per_weight: f64,
    pub(super) candidates: Vec<Candidate>,
    /// Index of the chosen candidate.
    #[serde(skip)]
    pub(super) chosen: usize,
}

impl Row {
    /// Returns the name of a candidate of this unit: its scheme, after its method if there are several.
    pub(super) fn named(&self, candidate: &Candidate) -> String {
        match self.candidates.iter().all(|other| other.method == candidate.method) {
            true => candidate.scheme.clone(),
            false => format!("{}-{}", candidate.method, candidate.scheme),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Candidate {
    /// Method; empty for a scheme of the KV cache.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) method: String,
    pub(super) scheme: String,
    pub(super) bits: u64,
    /// Mean KL (nats/token) of the model with this unit alone under the scheme; of several methods, times a factor of method
    /// and scheme.
    pub(super) kl: f64,
    pub(super) kl_se: f64,
}

/// Scheme of the KV cache.
#[derive(Debug)]
pub(super) struct Cache {
    /// Policy whose KL is measured.
    pub(super) policy: KvPolicy,
    /// Scheme that the recipe stores.
    pub(super) scheme: String,
    /// Bits of all sequences.
    pub(super) bits: u64,
}

impl Cache {
    pub(super) fn candidate(&self, kl: f64, kl_se: f64) -> Candidate {
        Candidate { method: String::new(), scheme: self.scheme.clone(), bits: self.bits, kl, kl_se }
    }
}

impl Candidate {
    /// The choice of this size and cost.
    pub(super) fn choice(&self) -> Choice {
        Choice { size: self.bits, cost: self.kl }
    }
}

/// Recipe with one method and scheme for all layers, under which units are measured.
#[derive(Clone)]
pub(super) struct Uniform {
    /// Method, as the user named it: with its transform, if it has one.
    pub(super) method: String,
    pub(super) plan: Plan,
}

impl Uniform {
    pub(super) fn recipe(&self) -> Option<&Recipe> {
        self.plan.job.recipe()
    }

    /// True if the method learns decoder layers as a whole.
    fn learns_layers(&self) -> bool {
        self.recipe().is_some_and(Recipe::learns_layers)
    }

    /// Returns the method as recipe files name it.
    pub(super) fn recipe_method(&self) -> &'static str {
        self.recipe().map_or(self.plan.job.method(), |recipe| recipe.method.recipe_name())
    }
}

/// Candidates from which one output takes its layers.
pub(super) struct Family {
    pub(super) methods: Vec<String>,
    pub(super) plans: Vec<Uniform>,
    /// Plans of outputs that mix the candidates; none for one method.
    pub(super) probes: Vec<Plan>,
    pub(super) units: Vec<Unit>,
    /// For each unit its candidates, in the order of `plans`; empty until measured.
    pub(super) costs: Vec<Vec<Candidate>>,
    /// Candidates of the KV cache, if its bytes count.
    pub(super) kv: Vec<Candidate>,
}

impl Family {
    /// Makes the family of these plans, at least one.
    pub(super) fn new(methods: Vec<String>, plans: Vec<Uniform>) -> Self {
        let units = plans.first().map(|first| Unit::of_plan(&first.plan)).unwrap_or_default();
        Family { methods, plans, probes: Vec::new(), units, costs: Vec::new(), kv: Vec::new() }
    }

    /// True if a method learns decoder layers as a whole.
    pub(super) fn learns_layers(&self) -> bool {
        self.plans.iter().any(Uniform::learns_layers)
    }

    /// Returns the names of the methods.
    pub(super) fn label(&self) -> String {
        self.methods.join(", ")
    }

    /// Returns the names of the methods that were chosen.
    pub(super) fn methods_of(&self, found: &Allocation) -> String {
        let chosen = |method: &&String| {
            let units = found.choices.iter().take(self.units.len());
            units.into_iter().any(|&at| self.plans[at].method == **method)
        };
        self.methods.iter().filter(chosen).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Iterates over the plans of all candidates, and those that mix them.
    pub(super) fn all_plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.iter().map(|uniform| &uniform.plan).chain(&self.probes)
    }

    /// Returns the candidates of every unit with sizes but no costs.
    pub(super) fn sizes(&self) -> Vec<Vec<Candidate>> {
        let none = Estimate { mean: 0.0, se: 0.0 };
        let of = |uniform| candidates(uniform, &self.units, std::iter::repeat(none));
        let plans: Vec<_> = self.plans.iter().map(of).collect();
        (0..self.units.len()).map(|unit| plans.iter().map(|plan| plan[unit].clone()).collect()).collect()
    }

    /// Returns the candidates of every unit, and last those of the KV cache, if its bytes count.
    pub(super) fn choices(&self, units: &[Vec<Candidate>]) -> Vec<Vec<Choice>> {
        let rows = units.iter().chain(Some(&self.kv).filter(|kv| !kv.is_empty()));
        rows.map(|row| row.iter().map(Candidate::choice).collect()).collect()
    }

    /// Returns the allocation of least cost among `rows`, made by [`choices`](Self::choices). A method that learns decoder
    /// layers takes all units of one or none.
    ///
    /// # Errors
    /// [`AllocateError`].
    pub(super) fn allocate(&self, rows: &[Vec<Choice>], limit: u64) -> Result<Allocation, AllocateError> {
        let learned: Vec<bool> = self.plans.iter().map(Uniform::learns_layers).collect();
        if learned.iter().all(|learned_by| *learned_by == learned[0]) {
            return allocate(rows, limit);
        }
        let layers: Vec<usize> = self.units.iter().map(|unit| unit.layer).collect();
        allocate_by_layer(rows, (&layers, &learned), limit)
    }

    /// Returns the scheme of the KV cache that was chosen; `None` if its bytes do not count.
    pub(super) fn kv_chosen(&self, found: &Allocation) -> Option<&Candidate> {
        found.choices.get(self.units.len()).and_then(|&at| self.kv.get(at))
    }

    /// Returns the units with the schemes chosen.
    pub(super) fn rows(&self, found: &Allocation) -> Vec<Row> {
        let units = self.units.iter().zip(&self.costs).zip(&found.choices);
        units.map(|((unit, candidates), &at)| row(unit, candidates.clone(), at)).collect()
    }
}

fn row(unit: &Unit, candidates: Vec<Candidate>, chosen: usize) -> Row {
    let weights: u64 = unit.linears.iter().map(|l| (l.rows * l.cols) as u64).sum();
    let Candidate { method, scheme, bits, .. } = candidates[chosen].clone();
    Row {
        unit: unit.name(),
        modules: unit.linears.iter().map(|l| l.module.clone()).collect(),
        scheme,
        method,
        bits_per_weight: bits as f64 / weights.max(1) as f64,
        candidates,
        chosen,
    }
}

/// Makes the candidates of all units under a recipe, with the bits that its format stores.
fn candidates(
    Uniform { method, plan }: &Uniform,
    units: &[Unit],
    measured: impl IntoIterator<Item = Estimate>,
) -> Vec<Candidate> {
    let stored: HashMap<&str, u64> =
        plan.quantized().map(|(info, scheme)| (info.module.as_str(), plan.bits(info, scheme))).collect();
    let bits = |unit: &Unit| unit.linears.iter().filter_map(|l| stored.get(l.module.as_str())).sum();
    let scheme = plan.weights.to_string();
    let of = |(unit, Estimate { mean, se })| Candidate {
        method: method.clone(),
        scheme: scheme.clone(),
        bits: bits(unit),
        kl: mean,
        kl_se: se,
    };
    units.iter().zip(measured).map(of).collect()
}

/// Line of the journal and of `--measurements`: costs of every unit under one scheme, or of the KV cache.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Hash of everything that decides the costs.
    key: String,
    method: String,
    scheme: String,
    costs: Vec<Candidate>,
    /// KL (nats/token) of the model with all units under the scheme, if several methods are compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<f64>,
}

/// Returns the key of the measurement of `units` under `plan`: a hash of everything that decides it.
///
/// # Errors
/// A file of the source cannot be examined.
pub(super) fn key(plan: &Plan, units: &[Unit], source: &ModelFiles, windows: &[Sequence]) -> Result<String> {
    let names: Vec<_> = units.iter().map(Unit::name).collect();
    let on: Vec<_> = windows.iter().map(|window| (&window.tokens, window.from)).collect();
    Ok(FileDigest::of(format!("{} {names:?} {on:?}", plan_key(plan, source)?).as_bytes()).hex())
}

impl Measured {
    /// Returns the costs, as those of `method`: lines of older versions do not name it.
    fn named(&self, method: &str) -> Vec<Candidate> {
        let named = |candidate: &Candidate| Candidate { method: method.to_owned(), ..candidate.clone() };
        self.costs.iter().map(named).collect()
    }

    /// Returns the costs, scaled so that their sum is the KL of the model with all units. A unit that is measured alone stands
    /// in the unquantized model. A method that corrects the errors of earlier layers has none to correct there, so its units
    /// lose more alone than together. The units of other methods do not.
    fn scaled(&self, method: &str) -> Vec<Candidate> {
        let mut costs = self.named(method);
        let sum: f64 = costs.iter().map(|cost| cost.kl).sum();
        let factor = self.whole.map(|whole| whole / sum).filter(|factor| factor.is_finite() && *factor > 0.0);
        for cost in &mut costs {
            cost.kl *= factor.unwrap_or(1.0);
            cost.kl_se *= factor.unwrap_or(1.0);
        }
        costs
    }
}

/// Appends a line to the journal.
fn keep(journal: &mut Journal, line: &Measured) -> Result<()> {
    journal.append(&serde_json::to_string(line)?)?;
    Ok(journal.sync()?)
}

/// First line of a file of measurements.
const HEAD: &str = "mantissa fit measurements 1";

/// Longest file of measurements read, in bytes.
const MOST: u64 = 256 << 20;

/// Reads the measurements of earlier runs; none if there is no such file.
///
/// # Errors
/// A file of something else; I/O.
pub(super) fn read(path: &Path) -> Result<Vec<Measured>> {
    let fault = |got: String| {
        BadInput::new(
            format!("--measurements {}", path.display()),
            got,
            format!("a file that begins \"{HEAD}\""),
        )
        .with_fix("name a file that does not exist yet")
    };
    let Some(text) = regular::read_optional(path, MOST, "a file of measurements")? else {
        return Ok(Vec::new());
    };
    let text = String::from_utf8(text).map_err(|error| fault(error.to_string()))?;
    let Some(lines) = text.strip_prefix(HEAD) else { return Err(fault("another file".to_owned()).into()) };
    // Lines of another version are measured anew.
    Ok(lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Makes the text of a file of measurements.
pub(super) fn text(all: &[Measured]) -> Result<String> {
    let lines = all.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>()?;
    Ok(format!("{HEAD}\n{}\n", lines.join("\n")))
}

/// Work folder and input of the measurements.
pub(super) struct Search<'a> {
    pub(super) work: &'a WorkFolder,
    pub(super) context: &'a Context,
    pub(super) source: &'a ModelFiles,
    pub(super) windows: &'a [Sequence],
    /// Measurements of earlier runs.
    pub(super) known: Vec<Measured>,
    /// Schemes of the KV cache with their bits; empty if its bytes do not count.
    pub(super) kv: Vec<Cache>,
    /// Minutes after which no further scheme is measured.
    pub(super) limit: Option<f64>,
    /// True if several methods are compared, whose units' costs are then scaled to the KL of the whole model.
    pub(super) several: bool,
}

impl Search<'_> {
    /// Measures every unit of each family under every scheme, the smallest first. Quantized models are kept in the work
    /// folder while they are measured. Each result is appended to a journal there, so that a rerun after a kill resumes.
    /// After the time limit the schemes that are not measured are left out. Returns also all measurements.
    ///
    /// # Errors
    /// I/O; a model that cannot be quantized or run; warnings under `--strict`.
    pub(super) fn measure(&self, families: Vec<Family>) -> Result<(Vec<Family>, Vec<Measured>)> {
        let at = self.work.path();
        let mut journal = match Journal::read(at) {
            Some(_) => Journal::reopen(at)?,
            None => Journal::create(at)?,
        };
        let read = Journal::read(at).unwrap_or_default();
        let mut known: Vec<Measured> =
            read.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        known.extend(self.known.iter().cloned());
        let start = Instant::now();
        let limit = self
            .limit
            .map(|minutes| Duration::try_from_secs_f64(60.0 * minutes.max(0.0)).unwrap_or(Duration::MAX));
        let over = || limit.is_some_and(|limit| start.elapsed() > limit);
        let kv = match families.first() {
            Some(family) => self.measure_kv(&family.plans[0].plan, &mut known, &mut journal)?,
            None => Vec::new(),
        };
        let (mut baseline, mut done, mut left_out) = (None, Vec::with_capacity(families.len()), Vec::new());
        for Family { methods, mut plans, probes, units, .. } in families {
            plans.sort_by_key(|uniform| uniform.plan.linear_bits());
            let mut measured: Vec<(Uniform, Vec<Candidate>)> = Vec::with_capacity(plans.len());
            for uniform in plans {
                let (method, scheme) = (uniform.method.clone(), uniform.plan.weights.to_string());
                let key = key(&uniform.plan, &units, self.source, self.windows)?;
                let complete = |line: &&Measured| line.whole.is_some() || !self.several;
                let mut of_key =
                    known.iter().filter(|line| line.key == key && line.costs.len() == units.len());
                let costs = match of_key.find(complete) {
                    Some(line) if self.several => line.scaled(&method),
                    Some(line) => line.named(&method),
                    None if over() && !(done.is_empty() && measured.is_empty()) => {
                        left_out.push(format!("{method}-{scheme}"));
                        continue;
                    }
                    None => {
                        let (costs, whole) = self.measure_under(&uniform, &units, &mut baseline)?;
                        let line = Measured { key, method: method.clone(), scheme, costs, whole };
                        keep(&mut journal, &line)?;
                        known.retain(|known| known.key != line.key);
                        known.push(line.clone());
                        if self.several { line.scaled(&method) } else { line.costs }
                    }
                };
                measured.push((uniform, costs));
            }
            if measured.is_empty() {
                continue;
            }
            let of_unit = |unit: usize| measured.iter().map(|(_, costs)| costs[unit].clone()).collect();
            let costs = (0..units.len()).map(of_unit).collect();
            let plans = measured.into_iter().map(|(uniform, _)| uniform).collect();
            done.push(Family { methods, plans, probes, units, costs, kv: kv.clone() });
        }
        if !left_out.is_empty() {
            self.context.warn_all(&[format!("--time-limit: not measured: {}", left_out.join(", "))])?;
        }
        known.sort_by(|a, b| a.key.cmp(&b.key));
        known.dedup_by(|a, b| a.key == b.key);
        Ok((done, known))
    }

    /// Measures the schemes of the KV cache on the source, which `plan` quantizes.
    fn measure_kv(
        &self,
        plan: &Plan,
        known: &mut Vec<Measured>,
        journal: &mut Journal,
    ) -> Result<Vec<Candidate>> {
        if self.kv.is_empty() {
            return Ok(Vec::new());
        }
        let policies: Vec<KvPolicy> = self.kv.iter().map(|cache| cache.policy.clone()).collect();
        let key = key(plan, &[], self.source, self.windows)?;
        let key = FileDigest::of(format!("{key} {policies:?}").as_bytes()).hex();
        if let Some(line) = known.iter().find(|line| line.key == key && line.costs.len() == self.kv.len()) {
            // The bits depend on the budget.
            let measured = self.kv.iter().zip(&line.costs);
            return Ok(measured.map(|(cache, cost)| cache.candidate(cost.kl, cost.kl_se)).collect());
        }
        let found = cache_schemes(self.source, &policies, self.windows, self.context.threads)?;
        let costs: Vec<_> =
            self.kv.iter().zip(found).map(|(cache, kl)| cache.candidate(kl.mean, kl.se)).collect();
        let (method, scheme) = ("kv".to_owned(), "all".to_owned());
        let line = Measured { key, method, scheme, costs: costs.clone(), whole: None };
        keep(journal, &line)?;
        known.push(line);
        Ok(costs)
    }

    /// Measures every unit under a recipe; if several methods are compared, also the whole model.
    fn measure_under(
        &self,
        uniform: &Uniform,
        units: &[Unit],
        baseline: &mut Option<Baseline>,
    ) -> Result<(Vec<Candidate>, Option<f64>)> {
        let Uniform { method, plan } = uniform;
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
        let whole = match self.several {
            true => Some(self.whole(&model)?),
            false => None,
        };
        // Removed at once: there may be many candidates.
        disk::remove_all(&at).map_err(|error| mantissa_store::Error::Io {
            path: at,
            operation: "remove",
            error,
        })?;
        Ok((candidates(uniform, units, measured), whole))
    }

    /// Measures the KL (nats/token) of a quantized model.
    fn whole(&self, model: &ModelFiles) -> Result<f64> {
        let running = &|_| match interrupt::received() {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        };
        let (model, reference) = (Decoder::load(model)?, Decoder::load(self.source)?);
        let threads = self.context.threads;
        let (_, found) =
            compare(&model, &reference, self.windows, threads, running).map_err(QuantError::from)?;
        Ok(found.kl)
    }

    /// Quantizes by `plan` into the folder `at`, or reuses the result of an earlier run.
    fn quantized(&self, plan: &Plan, at: &Path) -> Result<ModelFiles> {
        let (model, whole) = match plan.container.is_one_file() {
            true => (at.join("model.gguf"), false),
            false => (at.to_owned(), verify_manifest(at).is_ok_and(|differences| differences.is_empty())),
        };
        if !whole {
            carry_out(plan, self.source, &Output::owned(&model), Start::Resume, self.context)?;
        }
        Ok(ModelFiles::open(&model)?)
    }
}
