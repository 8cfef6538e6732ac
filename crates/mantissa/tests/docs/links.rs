//! Checks that every target of pages and code exists.

use std::fs;

use crate::markdown::Page;
use crate::{files, guide, pages, root, shown};

#[test]
fn every_link_and_anchor_resolves() {
    let (mut checked, mut broken) = (0, Vec::new());
    for page in pages() {
        for link in page.links().into_iter().filter(|link| !link.starts_with("http")) {
            checked += 1;
            let (path, anchor) =
                link.split_once('#').map_or((link.as_str(), None), |(path, anchor)| (path, Some(anchor)));
            let target =
                if path.is_empty() { page.path.clone() } else { page.path.parent().unwrap().join(path) };
            let found =
                target.exists() && anchor.is_none_or(|anchor| Page::read(&target).anchors().contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", shown(&page.path)));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(checked > 150, "only {checked} links were found");
}

#[test]
fn every_path_in_a_code_span_is_there() {
    let mut missing = Vec::new();
    let mut checked = 0;
    // The changelog names files of its time.
    for page in pages().into_iter().filter(|page| !page.path.ends_with("CHANGELOG.md")) {
        for path in page.paths() {
            checked += 1;
            let beside = page.path.parent().unwrap().join(&path);
            if !root().join(&path).exists() && !beside.exists() {
                missing.push(format!("{}: {path}", shown(&page.path)));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(checked > 30, "only {checked} paths were found");
}

#[test]
fn pages_that_code_names_are_there() {
    let mut missing = Vec::new();
    for path in files("rs") {
        let text = fs::read_to_string(&path).unwrap();
        for folder in ["guide", "reference", "explain", "results"] {
            for rest in text.split(&format!("docs/{folder}/")).skip(1) {
                let end = rest.find(".md").map_or(0, |end| end + 3);
                let name = format!("docs/{folder}/{}", &rest[..end]);
                if end > 0 && !root().join(&name).is_file() {
                    missing.push(format!("{}: {name}", shown(&path)));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn pages_name_nothing_outside_of_the_repository() {
    let read =
        |page: &Page| page.path.parent() == Some(&root()) || page.path.starts_with(root().join("docs"));
    for page in pages().into_iter().filter(read) {
        for outside in ["../shared", "github.com/mantissa"] {
            assert!(!page.text.contains(outside), "{} names {outside}", shown(&page.path));
        }
    }
}

#[test]
fn task_pages_are_short() {
    for page in guide() {
        let lines = page.text.lines().count();
        assert!(lines <= 150, "{}: {lines} lines", shown(&page.path));
    }
}
