//! Faults of a table: unknown and missing keys, and values that are not accepted.

use std::error::Error;
use std::fmt;

use toml::Table;

use crate::key::Key;

/// Faults of a file, each with its place.
#[derive(Debug, Default)]
pub struct Faults {
    /// Keys that are not declared.
    pub unknown: Vec<UnknownKey>,
    /// Keys that are needed.
    pub missing: Vec<MissingKey>,
    /// Values that are not accepted.
    pub refused: Vec<RefusedValue>,
}

/// Key that is not declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownKey {
    /// Path of its table; empty for the file itself.
    pub table: String,
    /// The key.
    pub key: String,
    /// Declared keys.
    pub known: Vec<&'static str>,
}

/// Needed key that is absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingKey {
    /// Path of the key.
    pub key: String,
    /// Accepted values.
    pub allowed: String,
    /// Accepted value, as TOML.
    pub example: &'static str,
    /// Paths of the keys that stand for it.
    pub or: Vec<String>,
}

/// Value that is not accepted.
#[derive(Debug)]
pub struct RefusedValue {
    /// Path of the key.
    pub key: String,
    /// Reason.
    pub refusal: Refusal,
}

/// Reason why a value is not accepted.
#[derive(Debug)]
pub enum Refusal {
    /// The value is none of those accepted.
    Value {
        /// The value, or its type.
        found: String,
        /// Accepted values.
        allowed: String,
    },
    /// The text does not parse.
    Cause(Box<dyn Error + Send + Sync>),
}

impl Refusal {
    /// Returns the refusal of a value, or of a type.
    pub fn new(found: impl Into<String>, allowed: impl Into<String>) -> Self {
        Refusal::Value { found: found.into(), allowed: allowed.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Value { found, allowed } => write!(f, "expected {allowed}, got {found}"),
            Refusal::Cause(error) => error.fmt(f),
        }
    }
}

impl UnknownKey {
    /// Returns the path of the key.
    pub fn path(&self) -> String {
        dotted(&self.table, &self.key)
    }

    /// Returns `; did you mean "x"?` if the key is close to a declared one.
    pub fn suggestion(&self) -> String {
        suggestion(&self.key, self.known.iter().copied())
    }
}

impl Faults {
    /// True if nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.unknown.is_empty() && self.missing.is_empty() && self.refused.is_empty()
    }

    /// Adds a value that is not accepted.
    pub fn refuse(&mut self, key: &str, refusal: Refusal) {
        self.refused.push(RefusedValue { key: key.to_owned(), refusal });
    }

    /// Adds the keys of `table`, whose path is `at`, that are neither declared nor in `beside`, and the needed ones that
    /// it lacks.
    pub fn check_keys(&mut self, table: &Table, at: &str, keys: &[Key], beside: &[&'static str]) {
        let shown = keys.iter().filter(|key| !key.note.retired).map(|key| key.name);
        let known: Vec<_> = shown.chain(beside.iter().copied()).collect();
        let declared = |name: &str| keys.iter().any(|key| key.name == name) || beside.contains(&name);
        for key in table.keys().filter(|key| !declared(key)) {
            let (table, key) = (at.to_owned(), key.to_owned());
            self.unknown.push(UnknownKey { table, key, known: known.clone() });
        }
        for key in keys.iter().filter(|key| key.note.needed) {
            let mut stand_ins = key.note.or.iter().chain([&key.name]);
            if !stand_ins.any(|name| table.contains_key(*name)) {
                self.missing.push(MissingKey {
                    key: dotted(at, key.name),
                    allowed: key.allowed.clone(),
                    example: key.note.example.unwrap_or_default(),
                    or: key.note.or.iter().map(|name| dotted(at, name)).collect(),
                });
            }
        }
    }
}

/// Joins the path of a table and a key.
pub fn dotted(at: &str, key: &str) -> String {
    if at.is_empty() { key.to_owned() } else { format!("{at}.{key}") }
}

/// Returns `; did you mean "x"?` if `got` is close to one of `names`.
pub fn suggestion<'a>(got: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let close = names
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(got, name), name))
        .filter(|(distance, name)| *distance <= name.len().max(3) / 3)
        .min();
    close.map_or_else(String::new, |(_, name)| format!("; did you mean \"{name}\"?"))
}
