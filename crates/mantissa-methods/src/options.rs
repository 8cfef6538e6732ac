//! Options of methods and transforms in recipe files: one TOML table each, with declared keys.

use std::fmt;

use toml::{Table, Value};

/// A table of a recipe file.
#[derive(Clone, Copy, Debug)]
pub struct TableSpec {
    /// Name, for example `gptq`.
    pub name: &'static str,
    /// Its keys, in the order of the documentation.
    pub keys: &'static [Key],
}

/// A key of such a table.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name.
    pub name: &'static str,
    /// Meaning, for the reference page of recipes.
    pub help: &'static str,
}

/// Option with its value, in TOML: `gptq.damp = 0.01`.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Table.
    pub table: &'static str,
    /// Key.
    pub key: &'static str,
    /// Value.
    pub value: Value,
}

impl Setting {
    /// `value` of `key` in `table`.
    pub fn new(table: &'static str, key: &'static str, value: impl Into<Value>) -> Self {
        Setting { table, key, value: value.into() }
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} = {}", self.table, self.key, self.value)
    }
}

/// Shortest decimal that reads back as the same f32.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

/// Name of `value` among `known`; empty if it has none.
pub fn name_of<T: PartialEq>(value: &T, known: &[(&'static str, T)]) -> &'static str {
    known.iter().find(|(_, one)| one == value).map_or("", |(name, _)| name)
}

/// Error: a key's value is not allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionError {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub found: String,
    /// The values allowed.
    pub allowed: String,
}

impl OptionError {
    fn new(key: &'static str, found: impl fmt::Display, allowed: impl Into<String>) -> Self {
        OptionError { key, found: found.to_string(), allowed: allowed.into() }
    }
}

/// Typed reader of a table's values. Every function returns `None` if the key is not set.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a>(&'a Table);

impl<'a> Options<'a> {
    /// The values of `table`.
    pub fn new(table: &'a Table) -> Self {
        Options(table)
    }

    /// Raw TOML value of `key`.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key)
    }

    /// Reads an integer from 1 to `most`.
    ///
    /// # Errors
    /// [`OptionError`] if the value is not allowed.
    pub fn count(&self, key: &'static str, most: usize) -> Result<Option<usize>, OptionError> {
        let count = |value: &Value| {
            let n = value.as_integer().and_then(|n| usize::try_from(n).ok());
            n.filter(|n| (1..=most).contains(n))
        };
        self.read(key, count, || format!("1 to {most}"))
    }

    /// Reads a number with a decimal point, from 0 to `most`.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn number(&self, key: &'static str, most: f64) -> Result<Option<f32>, OptionError> {
        let number = |value: &Value| value.as_float().filter(|n| (0.0..=most).contains(n));
        let read = self.read(key, number, || format!("a number from 0.0 to {most:?}"))?;
        Ok(read.map(|number| number as f32))
    }

    /// Reads a number from 0 to 1, in f64.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn fraction(&self, key: &'static str) -> Result<Option<f64>, OptionError> {
        let number = |value: &Value| value.as_float().or_else(|| value.as_integer().map(|i| i as f64));
        let fraction = |value: &Value| number(value).filter(|n| (0.0..=1.0).contains(n));
        self.read(key, fraction, || "a number from 0 to 1".to_owned())
    }

    /// Reads `true` or `false`.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn flag(&self, key: &'static str) -> Result<Option<bool>, OptionError> {
        self.read(key, Value::as_bool, || "true or false".to_owned())
    }

    /// Reads `seed`, an integer of at least 0.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn seed(&self) -> Result<Option<u64>, OptionError> {
        let seed = |value: &Value| value.as_integer().and_then(|seed| u64::try_from(seed).ok());
        self.read("seed", seed, || "an integer of at least 0".to_owned())
    }

    /// Reads one of the names in `known`.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn one_of<T: Copy>(&self, key: &'static str, known: &[(&str, T)]) -> Result<Option<T>, OptionError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let Some(text) = value.as_str() else {
            return Err(OptionError::new(key, value.type_str(), "a string"));
        };
        let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        let names = || known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        found.map(Some).ok_or_else(|| OptionError::new(key, format_args!("\"{text}\""), names()))
    }

    /// Converts the value of `key` with `read`. `allowed` names the allowed values.
    ///
    /// # Errors
    /// [`OptionError`] with `allowed` if `read` refuses the value.
    pub fn read<T>(
        &self,
        key: &'static str,
        read: impl Fn(&'a Value) -> Option<T>,
        allowed: impl Fn() -> String,
    ) -> Result<Option<T>, OptionError> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| OptionError::new(key, value, allowed()))
    }
}
