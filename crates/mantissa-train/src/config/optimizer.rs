//! `[optimizer]`: keys of all optimizers, and own keys of the chosen one, which its file declares.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use mantissa_options::{
    Accepts, Declared, Faults, Flag, Key, Note, Refusal, Table, Texts, Value, Within, Written, dotted,
    options,
};

use super::foreign;
use crate::optim::keys::{Fault, OptimizerKeys};
use crate::optim::registry::{self, FIRST, kinds};
use crate::optim::{DecayGroups, MomentFormat, OptimizerSpec, RateScales};

/// Name of the key that chooses the optimizer.
const KIND: &str = "kind";

/// Order in which keys are written; others follow.
const ORDER: [&str; 12] = [
    KIND,
    "lr",
    "moments",
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "momentum",
    "nesterov",
    "decay",
    "no_decay",
    "max_norm",
];

options! {
    /// Keys of all optimizers.
    #[derive(Clone, Debug, PartialEq)]
    pub struct CommonKeys {
        /// peak learning rate
        lr: f64, Within(0.0, 1e6), Note::needed("1e-3");
        /// weight decay, decoupled, times the learning rate
        weight_decay: f64 = 0.1, Within(0.0, 1e3);
        /// groups with decay; also norms, biases, and names such as "*.down_proj.weight"
        decay: Vec<String> = DecayGroups::default().decay, Texts;
        /// exceptions from decay
        no_decay: Vec<String>, Texts;
        /// gradient clipping; 0: none
        max_norm: f64 = 1.0, Within(0.0, 1e30);
        /// true: moments in a file of the run's folder instead of memory
        paged: bool = false, Flag, Note::LATER;
        /// factors of the learning rate, by group or name
        lr_scale: BTreeMap<String, f64>, Factors(Within(0.0, 1e6)), Note::example("{ embeddings = 0.1 }").later();
    }
}

/// Tables of factors in this range.
struct Factors(Within);

impl Accepts<BTreeMap<String, f64>> for Factors {
    fn read(&self, value: &Value) -> Option<BTreeMap<String, f64>> {
        let factor =
            |(name, value): (&String, &Value)| Some((name.clone(), Accepts::<f64>::read(&self.0, value)?));
        value.as_table()?.iter().map(factor).collect()
    }

    fn print(&self, factors: &BTreeMap<String, f64>) -> Option<Value> {
        let factors = factors.iter().map(|(name, factor)| (name.clone(), Value::Float(*factor)));
        Some(Value::Table(factors.collect()))
    }

    fn allowed(&self) -> String {
        format!("a table of factors, {}", Accepts::<f64>::allowed(&self.0))
    }

    fn refusal(&self, value: &Value) -> Refusal {
        let mut factors = value.as_table().into_iter().flatten().map(|(_, factor)| factor);
        match factors.find(|factor| Accepts::<f64>::read(&self.0, factor).is_none()) {
            Some(factor) => Accepts::<f64>::refusal(&self.0, factor),
            None => Refusal::new(value.to_string(), "a table of factors"),
        }
    }
}

/// `[optimizer]`.
#[derive(Clone, Debug)]
pub struct Optimizer {
    /// Name in the registry.
    pub kind: String,
    /// Keys of all optimizers.
    pub common: CommonKeys,
    /// Keys of this kind.
    own: Arc<dyn OptimizerKeys>,
}

impl Default for Optimizer {
    fn default() -> Self {
        let own = Arc::from((FIRST.keys)());
        Optimizer { kind: FIRST.name.to_owned(), common: CommonKeys::default(), own }
    }
}

impl PartialEq for Optimizer {
    fn eq(&self, other: &Self) -> bool {
        self.entries() == other.entries()
    }
}

impl Optimizer {
    /// Returns the optimizer with its hyperparameters.
    pub fn recipe(&self) -> OptimizerSpec {
        OptimizerSpec {
            method: self.own.build(),
            weight_decay: self.common.weight_decay,
            decay_vectors: false,
            max_norm: Some(self.common.max_norm).filter(|norm| *norm > 0.0),
            paged: self.common.paged,
        }
    }

    /// Returns the storage format of the moments.
    pub fn moments(&self) -> MomentFormat {
        self.own.moments().format
    }

    /// Returns the tensors with weight decay.
    pub fn decay_groups(&self) -> DecayGroups {
        DecayGroups { decay: self.common.decay.clone(), no_decay: self.common.no_decay.clone() }
    }

