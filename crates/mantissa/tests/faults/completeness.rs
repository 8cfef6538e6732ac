//! Checks completeness: every command is in the table, and every file change goes through one module.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::rows::ROWS;
use crate::support::{mantissa, root};

/// Commands outside the table, with the reason.
const ELSEWHERE: [(&str, &str); 7] = [
    ("train", "resumes from checkpoints instead of completing one output: tests/cli/train.rs, power.rs"),
    ("finetune", "runs in the folder of a training run, as train does: tests/cli/finetune.rs"),
    ("distill", "runs in the folder of a training run, as train does: tests/cli/distill.rs"),
    ("serve", "runs until it is stopped and writes no output: tests/cli/serve.rs"),
    ("pull", "fetches files one by one from a server: tests/cli/pull.rs"),
    ("worker", "adds results to a folder that stays for those who go on: tests/cli/workers.rs"),
    ("render-chat", "is a part of run in a process of its own, and writes to its standard output alone"),
];

#[test]
fn every_command_is_in_the_table() {
    let source = fs::read_to_string(root().join("crates/mantissa/src/commands/mod.rs")).unwrap();
    let list = source.split("\ncommands! {").nth(1).unwrap().split('}').next().unwrap();
    let rows = list.lines().map(str::trim).filter_map(|line| Some(line.split_once(": ")?.0));
    let commands: Vec<String> = rows.map(kebab).collect();
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
    let files = all_sources();
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

/// Ways to open a file for reading.
const OPENS: [&str; 7] = [
    "File::open(",
    "File::open)",
    "File::options(",
    "OpenOptions",
    "fs::read(",
    "fs::read_to_string(",
    "fs::copy(",
];

/// Source files that open files by themselves, with the reason; all others use `mantissa_store::regular`, so that no
/// command waits for a pipe or reads a device.
const OPENERS: [(&str, &str); 13] = [
    ("mantissa-serve/src/grammar/holder.rs", "only files of /proc and /dev/null"),
    ("mantissa-store/src/regular.rs", "the one way"),
    ("mantissa-store/src/text.rs", "a pipe that the user names is a text"),
    ("mantissa-store/src/disk.rs", "changes files; opens what it has written to make it durable"),
    ("mantissa-store/src/failpoint.rs", "writes the trace of a test"),
    ("mantissa-store/src/journal.rs", "follows no link, waits for no pipe"),
    ("mantissa-store/src/lock.rs", "follows no link, and keeps the file open for its lock"),
    ("mantissa-store/src/nested.rs", "follows no link, waits for no pipe"),
    ("mantissa-store/src/sealed.rs", "writes into the file that this process has just written"),
    ("mantissa-store/src/mark.rs", "follows no link, waits for no pipe"),
    ("mantissa-store/src/writer.rs", "follows no link, checks the type of the open file before it writes"),
    ("mantissa-jobs/src/machine.rs", "only files of /proc"),
    ("mantissa-jobs/src/memory.rs", "only files of /proc and /sys"),
];

/// A file opened in another way can be a pipe, which waits for ever, or a device, which has no end.
#[test]
fn every_file_is_opened_by_one_function() {
    let crates = root().join("crates");
    let (mut found, mut used) = (Vec::new(), BTreeSet::new());
    for path in all_sources() {
        let name = path.strip_prefix(&crates).unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).unwrap();
        for (number, line) in code(&text) {
            // Not the functions of this project whose names end alike, such as `TextFile::open`.
            let bare = |open: &str, at: usize| {
                !open.starts_with("File") || !line[..at].ends_with(|c: char| c.is_alphanumeric())
            };
            if OPENS.iter().any(|open| line.match_indices(open).any(|(at, _)| bare(open, at))) {
                used.insert(name.clone());
                if !OPENERS.iter().any(|(opener, _)| *opener == name) {
                    found.push(format!("{name}:{number}: {}", line.trim()));
                }
            }
        }
    }
    assert!(found.is_empty(), "not through mantissa_store::regular:\n{}", found.join("\n"));
    for (opener, reason) in OPENERS {
        assert!(used.contains(opener), "{opener} ({reason}) opens nothing any more");
    }
}

/// Returns all source files of the crates, without tests.
fn all_sources() -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    assert!(files.len() > 200, "{}", files.len());
    files
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
