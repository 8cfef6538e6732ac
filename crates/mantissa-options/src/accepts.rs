//! Kinds of values: which are accepted, and how they are written in TOML.

use toml::Value;

use crate::faults::{Faults, Refusal};
use crate::key::Subkeys;
use crate::written::Written;

/// Kind of the values of an option that is a `T`: which are accepted, and how they are written in TOML.
pub trait Accepts<T> {
    /// Reads a value; `None` if it is not accepted.
    fn read(&self, value: &Value) -> Option<T>;

    /// Writes a value; `None` if the key is left out for it.
    fn print(&self, value: &T) -> Option<Value>;

    /// Accepted values, for messages and pages.
    fn allowed(&self) -> String;

    /// Returns why [`read`](Self::read) does not accept `value`.
    fn refusal(&self, value: &Value) -> Refusal {
        Refusal::new(value.to_string(), self.allowed())
    }

    /// Reads the value of `key`, a path; notes why it is not accepted.
    fn take(&self, value: &Value, key: &str, faults: &mut Faults) -> Option<T> {
        let read = self.read(value);
        if read.is_none() {
            faults.refuse(key, self.refusal(value));
        }
        read
    }

    /// Returns the value of an absent `key`, if that is not the default; notes what the table in its place lacks.
    fn absent(&self, _key: &str, _faults: &mut Faults) -> Option<T> {
        None
    }

    /// Writes a value in the order of its file; `None` if the key is left out for it.
    fn write(&self, value: &T) -> Option<Written> {
        self.print(value).map(Written::Value)
    }

    /// Returns the keys of the value, if it is a table of options.
    fn subkeys(&self) -> Option<Subkeys> {
        None
    }
}
