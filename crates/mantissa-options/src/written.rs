//! Options as they are written to a file, in order.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use toml::Value;

/// Value of an option in a file. Unlike a [`Value`], a table keeps its order.
#[derive(Clone, Debug, PartialEq)]
pub enum Written {
    /// Value without keys of its own.
    Value(Value),
    /// Table of options.
    Table(Vec<(&'static str, Written)>),
}

impl From<Written> for Value {
    fn from(written: Written) -> Value {
        match written {
            Written::Value(value) => value,
            Written::Table(entries) => {
                Value::Table(entries.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect())
            }
        }
    }
}

impl Serialize for Written {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Written::Value(value) => value.serialize(serializer),
            Written::Table(entries) => {
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
    }
}

/// Key with the value to write.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Name.
    pub name: &'static str,
    /// Value; `None` if the key is left out.
    pub written: Option<Written>,
    /// Key before which it is written, if this is not its place.
    pub before: Option<&'static str>,
}

/// Puts entries in the order of the file.
pub fn ordered(mut entries: Vec<Entry>) -> Vec<(&'static str, Written)> {
    let moved: Vec<_> = entries.iter().filter_map(|entry| Some((entry.name, entry.before?))).collect();
    for (name, before) in moved {
        let at = |name: &str, entries: &[Entry]| entries.iter().position(|entry| entry.name == name);
        let Some(from) = at(name, &entries) else { continue };
        let entry = entries.remove(from);
        let to = at(before, &entries).unwrap_or(from);
        entries.insert(to, entry);
    }
    entries.into_iter().filter_map(|entry| Some((entry.name, entry.written?))).collect()
}
