//! Values of libraries below as their names, for serialized jobs.

use std::fmt::Display;
use std::ops::Deref;
use std::str::FromStr;

use mantissa_model::StopReason;
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

/// Value of a library below, serialized as its text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AsText<T>(pub T);

impl<T> Deref for AsText<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Display> Serialize for AsText<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for AsText<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(AsText).map_err(D::Error::custom)
    }
}

/// Engine that runs a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// Repacked weights, quantized activations.
    Fast,
    /// Dense f32 matmuls.
    Reference,
}

/// Returns the name of a reason for the end of a text.
pub fn stop_name(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Length => "length",
        StopReason::Token(_) => "stop token",
        StopReason::Caller => "caller",
        StopReason::Constraint => "constraint",
    }
}
