//! Description of an optimizer: its name, its own keys of `[optimizer]`, and how it is made of them.

use std::fmt;
use std::sync::Arc;

use mantissa_options::{Accepts, Declared, Value, options};

use super::method::UpdateRule;
use super::moment_format::MomentFormat;

/// Optimizer in the registry.
pub(crate) struct OptimizerKind {
    /// Value of `optimizer.kind`.
    pub(crate) name: &'static str,
    /// Method and source.
    pub(crate) about: &'static str,
    /// Own keys with their defaults; the keys of all optimizers are in [`crate::config::Optimizer`].
    pub(crate) keys: fn() -> Box<dyn OptimizerKeys>,
}

/// Key that is wrong, value found, and accepted values.
pub(crate) type Fault = (&'static str, String, &'static str);

/// Own keys of an optimizer.
pub(crate) trait OptimizerKeys: Declared + fmt::Debug + Send + Sync {
    /// Finds a combination of keys that cannot be met.
    fn fault(&self) -> Option<Fault> {
        None
    }

    /// Returns the storage format of the moments.
    fn moments(&self) -> &NamedFormat;

    /// Makes the optimizer.
    fn build(&self) -> Arc<dyn UpdateRule>;
}

options! {
    /// Keys of every optimizer with moments.
    #[derive(Clone, Debug)]
    pub(crate) struct MomentKeys {
        /// f32 bf16 fp8 8bit 8bit:cpu 8bit:torchao 4bit, or a map as a scheme: lin8 dyn8-tensor …
        moments: NamedFormat, Moments;
    }
}

/// Storage format of moments with the name that the settings have for it.
#[derive(Clone, Debug)]
pub(crate) struct NamedFormat {
    pub(crate) name: String,
    pub(crate) format: MomentFormat,
}

impl Default for NamedFormat {
    fn default() -> Self {
        NamedFormat { name: "f32".to_owned(), format: MomentFormat::F32 }
    }
}

/// Storage formats of moments.
struct Moments;

impl Accepts<NamedFormat> for Moments {
    fn read(&self, value: &Value) -> Option<NamedFormat> {
        let name = value.as_str()?;
        Some(NamedFormat { name: name.to_owned(), format: MomentFormat::parse(name)? })
    }

    fn print(&self, value: &NamedFormat) -> Option<Value> {
        Some(value.name.clone().into())
    }

    fn allowed(&self) -> String {
        MomentFormat::ALLOWED.to_owned()
    }
}

/// Whole numbers from the first to the second, with or without a decimal point.
pub(super) struct Whole(pub(super) u32, pub(super) u32);

impl Accepts<f64> for Whole {
    fn read(&self, value: &Value) -> Option<f64> {
        let range = f64::from(self.0)..=f64::from(self.1);
        number(value).filter(|number| number.fract() == 0.0 && range.contains(number))
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        format!("a whole number from {} to {}", self.0, self.1)
    }
}

/// Reads a number with or without a decimal point.
fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

/// One value: of keys that earlier versions wrote for every optimizer.
pub(super) struct Only<T>(pub(super) T);

impl Accepts<f64> for Only<f64> {
    fn read(&self, value: &Value) -> Option<f64> {
        number(value).filter(|number| *number == self.0)
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        self.0.to_string()
    }
}

impl Accepts<bool> for Only<bool> {
    fn read(&self, value: &Value) -> Option<bool> {
        value.as_bool().filter(|flag| *flag == self.0)
    }

    fn print(&self, value: &bool) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        self.0.to_string()
    }
}
