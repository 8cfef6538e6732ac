//! Typed access to the fields of a JSON object; every error names file, field, expected values and the value found.

use std::ops::RangeInclusive;
use std::path::Path;

use mantissa_store::Shown;
use serde_json::{Map, Value};

use mantissa_arch::rules::Flag;

/// Widest accepted layer; keeps every product of two sizes far from overflow.
pub(crate) const MAX_WIDTH: u64 = 1 << 24;
/// Largest number of layers.
pub(crate) const MAX_LAYERS: u64 = 10_000;
/// Longest context.
pub(crate) const MAX_POSITIONS: u64 = 1 << 31;

/// A field of a configuration file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: {}: expected {allowed}, got {}", Shown(.field), Shown(.found))]
pub struct ConfigError {
    /// The file.
    pub file: String,
    /// The field, with dots between levels.
    pub field: String,
    /// Value found.
    pub found: String,
    /// Values expected.
    pub allowed: String,
}

impl ConfigError {
    /// Makes the error for a file that cannot be read.
    pub fn unreadable(path: &Path, error: &mantissa_store::Error) -> Self {
        let (allowed, found) = error.expected_and_found();
        ConfigError { file: path.display().to_string(), field: "the file".into(), found, allowed }
    }
}

/// A JSON object, its file and its place in it.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    file: &'a str,
    /// Name of the object in its file, empty for the root.
    parent: &'a str,
    object: &'a Map<String, Value>,
    /// Names that the file uses for fields: `(asked for, in the file)`.
    aliases: &'static [(&'static str, &'static str)],
    /// Integers of fields that are absent; flags are 0 or 1.
    defaults: &'static [(&'static str, u64)],
}

impl<'a> Fields<'a> {
    pub(crate) fn root(file: &'a str, value: &'a Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(object) => Ok(Fields { file, parent: "", object, aliases: &[], defaults: &[] }),
            other => Err(ConfigError {
                file: file.into(),
                field: "the file".into(),
                found: show(Some(other)),
                allowed: "a JSON object".into(),
            }),
        }
    }

    /// Returns the same object with other names for its fields: `(asked for, in the file)`.
    pub(crate) fn named(self, aliases: &'static [(&'static str, &'static str)]) -> Self {
        Fields { aliases, ..self }
    }

    /// Returns the same object with integers for fields that are absent; flags are 0 or 1.
    pub(crate) fn or_defaults(self, defaults: &'static [(&'static str, u64)]) -> Self {
        Fields { defaults, ..self }
    }

    fn default_of(&self, field: &str) -> Option<u64> {
        self.defaults.iter().find(|(name, _)| *name == field).map(|(_, value)| *value)
    }

    fn key<'n>(&self, field: &'n str) -> &'n str {
        self.aliases.iter().find(|(asked, _)| *asked == field).map_or(field, |(_, name)| name)
    }

    pub(crate) fn error(&self, field: &str, allowed: impl Into<String>) -> ConfigError {
        self.error_found(field, show(self.object.get(self.key(field))), allowed)
    }

    pub(crate) fn error_found(
        &self,
        field: &str,
        found: impl Into<String>,
        allowed: impl Into<String>,
    ) -> ConfigError {
        let field = self.key(field);
        let field = match self.parent {
            "" => field.into(),
            parent => format!("{parent}.{field}"),
        };
        ConfigError { file: self.file.into(), field, found: found.into(), allowed: allowed.into() }
    }

    /// True if the field is present, `null` included.
    pub(crate) fn has(&self, field: &str) -> bool {
        self.object.contains_key(self.key(field))
    }

    /// Returns the value of a field; `null` counts as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(self.key(field)).filter(|value| !value.is_null())
    }

    pub(crate) fn size(&self, field: &str, allowed: RangeInclusive<u64>) -> Result<usize, ConfigError> {
        self.optional_size(field, allowed.clone())?
            .ok_or_else(|| self.error(field, between("an integer", &allowed)))
    }

    pub(crate) fn optional_size(
        &self,
        field: &str,
        allowed: RangeInclusive<u64>,
    ) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(field) else {
            return Ok(self.default_of(field).and_then(|n| usize::try_from(n).ok()));
        };
        match value.as_u64().filter(|n| allowed.contains(n)).and_then(|n| usize::try_from(n).ok()) {
            Some(n) => Ok(Some(n)),
            None => Err(self.error(field, between("an integer", &allowed))),
        }
    }

    /// Returns a finite number greater than 0.
    pub(crate) fn positive(&self, field: &str) -> Result<f64, ConfigError> {
        self.optional_positive(field)?.ok_or_else(|| self.error(field, "a number greater than 0"))
    }

    pub(crate) fn optional_positive(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        match self.optional_number(field)? {
            Some(x) if x <= 0.0 => Err(self.error(field, "a number greater than 0")),
            x => Ok(x),
        }
    }

    /// Returns a finite number.
    pub(crate) fn optional_number(&self, field: &str) -> Result<Option<f64>, ConfigError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|x| (*x as f32).is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(self.error(field, "a finite number")),
        }
    }

    pub(crate) fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(self.default_of(field).map_or(default, |n| n != 0)),
            Some(value) => value.as_bool().ok_or_else(|| self.error(field, "true or false")),
        }
    }

    /// Returns the value of a flag that the architecture or a field states.
    pub(crate) fn resolve(&self, flag: Flag) -> Result<bool, ConfigError> {
        match flag {
            Flag::Fixed(value) => Ok(value),
            Flag::Field(field, default) => self.flag(field, default),
        }
    }

    pub(crate) fn text(&self, field: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.error(field, "a string")),
        }
    }

    pub(crate) fn object(&self, field: &'a str) -> Result<Option<Fields<'a>>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => {
                Ok(Some(Fields { file: self.file, parent: field, object, aliases: &[], defaults: &[] }))
            }
            Some(_) => Err(self.error(field, "an object or null")),
        }
    }

    /// Returns one token id.
    pub(crate) fn token(&self, field: &str) -> Result<Option<u32>, ConfigError> {
        Ok(self.optional_size(field, 0..=u64::from(u32::MAX))?.map(|id| id as u32))
    }

    /// Returns one token id or a list of them.
    pub(crate) fn tokens(&self, field: &str) -> Result<Vec<u32>, ConfigError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match self.get(field) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(value) => id(value).map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.error(field, "a token id or a list of token ids"))
    }
}

fn between(what: &str, allowed: &RangeInclusive<u64>) -> String {
    format!("{what} from {} to {}", allowed.start(), allowed.end())
}

/// Formats a value for a message: JSON, which escapes control characters, cut to one line.
fn show(value: Option<&Value>) -> String {
    const LIMIT: usize = 120;
    let Some(value) = value else { return "nothing".into() };
    let text = value.to_string();
    match text.char_indices().nth(LIMIT) {
        None => text,
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}
