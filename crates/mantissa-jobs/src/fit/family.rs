//! Candidates of a fit: units, their sizes and costs, and the methods that one output can mix.

use std::collections::HashMap;

use mantissa_advise::sensitivity::Unit;
use mantissa_eval::stats::Estimate;
use mantissa_model::KvPolicy;
use mantissa_quant::allocate::{AllocateError, Allocation, StorageOption, allocate};
use mantissa_quant::{Plan, Recipe};
use serde::{Deserialize, Serialize};

use super::layers::allocate_by_layer;

/// Unit with its KL under each candidate.
#[derive(Serialize)]
pub struct Row {
    /// Name.
    pub unit: String,
    /// Modules of its layers.
    pub modules: Vec<String>,
    /// Chosen scheme.
    pub scheme: String,
    /// Chosen method.
    pub method: String,
    /// Bits per weight under the chosen scheme.
    pub bits_per_weight: f64,
    /// Candidates, in the order of the recipes.
    pub candidates: Vec<Candidate>,
    /// Index of the chosen candidate.
    #[serde(skip)]
    pub chosen: usize,
}

impl Row {
    /// Returns the name of a candidate of this unit: its scheme, after its method if there are several.
    pub fn named(&self, candidate: &Candidate) -> String {
        match self.candidates.iter().all(|other| other.method == candidate.method) {
            true => candidate.scheme.clone(),
            false => format!("{}-{}", candidate.method, candidate.scheme),
        }
    }
}

/// Scheme and method for a unit, with its size and cost.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Candidate {
    /// Method; empty for a scheme of the KV cache.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub method: String,
    /// Scheme of the weights, or of the KV cache.
    pub scheme: String,
    /// Bits of the unit.
    pub bits: u64,
    /// Mean KL (nats/token) of the model with this unit alone under the scheme; of several methods, times a factor of method
    /// and scheme.
    pub kl: f64,
    /// Standard error of the KL.
    pub kl_se: f64,
}

/// Scheme of the KV cache.
#[derive(Debug)]
pub struct Cache {
    /// Policy whose KL is measured.
    pub policy: KvPolicy,
    /// Scheme that the recipe stores.
    pub scheme: String,
    /// Bits of all sequences.
    pub bits: u64,
}

impl Cache {
    pub fn candidate(&self, kl: f64, kl_se: f64) -> Candidate {
        Candidate { method: String::new(), scheme: self.scheme.clone(), bits: self.bits, kl, kl_se }
    }
}

impl Candidate {
    /// The choice of this size and cost.
    pub fn choice(&self) -> StorageOption {
        StorageOption { size: self.bits, cost: self.kl }
    }
}

/// Recipe with one method and scheme for all layers, under which units are measured.
#[derive(Clone)]
pub struct Uniform {
    /// Method, as the user named it: with its transform, if it has one.
    pub method: String,
    pub plan: Plan,
}

impl Uniform {
    pub fn recipe(&self) -> Option<&Recipe> {
        self.plan.job.recipe()
    }

    /// True if the method learns decoder layers as a whole.
    fn learns_layers(&self) -> bool {
        self.recipe().is_some_and(Recipe::learns_layers)
    }

    /// Returns the method as recipe files name it.
    pub fn recipe_method(&self) -> &'static str {
        self.recipe().map_or(self.plan.job.method(), |recipe| recipe.method.recipe_name())
    }
}

/// Candidates from which one output takes its layers.
pub struct Family {
    pub methods: Vec<String>,
    pub plans: Vec<Uniform>,
    /// Plans of outputs that mix the candidates; none for one method.
    pub probes: Vec<Plan>,
    pub units: Vec<Unit>,
    /// For each unit its candidates, in the order of `plans`; empty until measured.
    pub costs: Vec<Vec<Candidate>>,
    /// Candidates of the KV cache, if its bytes count.
    pub kv: Vec<Candidate>,
}

impl Family {
    /// Makes the family of these plans, at least one.
    pub fn new(methods: Vec<String>, plans: Vec<Uniform>) -> Self {
        let units = plans.first().map(|first| Unit::of_plan(&first.plan)).unwrap_or_default();
        Family { methods, plans, probes: Vec::new(), units, costs: Vec::new(), kv: Vec::new() }
    }

    /// True if a method learns decoder layers as a whole.
    pub fn learns_layers(&self) -> bool {
        self.plans.iter().any(Uniform::learns_layers)
    }

    /// Returns the names of the methods.
    pub fn label(&self) -> String {
        self.methods.join(", ")
    }

    /// Returns the names of the methods that were chosen.
    pub fn methods_of(&self, found: &Allocation) -> String {
        let chosen = |method: &&String| {
            let units = found.choices.iter().take(self.units.len());
            units.into_iter().any(|&at| self.plans[at].method == **method)
        };
        self.methods.iter().filter(chosen).cloned().collect::<Vec<_>>().join(", ")
    }

    /// Iterates over the plans of all candidates, and those that mix them.
    pub fn all_plans(&self) -> impl Iterator<Item = &Plan> {
        self.plans.iter().map(|uniform| &uniform.plan).chain(&self.probes)
    }

    /// Returns the candidates of every unit with sizes but no costs.
    pub fn sizes(&self) -> Vec<Vec<Candidate>> {
        let none = Estimate { mean: 0.0, se: 0.0 };
        let of = |uniform| candidates(uniform, &self.units, std::iter::repeat(none));
        let plans: Vec<_> = self.plans.iter().map(of).collect();
        (0..self.units.len()).map(|unit| plans.iter().map(|plan| plan[unit].clone()).collect()).collect()
    }

    /// Returns the candidates of every unit, and last those of the KV cache, if its bytes count.
    pub fn choices(&self, units: &[Vec<Candidate>]) -> Vec<Vec<StorageOption>> {
        let rows = units.iter().chain(Some(&self.kv).filter(|kv| !kv.is_empty()));
        rows.map(|row| row.iter().map(Candidate::choice).collect()).collect()
    }

    /// Returns the allocation of least cost among `rows`, made by [`choices`](Self::choices). A method that learns decoder
    /// layers takes all units of one or none.
    ///
    /// # Errors
    /// [`AllocateError`].
    pub fn allocate(&self, rows: &[Vec<StorageOption>], limit: u64) -> Result<Allocation, AllocateError> {
        let learned: Vec<bool> = self.plans.iter().map(Uniform::learns_layers).collect();
        if learned.iter().all(|learned_by| *learned_by == learned[0]) {
            return allocate(rows, limit);
        }
        let layers: Vec<usize> = self.units.iter().map(|unit| unit.layer).collect();
        allocate_by_layer(rows, (&layers, &learned), limit)
    }

    /// Returns the scheme of the KV cache that was chosen; `None` if its bytes do not count.
    pub fn kv_chosen(&self, found: &Allocation) -> Option<&Candidate> {
        found.choices.get(self.units.len()).and_then(|&at| self.kv.get(at))
    }

    /// Returns the units with the schemes chosen.
    pub fn rows(&self, found: &Allocation) -> Vec<Row> {
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
pub(super) fn candidates(
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
