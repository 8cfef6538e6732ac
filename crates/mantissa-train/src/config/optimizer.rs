//! `[optimizer]`: keys of all optimizers, and keys of the chosen one, which the registry lists with their defaults.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use toml::Value;

use super::declared::{default, setting};
use crate::optim::keys::{Key, OptimizerKind, Values};
use crate::optim::registry::kind;
use crate::optim::{DecayGroups, MomentFormat, OptimizerSpec, RateScales, optimizers};

/// Keys of all optimizers besides `kind` and `lr`.
const COMMON: [&str; 6] = ["weight_decay", "decay", "no_decay", "max_norm", "lr_scale", "paged"];

/// Order in which keys are written; others follow.
const ORDER: [&str; 12] = [
    "kind",
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

/// `[optimizer]`, checked, with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    /// Name in the registry.
    pub kind: String,
    /// Peak learning rate.
    pub lr: f64,
    /// Weight decay of the selected tensors.
    pub weight_decay: f64,
    /// Groups and tensors that decay.
    pub decay: Vec<String>,
    /// Exceptions that do not decay.
    pub no_decay: Vec<String>,
    /// Largest gradient norm; 0: no clipping.
    pub max_norm: f64,
    /// Factors of the learning rate by group or tensor.
    pub lr_scale: BTreeMap<String, f64>,
    /// True if moments lie in a file.
    pub paged: bool,
    /// Keys of this kind.
    own: BTreeMap<String, Value>,
}

impl Optimizer {
    /// Returns the optimizer with its hyperparameters.
    pub fn recipe(&self) -> OptimizerSpec {
        // A kind was checked when it was read, so the fallback is not used.
        let kind = kind(&self.kind).unwrap_or(&crate::optim::registry::FIRST);
        OptimizerSpec {
            method: (kind.build)(&Values(&self.own)),
            weight_decay: self.weight_decay,
            decay_vectors: false,
            max_norm: Some(self.max_norm).filter(|norm| *norm > 0.0),
            paged: self.paged,
        }
    }

    /// Returns the storage format of the moments.
    pub fn moments(&self) -> MomentFormat {
        Values(&self.own).moments()
    }

    /// Returns the tensors with weight decay.
    pub fn decay_groups(&self) -> DecayGroups {
        DecayGroups { decay: self.decay.clone(), no_decay: self.no_decay.clone() }
    }

    /// Returns the factors of the learning rate.
    pub fn rate_scales(&self) -> RateScales {
        RateScales(self.lr_scale.clone())
    }

    /// Takes the keys of `table`; the message names the key and the accepted values.
    fn take(mut table: BTreeMap<String, Value>) -> Result<Self, String> {
        let name = match table.remove("kind") {
            None => "adamw".to_owned(),
            Some(Value::String(name)) => name,
            Some(other) => return Err(fault("kind", &other, &kinds())),
        };
        let Some(kind) = kind(&name) else { return Err(fault("kind", &Value::String(name), &kinds())) };
        let lr = table.remove("lr").ok_or("missing field `lr` in optimizer")?;
        let mut own = BTreeMap::new();
        for key in kind.keys {
            let value = table.remove(key.name).unwrap_or_else(|| key.value());
            let checked = key.checked(value.clone()).map_err(|allowed| match key.used {
                true => fault(key.name, &value, &allowed),
                false => fault(
                    key.name,
                    &value,
                    &format!("no such key with kind = \"{name}\"; it accepts {}", accepted(kind)),
                ),
            })?;
            own.insert(key.name.to_owned(), checked);
        }
        let optimizer = Optimizer {
            lr: number("lr", lr)?,
            weight_decay: taken(&mut table, "weight_decay", default("optimizer.weight_decay"), |v| {
                number("weight_decay", v)
            })?,
            decay: taken(&mut table, "decay", DecayGroups::default().decay, |v| names("decay", v))?,
            no_decay: taken(&mut table, "no_decay", Vec::new(), |v| names("no_decay", v))?,
            max_norm: taken(&mut table, "max_norm", default("optimizer.max_norm"), |v| {
                number("max_norm", v)
            })?,
            lr_scale: taken(&mut table, "lr_scale", BTreeMap::new(), factors)?,
            paged: taken(&mut table, "paged", false, |v| match v {
                Value::Boolean(paged) => Ok(paged),
                other => Err(fault("paged", &other, "true or false")),
            })?,
            kind: name,
            own,
        };
        if let Some(unknown) = table.keys().next() {
            return Err(format!("unknown field `{unknown}`, expected one of {}", accepted(kind)));
        }
        optimizer.check(kind)?;
        Ok(optimizer)
    }

