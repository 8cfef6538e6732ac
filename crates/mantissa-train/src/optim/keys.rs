//! Description of an optimizer: its name, the keys of `[optimizer]` that it accepts with their defaults, and how it is
//! made.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::method::UpdateRule;
use super::moment_format::MomentFormat;

/// Optimizer in the registry.
pub(crate) struct OptimizerKind {
    /// Value of `optimizer.kind`.
    pub(crate) name: &'static str,
    /// Method and source.
    pub(crate) about: &'static str,
    /// Own keys; the keys of all optimizers are in [`crate::config::Optimizer`].
    pub(crate) keys: &'static [Key],
    /// Refuses combinations of keys.
    pub(crate) check: fn(&Values<'_>) -> Result<(), Fault>,
    /// Makes the optimizer.
    pub(crate) build: fn(&Values<'_>) -> Arc<dyn UpdateRule>,
}

/// Key that is wrong, value found, and accepted values.
pub(crate) type Fault = (&'static str, String, &'static str);

/// Key of an optimizer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) name: &'static str,
    pub(crate) default: Default,
    /// False for a key that earlier versions wrote for every optimizer: only its default is accepted.
    pub(crate) used: bool,
}

/// Default of a key, which states its type, and the accepted values.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Default {
    /// Number; any other than this is an error.
    Number(f64),
    /// Number with the least and the greatest accepted one.
    Range(f64, f64, f64),
    Flag(bool),
    /// First name, of all accepted names.
    Name(&'static [&'static str]),
    /// Format of moments.
    Moments,
}

impl Key {
    /// Format of the moments.
    pub(crate) const MOMENTS: Key = Key { name: "moments", default: Default::Moments, used: true };

    pub(crate) const fn number(name: &'static str, default: f64, least: f64, most: f64) -> Self {
        Key { name, default: Default::Range(default, least, most), used: true }
    }

    pub(crate) const fn flag(name: &'static str, default: bool) -> Self {
        Key { name, default: Default::Flag(default), used: true }
    }

    pub(crate) const fn name(name: &'static str, all: &'static [&'static str]) -> Self {
        Key { name, default: Default::Name(all), used: true }
    }

    pub(crate) const fn unused(name: &'static str, default: Default) -> Self {
        Key { name, default, used: false }
    }

    /// Returns the default as TOML.
    pub(crate) fn value(&self) -> toml::Value {
        match self.default {
            Default::Number(x) | Default::Range(x, _, _) => toml::Value::Float(x),
            Default::Flag(flag) => toml::Value::Boolean(flag),
            Default::Name(all) => toml::Value::String(all.first().copied().unwrap_or_default().to_owned()),
            Default::Moments => toml::Value::String("f32".to_owned()),
        }
    }

    /// Returns the value as it is stored, or the accepted ones.
    pub(crate) fn checked(&self, value: toml::Value) -> Result<toml::Value, String> {
        // TOML writes whole numbers without a point.
        let value = match value {
            toml::Value::Integer(x) => toml::Value::Float(x as f64),
            value => value,
        };
        let accepted = match (&value, self.default) {
            (toml::Value::Float(x), Default::Number(only)) => *x == only,
            (toml::Value::Float(x), Default::Range(_, least, most)) => (least..=most).contains(x),
            (toml::Value::Boolean(x), Default::Flag(only)) => self.used || *x == only,
            (toml::Value::String(x), Default::Name(all)) => all.contains(&x.as_str()),
            (toml::Value::String(x), Default::Moments) => MomentFormat::parse(x).is_some(),
            _ => false,
        };
        if accepted { Ok(value) } else { Err(self.allowed()) }
    }

    fn allowed(&self) -> String {
        match self.default {
            Default::Number(only) => only.to_string(),
            Default::Range(_, least, most) => format!("{least} to {most}"),
            Default::Flag(only) if !self.used => only.to_string(),
            Default::Flag(_) => "true or false".to_owned(),
            Default::Name(all) => all.join(", "),
            Default::Moments => MomentFormat::ALLOWED.to_owned(),
        }
    }
}

/// Own keys of an optimizer, checked.
pub(crate) struct Values<'a>(pub(crate) &'a BTreeMap<String, toml::Value>);

impl Values<'_> {
    pub(crate) fn number(&self, key: &str) -> f64 {
        self.0.get(key).and_then(toml::Value::as_float).unwrap_or_default()
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        self.0.get(key).and_then(toml::Value::as_bool).unwrap_or_default()
    }

    pub(crate) fn name(&self, key: &str) -> &str {
        self.0.get(key).and_then(toml::Value::as_str).unwrap_or_default()
    }

    pub(crate) fn moments(&self) -> MomentFormat {
        MomentFormat::parse(self.name("moments")).unwrap_or_default()
    }
}
