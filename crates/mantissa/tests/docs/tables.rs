//! Content of the generated parts, from the binary.

use std::fmt::Write;
use std::fs;

use mantissa_methods::e2e::{self, EndToEnd};
use mantissa_methods::{METHODS, TRANSFORMS, registry};
use mantissa_num::{Blocks, Scheme};
use mantissa_options::{Key, Named, spec};
use mantissa_quant::recipe::file_keys;
use mantissa_train::config::{optimizer_keys, section};
use serde_json::Value;
use tempfile::TempDir;

use crate::output_in;

/// Recipes of the README's table: what an engine's user starts with.
const SHOWN: [&str; 9] = [
    "w8a8",
    "mxfp8",
    "fp8-dynamic",
    "gptq-nvfp4",
    "rtn-q4_0",
    "gptq-int4-g128",
    "nvfp4",
    "rtn-int4-g128",
    "mxfp4",
];

/// A run of `mantissa demo`.
pub struct Demo {
    printed: String,
    report: Value,
}

impl Demo {
    pub fn run() -> Self {
        let dir = TempDir::new().unwrap();
        let printed = output_in(dir.path(), &["demo", "--quiet", "--json=demo.json"]);
        let report =
            serde_json::from_str(&fs::read_to_string(dir.path().join("demo.json")).unwrap()).unwrap();
        Demo { printed, report }
    }

    /// The output as a block, without its last line, which has the time.
    pub fn output(&self) -> String {
        let lines: Vec<_> = self.printed.trim_end().lines().collect();
        let (_, kept) = lines.split_last().unwrap();
        format!("```\n$ mantissa demo\n{}\n```\n", kept.join("\n"))
    }

    /// The table of the README.
    pub fn table(&self) -> String {
        let engines = recipe_rows();
        let mut table =
            "| recipe | bits/weight | size | KL, stories | KL, prose | KL, code | loads in |\n".to_owned();
        table.push_str("|---|--:|--:|--:|--:|--:|---|\n");
        let dense = megabytes(&self.report["bytes"]);
        writeln!(table, "| (bf16) | 16 | {dense} | 0 | 0 | 0 | |").unwrap();
        for name in SHOWN {
            let rows = self.report["recipes"].as_array().unwrap();
            let row = rows.iter().find(|row| row["recipe"] == name).expect(name);
            let engine = engines.iter().find(|engine| engine["name"] == name);
            // A recipe that is not listed loads where its format does.
            let engine = engine.or_else(|| engines.iter().find(|engine| engine["format"] == row["format"]));
            let kl = |domain: usize| format!("{:.4}", row["domains"][domain]["kl"].as_f64().unwrap());
            writeln!(
                table,
                "| `{name}` | {:.2} | {} | {} | {} | {} | {} |",
                row["linear_stored_bits_per_weight"].as_f64().unwrap(),
                megabytes(&row["bytes"]),
                kl(0),
                kl(1),
                kl(2),
                engines_of(engine.expect(name))
            )
            .unwrap();
        }
        table
    }
}

fn megabytes(bytes: &Value) -> String {
    format!("{:.2} MB", bytes.as_f64().unwrap() / 1e6)
}

fn json(arguments: &[&str]) -> Value {
    let dir = TempDir::new().unwrap();
    serde_json::from_str(&output_in(dir.path(), arguments)).unwrap()
}

fn recipe_rows() -> Vec<Value> {
    json(&["recipes", "--json"])["recipes"].as_array().unwrap().clone()
}

fn engines_of(recipe: &Value) -> String {
    recipe["loads_in"].as_str().expect("loads_in is text").to_owned()
}