    /// Returns the factors of the learning rate.
    pub fn rate_scales(&self) -> RateScales {
        RateScales(self.common.lr_scale.clone())
    }

    /// Finds a combination of keys that cannot be met.
    pub(super) fn fault(&self) -> Option<Fault> {
        if self.common.paged && matches!(self.moments(), MomentFormat::Map(_)) {
            let found = format!("\"{}\"", self.own.moments().name);
            return Some(("moments", found, "a format other than a map with paged = true"));
        }
        self.own.fault()
    }

    /// Reads the kind. A name that no optimizer has stays, so that keys of any optimizer are known beside it.
    fn take_kind(&mut self, table: &Table, at: &str, faults: &mut Faults) {
        let Some(value) = table.get(KIND) else { return };
        let name = value.as_str().unwrap_or_default();
        name.clone_into(&mut self.kind);
        if registry::kind(name).is_none() {
            let fix =
                foreign::optimizer(name).map_or_else(String::new, |changes| format!("; fix: {changes}"));
            faults.refuse(&dotted(at, KIND), Refusal::new(format!("{value}{fix}"), names()));
        }
    }

    /// Says that keys which only earlier versions wrote are none of this kind.
    fn name_foreign_keys(&self, at: &str, refused_before: usize, faults: &mut Faults) {
        let keys = self.keys();
        let retired: Vec<_> =
            keys.iter().filter(|key| key.note.retired).map(|key| dotted(at, key.name)).collect();
        let accepted = keys.iter().filter(|key| !key.note.retired).map(|key| format!("`{}`", key.name));
        let accepted = accepted.collect::<Vec<_>>().join(", ");
        for refused in faults.refused.iter_mut().skip(refused_before) {
            if let (true, Refusal::Value { allowed, .. }) =
                (retired.contains(&refused.key), &mut refused.refusal)
            {
                *allowed = format!("no such key with kind = \"{}\"; it accepts {accepted}", self.kind);
            }
        }
    }
}

impl Declared for Optimizer {
    fn keys(&self) -> Vec<Key> {
        let kind = Key {
            name: KIND,
            allowed: names(),
            help: &KIND_HELP,
            default: format!("\"{}\"", FIRST.name),
            note: Note::NONE,
            subkeys: None,
        };
        let own = match registry::kind(&self.kind) {
            Some(_) => self.own.keys(),
            None => kinds().flat_map(|kind| (kind.keys)().keys()).collect(),
        };
        // The rate comes first, as it has no default.
        let mut common = self.common.keys().into_iter();
        let first = common.next();
        [kind].into_iter().chain(first).chain(own).chain(common).collect()
    }

    fn take(&mut self, table: &Table, at: &str, faults: &mut Faults) {
        self.take_kind(table, at, faults);
        self.common.take(table, at, faults);
        let mut own = (registry::kind(&self.kind).unwrap_or(&FIRST).keys)();
        let refused_before = faults.refused.len();
        own.take(table, at, faults);
        self.own = Arc::from(own);
        self.name_foreign_keys(at, refused_before, faults);
    }

    fn entries(&self) -> Vec<(&'static str, Written)> {
        let kind = Written::Value(Value::String(self.kind.clone()));
        let mut own = self.own.entries();
        // Earlier versions wrote own keys by name.
        own.sort_by_key(|(key, _)| *key);
        let mut all: Vec<_> = [(KIND, kind)].into_iter().chain(own).chain(self.common.entries()).collect();
        let place = |key: &str| ORDER.iter().position(|name| *name == key).unwrap_or(ORDER.len());
        all.sort_by_key(|(key, _)| place(key));
        all
    }
}

/// Names of all optimizers.
fn names() -> String {
    kinds().map(|kind| kind.name).collect::<Vec<_>>().join(", ")
}

/// Meaning of the kind, for pages.
static KIND_HELP: LazyLock<String> = LazyLock::new(|| {
    let names = kinds().map(|kind| kind.name).collect::<Vec<_>>().join(" ");
    format!("{names}, each with keys of its own")
});

/// Returns own keys of an optimizer; `None` if there is none of this name.
pub(super) fn own_keys(name: &str) -> Option<Vec<Key>> {
    Some((registry::kind(name)?.keys)().keys())
}

/// Lists own keys of every optimizer by its name, without the format of moments, for pages.
pub fn optimizer_keys() -> Vec<(&'static str, Vec<Key>)> {
    let shown = |key: &Key| !key.note.retired && key.name != "moments";
    kinds().map(|kind| (kind.name, (kind.keys)().keys().into_iter().filter(shown).collect())).collect()
}
