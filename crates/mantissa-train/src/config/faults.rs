//! Search for the missing and unknown keys of all tables, which are reported together.

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::Optimizer;
use super::declared::{self, Fallback, Setting};
use super::keys::{CheckpointConfig, Data, Model, RunConfig, Samples, ScheduleConfig, Telemetry, Validation};
use crate::error::KeyFaults;
use crate::policy::PolicyTable;

/// Lists the missing and unknown keys of the settings `root`. Stops at a wrong type, which is reported by itself.
pub(super) fn of(root: &Table) -> KeyFaults {
    let mut faults = KeyFaults::default();
    let mut whole = root.clone();
    let sections: [(&str, Section); 9] = [
        ("model", section::<Model>),
        ("data", section::<Data>),
        ("validation", section::<Validation>),
        ("samples", section::<Samples>),
        ("precision", section::<PolicyTable>),
        ("optimizer", section::<Optimizer>),
        ("schedule", section::<ScheduleConfig>),
        ("checkpoint", section::<CheckpointConfig>),
        ("telemetry", section::<Telemetry>),
    ];
    for (name, complete) in sections {
        if let Some(table) = root.get(name).cloned().unwrap_or(Value::Table(Table::new())).as_table() {
            whole.insert(name.to_owned(), Value::Table(complete(name, table.clone(), &mut faults)));
        }
    }
    need_one(root, "model", &["config", "architecture", "init"], &mut faults);
    need_one(root, "schedule", &["steps", "minutes"], &mut faults);
    section::<RunConfig>("", whole, &mut faults);
    faults
}

type Section = fn(&str, Table, &mut KeyFaults) -> Table;

/// Adds the first of `keys` to the missing keys, with the others, if the table `section` has none of them.
fn need_one(root: &Table, section: &str, keys: &[&str], faults: &mut KeyFaults) {
    let table = root.get(section).and_then(Value::as_table);
    if root.contains_key(section) && table.is_none() {
        return;
    }
    if !keys.iter().any(|key| table.is_some_and(|table| table.contains_key(*key))) {
        let paths = keys.iter().map(|key| missing(&format!("{section}.{key}")));
        faults.missing.push(paths.collect::<Vec<_>>().join(" or "));
    }
}

/// Completes a table: removes unknown keys and adds examples of missing ones, each of which is noted. Keys and their
/// types are known to the deserializer only, so it is asked until it accepts the table or rejects a value.
fn section<T: DeserializeOwned>(name: &str, mut table: Table, faults: &mut KeyFaults) -> Table {
    // Each round adds or removes a key.
    let keys = declared::section(name).map_or(0, |section| section.settings.len());
    for _ in 0..=table.len() + keys {
        let Err(error) = T::deserialize(Value::Table(table.clone())) else { break };
        let message = error.message().to_owned();
        if let Some(key) = quoted(&message, "unknown field `") {
            let dot = if name.is_empty() { String::new() } else { format!("[{name}] ") };
            faults.unknown.push(format!("{dot}{}", message.trim_start_matches("unknown field ")));
            // A key of a table within is named by its own message, once.
            if table.remove(key).is_none() {
                break;
            }
        } else if let Some(key) = quoted(&message, "missing field `") {
            let path = if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
            faults.missing.push(missing(&path));
            let Some(example) = example(&path) else { break };
            table.insert(key.to_owned(), example);
        } else {
            break;
        }
    }
    table
}

/// Returns the key that follows `start` in a message.
fn quoted<'a>(message: &'a str, start: &str) -> Option<&'a str> {
    message.strip_prefix(start)?.split('`').next()
}

/// Finds a setting that has no default.
fn needed(path: &str) -> Option<&'static Setting> {
    declared::setting(path).filter(|setting| setting.default == Fallback::Needed)
}

fn missing(path: &str) -> String {
    needed(path).map_or_else(|| path.to_owned(), |setting| format!("{path} = {}", setting.example))
}

fn example(path: &str) -> Option<Value> {
    needed(path)?.value()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_missing_and_unknown_key_is_listed_once() {
        let faults =
            of(&"seeed = 1\n[optimizer]\nlrr = 1\n[data]\nbatch = 2\nfils = [\"a\"]".parse().unwrap());
        assert_eq!(
            faults.missing,
            [
                "data.files = [\"text.txt\"]",
                "data.length = 256",
                "optimizer.lr = 1e-3",
                "model.config = \"config.json\" or model.architecture or model.init",
                "schedule.steps = 1000 or schedule.minutes",
                "out = \"runs/first\"",
            ]
        );
        assert_eq!(faults.unknown.len(), 3, "{faults:?}");
        assert!(faults.unknown[0].starts_with("[data] `fils`, expected one of `files`"), "{faults:?}");
        assert!(faults.unknown[2].starts_with("`seeed`, expected one of `seed`"), "{faults:?}");
    }

    /// Every example has the type of its key, so that the search does not stop at it.
    #[test]
    fn examples_are_settings() {
        let settings = declared::SECTIONS.iter().flat_map(|section| section.settings);
        let needed = settings.filter(|setting| setting.default == Fallback::Needed);
        let needed = needed.filter(|setting| !setting.key.starts_with("adapter."));
        let set =
            needed.map(|setting| format!("{} = {}\n", setting.key, setting.example)).collect::<String>();
        assert!(of(&set.parse().unwrap()).is_empty());
        super::super::RunConfig::parse("x", &set, &[]).unwrap();
    }
}
