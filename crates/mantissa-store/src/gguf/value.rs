//! Metadata values and typed access to them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Type of a metadata value, in the order of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // Named as the format names them.
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // Named as the format names them.
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    /// Type of the elements, and the elements.
    Array(ValueType, Vec<Value>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl ValueType {
    /// Every type; the index is its number.
    pub const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Type with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Number in the file.
    pub fn id(self) -> u32 {
        Self::ALL.iter().position(|ty| *ty == self).unwrap_or(0) as u32
    }

    /// The fewest bytes that a value of this type takes in a file.
    pub(super) fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "a boolean",
            Self::String => "a string",
            Self::Array => "an array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        }
    }
}

impl Value {
    /// Its type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::String(_) => ValueType::String,
            Self::Array(..) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }

    /// Names the type, for messages.
    pub fn kind(&self) -> String {
        match self {
            Self::Array(items, values) => format!("an array of {} {}", values.len(), items.name()),
            other => other.value_type().name().to_owned(),
        }
    }

    /// An array of strings.
    pub fn strings(values: impl IntoIterator<Item = String>) -> Self {
        Self::Array(ValueType::String, values.into_iter().map(Self::String).collect())
    }

    /// An integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(v) => Some(v.into()),
            Self::U16(v) => Some(v.into()),
            Self::U32(v) => Some(v.into()),
            Self::U64(v) => Some(v),
            Self::I8(v) => v.try_into().ok(),
            Self::I16(v) => v.try_into().ok(),
            Self::I32(v) => v.try_into().ok(),
            Self::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A float of either width.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F32(v) => Some(v.into()),
            Self::F64(v) => Some(v),
            _ => None,
        }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// The elements of an array.
    pub fn as_array(&self) -> Option<&[Value]> {
        match self {
            Self::Array(_, values) => Some(values),
            _ => None,
        }
    }
}

/// The key-value pairs of a file, in its order, keys unique.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    path: PathBuf,
    pub(super) entries: Vec<(String, Value)>,
    pub(super) by_key: HashMap<String, usize>,
    /// First byte of each value in the file.
    pub(super) starts: Vec<u64>,
}

impl Metadata {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), ..Self::default() }
    }

    /// Makes metadata of pairs that are not from a file; `path` is their name in errors. Of equal keys the last counts.
    pub fn from_pairs(path: &Path, pairs: impl IntoIterator<Item = (String, Value)>) -> Self {
        let entries: Vec<_> = pairs.into_iter().collect();
        let by_key = entries.iter().enumerate().map(|(at, (key, _))| (key.clone(), at)).collect();
        Self { entries, by_key, ..Self::new(path) }
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&at| &self.entries[at].1)
    }

    /// First byte in the file, and number, of the elements of an array of f32.
    pub(crate) fn floats(&self, key: &str) -> Option<(u64, usize)> {
        /// Bytes of an array before its elements: their type and number.
        const HEADER: u64 = 4 + 8;
        let at = *self.by_key.get(key)?;
        match (&self.entries[at].1, self.starts.get(at)) {
            (Value::Array(ValueType::F32, values), Some(start)) => Some((start + HEADER, values.len())),
            _ => None,
        }
    }

    /// All pairs, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads a non-negative integer.
    ///
    /// # Errors
    /// [`Error::Field`] if the key holds another type.
    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "an integer of at least 0", Value::as_u64)
    }

    /// A float.
    ///
    /// # Errors
    /// As [`uint`](Self::uint).
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a float", Value::as_f64)
    }

    /// A string.
    ///
    /// # Errors
    /// As [`uint`](Self::uint).
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A boolean.
    ///
    /// # Errors
    /// As [`uint`](Self::uint).
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a boolean", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// Reads an array whose elements `of` accepts.
    ///
    /// # Errors
    /// As [`uint`](Self::uint).
    pub fn list<'a, T>(
        &'a self,
        key: &str,
        allowed: &str,
        of: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        self.typed(key, allowed, |value| value.as_array()?.iter().map(&of).collect())
    }

    /// A value of `key` that is not allowed.
    pub fn fault(&self, key: &str, found: impl Into<String>, allowed: impl Into<String>) -> Error {
        Error::field(&self.path, key, found, allowed, "")
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        allowed: &str,
        of: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        of(value).map(Some).ok_or_else(|| self.fault(key, shown(value), allowed))
    }
}

/// A value for a message: numbers themselves, the kind of everything else.
fn shown(value: &Value) -> String {
    match (value.as_u64(), value.as_f64(), value) {
        (Some(n), _, _) => n.to_string(),
        (_, Some(x), _) => x.to_string(),
        (_, _, Value::I8(_) | Value::I16(_) | Value::I32(_) | Value::I64(_)) => {
            "a negative integer".to_owned()
        }
        _ => value.kind(),
    }
}
