//! Trees of files in memory, for comparing and restoring folders.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Files below a folder by relative path; folders are `None`.
pub type Tree = BTreeMap<String, Option<Vec<u8>>>;

/// Reads the tree below `root` without following links.
pub fn read(root: &Path) -> Tree {
    let mut tree = Tree::new();
    read_into(root, "", &mut tree);
    tree
}

fn read_into(dir: &Path, prefix: &str, tree: &mut Tree) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type().unwrap().is_dir() {
            read_into(&entry.path(), &format!("{name}/"), tree);
            tree.insert(name, None);
        } else {
            // A work file of a killed process cannot vanish: nobody removes it.
            tree.insert(name, Some(fs::read(entry.path()).unwrap()));
        }
    }
}

/// Makes the folder `root` hold exactly this tree.
pub fn put(root: &Path, tree: &Tree) {
    if root.exists() {
        fs::remove_dir_all(root).unwrap();
    }
    fs::create_dir_all(root).unwrap();
    // Sorted, so that a folder precedes its content.
    for (name, content) in tree {
        match content {
            None => fs::create_dir(root.join(name)).unwrap(),
            Some(bytes) => fs::write(root.join(name), bytes).unwrap(),
        }
    }
}

/// Returns the part of a tree at `name` and below.
pub fn below(tree: &Tree, name: &str) -> Tree {
    let inside = format!("{name}/");
    tree.iter()
        .filter(|(path, _)| *path == name || path.starts_with(&inside))
        .map(|(path, content)| (path.clone(), content.clone()))
        .collect()
}

/// Merges two trees.
pub fn joined(a: &Tree, b: &Tree) -> Tree {
    a.iter().chain(b).map(|(path, content)| (path.clone(), content.clone())).collect()
}

/// Describes the difference between two trees.
pub fn difference(found: &Tree, expected: &Tree) -> String {
    let mut said = Vec::new();
    for path in expected.keys().filter(|path| !found.contains_key(*path)) {
        said.push(format!("{path} is missing"));
    }
    for (path, content) in found {
        match expected.get(path) {
            None => said.push(format!("{path} should not be there")),
            Some(other) if other != content => said.push(format!("{path} differs")),
            Some(_) => {}
        }
    }
    said.join(", ")
}

/// Masks timings in a report: every number becomes 0; structure and words stay.
pub fn without_numbers(bytes: &[u8]) -> Option<Vec<u8>> {
    fn clear(value: &mut Value) {
        match value {
            Value::Number(_) => *value = Value::from(0),
            Value::Array(items) => items.iter_mut().for_each(clear),
            Value::Object(fields) => fields.values_mut().for_each(clear),
            _ => {}
        }
    }
    let mut value: Value = serde_json::from_slice(bytes).ok()?;
    clear(&mut value);
    Some(value.to_string().into_bytes())
}

/// Removes digits and points from a page.
pub fn without_digits(bytes: &[u8]) -> Option<Vec<u8>> {
    Some(bytes.iter().copied().filter(|byte| !byte.is_ascii_digit() && *byte != b'.').collect())
}
