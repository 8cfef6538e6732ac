//! Options of methods and transforms in recipe files. Each is declared once, in [`options!`](crate::options!): field,
//! default, accepted values and meaning. The struct with its defaults, the keys of its TOML table, the check of their
//! values, the printed settings and the reference page follow.

use std::fmt;

pub use toml::{Table, Value};

/// A table of a recipe file.
#[derive(Clone, Debug)]
pub struct TableSpec {
    /// Name, for example `gptq`.
    pub name: &'static str,
    /// Its keys, in the order of the declaration.
    pub keys: Vec<Key>,
}

/// A key of such a table.
#[derive(Clone, Debug)]
pub struct Key {
    /// Name.
    pub name: &'static str,
    /// Accepted values.
    pub allowed: String,
    /// Meaning.
    pub help: &'static str,
}

impl Key {
    /// Key `name` of values of `kind`; `help` is the documentation of its field.
    pub fn new<T>(name: &'static str, kind: &dyn Accepts<T>, help: &'static str) -> Self {
        Key { name, allowed: kind.allowed(), help: help.trim().trim_end_matches('.') }
    }
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

/// Error: a key's value is not allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct OptionError {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub found: String,
    /// The values allowed.
    pub allowed: String,
}

/// Struct of options that [`options!`](crate::options!) declares.
pub trait Declared {
    /// Keys, in the order of the declaration.
    fn keys(&self) -> Vec<Key>;

    /// Sets the options that `table` has. The caller has refused unknown keys.
    ///
    /// # Errors
    /// A value that is not allowed.
    fn set(&mut self, table: &Table) -> Result<(), OptionError>;

    /// Returns all options that have a value, in the order of the declaration; [`set`](Self::set) reads them back.
    fn values(&self) -> Vec<(&'static str, Value)>;
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

/// Sets the options of each of `tables` that is named `name` to the values of `from`.
///
/// # Errors
/// A value that is not allowed.
pub fn set(tables: Vec<NamedMut<'_>>, name: &str, from: &Table) -> Result<(), OptionError> {
    tables.into_iter().filter(|(own, _)| *own == name).try_for_each(|(_, options)| options.set(from))
}

/// Reads the value of `key` in `table`; `None` if the key is not set.
///
/// # Errors
/// [`OptionError`] if `kind` does not accept the value.
pub fn read<T>(table: &Table, key: &'static str, kind: &dyn Accepts<T>) -> Result<Option<T>, OptionError> {
    let Some(value) = table.get(key) else { return Ok(None) };
    let fault = || OptionError { key, found: value.to_string(), allowed: kind.allowed() };
    kind.read(value).map(Some).ok_or_else(fault)
}

/// Kind of the values of an option that is a `T`: which are accepted, and how they are written in TOML.
pub trait Accepts<T> {
    /// Reads a value; `None` if it is not accepted.
    fn read(&self, value: &Value) -> Option<T>;

    /// Writes a value; `None` if the key is left out for it.
    fn print(&self, value: &T) -> Option<Value>;

    /// Accepted values, for messages and pages.
    fn allowed(&self) -> String;
}

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
        format!("1 to {}", self.0)
    }
}

/// Numbers with a decimal point, from 0 to this one.
pub struct Number(pub f64);

