//! Keys in which the settings of two runs differ.

use std::collections::{BTreeMap, BTreeSet};

use toml::Value;

/// Values by dotted key.
type Flat = BTreeMap<String, Value>;

/// Lists the settings of a run by dotted key, with their values as TOML; none if the text is not TOML.
pub fn flat_settings(text: &str) -> BTreeMap<String, String> {
    let mut flat = Flat::new();
    if let Ok(table) = text.parse::<toml::Table>() {
        flatten("", &Value::Table(table), &mut flat);
    }
    flat.into_iter().map(|(key, value)| (key, value.to_string())).collect()
}

/// Lists the keys in which the settings `now` differ from a `run`, with both values:
/// `schedule.steps = 5 (run: 3)`. Empty if either is not TOML.
pub fn differences(run: &str, now: &str) -> Vec<String> {
    let (Ok(run), Ok(now)) = (run.parse::<toml::Table>(), now.parse::<toml::Table>()) else {
        return Vec::new();
    };
    let (mut before, mut after) = (Flat::new(), Flat::new());
    flatten("", &Value::Table(run), &mut before);
    flatten("", &Value::Table(now), &mut after);
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let shown = |value: Option<&Value>| value.map_or_else(|| "not set".to_owned(), ToString::to_string);
    let differs = keys.into_iter().filter(|key| before.get(*key) != after.get(*key));
    differs
        .map(|key| format!("{key} = {} (run: {})", shown(after.get(key)), shown(before.get(key))))
        .collect()
}

fn flatten(key: &str, value: &Value, into: &mut Flat) {
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                let dot = if key.is_empty() { "" } else { "." };
                flatten(&format!("{key}{dot}{name}"), value, into);
            }
        }
        value => drop(into.insert(key.to_owned(), value.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_listed_with_both_values() {
        let run = "seed = 1\n[schedule]\nsteps = 3\n[data]\nfiles = [\"a\"]\n";
        let now = "seed = 1\n[schedule]\nsteps = 5\nkind = \"cosine\"\n[data]\nfiles = [\"a\"]\n";
        assert_eq!(
            differences(run, now),
            ["schedule.kind = \"cosine\" (run: not set)", "schedule.steps = 5 (run: 3)"]
        );
        assert_eq!(differences(run, run), Vec::<String>::new());
        assert_eq!(differences("= no TOML", now), Vec::<String>::new());
        assert_eq!(super::flat_settings(now)["data.files"], "[\"a\"]");
        assert!(super::flat_settings("= no TOML").is_empty());
    }
}
