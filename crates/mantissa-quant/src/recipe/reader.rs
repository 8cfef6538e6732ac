//! Errors of recipe files, which name the place.

use mantissa_options::{self as options, Faults, NamedMut, Refusal, TableSpec};
use toml::Table;

use crate::error::RecipeError;

/// A recipe file, for errors.
pub(super) struct Reader<'a> {
    pub(super) file: &'a str,
    pub(super) table: &'a Table,
}

impl<'a> Reader<'a> {
    /// Returns the table of a method or transform.
    pub(super) fn options(&self, spec: &TableSpec) -> Result<Option<&'a Table>, RecipeError> {
        let Some(value) = self.table.get(spec.name) else { return Ok(None) };
        let fault = || self.fault(spec.name, value.type_str(), "a table");
        value.as_table().map(Some).ok_or_else(fault)
    }

    /// Sets the options of those of `tables` that `spec` describes to the values of `from`.
    pub(super) fn set(
        &self,
        spec: &TableSpec,
        from: &Table,
        tables: Vec<NamedMut<'_>>,
    ) -> Result<(), RecipeError> {
        let mut faults = Faults::default();
        faults.check_keys(from, spec.name, &spec.keys, &[]);
        options::set(tables, spec.name, from, &mut faults);
        self.refuse(faults)
    }

    /// Refuses the file for the first of its faults.
    pub(super) fn refuse(&self, faults: Faults) -> Result<(), RecipeError> {
        if let Some(unknown) = faults.unknown.first() {
            let expected = unknown.known.join(", ") + &unknown.suggestion();
            return Err(self.fault(&unknown.path(), "an unknown key", expected));
        }
        if let Some(missing) = faults.missing.first() {
            return Err(self.fault(&missing.key, "nothing", &*missing.allowed));
        }
        let Some(refused) = faults.refused.into_iter().next() else { return Ok(()) };
        match refused.refusal {
            Refusal::Value { found, allowed } => Err(self.fault(&refused.key, found, allowed)),
            Refusal::Cause(error) => {
                Err(RecipeError::Scheme { name: self.file.to_owned(), field: refused.key, error })
            }
        }
    }

    /// Returns the error of a key.
    pub(super) fn fault(
        &self,
        key: &str,
        got: impl Into<String>,
        expected: impl Into<String>,
    ) -> RecipeError {
        fault(self.file, key, got, expected)
    }
}

/// Returns the error of a field of `file`.
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
