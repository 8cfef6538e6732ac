//! Tables of the serving contract: sources of each engine's rules, and load tests.

use std::fmt::Write;
use std::fs;

use mantissa_plan::contract::{ENGINES, LOADS};

use crate::root;

/// Engines with the files that their rules were read from.
pub fn sources() -> String {
    let mut table = "| engine | rules read from |\n|---|---|\n".to_owned();
    for engine in ENGINES {
        let mut files: Vec<&str> = Vec::new();
        for rule in engine.own_rules() {
            if !files.contains(&rule.source) {
                files.push(rule.source);
            }
        }
        if files.is_empty() {
            continue;
        }
        let files: Vec<_> = files.into_iter().map(|file| format!("`{file}`")).collect();
        writeln!(table, "| {} | {} |", engine.title, files.join("; ")).unwrap();
    }
    table
}

/// Table of the load tests that passed.
pub fn loads() -> String {
    let mut table =
        "| program | format | schemes | versions | date | script |\n|---|---|---|---|---|---|\n".to_owned();
    for load in LOADS {
        let schemes: Vec<_> = load.schemes.iter().map(|scheme| format!("`{scheme}`")).collect();
        writeln!(
            table,
            "| {} | `{}` | {} | {} | {} | `{}` |",
            load.reader,
            load.format,
            schemes.join(", "),
            load.version,
            load.date,
            load.script
        )
        .unwrap();
    }
    table
}

/// Every cell marked as loaded has a script that knows it.
#[test]
fn load_tests_have_their_scripts() {
    for load in LOADS {
        let script = fs::read_to_string(root().join(load.script)).unwrap();
        assert!(script.contains(&format!("\"{}\"", load.reader)), "{}: {}", load.script, load.reader);
        for scheme in load.schemes {
            assert!(script.contains(scheme), "{}: {scheme}", load.script);
        }
    }
}
