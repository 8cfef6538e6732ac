//! Errors of settings: missing and unknown keys of all tables together, else the first value that is not accepted.

use mantissa_options::{Declared, Faults, MissingKey, Refusal, UnknownKey, sections};

use crate::config::RunConfig;
use crate::error::{KeyFaults, TrainError};

/// Refuses the settings `file` for its faults.
///
/// # Errors
/// [`TrainError::Keys`]; [`TrainError::Config`] names the key and the accepted values.
pub(super) fn refuse(file: &str, faults: Faults) -> Result<(), TrainError> {
    let file = file.to_owned();
    let keys = KeyFaults {
        unknown: faults.unknown.iter().map(unknown).collect(),
        missing: faults.missing.iter().map(missing).collect(),
    };
    if !keys.is_empty() {
        return Err(TrainError::Keys { file, faults: keys });
    }
    let Some(refused) = faults.refused.into_iter().next() else { return Ok(()) };
    Err(match refused.refusal {
        Refusal::Value { found, allowed } => TrainError::Config { file, key: refused.key, found, allowed },
        Refusal::Cause(error) => TrainError::Toml { file, place: refused.key, error: error.to_string() },
    })
}

/// Names an unknown key with the accepted ones.
fn unknown(unknown: &UnknownKey) -> String {
    let table = if unknown.table.is_empty() { String::new() } else { format!("[{}] ", unknown.table) };
    let known = unknown.known.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    let of = if unknown.known.len() > 1 { "one of " } else { "" };
    let suggestion = match elsewhere(&unknown.key) {
        Some(path) => format!("; did you mean {path}?"),
        None => unknown.suggestion(),
    };
    format!("{table}`{}`, expected {of}{known}{suggestion}", unknown.key)
}

/// Returns the path of the first key of this name in a table.
fn elsewhere(key: &str) -> Option<String> {
    let tables = sections(RunConfig::default().keys());
    let mut tables = tables.iter().filter(|table| !table.name.is_empty());
    tables
        .find(|table| table.keys.iter().any(|own| own.name == key))
        .map(|table| format!("{}.{key}", table.name))
}

/// Names a missing key with an example, and the keys that stand for it.
fn missing(missing: &MissingKey) -> String {
    let example = format!("{} = {}", missing.key, missing.example);
    [example].into_iter().chain(missing.or.iter().cloned()).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use mantissa_options::{Key, Section, read};

    use super::*;

    fn faults(text: &str) -> KeyFaults {
        let mut faults = Faults::default();
        let _: RunConfig = read(&text.parse().unwrap(), "", &mut faults);
        match refuse("run.toml", faults) {
            Err(TrainError::Keys { faults, .. }) => faults,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_key_of_a_table_is_named_with_its_table() {
        let faults = faults("lr = 1\nwarmup = 3\nnothing_like_it = 1");
        let has = |path: &str| {
            faults.unknown.iter().any(|fault| fault.ends_with(&format!("; did you mean {path}?")))
        };
        assert!(has("optimizer.lr") && has("schedule.warmup"), "{:?}", faults.unknown);
    }

    #[test]
    fn every_missing_and_unknown_key_is_listed_once() {
        let faults = faults("seeed = 1\n[optimizer]\nlrr = 1\n[data]\nbatch = 2\nfils = [\"a\"]");
        assert_eq!(
            faults.missing,
            [
                "model.config = \"config.json\" or model.architecture or model.init",
                "data.files = [\"text.txt\"]",
                "data.length = 256",
                "optimizer.lr = 1e-3",
                "schedule.steps = 1000 or schedule.minutes",
                "out = \"runs/first\"",
            ]
        );
        assert_eq!(faults.unknown.len(), 3, "{faults:?}");
        assert!(faults.unknown[0].starts_with("[data] `fils`, expected one of `files`"), "{faults:?}");
        assert!(faults.unknown[0].ends_with("did you mean \"files\"?"), "{faults:?}");
        assert!(faults.unknown[2].starts_with("`seeed`, expected one of `seed`"), "{faults:?}");
    }

    #[test]
    fn keys_of_tables_within_tables_are_listed_too() {
        let faults = faults("[precision.fprop]\nx = { sheme = \"bf16\" }\n[adapter]\nranks = 4");
        let unknown = &faults.unknown;
        assert!(unknown[0].starts_with("[adapter] `ranks`, expected one of `kind`, `rank`"), "{unknown:?}");
        assert!(
            unknown[1].starts_with("[precision.fprop.x] `sheme`, expected one of `scheme`"),
            "{unknown:?}"
        );
        assert!(faults.missing.contains(&"adapter.kind = \"lora\"".to_owned()), "{faults:?}");
    }

    /// Every value that pages show is accepted, and every default is that of a run without the key.
    #[test]
    fn shown_values_are_settings() {
        let all = sections(RunConfig::default().keys());
        let shown = |wanted: fn(&Key) -> bool| {
            let line = |section: &Section| {
                let keys =
                    section.keys.iter().filter(|key| !key.note.hidden && !key.note.retired && wanted(key));
                let name = section.name;
                let keys = keys.map(|key| {
                    let dot = if name.is_empty() { "" } else { "." };
                    format!("{name}{dot}{} = {}\n", key.name, key.shown())
                });
                keys.collect::<String>()
            };
            all.iter().map(line).collect::<String>()
        };
        let read_from = |text: &str| {
            let mut faults = Faults::default();
            let run: RunConfig = read(&text.parse().unwrap(), "", &mut faults);
            refuse("run.toml", faults).unwrap();
            run
        };
        // Adapters and distillation are read whole, so their tables need no key beside those with an example.
        read_from(&shown(|_| true));
        let needed = shown(|key| key.note.needed);
        let defaults = shown(|key| key.note.needed || !key.is_unset());
        let [needed, mut defaults] = [needed, defaults].map(|text| read_from(&text));
        // The keys with defaults make the table.
        defaults.distill = None;
        assert_eq!(needed, defaults);
    }
}
