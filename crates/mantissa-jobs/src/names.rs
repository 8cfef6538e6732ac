//! Values of libraries below as their names, for serialized jobs.

use std::ops::Deref;

use mantissa_num::Scheme;
use mantissa_plan::contract::EngineTarget;
use mantissa_store::convention::Container;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Checkpoint format, serialized by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format(pub Container);

impl Deref for Format {
    type Target = Container;

    fn deref(&self) -> &Container {
        &self.0
    }
}

impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let found = Container::named(&name);
        found.map(Format).ok_or_else(|| D::Error::custom(format!("{name:?} is no checkpoint format")))
    }
}

/// Serving engine with its options, serialized as `ENGINE[:tp=N,gpu=NAME]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TargetName(pub EngineTarget);

impl Serialize for TargetName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for TargetName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        EngineTarget::parse(&String::deserialize(deserializer)?).map(TargetName).map_err(D::Error::custom)
    }
}

/// Scheme, serialized as its text.
#[derive(Clone, Debug, PartialEq)]
pub struct SchemeName(pub Scheme);

impl Serialize for SchemeName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for SchemeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(SchemeName).map_err(D::Error::custom)
    }
}