impl Accepts<f64> for Number {
    fn read(&self, value: &Value) -> Option<f64> {
        value.as_float().filter(|n| (0.0..=self.0).contains(n))
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        format!("a number from 0.0 to {:?}", self.0)
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

/// Numbers from 0 to 1, with or without a decimal point.
pub struct Fraction;

impl Accepts<f64> for Fraction {
    fn read(&self, value: &Value) -> Option<f64> {
        let number = value.as_float().or_else(|| value.as_integer().map(|i| i as f64));
        number.filter(|n| (0.0..=1.0).contains(n))
    }

    fn print(&self, value: &f64) -> Option<Value> {
        Some((*value).into())
    }

    fn allowed(&self) -> String {
        "a number from 0 to 1".to_owned()
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
}

/// Shortest decimal that reads back as the same f32.
pub fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

/// Declares a struct of options. An entry is an option: its meaning, name, type, default, and the kind of its values
/// ([`Accepts`]), for example [`Count`]. An entry without a kind is a field that recipe files do not set;
/// `..field: Type, "Documentation.";` before all entries takes over the options of another such struct.
///
/// ```
/// mantissa_methods::options! {
///     /// Options of a method.
///     #[derive(Clone, Copy, Debug, PartialEq)]
///     pub struct Rounds {
///         /// Steps of each layer.
///         steps: usize = 100, Count(1_000_000);
///         /// Rounds half to even.
///         even: bool = true, Flag;
///     }
/// }
/// # use mantissa_methods::options::{Count, Declared, Flag};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut options = Rounds::DEFAULT;
/// options.set(&"steps = 7".parse()?).map_err(|error| error.allowed)?;
/// assert_eq!(options, Rounds { steps: 7, even: true });
/// assert_eq!(options.keys()[0].help, "Steps of each layer");
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! options {
    (
        $(#[$about:meta])+
        pub struct $name:ident {
            $(..$base:ident: $base_type:ty, $base_help:literal;)?
            $($(#[doc = $help:literal])+ $field:ident: $type:ty = $default:expr $(, $kind:expr)?;)+
        }
    ) => {
        $(#[$about])+
        pub struct $name {
            $(#[doc = $base_help] pub $base: $base_type,)?
            $($(#[doc = $help])+ pub $field: $type,)+
        }

        impl $name {
            /// The defaults.
            pub const DEFAULT: Self =
                $name { $($base: <$base_type>::DEFAULT,)? $($field: $default),+ };
        }

        impl Default for $name {
            fn default() -> Self {
                Self::DEFAULT
            }
        }

        impl $crate::options::Declared for $name {
            fn keys(&self) -> Vec<$crate::options::Key> {
                let base: &[Vec<$crate::options::Key>] = &[$(self.$base.keys())?];
                let own = [$($crate::options!(@key $field: $type, concat!($($help),+) $(, $kind)?)),+];
                base.iter().flatten().cloned().chain(own.into_iter().flatten()).collect()
            }

            fn set(&mut self, table: &$crate::options::Table) -> Result<(), $crate::options::OptionError> {
                $(self.$base.set(table)?;)?
                $($(if let Some(value) = $crate::options::read(table, stringify!($field), &$kind)? {
                    self.$field = value;
                })?)+
                Ok(())
            }

            fn values(&self) -> Vec<(&'static str, $crate::options::Value)> {
                let mut values = Vec::new();
                $(values.extend(self.$base.values());)?
                $($(let value = $crate::options::Accepts::<$type>::print(&$kind, &self.$field);
                values.extend(value.map(|value| (stringify!($field), value)));)?)+
                values
            }
        }
    };
    (@key $field:ident: $type:ty, $help:expr) => {
        None
    };
    (@key $field:ident: $type:ty, $help:expr, $kind:expr) => {
        Some($crate::options::Key::new::<$type>(stringify!($field), &$kind, $help))
    };
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SIDES: [(&str, u8); 2] = [("left", 0), ("right", 1)];

    options! {
        /// Options of every kind.
        #[derive(Debug, PartialEq)]
        pub struct Inner {
            /// Number of
            /// steps.
            steps: usize = 3, Count(10);
            /// Not an option.
            fixed: u8 = 7;
            /// Seed.
            seed: u64 = 0, Seed;
        }
    }

    options! {
        /// Options of every kind, and the options of another struct.
        #[derive(Debug, PartialEq)]
        pub struct Outer {
            ..inner: Inner, "Inner options.";
            /// Rate.
            rate: f32 = 0.1, Number(2.0);
            /// Damping.
            damp: f64 = 0.5, Fraction;
            /// Switch.
            on: bool = false, Flag;
            /// Side.
            side: u8 = 0, OneOf(&SIDES);
            /// Side that is unset.
            other: Option<u8> = None, Unset(OneOf(&SIDES));
        }
    }

    #[test]
    fn values_read_back_in_the_order_of_the_declaration() {
        let text =
            "steps = 7\nseed = 9\nrate = 0.3\ndamp = 1.0\non = true\nside = \"right\"\nother = \"left\"";
        let mut options = Outer::DEFAULT;
        options.set(&text.parse().unwrap()).unwrap();
        let inner = Inner { steps: 7, fixed: 7, seed: 9 };
        assert_eq!(options, Outer { inner, rate: 0.3, damp: 1.0, on: true, side: 1, other: Some(0) });
        let lines = |options: &Outer| {
            let lines = settings(&[("t", options)]);
            lines.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(lines(&options), text.lines().map(|line| format!("t.{line}")).collect::<Vec<_>>());
        // An option without a value has no line, but is a key.
        assert_eq!((lines(&Outer::DEFAULT).len(), options.keys().len()), (6, 7));
        assert_eq!(options.keys()[0].help, "Number of steps");
    }

    #[test]
    fn other_values_are_refused_with_those_accepted() {
        for (text, allowed) in [
            ("steps = 0", "1 to 10"),
            ("steps = 11", "1 to 10"),
            ("steps = 1.0", "1 to 10"),
            ("seed = -1", "an integer of at least 0"),
            ("rate = 1", "a number from 0.0 to 2.0"),
            ("rate = nan", "a number from 0.0 to 2.0"),
            ("damp = 1.5", "a number from 0 to 1"),
            ("on = 1", "true or false"),
            ("side = \"up\"", "left, right"),
            ("other = 0", "left, right"),
        ] {
            let error = Outer::default().set(&text.parse().unwrap()).unwrap_err();
            assert_eq!((error.key, &*error.allowed), (text.split_once(' ').unwrap().0, allowed));
        }
    }
}
