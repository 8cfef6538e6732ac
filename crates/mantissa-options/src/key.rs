//! Keys of tables.

use crate::note::Note;

/// A key of a table.
#[derive(Clone, Debug)]
pub struct Key {
    /// Name.
    pub name: &'static str,
    /// Accepted values.
    pub allowed: String,
    /// Meaning.
    pub help: &'static str,
    /// The default, as TOML; empty if there is none.
    pub default: String,
    /// Remarks of the declaration.
    pub note: Note,
    /// Keys of the table, if its value is one.
    pub subkeys: Option<Subkeys>,
}

/// Keys of a table in a table.
#[derive(Clone, Debug)]
pub struct Subkeys {
    /// Remark behind the header of the table.
    pub about: &'static str,
    /// Its keys, in the order of the declaration.
    pub keys: Vec<Key>,
}

impl Key {
    /// Returns the key with what the declaration says besides.
    #[must_use]
    pub fn noted(self, note: Note) -> Self {
        Key { note, ..self }
    }

    /// Returns the value that pages show: the example, or the default.
    pub fn shown(&self) -> &str {
        self.note.example.unwrap_or(&self.default)
    }

    /// True if a table without the key has no value for it, or one that depends on other keys.
    pub fn is_unset(&self) -> bool {
        !self.note.needed && (self.note.example.is_some() || self.default.is_empty())
    }
}
