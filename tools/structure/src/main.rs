//! Checks the structure of the workspace and fails on what the next change would pay for:
//!
//! - a circle of more than three files that import each other,
//! - an import of a crate that ARCHITECTURE.md's table does not place above the importing one,
//! - an import against the order of modules that a crate's root declares (`// Layer: …`),
//! - a file over 600 lines that is no table, and a function over 100,
//! - a branch on the members of a kind outside its home (ARCHITECTURE.md's table of kinds),
//! - an example in the docs of a crate that says `doctest = false`: no test would run it,
//! - a release profile that links a program at a level without vectorization.
//!
//! `structure [ROOT]`; exit code 0 without problems, 1 with some, 2 if a file can't be read.

mod architecture;
mod circles;
mod examples;
mod imports;
mod kinds;
mod layers;
mod lengths;
mod profiles;
mod source;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};

use architecture::Architecture;
use source::CrateSources;

/// Most files of a circle.
const CIRCLE: usize = 3;

fn main() -> ExitCode {
    let root = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("."), PathBuf::from);
    match check(&root) {
        Ok(report) => {
            report.lines.iter().for_each(|line| println!("{line}"));
            report.problems.iter().for_each(|problem| println!("error: {problem}"));
            println!("structure: {} problems", report.problems.len());
            ExitCode::from(u8::from(!report.problems.is_empty()))
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Figures of the crates, and what is wrong.
#[derive(Default)]
struct Report {
    lines: Vec<String>,
    problems: Vec<String>,
}

/// Checks all crates under `root/crates`.
fn check(root: &Path) -> Result<Report> {
    let architecture = Architecture::read(root)?;
    let mut report = Report::default();
    let workspace = read(&root.join("Cargo.toml"))?;
    let mut branches = vec![Vec::new(); architecture.kinds.len()];
    let folder = root.join("crates");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut directories: Vec<PathBuf> = entries.filter_map(Result::ok).map(|entry| entry.path()).collect();
    directories.sort();
    for directory in directories.iter().filter(|directory| directory.join("Cargo.toml").is_file()) {
        let manifest = read(&directory.join("Cargo.toml"))?;
        check_dependencies(directory, &manifest, &architecture, &mut report);
        report.problems.extend(profiles::slow_link(&workspace, directory, &manifest));
        let sources = CrateSources::read(directory)?;
        if manifest.lines().any(|line| line.trim() == "doctest = false") {
            report.problems.extend(unrun_examples(root, &sources));
        }
        check_crate(root, &sources, &architecture, &mut branches, &mut report);
    }
    for (kind, found) in architecture.kinds.iter().zip(branches) {
        let (left, got) = (kind.elsewhere, found.len());
        match got.cmp(&left) {
            std::cmp::Ordering::Greater => report.problems.extend(found),
            std::cmp::Ordering::Less => report.problems.push(format!(
                "ARCHITECTURE.md: kind {}: expected {left} branches elsewhere, got {got}; fix: lower the number",
                kind.name
            )),
            std::cmp::Ordering::Equal => {}
        }
    }
    Ok(report)
}

/// Checks that a crate depends only on crates above it in the table.
fn check_dependencies(directory: &Path, manifest: &str, architecture: &Architecture, report: &mut Report) {
    let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let place = |name: &str| architecture.crates.iter().position(|known| known == name);
    let Some(own) = place(&name) else {
        report.problems.push(format!("{name}: not in ARCHITECTURE.md's table of crates"));
        return;
    };
    let dependencies = section(manifest, "[dependencies]")
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .filter(|name| name.starts_with("mantissa"));
    for dependency in dependencies {
        if place(dependency).is_none_or(|other| other >= own) {
            let problem =
                format!("{name}: uses {dependency}, which does not stand above it in ARCHITECTURE.md");
            report.problems.push(problem);
        }
    }
}

/// Returns the lines of a manifest's section, without its header; none if there is no such section.
fn section<'m>(manifest: &'m str, header: &str) -> impl Iterator<Item = &'m str> {
    manifest
        .lines()
        .skip_while(move |line| line.trim() != header)
        .skip(1)
        .take_while(|line| !line.starts_with('['))
}

/// Reads a file as text.
fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Finds the examples of a crate that no test runs.
fn unrun_examples(root: &Path, sources: &CrateSources) -> Vec<String> {
    let files = sources.files.values();
    let found = files.flat_map(|file| {
        let path = file.path.strip_prefix(root).unwrap_or(&file.path).display();
        let lines = examples::examples(file).into_iter();
        lines.map(move |line| {
            format!("{path}:{line}: an example that no test runs; fix: remove `doctest = false` from the crate's Cargo.toml, or write ```text")
        }).collect::<Vec<_>>()
    });
    found.collect()
}

/// Checks a crate; adds its branches on kinds outside their homes to `branches`, by kind.
fn check_crate(
    root: &Path,
    sources: &CrateSources,
    architecture: &Architecture,
    branches: &mut [Vec<String>],
    report: &mut Report,
) {
    let imports = imports::imports(sources);
    let circles = circles::circles(&imports);
    let sizes: Vec<usize> = circles.iter().map(std::collections::BTreeSet::len).collect();
    let edges: usize = imports.values().map(std::collections::BTreeMap::len).sum();
    report.lines.push(format!(
        "{}: {} files, {edges} imports, circles {sizes:?}",
        sources.name,
        sources.files.len()
    ));
    for circle in circles.iter().filter(|circle| circle.len() > CIRCLE) {
        let way: Vec<String> =
            circles::shortest(circle, &imports).into_iter().map(|module| sources.show(module)).collect();
        report.problems.push(format!(
            "{}: circle of {} files, expected at most {CIRCLE}; the shortest way around: {} → {}",
            sources.name,
            circle.len(),
            way.join(" → "),
            way[0],
        ));
    }
    if let Some(layers) = layers::Layers::read(sources) {
        let wrong = layers.upward(sources, &imports).into_iter().chain(layers.unplaced(sources));
        report.problems.extend(wrong.map(|problem| format!("{}: {problem}", sources.name)));
    }
    for file in sources.files.values() {
        let path = file.path.strip_prefix(root).unwrap_or(&file.path).display().to_string();
        report
            .problems
            .extend(lengths::too_long(file).into_iter().map(|problem| format!("{path}: {problem}")));
        for (kind, found) in
            architecture.kinds.iter().zip(&mut *branches).filter(|(kind, _)| !kind.is_home(&path))
        {
            // A name that two kinds share ("hqq" is a method and a format) belongs to either home.
            let at_home = |member: &str| {
                architecture.kinds.iter().any(|kind| kind.names.contains(member) && kind.is_home(&path))
            };
            let here = kinds::branches(file, kind).into_iter();
            let here = here.filter(|branch| !at_home(branch.member.trim_matches('"')));
            found.extend(here.map(|branch| {
                format!(
                    "{path}:{}: branches on {} of kind {} outside its home",
                    branch.line, branch.member, kind.name
                )
            }));
        }
    }
}
