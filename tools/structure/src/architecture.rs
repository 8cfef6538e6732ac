//! What ARCHITECTURE.md declares: the order of the crates, and the kinds with their homes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Declarations of ARCHITECTURE.md.
pub struct Architecture {
    /// Crates; each uses only crates before it.
    pub crates: Vec<String>,
    pub kinds: Vec<Kind>,
}

/// One closed set of things of which code elsewhere must not know the members.
pub struct Kind {
    pub name: String,
    /// Enum whose variants are the members; empty if they are only known by name.
    pub enum_name: String,
    /// Names of the members in files and on the command line.
    pub names: BTreeSet<String>,
    /// Files and folders, relative to the root, that may match on the members.
    pub homes: Vec<String>,
    /// Branches outside the homes that are left.
    pub elsewhere: usize,
}

impl Architecture {
    /// Reads the two tables of `ARCHITECTURE.md` under `root`.
    pub fn read(root: &Path) -> Result<Self> {
        let path = root.join("ARCHITECTURE.md");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let crates: Vec<String> = rows(&text, "| crate |").map(|row| code(&row[0])).collect();
        ensure!(!crates.is_empty(), "{}: expected a table that starts with \"| crate |\"", path.display());
        let kinds = rows(&text, "| kind |").map(|row| Kind::read(root, &row)).collect::<Result<Vec<_>>>()?;
        ensure!(!kinds.is_empty(), "{}: expected a table that starts with \"| kind |\"", path.display());
        Ok(Self { crates, kinds })
    }
}

impl Kind {
    /// Reads a row: kind, enum, names, homes, branches elsewhere.
    fn read(root: &Path, row: &[String]) -> Result<Self> {
        ensure!(row.len() == 5, "ARCHITECTURE.md: kind {}: expected 5 columns, got {}", row[0], row.len());
        let homes: Vec<String> = row[3].split(',').map(code).collect();
        for home in &homes {
            ensure!(root.join(home).exists(), "ARCHITECTURE.md: kind {}: {home} does not exist", row[0]);
        }
        let mut names = BTreeSet::new();
        for source in row[2].split(',') {
            // A path, then what stands before the names in its files; or a word that also means something else.
            match *spans(source).as_slice() {
                [] => {}
                [word] if word.starts_with('!') => {
                    names.remove(&word[1..]);
                }
                [path] => names.extend(stems(&root.join(path))?),
                [path, field, ..] => names.extend(named(&root.join(path), field)?),
            }
        }
        let elsewhere = row[4].parse();
        let elsewhere = elsewhere.with_context(|| format!("ARCHITECTURE.md: kind {}: elsewhere", row[0]))?;
        Ok(Self { name: row[0].clone(), enum_name: code(&row[1]), names, homes, elsewhere })
    }

    /// True if a file may match on the members.
    pub fn is_home(&self, file: &str) -> bool {
        self.homes.iter().any(|home| file.starts_with(home.as_str()))
    }
}

/// String literals after `field` in a file or folder: `name: "llama"`, `fn name(&self) -> &'static str { "hqq" }`.
fn named(path: &Path, field: &str) -> Result<BTreeSet<String>> {
    let mut files = Vec::new();
    if path.is_dir() {
        files_below(path, &mut files)?;
    } else {
        files.push(path.to_owned());
    }
    let mut names = BTreeSet::new();
    for file in files {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let Some(at) = line.find(field) else { continue };
            let literal =
                |text: &str| text.split('"').nth(1).filter(|name| !name.is_empty()).map(str::to_owned);
            // The body of a function is on the next line.
            names.extend(literal(&line[at + field.len()..]).or_else(|| literal(lines.clone().next()?)));
        }
    }
    ensure!(!names.is_empty(), "ARCHITECTURE.md: {}: no {field} \"…\" found", path.display());
    Ok(names)
}

fn files_below(folder: &Path, files: &mut Vec<std::path::PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files_below(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

/// Names of the files of a folder without extension.
fn stems(folder: &Path) -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let stem = |path: &Path| path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(entries.filter_map(Result::ok).map(|entry| stem(&entry.path())).collect())
}

/// Rows of the table whose header starts with `header`, as trimmed cells.
fn rows<'a>(text: &'a str, header: &'a str) -> impl Iterator<Item = Vec<String>> + 'a {
    let body = text.lines().skip_while(move |line| !line.starts_with(header)).skip(2);
    body.take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
}

/// Code spans of a cell.
fn spans(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Text of a cell without code marks.
fn code(cell: &str) -> String {
    cell.trim().trim_matches('`').to_owned()
}
