//! Structs of options, and their tables in files.

use std::fmt;

use toml::{Table, Value};

use crate::accepts::Accepts;
use crate::faults::{Faults, dotted};
use crate::key::Key;
use crate::note::Note;
use crate::written::{Entry, Written};

/// Struct of options that [`options!`](crate::options!) declares.
pub trait Declared {
    /// Keys, in the order of the declaration.
    fn keys(&self) -> Vec<Key>;

    /// Sets the options that `table`, whose path is `at`, has. Notes values that are not accepted. Unknown and missing
    /// keys are looked for by [`read`](crate::read), or by the caller.
    fn take(&mut self, table: &Table, at: &str, faults: &mut Faults);

    /// Returns the options as they are written to a file, in its order; [`take`](Self::take) reads them back.
    fn entries(&self) -> Vec<(&'static str, Written)>;

    /// Returns all options that have a value, in the order of the file.
    fn values(&self) -> Vec<(&'static str, Value)> {
        self.entries().into_iter().map(|(key, written)| (key, written.into())).collect()
    }
}

/// A table of a recipe file.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// Name, for example `gptq`.
    pub name: &'static str,
    /// Its keys, in the order of the declaration.
    pub keys: Vec<Key>,
}

/// Option with its value, in TOML: `gptq.damp = 0.01`.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionValue {
    /// Table.
    pub table: &'static str,
    /// Key.
    pub key: &'static str,
    /// Value.
    pub value: Value,
}

impl fmt::Display for OptionValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} = {}", self.table, self.key, self.value)
    }
}

/// Options with the name of their table.
pub type Named<'a> = (&'static str, &'a dyn Declared);

/// Options that can be set, with the name of their table.
pub type NamedMut<'a> = (&'static str, &'a mut dyn Declared);

/// Describes the table `name` of these options.
pub fn spec((name, options): Named<'_>) -> TableSpec {
    TableSpec { name, keys: options.keys() }
}

/// Returns the options of these tables as they are set.
pub fn settings(tables: &[Named<'_>]) -> Vec<OptionValue> {
    let table_settings = |(table, options): &Named<'_>| {
        let table = *table;
        options.values().into_iter().map(move |(key, value)| OptionValue { table, key, value })
    };
    tables.iter().flat_map(table_settings).collect()
}

/// Sets the options of each of `tables` that is named `name` to the values of `from`. Notes values that are not accepted.
pub fn set(tables: Vec<NamedMut<'_>>, name: &str, from: &Table, faults: &mut Faults) {
    let named = tables.into_iter().filter(|(own, _)| *own == name);
    named.for_each(|(_, options)| options.take(from, name, faults));
}

/// Writes options as a TOML file.
pub fn to_toml(options: &dyn Declared) -> String {
    toml::to_string(&Written::Table(options.entries())).unwrap_or_default()
}

/// Describes the option `name`, whose default is `value`; `help` is the documentation of its field.
pub fn key<T>(name: &'static str, kind: &dyn Accepts<T>, value: &T, help: &'static str) -> Key {
    let subkeys = kind.subkeys();
    let default = if subkeys.is_some() { None } else { kind.print(value) };
    Key {
        name,
        allowed: kind.allowed(),
        help: help.trim().trim_end_matches('.'),
        default: default.as_ref().map_or_else(String::new, literal),
        note: Note::NONE,
        subkeys,
    }
}

/// Writes a value as a person does: numbers in the shortest form, such as `1e-8`.
fn literal(value: &Value) -> String {
    match value {
        Value::Float(number) => format!("{number:?}"),
        value => value.to_string(),
    }
}

/// Sets the option `name` if `table`, whose path is `at`, has it. Notes a value that is not accepted.
pub fn take<T>(
    option: &mut T,
    name: &str,
    kind: &dyn Accepts<T>,
    (table, at): (&Table, &str),
    faults: &mut Faults,
) {
    let path = dotted(at, name);
    let value = match table.get(name) {
        Some(value) => kind.take(value, &path, faults),
        None => kind.absent(&path, faults),
    };
    if let Some(value) = value {
        *option = value;
    }
}

/// Writes the option `name`.
pub fn entry<T>(name: &'static str, kind: &dyn Accepts<T>, (value, default): (&T, &T), note: Note) -> Entry {
    let written =
        kind.write(value).filter(|written| !note.later || Some(written) != kind.write(default).as_ref());
    Entry { name, written, before: note.before }
}
