//! Documentation against the binary and the tree: links resolve, examples run, generated tables are current.
//!
//! `UPDATE_DOCS=1 cargo test --profile ci -p mantissa --test docs` writes the generated parts instead of comparing them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod engines;
mod examples;
mod fields;
mod figures;
mod generated;
mod links;
mod markdown;
#[path = "../cli/support.rs"]
#[allow(dead_code)]
mod support;
mod tables;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The root of the workspace.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Runs the binary in `dir`, which must succeed, and gives its standard output.
fn output_in(dir: &Path, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_mantissa"))
        .current_dir(dir)
        .stdin(Stdio::null())
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Lists the files of the tree with this extension, sorted; build outputs and hidden folders are left out.
fn files(extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if path.extension() == Some(OsStr::new(extension)) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The path relative to the root, for messages.
fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// Reads every Markdown file of the tree.
fn pages() -> Vec<markdown::Page> {
    files("md").iter().map(|path| markdown::Page::read(path)).collect()
}

/// Reads README and the guide, whose commands are run.
fn guide() -> Vec<markdown::Page> {
    let guide = root().join("docs/guide");
    pages()
        .into_iter()
        .filter(|page| page.path == root().join("README.md") || page.path.starts_with(&guide))
        .collect()
}
