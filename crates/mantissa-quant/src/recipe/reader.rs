//! Reader of a table of a recipe file, whose errors name the place.

use mantissa_methods::options::TableSpec;
use mantissa_methods::registry::{self, METHODS, Registered};
use mantissa_num::{Scheme, nearest_list};
use toml::{Table, Value};

use super::{Glob, suggestion};
use crate::error::RecipeError;

/// Maximum length of a scheme in bytes, far above any; errors quote it.
const MAX_SCHEME: usize = 120;

/// Maximum number of rules, far above any real recipe; limits hostile files.
pub(super) const MAX_RULES: usize = 10_000;

/// A table of the file, with its place for errors.
pub(super) struct Reader<'a> {
    pub(super) file: &'a str,
    pub(super) table: &'a Table,
    pub(super) at: String,
}

impl<'a> Reader<'a> {
    /// Returns the table of a method or transform after checking its keys.
    pub(super) fn options(&self, spec: &TableSpec) -> Result<Option<Reader<'a>>, RecipeError> {
        let Some(value) = self.table.get(spec.name) else { return Ok(None) };
        let table = value.as_table().ok_or_else(|| self.fault(spec.name, value.type_str(), "a table"))?;
        let reader = Reader { file: self.file, table, at: format!("{}.", spec.name) };
        reader.refuse_unknown(&spec.keys.iter().map(|key| key.name).collect::<Vec<_>>())?;
        Ok(Some(reader))
    }

    pub(super) fn refuse_unknown(&self, known: &[&'static str]) -> Result<(), RecipeError> {
        let Some(key) = self.table.keys().find(|key| !known.contains(&key.as_str())) else { return Ok(()) };
        Err(RecipeError::File {
            file: self.file.to_owned(),
            field: format!("{}{key}", self.at),
            got: "an unknown key".to_owned(),
            expected: known.join(", ") + &suggestion(key, known.iter().copied()),
        })
    }

    /// Returns the row of the method `name`, the value of `method`.
    pub(super) fn method(&self, name: &str) -> Result<&'static Registered, RecipeError> {
        let names = || nearest_list(name, METHODS.iter().map(|row| row.name));
        registry::find(name).ok_or_else(|| self.fault("method", format!("\"{name}\""), names()))
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&str>, RecipeError> {
        match self.table.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.fault(key, other.type_str(), "a string")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<bool, RecipeError> {
        match self.table.get(key) {
            None => Ok(false),
            Some(Value::Boolean(flag)) => Ok(*flag),
            Some(other) => Err(self.fault(key, other.type_str(), "true or false")),
        }
    }

    /// Returns the value named by the text under `key`.
    pub(super) fn one_of<T: Copy>(&self, key: &str, known: &[(&str, T)]) -> Result<Option<T>, RecipeError> {
        let Some(text) = self.string(key)? else { return Ok(None) };
        let found = known.iter().find(|(name, _)| *name == text).map(|(_, value)| *value);
        let names = || known.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        found.map(Some).ok_or_else(|| self.fault(key, format!("\"{text}\""), names()))
    }

    pub(super) fn scheme(
        &self,
        key: &str,
        parse: impl Fn(&str) -> Result<Scheme, mantissa_num::ParseError>,
    ) -> Result<Option<Scheme>, RecipeError> {
        let Some(text) = self.string(key)? else { return Ok(None) };
        if text.len() > MAX_SCHEME {
            let got = format!("{} bytes, \"{text}\"", text.len());
            return Err(self.fault(key, got, "a scheme such as \"int4-g128\""));
        }
        parse(text).map(Some).map_err(|error| RecipeError::Scheme {
            name: self.file.to_owned(),
            field: format!("{}{key}", self.at),
            error,
        })
    }

    pub(super) fn globs(&self, key: &str) -> Result<Option<Vec<Glob>>, RecipeError> {
        let Some(value) = self.table.get(key) else { return Ok(None) };
        let list = value.as_array().filter(|l| l.len() <= MAX_RULES);
        let list = list.ok_or_else(|| self.fault(key, value.type_str(), "a list of names or globs"))?;
        let glob = |item: &Value| {
            let text = item.as_str().ok_or_else(|| self.fault(key, item.type_str(), "names or globs"))?;
            Ok(Glob(text.to_owned()))
        };
        list.iter().map(glob).collect::<Result<_, _>>().map(Some)
    }

    pub(super) fn fault(
        &self,
        key: &str,
        got: impl Into<String>,
        expected: impl Into<String>,
    ) -> RecipeError {
        fault(self.file, &format!("{}{key}", self.at), got, expected)
    }
}

pub(super) fn fault(
    file: &str,
    field: &str,
    got: impl Into<String>,
    expected: impl Into<String>,
) -> RecipeError {
    RecipeError::File {
        file: file.to_owned(),
        field: field.to_owned(),
        got: got.into(),
        expected: expected.into(),
    }
}
