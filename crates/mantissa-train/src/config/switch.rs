//! Changes of a kind on the command line, such as `optimizer.kind=lion`: keys that belong to the kind of the file.
//!
//! Printed settings (`mantissa train --init`) state every key of their kinds. Where a change chooses another kind, keys that still
//! hold the default of the old one are not the user's: they go, or take the new kind's default. Others are refused by name.

use mantissa_options::{Declared, Key, Table, Value};

use super::keys::ScheduleConfig;
use super::optimizer::own_keys;
use crate::policy::Policy;

/// Key of a table that chooses which other keys it has.
struct Switch {
    table: &'static str,
    key: &'static str,
    /// Kind of a table without the key.
    default: &'static str,
    /// Returns the keys that belong to a kind, with its defaults; `None` for a kind that does not exist.
    keys: fn(&str) -> Option<Vec<Own>>,
}

/// Key that belongs to a kind.
struct Own {
    name: &'static str,
    /// The default, as TOML; empty if there is none.
    default: String,
    /// True if the kind does not use it, and reads it from settings of earlier versions only.
    retired: bool,
}

impl From<&Key> for Own {
    fn from(key: &Key) -> Self {
        Own { name: key.name, default: key.default.clone(), retired: key.note.retired }
    }
}

/// Every key that chooses others.
const SWITCHES: [Switch; 3] = [
    Switch {
        table: "optimizer",
        key: "kind",
        default: "adamw",
        keys: |kind| Some(own_keys(kind)?.iter().map(Own::from).collect()),
    },
    Switch { table: "schedule", key: "kind", default: "cosine", keys: schedule_keys },
    Switch { table: "precision", key: "policy", default: "fp32", keys: policy_keys },
];

/// Keys of `[schedule]` that only some kinds use.
fn schedule_keys(kind: &str) -> Option<Vec<Own>> {
    let names: &[&str] = match kind {
        "constant" => &[],
        "linear" | "cosine" => &["min_ratio"],
        "wsd" | "stable" => &["min_ratio", "decay_steps", "minutes", "decay_share"],
        _ => return None,
    };
    let keys = ScheduleConfig::default().keys();
    Some(keys.iter().filter(|key| names.contains(&key.name)).map(Own::from).collect())
}

/// Keys of `[precision]` that only some policies use.
fn policy_keys(name: &str) -> Option<Vec<Own>> {
    let scales = Policy::by_name(name, 0)?.scaling.is_some();
    let scaling = || Own { name: "scaling", default: "\"pytorch\"".to_owned(), retired: false };
    Some(scales.then(scaling).into_iter().collect())
}

/// Effects of a change of kind on other keys.
#[derive(Debug, Default)]
pub(super) struct Switched {
    /// A line for each kind that was changed, with the keys that went.
    pub(super) notes: Vec<String>,
    /// Keys with values of their own that the new kind does not have, and the new kind.
    pub(super) foreign: Vec<(String, String)>,
}

/// Adapts `now`, the settings of a file `before` with the changed `paths`, to the kinds that were changed.
pub(super) fn adapt(before: &Table, now: &mut Table, paths: &[String]) -> Switched {
    let mut switched = Switched::default();
    for switch in &SWITCHES {
        switch.adapt(before, now, paths, &mut switched);
    }
    switched
}

impl Switch {
    fn kind<'t>(&self, settings: &'t Table) -> Option<&'t str> {
        settings.get(self.table)?.get(self.key)?.as_str()
    }

    fn adapt(&self, before: &Table, now: &mut Table, paths: &[String], switched: &mut Switched) {
        let old = self.kind(before).unwrap_or(self.default).to_owned();
        let Some(new) = self.kind(now).map(str::to_owned).filter(|new| *new != old) else { return };
        let (Some(old_keys), Some(new_keys)) = ((self.keys)(&old), (self.keys)(&new)) else { return };
        let Some(table) = now.get_mut(self.table).and_then(Value::as_table_mut) else { return };
        let Some(file) = before.get(self.table).and_then(Value::as_table) else { return };
        let (mut dropped, mut replaced) = (Vec::new(), Vec::new());
        for own in &old_keys {
            let path = format!("{}.{}", self.table, own.name);
            let Some(value) = file.get(own.name).filter(|_| !is_changed(&path, paths)) else { continue };
            let is_default = parsed(&own.default).is_some_and(|default| same(value, &default));
            match new_keys.iter().find(|key| key.name == own.name) {
                None if is_default => {
                    table.remove(own.name);
                    if !own.retired {
                        dropped.push(format!("{} = {}", own.name, shown(value)));
                    }
                }
                None => switched.foreign.push((format!("{path} = {}", shown(value)), new.clone())),
                Some(key) if is_default && !key.retired && key.default != own.default => {
                    table.remove(own.name);
                    let default = if key.default.is_empty() { "not set" } else { &key.default };
                    replaced.push(format!("{} = {default} (was {})", own.name, shown(value)));
                }
                Some(_) => {}
            }
        }
        let mut parts = Vec::new();
        if !dropped.is_empty() {
            parts.push(format!("left out {}, {old}'s default", dropped.join(", ")));
        }
        if !replaced.is_empty() {
            parts.push(format!("{new}'s default {}", replaced.join(", ")));
        }
        if !parts.is_empty() {
            switched.notes.push(format!("{}.{} = \"{new}\": {}", self.table, self.key, parts.join("; ")));
        }
    }
}

/// True if one of the changed `paths` is a key, a table that holds it, or a part of its value.
fn is_changed(path: &str, paths: &[String]) -> bool {
    let within = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    paths.iter().any(|changed| within(path, changed) || within(changed, path))
}

/// Parses the text of a default.
fn parsed(text: &str) -> Option<Value> {
    format!("x = {text}").parse::<Table>().ok()?.remove("x")
}

/// Formats a value as settings are printed: `1e-8`, not `0.00000001`.
fn shown(value: &Value) -> String {
    value.as_float().map_or_else(|| value.to_string(), |number| format!("{number:?}"))
}

/// True if two values are equal, whole numbers and others alike.
fn same(a: &Value, b: &Value) -> bool {
    let number = |value: &Value| value.as_float().or_else(|| value.as_integer().map(|n| n as f64));
    match (number(a), number(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}