    /// Refuses combinations of keys.
    fn check(&self, kind: &OptimizerKind) -> Result<(), String> {
        if self.paged && matches!(self.moments(), MomentFormat::Map(_)) {
            let found = self.own.get("moments").cloned().unwrap_or(Value::Boolean(true));
            return Err(fault("moments", &found, "a format other than a map with paged = true"));
        }
        (kind.check)(&Values(&self.own))
            .map_err(|(key, found, allowed)| format!("optimizer.{key}: expected {allowed}, got {found}"))
    }

    /// Returns every key with its value, in the order in which they are written.
    fn entries(&self) -> Vec<(String, Value)> {
        let strings = |names: &[String]| Value::Array(names.iter().cloned().map(Value::String).collect());
        let mut all: Vec<(String, Value)> = vec![
            ("kind".to_owned(), Value::String(self.kind.clone())),
            ("lr".to_owned(), Value::Float(self.lr)),
            ("weight_decay".to_owned(), Value::Float(self.weight_decay)),
            ("decay".to_owned(), strings(&self.decay)),
            ("no_decay".to_owned(), strings(&self.no_decay)),
            ("max_norm".to_owned(), Value::Float(self.max_norm)),
        ];
        all.extend(self.own.iter().map(|(key, value)| (key.clone(), value.clone())));
        // Keys that earlier versions do not know are written only if they are set.
        all.extend(self.paged.then(|| ("paged".to_owned(), Value::Boolean(true))));
        let factors = self.lr_scale.iter().map(|(name, factor)| (name.clone(), Value::Float(*factor)));
        let factors: toml::Table = factors.collect();
        all.extend((!factors.is_empty()).then(|| ("lr_scale".to_owned(), Value::Table(factors))));
        let place = |key: &str| ORDER.iter().position(|name| *name == key).unwrap_or(ORDER.len());
        all.sort_by_key(|(key, value)| (value.is_table(), place(key)));
        all
    }
}

impl<'de> Deserialize<'de> for Optimizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Optimizer::take(BTreeMap::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

impl Serialize for Optimizer {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = self.entries();
        let mut map = serializer.serialize_map(Some(entries.len()))?;
        entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
        map.end()
    }
}

/// Message about a value.
fn fault(key: &str, found: &Value, allowed: &str) -> String {
    format!("optimizer.{key}: expected {allowed}, got {found}")
}

/// Names of all optimizers.
fn kinds() -> String {
    optimizers().map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

/// Keys that `kind` accepts.
fn accepted(kind: &OptimizerKind) -> String {
    let own = kind.keys.iter().filter(|key: &&Key| key.used).map(|key| key.name);
    let all = ["kind", "lr"].into_iter().chain(own).chain(COMMON);
    all.map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ")
}

/// Takes a key, or its default.
fn taken<T>(
    table: &mut BTreeMap<String, Value>,
    key: &str,
    default: T,
    read: impl FnOnce(Value) -> Result<T, String>,
) -> Result<T, String> {
    table.remove(key).map_or(Ok(default), read)
}

/// Reads a number within the declared range of the key.
fn number(key: &str, value: Value) -> Result<f64, String> {
    let found = match &value {
        Value::Float(x) => *x,
        Value::Integer(x) => *x as f64,
        _ => return Err(fault(key, &value, "a number")),
    };
    match setting(&format!("optimizer.{key}")).and_then(|setting| setting.refusal(&Value::Float(found))) {
        None => Ok(found),
        Some(allowed) => Err(fault(key, &value, &allowed)),
    }
}

fn names(key: &str, value: Value) -> Result<Vec<String>, String> {
    let strings = |values: &[Value]| {
        values.iter().map(|value| value.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
    };
    value.as_array().and_then(|values| strings(values)).ok_or_else(|| fault(key, &value, "a list of names"))
}

fn factors(value: Value) -> Result<BTreeMap<String, f64>, String> {
    let Value::Table(table) = value else { return Err(fault("lr_scale", &value, "a table of factors")) };
    let factor = |(name, value): (String, Value)| {
        let factor = number("lr_scale", value)?;
        Ok((name, factor))
    };
    table.into_iter().map(factor).collect()
}
