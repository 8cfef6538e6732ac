//! Checks completeness: every command is in the table, and every file change goes through one module.

use std::fs;
use std::path::{Path, PathBuf};

use crate::rows::ROWS;
use crate::support::{mantissa, root};

/// Commands outside the table, with the reason.
const ELSEWHERE: [(&str, &str); 5] = [
    ("train", "resumes from checkpoints instead of completing one output: tests/cli/train.rs, power.rs"),
    ("finetune", "runs in the folder of a training run, as train does: tests/cli/finetune.rs"),
    ("distill", "runs in the folder of a training run, as train does: tests/cli/distill.rs"),
    ("serve", "runs until it is stopped and writes no output: tests/cli/serve.rs"),
    ("render-chat", "is a part of run in a process of its own, and writes to its standard output alone"),
];

#[test]
fn every_command_is_in_the_table() {
    let source = fs::read_to_string(root().join("crates/mantissa/src/commands/mod.rs")).unwrap();
    let variants = source.split("pub enum Command {").nth(1).unwrap().split('}').next().unwrap();
    let variants = variants.lines().map(str::trim).filter_map(|line| Some(line.split_once('(')?.0));
    let commands: Vec<String> = variants.filter(|name| !name.starts_with('#')).map(kebab).collect();
    assert!(commands.len() >= 20 && commands.contains(&"quantize".to_owned()), "{commands:?}");
    for command in &commands {
        let row = ROWS.iter().any(|row| row.command.split(' ').next() == Some(command));
        let elsewhere = ELSEWHERE.iter().any(|(name, _)| name == command);
        assert!(row != elsewhere, "{command} has no row in the table of tests/faults/rows.rs, or two places");
    }
    // The commands in the help are the same list.
    let help = String::from_utf8(mantissa(&["--help"]).stdout).unwrap();
    let shown = help.split("\nCommon options:").next().unwrap();
    let shown = shown.lines().filter(|line| line.starts_with("  "));
    for name in shown.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
        assert!(commands.iter().any(|command| command == name), "{name}");
    }
}

/// Returns the name that clap gives to a variant.
fn kebab(variant: &str) -> String {
    let mut name = String::new();
    for (i, letter) in variant.chars().enumerate() {
        if letter.is_ascii_uppercase() && i > 0 {
            name.push('-');
        }
        name.push(letter.to_ascii_lowercase());
    }
    name
}

/// Calls that change files, or open them for writing.
const CHANGES: [&str; 22] = [
    "fs::write(",
    "fs::create_dir(",
    "fs::create_dir_all(",
    "fs::remove_file(",
    "fs::remove_dir(",
    "fs::remove_dir_all(",
    "fs::rename(",
    "fs::copy(",
    "fs::hard_link(",
    "fs::set_permissions(",
    "symlink(",
    "File::create(",
    "File::create_new(",
    ".set_len(",
    ".write(true)",
    ".append(true)",
    ".truncate(true)",
    ".create(true)",
    ".create_new(true)",
    "DirBuilder",
    "setxattr(",
    "renameat",
];

/// Source files of the store that may change files: the one module, and those that pass their changes to its
/// failpoints.
const MAY: [&str; 4] = ["disk.rs", "failpoint.rs", "lock.rs", "scratch.rs"];

/// Files of the store that open an existing file and write to it through that module.
const OPEN: [&str; 2] = ["sealed.rs", "writer.rs"];

/// A file changed in another way would be out of reach of every test in this folder.
#[test]
fn every_change_of_a_file_goes_through_one_module() {
    let mut found = Vec::new();
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    assert!(files.len() > 200, "{}", files.len());
    let store = root().join("crates/mantissa-store/src");
    let is_of = |path: &Path, names: &[&str]| names.iter().any(|name| path == store.join(name));
    for path in files.iter().filter(|path| !is_of(path, &MAY)) {
        let text = fs::read_to_string(path).unwrap();
        for (number, line) in code(&text) {
            let opens = is_of(path, &OPEN) && line.contains(".write(true)");
            if CHANGES.iter().any(|change| line.contains(change)) && !opens {
                found.push(format!("{}:{number}: {}", path.display(), line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "not through mantissa_store::disk:\n{}", found.join("\n"));
}

/// Returns the lines of code with their numbers, up to the tests.
fn code(text: &str) -> Vec<(usize, &str)> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
    let lines = lines.take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    lines.filter(|(_, line)| !line.trim_start().starts_with("//")).collect()
}

/// Returns the source files below a folder, without tests.
fn sources(dir: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "tests" {
            sources(&path, files);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            files.push(path);
        }
    }
}
