//! Kinds of values that options share.

use toml::{Table, Value};

use crate::accepts::Accepts;
use crate::faults::{Faults, Refusal};
use crate::key::Subkeys;
use crate::written::Written;

/// Integers from 1 to this one.
pub struct Count(pub usize);

impl Accepts<usize> for Count {
    fn read(&self, value: &Value) -> Option<usize> {
        let n = value.as_integer().and_then(|n| usize::try_from(n).ok());
        n.filter(|n| (1..=self.0).contains(n))
    }

    fn print(&self, value: &usize) -> Option<Value> {
        Some((*value as i64).into())
    }

    fn allowed(&self) -> String {
        format!("a whole number from 1 to {}", self.0)
    }
}

/// Numbers from 0 to this one, with or without a decimal point.
pub struct Number(pub f64);

impl Accepts<f64> for Number {
    fn read(&self, value: &Value) -> Option<f64> {
        number(value).filter(|n| (0.0..=self.0).contains(n))
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        format!("a number from 0 to {}", short(self.0))
    }
}

impl Accepts<f32> for Number {
    fn read(&self, value: &Value) -> Option<f32> {
        Accepts::<f64>::read(self, value).map(|number| number as f32)
    }

    fn print(&self, value: &f32) -> Option<Value> {
        Some(shortest(*value).into())
    }

    fn allowed(&self) -> String {
        Accepts::<f64>::allowed(self)
    }
}

/// Whole numbers from this one.
pub struct AtLeast(pub u64);

impl AtLeast {
    fn of(&self, value: &Value) -> Option<u64> {
        value.as_integer().and_then(|n| u64::try_from(n).ok()).filter(|n| *n >= self.0)
    }

    fn text(&self) -> String {
        format!("a whole number of at least {}", self.0)
    }
}

impl Accepts<usize> for AtLeast {
    fn read(&self, value: &Value) -> Option<usize> {
        self.of(value).and_then(|n| usize::try_from(n).ok())
    }

    fn print(&self, value: &usize) -> Option<Value> {
        Some((*value as i64).into())
    }

    fn allowed(&self) -> String {
        self.text()
    }
}

impl Accepts<u64> for AtLeast {
    fn read(&self, value: &Value) -> Option<u64> {
        self.of(value)
    }

    fn print(&self, value: &u64) -> Option<Value> {
        Some((*value as i64).into())
    }

    fn allowed(&self) -> String {
        self.text()
    }
}

/// Numbers from the first to the second, with or without a decimal point.
#[derive(PartialEq)]
pub struct Within(pub f64, pub f64);

impl Within {
    /// All numbers.
    pub const ALL: Within = Within(f64::NEG_INFINITY, f64::INFINITY);

    fn of(&self, value: &Value) -> Option<f64> {
        number(value).filter(|n| (self.0..=self.1).contains(n))
    }

    fn text(&self) -> String {
        if *self == Within::ALL {
            "a number".to_owned()
        } else {
            format!("{} to {}", short(self.0), short(self.1))
        }
    }

    fn why(&self, value: &Value) -> Refusal {
        match number(value) {
            Some(found) => Refusal::new(found.to_string(), self.text()),
            None => Refusal::new(value.to_string(), "a number"),
        }
    }
}

impl Accepts<f64> for Within {
    fn read(&self, value: &Value) -> Option<f64> {
        self.of(value)
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        self.text()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        self.why(value)
    }
}

impl Accepts<f32> for Within {
    fn read(&self, value: &Value) -> Option<f32> {
        self.of(value).map(|number| number as f32)
    }

    fn print(&self, value: &f32) -> Option<Value> {
        Some(shortest(*value).into())
    }

    fn allowed(&self) -> String {
        self.text()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        self.why(value)
    }
}

/// Writes a bound of a range; very small and large ones as powers of ten.
fn short(bound: f64) -> String {
    if bound != 0.0 && !(1e-4..1e7).contains(&bound.abs()) { format!("{bound:e}") } else { bound.to_string() }
}

/// Reads a number with or without a decimal point.
fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

/// Texts.
pub struct Text;

impl Accepts<String> for Text {
    fn read(&self, value: &Value) -> Option<String> {
        value.as_str().map(str::to_owned)
    }

    fn print(&self, value: &String) -> Option<Value> {
        Some(value.clone().into())
    }

    fn allowed(&self) -> String {
        "a string".to_owned()
    }
}

/// Lists of texts.
pub struct Texts;

impl Accepts<Vec<String>> for Texts {
    fn read(&self, value: &Value) -> Option<Vec<String>> {
        value.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
    }

    fn print(&self, value: &Vec<String>) -> Option<Value> {
        Some(Value::Array(value.iter().cloned().map(Value::String).collect()))
    }

    fn allowed(&self) -> String {
        "a list of strings".to_owned()
    }
}

/// Tables whose keys are declared elsewhere.
pub struct AnyTable;

impl Accepts<Table> for AnyTable {
    fn read(&self, value: &Value) -> Option<Table> {
        value.as_table().cloned()
    }

    fn print(&self, value: &Table) -> Option<Value> {
        Some(Value::Table(value.clone()))
    }

    fn allowed(&self) -> String {
        "a table".to_owned()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        Refusal::new(value.type_str(), "a table")
    }
}

/// `true` or `false`.
pub struct Flag;

impl Accepts<bool> for Flag {
    fn read(&self, value: &Value) -> Option<bool> {
        value.as_bool()
    }

    fn print(&self, value: &bool) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        "true or false".to_owned()
    }
}

/// Seeds of random numbers: integers of at least 0.
pub struct Seed;

impl Accepts<u64> for Seed {
    fn read(&self, value: &Value) -> Option<u64> {
        value.as_integer().and_then(|seed| u64::try_from(seed).ok())
    }

    fn print(&self, value: &u64) -> Option<Value> {
        Some((*value as i64).into())
    }

    fn allowed(&self) -> String {
        "an integer of at least 0".to_owned()
    }
}

/// Names, each with the value that it stands for.
pub struct OneOf<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy + PartialEq> Accepts<T> for OneOf<T> {
    fn read(&self, value: &Value) -> Option<T> {
        let text = value.as_str()?;
        self.0.iter().find(|(name, _)| *name == text).map(|(_, value)| *value)
    }

    fn print(&self, value: &T) -> Option<Value> {
        self.0.iter().find(|(_, one)| one == value).map(|(name, _)| (*name).into())
    }

    fn allowed(&self) -> String {
        self.0.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ")
    }
}

/// Values of another kind, for options that have no value unless they are set.
pub struct Unset<K>(pub K);

impl<T, K: Accepts<T>> Accepts<Option<T>> for Unset<K> {
    fn read(&self, value: &Value) -> Option<Option<T>> {
        self.0.read(value).map(Some)
    }

    fn print(&self, value: &Option<T>) -> Option<Value> {
        self.0.print(value.as_ref()?)
    }

    fn allowed(&self) -> String {
        self.0.allowed()
    }

    fn refusal(&self, value: &Value) -> Refusal {
        self.0.refusal(value)
    }

    fn take(&self, value: &Value, key: &str, faults: &mut Faults) -> Option<Option<T>> {
        self.0.take(value, key, faults).map(Some)
    }

    fn write(&self, value: &Option<T>) -> Option<Written> {
        self.0.write(value.as_ref()?)
    }

    fn subkeys(&self) -> Option<Subkeys> {
        self.0.subkeys()
    }
}

/// Shortest decimal that reads back as the same f32.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