/// The recipes with a name of their own.
pub fn recipes() -> String {
    let mut table =
        "| name | recipe | bits/weight | calibration | format | loads in |\n|---|---|--:|---|---|---|\n"
            .to_owned();
    for row in recipe_rows() {
        let calibration = match (row["calibration"].as_bool(), row["importance"].as_bool()) {
            (Some(true), _) => "needed",
            (_, Some(true)) => "recommended",
            _ => "none",
        };
        writeln!(
            table,
            "| `{}` | {} | {:.3} | {calibration} | {} | {} |",
            row["name"].as_str().unwrap(),
            row["recipe"].as_str().unwrap(),
            row["bits_per_weight"].as_f64().unwrap(),
            row["format"].as_str().unwrap(),
            engines_of(&row)
        )
        .unwrap();
    }
    table
}

/// The tables of methods and transforms in recipe files, with their keys.
pub fn keys() -> String {
    let scheme = Scheme::int_symmetric(4, Blocks::Row);
    let methods = METHODS.iter().map(|row| (row.name, (row.new)(&scheme))).collect::<Vec<_>>();
    let transforms = TRANSFORMS.iter().map(|row| (row.name, (row.new)())).collect::<Vec<_>>();
    let end_to_end = EndToEnd::default();
    let tuning: Named<'_> = (e2e::NAME, &end_to_end);
    let mut owners = methods.iter().map(|(name, method)| (*name, method.tables())).collect::<Vec<_>>();
    owners.extend(transforms.iter().map(|(name, transform)| (*name, transform.tables())));
    owners.push(("+e2e", vec![tuning]));
    let mut page = "| table | key | default | values | meaning |\n|---|---|---|---|---|\n".to_owned();
    for table in registry::tables().into_iter().chain(registry::transform_tables()).chain([spec(tuning)]) {
        let users: Vec<_> = owners
            .iter()
            .flat_map(|(owner, tables)| tables.iter().map(move |own| (*owner, own)))
            .filter(|(_, (name, _))| *name == table.name)
            .collect();
        let names: Vec<_> = users.iter().map(|(owner, _)| format!("`{owner}`")).collect();
        writeln!(page, "| `[{}]` | | | | with {} |", table.name, names.join(", ")).unwrap();
        for key in table.keys {
            let defaults = defaults(&users, key.name);
            writeln!(page, "| | `{}` | {defaults} | {} | {} |", key.name, key.allowed, key.help).unwrap();
        }
    }
    page
}

/// The keys of recipe files beside these tables.
pub fn recipe_keys() -> String {
    let mut page = "| key | default | values | meaning |\n|---|---|---|---|\n".to_owned();
    for key in file_keys() {
        match &key.subkeys {
            None => page += &key_row(key.name, &key),
            Some(subkeys) => {
                writeln!(page, "| `[[{}]]` | | | {} |", key.name, key.help).unwrap();
                subkeys.keys.iter().for_each(|key| page += &key_row(&format!("layers.{}", key.name), key));
            }
        }
    }
    page
}

/// The row of the key at `path`.
fn key_row(path: &str, key: &Key) -> String {
    let or = key.note.or.iter().map(|name| format!(", or `{name}`")).collect::<String>();
    let default = match (key.note.needed, key.is_unset()) {
        (true, _) => format!("needed{or}"),
        (false, true) => String::new(),
        (false, false) => format!("`{}`", key.default),
    };
    format!("| `{path}` | {default} | {} | {} |\n", key.allowed, key.help)
}

