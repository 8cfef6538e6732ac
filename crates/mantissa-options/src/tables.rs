//! Tables of options as values of options, and the reading of whole tables.

use toml::{Table, Value};

use crate::accepts::Accepts;
use crate::declared::Declared;
use crate::faults::{Faults, Refusal};
use crate::key::Subkeys;
use crate::written::Written;

/// Reads a table whose path is `at`. Notes unknown and missing keys, and values that are not accepted.
pub fn read<T: Declared + Default>(table: &Table, at: &str, faults: &mut Faults) -> T {
    read_beside(table, at, &[], faults)
}

/// Reads a table as [`read`] does, which may also have the keys `beside`.
pub fn read_beside<T: Declared + Default>(
    table: &Table,
    at: &str,
    beside: &[&'static str],
    faults: &mut Faults,
) -> T {
    let mut options = T::default();
    options.take(table, at, faults);
    // Keys of some tables depend on their values.
    faults.check_keys(table, at, &options.keys(), beside);
    options
}

/// Reads the text of a table.
///
/// # Errors
/// A message that names the first fault.
pub fn from_toml<T: Declared + Default>(text: &str) -> Result<T, String> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
    let mut faults = Faults::default();
    let options = read(&table, "", &mut faults);
    let unknown = faults.unknown.first().map(|unknown| {
        let known = unknown.known.join(", ");
        format!("{}: expected {known}, got an unknown key{}", unknown.path(), unknown.suggestion())
    });
    let missing =
        faults.missing.first().map(|key| format!("{}: expected {}, got nothing", key.key, key.allowed));
    let refused = faults.refused.first().map(|value| format!("{}: {}", value.key, value.refusal));
    unknown.or(missing).or(refused).map_or(Ok(options), Err)
}

/// Tables of options, with the remark behind their header.
pub struct Subtable(pub &'static str);

impl<T: Declared + Default> Accepts<T> for Subtable {
    fn read(&self, value: &Value) -> Option<T> {
        let mut faults = Faults::default();
        let options = read(value.as_table()?, "", &mut faults);
        faults.is_empty().then_some(options)
    }

    fn print(&self, value: &T) -> Option<Value> {
        Some(Written::Table(value.entries()).into())
    }

    fn allowed(&self) -> String {
        "a table".to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        Refusal::new(value.type_str(), "a table")
    }

    fn take(&self, value: &Value, key: &str, faults: &mut Faults) -> Option<T> {
        let Some(table) = value.as_table() else {
            faults.refuse(key, Accepts::<T>::refusal(self, value));
            return None;
        };
        Some(read(table, key, faults))
    }

    fn absent(&self, key: &str, faults: &mut Faults) -> Option<T> {
        Some(read(&Table::new(), key, faults))
    }

    fn write(&self, value: &T) -> Option<Written> {
        Some(Written::Table(value.entries()))
    }

    fn subkeys(&self) -> Option<Subkeys> {
        Some(Subkeys { about: self.0, keys: T::default().keys() })
    }
}

/// Lists of values of a kind.
pub struct ListOf<K> {
    /// Kind of the values.
    pub item: K,
    /// Maximum number of values.
    pub most: usize,
    /// Name of the list, for messages and pages.
    pub allowed: &'static str,
}

impl<T, K: Accepts<T>> Accepts<Vec<T>> for ListOf<K> {
    fn read(&self, value: &Value) -> Option<Vec<T>> {
        let list = value.as_array().filter(|list| list.len() <= self.most)?;
        list.iter().map(|item| self.item.read(item)).collect()
    }

    fn print(&self, value: &Vec<T>) -> Option<Value> {
        Some(Value::Array(value.iter().filter_map(|item| self.item.print(item)).collect()))
    }

    fn allowed(&self) -> String {
        self.allowed.to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        Refusal::new(value.type_str(), self.allowed)
    }

    fn take(&self, value: &Value, key: &str, faults: &mut Faults) -> Option<Vec<T>> {
        let Some(list) = value.as_array().filter(|list| list.len() <= self.most) else {
            faults.refuse(key, Accepts::<Vec<T>>::refusal(self, value));
            return None;
        };
        let item = |(i, item): (usize, &Value)| self.item.take(item, &format!("{key}[{i}]"), faults);
        list.iter().enumerate().map(item).collect()
    }

    fn subkeys(&self) -> Option<Subkeys> {
        self.item.subkeys()
    }
}
