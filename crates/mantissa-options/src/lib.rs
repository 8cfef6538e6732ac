//! Options of methods, recipes and training runs, each declared once, in [`options!`]: key, type, default, accepted
//! values, and meaning. The struct with its defaults, the keys of its TOML table, the errors for unknown, missing and
//! refused ones, the printed settings and the reference pages follow.
//!
//! An option of a new type has a kind of its own, which implements [`Accepts`].
#![forbid(unsafe_code)]

// Layer: keys, values as they are written, and faults.
mod faults;
mod key;
mod note;
mod written;

// Layer: kinds of values.
mod accepts;
mod kinds;

// Layer: declarations, and what follows from them.
mod declared;
mod macros;
mod page;
mod tables;

pub use accepts::Accepts;
pub use declared::{Declared, Named, NamedMut, OptionValue, TableSpec, set, settings, spec, to_toml};
pub use faults::{Faults, MissingKey, Refusal, RefusedValue, UnknownKey, dotted, suggestion};
pub use key::{Key, Subkeys};
pub use kinds::{AnyTable, AtLeast, Count, Flag, Number, OneOf, Seed, Text, Texts, Unset, Within, shortest};
pub use note::Note;
pub use page::{Section, sections};
pub use tables::{ListOf, Subtable, from_toml, read, read_beside};
pub use toml::{Table, Value};
pub use written::{Entry, Written};

/// Functions that [`options!`] calls.
#[doc(hidden)]
pub mod expansion {
    pub use crate::declared::{entry, key, take};
    pub use crate::written::ordered;
}