/// The default of a key; where methods that share a table differ, each with its name.
fn defaults(users: &[(&str, &Named<'_>)], key: &str) -> String {
    let mut found: Vec<(String, &str)> = Vec::new();
    for (owner, (_, options)) in users {
        let value = options.values().into_iter().find(|(name, _)| *name == key);
        let value = value.map(|(_, value)| format!("`{value}`"));
        if let Some(value) = value.filter(|value| found.iter().all(|(known, _)| known != value)) {
            found.push((value, owner));
        }
    }
    match found.as_slice() {
        [(only, _)] => only.clone(),
        several => {
            several.iter().map(|(value, name)| format!("{value} ({name})")).collect::<Vec<_>>().join(", ")
        }
    }
}

/// The elements and named formats.
pub fn schemes() -> String {
    let mut table = "| scheme | bits/weight | largest | smallest positive | rules | native hardware |\n|---|--:|--:|--:|---|---|\n".to_owned();
    for row in json(&["schemes", "--json"])["schemes"].as_array().unwrap() {
        let number = |key: &str| row[key].as_f64().map_or_else(String::new, figure);
        let rules: Vec<_> = row["rules"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        writeln!(
            table,
            "| `{}` | {:.4} | {} | {} | {} | {} |",
            row["name"].as_str().unwrap(),
            row["bits_per_weight"].as_f64().unwrap(),
            number("largest"),
            number("smallest_positive"),
            rules.join(", "),
            row["hardware"].as_str().unwrap_or_default()
        )
        .unwrap();
    }
    table
}

/// Four significant digits, as a power of ten where that is shorter.
fn figure(x: f64) -> String {
    if x == 0.0 || (1e-3..1e6).contains(&x.abs()) {
        format!("{}", (x * 1e6).round() / 1e6)
    } else {
        format!("{x:.3e}")
    }
}

/// Every command with its help.
pub fn commands() -> String {
    let dir = TempDir::new().unwrap();
    let help = |arguments: &[&str]| output_in(dir.path(), arguments);
    let all = help(&["--help"]);
    let list = all.split("\nCommon options:").next().unwrap();
    let names = list.lines().filter(|line| line.starts_with("  "));
    let mut page = String::new();
    let mut common = String::new();
    for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        let text = help(&[name, "--help-all"]);
        let (own, rest) = text.split_once("\nCommon options:\n").expect("common options");
        let (options, examples) = rest.split_once("\nEXAMPLES\n").expect("examples");
        common = options.to_owned();
        let own = trimmed(own);
        write!(page, "## {name}\n\n```text\n{own}\n```\n\n```text\n{}\n```\n\n", trimmed(examples)).unwrap();
    }
    format!("{page}## Common options\n\n```text\n{}\n```\n", trimmed(&common))
}

/// Lines without space at their ends; of several empty lines one.
fn trimmed(text: &str) -> String {
    let lines: Vec<_> = text.trim_end().lines().map(str::trim_end).collect();
    let repeated = |i: usize| i > 0 && lines[i].is_empty() && lines[i - 1].is_empty();
    (0..lines.len()).filter(|i| !repeated(*i)).map(|i| lines[i]).collect::<Vec<_>>().join("\n")
}

/// Tables of the settings of a training run, as TOML.
pub fn settings(tables: &[&str]) -> String {
    let print = |name: &&str| section(name).expect("a table of the settings").print(&[], &[]);
    format!("```toml\n{}```\n", tables.iter().map(print).collect::<Vec<_>>().join("\n"))
}

/// Own keys of the optimizers.
pub fn own_keys() -> String {
    let mut table = "| kind | key | default | values | meaning |\n|---|---|---|---|---|\n".to_owned();
    for (kind, keys) in optimizer_keys() {
        writeln!(table, "| `{kind}` | | | | |").unwrap();
        keys.iter().for_each(|key| table += &format!("| {}", key_row(key.name, key)));
    }
    table
}

/// Keys of precision policies; tables of the same keys are listed once.
pub fn precision_keys() -> String {
    let mut table = "| key | default | values | meaning |\n|---|---|---|---|\n".to_owned();
    let policy = section("precision").expect("a table of the settings");
    table_rows("", &policy.keys, &mut Vec::new(), &mut table);
    table
}

fn table_rows(at: &str, keys: &[Key], listed: &mut Vec<Vec<&str>>, table: &mut String) {
    for key in keys {
        let path = format!("{at}{}", key.name);
        *table += &key_row(&path, key);
        let Some(subkeys) = &key.subkeys else { continue };
        let names: Vec<_> = subkeys.keys.iter().map(|key| key.name).collect();
        if !listed.contains(&names) {
            listed.push(names);
            table_rows(&format!("{path}."), &subkeys.keys, listed, table);
        }
    }
}
