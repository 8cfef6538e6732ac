//! The JSON of a safetensors header, streamed into entries without an intermediate tree.
//!
//! A visitor can only fail with text. So it records its scope, and a typed fault if it found one, in [`Scope`], from
//! which the error is built.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::dtype::Dtype;
use crate::error::{Error, HeaderFault, Result, TensorFault};
use crate::json;

/// A tensor's entry, its name and dtype known and its numbers in range, not yet checked against each other.
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) start: u64,
    pub(crate) end: u64,
}

type Parsed = (Vec<Entry>, BTreeMap<String, String>);

/// Entries in the header's order, repeated names included, and `__metadata__`.
pub(crate) fn parse(path: &Path, json: &[u8]) -> Result<Parsed> {
    let text = std::str::from_utf8(json)
        .map_err(|e| Error::header(path, HeaderFault::NotUtf8 { position: e.valid_up_to() }))?;
    let scope = RefCell::new(Scope::Root);
    let mut parser = serde_json::Deserializer::from_str(text);
    let parsed = parser.deserialize_map(Root { scope: &scope });
    parsed
        .and_then(|parsed| parser.end().map(|()| parsed))
        .map_err(|error| scope.into_inner().error(path, position(text, &error), json::message(&error)))
}

/// Position of the parser in the header, with the fault that a visitor has found there.
enum Scope {
    Root,
    Metadata,
    Tensor(String),
    HeaderFault(HeaderFault),
    TensorFault(String, TensorFault),
}

impl Scope {
    fn error(self, path: &Path, position: usize, message: String) -> Error {
        match self {
            Self::Root => Error::header(path, HeaderFault::Json { position, message }),
            Self::Metadata => Error::header(path, HeaderFault::Metadata { position, message }),
            Self::Tensor(name) => Error::tensor(path, &name, TensorFault::Entry { position, message }),
            Self::HeaderFault(fault) => Error::header(path, fault),
            Self::TensorFault(name, fault) => Error::tensor(path, &name, fault),
        }
    }
}

/// Byte at which the parser stopped. The parser's column is the last byte read or the next one, so this is accurate
/// to one byte.
fn position(text: &str, error: &serde_json::Error) -> usize {
    let line_start: usize =
        text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
    (line_start + error.column().saturating_sub(1)).min(text.len())
}

#[derive(Clone, Copy)]
struct Root<'a> {
    scope: &'a RefCell<Scope>,
}

impl<'de> Visitor<'de> for Root<'_> {
    type Value = Parsed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Parsed, A::Error> {
        let mut entries = Vec::new();
        let mut metadata = None;
        while let Some(key) = map.next_key::<String>()? {
            if key != "__metadata__" {
                entries.push(self.entry(key, &mut map)?);
            } else if metadata.is_some() {
                self.scope.replace(Scope::HeaderFault(HeaderFault::DuplicateMetadata));
                return Err(A::Error::custom(""));
            } else {
                self.scope.replace(Scope::Metadata);
                metadata = Some(map.next_value_seed(Metadata { scope: self.scope })?);
            }
            self.scope.replace(Scope::Root);
        }
        Ok((entries, metadata.unwrap_or_default()))
    }
}

impl Root<'_> {
    fn entry<'de, A: MapAccess<'de>>(
        self,
        name: String,
        map: &mut A,
    ) -> std::result::Result<Entry, A::Error> {
        self.scope.replace(Scope::Tensor(name));
        let fields = map.next_value_seed(Fields { scope: self.scope })?;
        let name = match self.scope.replace(Scope::Root) {
            Scope::Tensor(name) => name,
            _ => String::new(),
        };
        let (dtype, shape, [start, end]) = fields;
        Ok(Entry { name, dtype, shape, start, end })
    }
}

struct Metadata<'a> {
    scope: &'a RefCell<Scope>,
}

impl<'de> DeserializeSeed<'de> for Metadata<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let mut metadata = BTreeMap::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value::<String>()?;
            if metadata.contains_key(&key) {
                self.scope.replace(Scope::HeaderFault(HeaderFault::DuplicateMetadataKey { key }));
                return Err(A::Error::custom(""));
            }
            metadata.insert(key, value);
        }
        Ok(metadata)
    }
}

