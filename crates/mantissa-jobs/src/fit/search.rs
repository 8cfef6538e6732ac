//! Measures the KL of every unit alone under every candidate.

use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use mantissa_advise::sensitivity::{Baseline, Unit, cache_schemes};
use mantissa_eval::{Sequence, compare};
use mantissa_model::{Decoder, KvPolicy};
use mantissa_quant::{Plan, QuantError, Start, plan_key};
use mantissa_ranks::{RankError, Team};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Journal, Output, disk, regular, verify_manifest};
use serde::{Deserialize, Serialize};

use super::family::{Cache, Candidate, Family, Uniform, candidates};
use crate::error::{BadInput, JobError, Result};
use crate::execute;
use crate::host::Host;
use crate::progress::Unit as Progressed;
use crate::text::short;

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
    journal.append(&serde_json::to_string(line).map_err(std::io::Error::from)?)?;
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
    let lines = all.iter().map(serde_json::to_string).collect::<Result<Vec<_>, _>>();
    let lines = lines.map_err(std::io::Error::from)?;
    Ok(format!("{HEAD}\n{}\n", lines.join("\n")))
}

/// Work folder and input of the measurements.
pub(super) struct Search<'a> {
    /// Folder for quantized candidates and the journal.
    pub(super) at: &'a Path,
    /// Workers that divide the candidates.
    pub(super) team: &'a Team,
    pub(super) host: &'a Host,
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
        let at = self.at;
        let mut journal = match Journal::read(at) {
            Some(_) => Journal::reopen(at)?,
            None => Journal::create(at)?,
        };
        let read = Journal::read(at).unwrap_or_default();
        let mut known: Vec<Measured> =
            read.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        known.extend(self.known.iter().cloned());
        self.share(&families, &mut known)?;
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
            self.host.warn_all(&[format!("--time-limit: not measured: {}", left_out.join(", "))])?;
        }
        known.sort_by(|a, b| a.key.cmp(&b.key));
        known.dedup_by(|a, b| a.key == b.key);
        Ok((done, known))
    }

    /// Measures the candidates that no other worker of the team measures, until each has a result; adds all to `known`. Does
    /// nothing for a process that works alone.
    ///
    /// # Errors
    /// As [`measure`](Self::measure).
    pub(super) fn share(&self, families: &[Family], known: &mut Vec<Measured>) -> Result<()> {
        if !self.team.is_shared() {
            return Ok(());
        }
        let all: Vec<(usize, usize)> = families
            .iter()
            .enumerate()
            .flat_map(|(at, family)| (0..family.plans.len()).map(move |plan| (at, plan)))
            .collect();
        let parts =
            |(family, plan): (usize, usize)| (&families[family].plans[plan], &families[family].units[..]);
        let name = |candidate: &(usize, usize)| {
            let (Uniform { method, plan }, _) = parts(*candidate);
            format!("candidate {method}-{} of family {}", plan.weights, candidate.0)
        };
        let names: Vec<String> = all.iter().map(name).collect();
        // What earlier runs measured is a result.
        for (candidate, name) in all.iter().zip(&names).filter(|(_, name)| !self.team.has(name)) {
            let (uniform, units) = parts(*candidate);
            let key = key(&uniform.plan, units, self.source, self.windows)?;
            let complete = |line: &&Measured| {
                line.key == key && line.costs.len() == units.len() && (line.whole.is_some() || !self.several)
            };
            if let Some(line) = known.iter().find(complete) {
                let (method, scheme) = (uniform.method.clone(), uniform.plan.weights.to_string());
                let line = Measured { key: String::new(), method, scheme, ..line.clone() };
                self.team.replace(name, serde_json::to_vec(&line)?)?;
            }
        }
        let mut baseline = None;
        let mut compute = |unit: usize| {
            let (uniform, units) = parts(all[unit]);
            let (costs, whole) = self.measure_under(uniform, units, &mut baseline)?;
            let (method, scheme) = (uniform.method.clone(), uniform.plan.weights.to_string());
            // The key depends on the machine.
            let line = Measured { key: String::new(), method, scheme, costs, whole };
            Ok::<_, JobError>(serde_json::to_vec(&line)?)
        };
        let mut tick = |_| if self.host.stops() { Err(RankError::Interrupted.into()) } else { Ok(()) };
        self.team.complete(&names, &mut compute, &mut tick)?;
        for (candidate, name) in all.iter().zip(&names) {
            let found =
                self.team.result(name)?.and_then(|bytes| serde_json::from_slice::<Measured>(&bytes).ok());
            let (uniform, units) = parts(*candidate);
            if let Some(line) = found.filter(|line| line.costs.len() == units.len()) {
                let key = key(&uniform.plan, units, self.source, self.windows)?;
                known.push(Measured { key, ..line });
            }
        }
        Ok(())
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
        let found = cache_schemes(self.source, &policies, self.windows, self.host.threads)?;
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
        let at = self.at.join(format!("{method}-{}", plan.weights));
        let model = self.quantized(plan, &at)?;
        let baseline = match baseline {
            Some(baseline) => baseline,
            none => none.insert(Baseline::new(self.source, self.windows, self.host.threads)?),
        };
        let (progress, mut done) = (self.host.progress(units.len() as u64, Progressed::Items("units")), 0);
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
        let running = &|_| match self.host.stops() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        let (model, reference) = (Decoder::load(model)?, Decoder::load(self.source)?);
        let threads = self.host.threads;
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
            execute::run(plan, self.source, &Output::owned(&model), Start::Resume, self.host)?;
        }
        Ok(ModelFiles::open(&model)?)
    }
}
