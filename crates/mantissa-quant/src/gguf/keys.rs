//! Keys of the metadata of a GGUF file.

use mantissa_store::gguf::{Value, ValueType};

/// Keys and values in the order in which they are written.
pub(super) struct Keys {
    architecture: &'static str,
    all: Vec<(String, Value)>,
}

impl Keys {
    /// Starts the keys of an architecture.
    pub(super) fn new(architecture: &'static str) -> Self {
        Keys { architecture, all: Vec::new() }
    }

    pub(super) fn put(&mut self, key: &str, value: Value) {
        self.all.push((format!("{}.{key}", self.architecture), value));
    }

    pub(super) fn put_number(&mut self, key: &str, n: usize) {
        self.put(key, Value::U32(u32::try_from(n).unwrap_or(u32::MAX)));
    }

    /// Puts one number for each layer.
    pub(super) fn put_numbers(&mut self, key: &str, numbers: impl Iterator<Item = usize>) {
        let numbers = numbers.map(|n| Value::U32(u32::try_from(n).unwrap_or(u32::MAX)));
        self.put(key, Value::Array(ValueType::U32, numbers.collect()));
    }

    /// Returns the keys with their values.
    pub(super) fn into_pairs(self) -> Vec<(String, Value)> {
        self.all
    }
}

/// Adds `more` to the metadata; a key that they have takes the new value.
pub(super) fn extend(metadata: &mut Vec<(String, Value)>, more: Vec<(String, Value)>) {
    for (key, value) in more {
        match metadata.iter_mut().find(|(known, _)| *known == key) {
            Some((_, known)) => *known = value,
            None => metadata.push((key, value)),
        }
    }
}