/// The three fields of a tensor's entry.
#[derive(Clone, Copy)]
struct Fields<'a> {
    scope: &'a RefCell<Scope>,
}

impl Fields<'_> {
    /// Records a typed fault of the current tensor and returns the error that unwinds the parser.
    fn fail<E: serde::de::Error>(self, fault: TensorFault) -> E {
        let mut scope = self.scope.borrow_mut();
        if let Scope::Tensor(name) = &mut *scope {
            *scope = Scope::TensorFault(std::mem::take(name), fault);
        }
        E::custom("")
    }

    fn set<T, E: serde::de::Error>(
        self,
        slot: &mut Option<T>,
        field: &'static str,
        value: T,
    ) -> std::result::Result<(), E> {
        match slot.replace(value) {
            None => Ok(()),
            Some(_) => Err(self.fail(TensorFault::DuplicateField { field })),
        }
    }

    fn require<T, E: serde::de::Error>(
        self,
        slot: Option<T>,
        field: &'static str,
    ) -> std::result::Result<T, E> {
        slot.ok_or_else(|| self.fail(TensorFault::MissingField { field }))
    }
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = (Dtype, Vec<usize>, [u64; 2]);

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = (Dtype, Vec<usize>, [u64; 2]);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "dtype" => {
                    let found = map.next_value::<String>()?;
                    let known = Dtype::parse(&found)
                        .ok_or_else(|| self.fail(TensorFault::UnknownDtype { found: found.clone() }))?;
                    self.set(&mut dtype, "dtype", known)?;
                }
                "shape" => {
                    let dims = map.next_value_seed(Numbers { fields: self, number: Number::Dimension })?;
                    self.set(&mut shape, "shape", dims)?;
                }
                "data_offsets" => {
                    let found = map.next_value_seed(Numbers { fields: self, number: Number::Offset })?;
                    self.set(&mut offsets, "data_offsets", found)?;
                }
                _ => return Err(self.fail(TensorFault::UnknownField { field: key })),
            }
        }
        let dims = self.require(shape, "shape")?;
        let offsets = self.require(offsets, "data_offsets")?;
        let pair = <[u64; 2]>::try_from(offsets)
            .map_err(|found| self.fail(Number::Offset.fault(format!("{} numbers", found.len()))))?;
        // Each was checked to be below 2^63, so this fails only with 32-bit addresses.
        let shape = dims.iter().map(|&dim| usize::try_from(dim)).collect::<std::result::Result<_, _>>();
        let shape =
            shape.map_err(|_| self.fail(Number::Dimension.fault("a dimension beyond memory".into())))?;
        Ok((self.require(dtype, "dtype")?, shape, pair))
    }
}

/// Kind of the numbers of an array, which chooses the fault of a bad one.
#[derive(Clone, Copy)]
enum Number {
    Dimension,
    Offset,
}

impl Number {
    fn fault(self, found: String) -> TensorFault {
        match self {
            Self::Dimension => TensorFault::Dimension { found },
            Self::Offset => TensorFault::Offset { found },
        }
    }
}

/// An array of integers from 0 to 2^63 - 1.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    fields: Fields<'a>,
    number: Number,
}

impl<'de> DeserializeSeed<'de> for Numbers<'_> {
    type Value = Vec<u64>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Numbers<'_> {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of integers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Vec<u64>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = seq.next_element_seed(One(self))? {
            numbers.push(number);
        }
        Ok(numbers)
    }
}

struct One<'a>(Numbers<'a>);

impl<'de> DeserializeSeed<'de> for One<'_> {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> std::result::Result<u64, D::Error> {
        d.deserialize_any(self)
    }
}

impl Visitor<'_> for One<'_> {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an integer from 0 to 2^63-1")
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> std::result::Result<u64, E> {
        match i64::try_from(value) {
            Ok(_) => Ok(value),
            Err(_) => Err(self.0.fields.fail(self.0.number.fault(value.to_string()))),
        }
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> std::result::Result<u64, E> {
        Err(self.0.fields.fail(self.0.number.fault(value.to_string())))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> std::result::Result<u64, E> {
        Err(self.0.fields.fail(self.0.number.fault(format!("{value:?}"))))
    }
}
