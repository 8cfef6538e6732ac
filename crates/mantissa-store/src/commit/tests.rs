#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use super::names::{NEW, OLD, PURPOSE};
use super::*;
use crate::error::Result;
use crate::output::Output;
use crate::target::Target;
use crate::work::Work;

fn folder_with(path: &Path, text: &str) {
    fs::create_dir(path).unwrap();
    fs::write(path.join("config.json"), text).unwrap();
}

fn config_of(path: &Path) -> String {
    fs::read_to_string(path.join("config.json")).unwrap()
}

/// A work folder of a dead process with this key.
fn left(dir: &Path, key: &str) -> PathBuf {
    let target = Target::prepare(&dir.join("out")).unwrap();
    let path = Work::create(&target, PURPOSE, key).unwrap().0.path().to_owned();
    fs::write(path.join("half"), "x").unwrap();
    path
}

#[test]
fn a_kill_between_two_renames_is_undone_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let work = left(dir.path(), "");
    fs::write(work.join("exchanged"), "1").unwrap();
    folder_with(&work.join(OLD), "old");
    folder_with(&work.join(NEW), "new, incomplete");
    let out = dir.path().join("out");
    let staging = Staging::begin(&Output::owned(&out)).unwrap();
    assert_eq!(config_of(&out), "old");
    assert_eq!(staging.cleaned(), [work]);
}

#[test]
fn work_of_other_plans_and_of_strangers_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let (ours, other) = (left(dir.path(), ""), left(dir.path(), "another plan"));
    let stranger = dir.path().join(".out.mantissa-partial-7");
    folder_with(&stranger, "mine");
    let staging = Staging::begin(&Output::new(dir.path().join("out"))).unwrap();
    assert_eq!(staging.cleaned(), std::slice::from_ref(&ours));
    assert_eq!(staging.others(), std::slice::from_ref(&other));
    drop(staging);
    assert!(!ours.exists() && other.exists() && stranger.exists());
}

/// A set of two parts and a file beside them, each holding `text`.
fn publish_set(dir: &Path, text: &str) -> Result<()> {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let set = FileSet { parts: names(&["a", "b"]), beside: names(&["a.json"]) };
    let staged = StagedSet::begin(&Output::owned(dir.join("m")), set, &|| Ok(Vec::new()))?;
    ["a", "b", "a.json"].iter().try_for_each(|name| staged.write(name, text.as_bytes()))?;
    staged.seal()?;
    staged.publish().map(drop)
}

fn set_of(dir: &Path) -> Vec<Option<String>> {
    ["a", "b", "a.json"].iter().map(|name| fs::read_to_string(dir.join(name)).ok()).collect()
}

#[test]
fn an_error_in_a_publication_of_several_files_puts_the_old_ones_back() {
    use crate::failpoint::{Failing, Operation, failing};
    let dir = tempfile::tempdir().unwrap();
    publish_set(dir.path(), "old").unwrap();
    let (old, new) = (set_of(dir.path()), vec![Some("new".to_owned()); 3]);
    let mut failures = 0;
    for n in 0.. {
        let publish = || publish_set(dir.path(), "new");
        let (result, seen) = failing(Operation::Write, Failing::Once(n), rustix::io::Errno::IO, publish);
        let now = set_of(dir.path());
        if n >= seen {
            result.unwrap();
            break;
        }
        // The last operations, after all files are in place, may fail too.
        assert!(now == old || now == new, "operation {n}: {now:?}");
        failures += usize::from(result.is_err());
        publish_set(dir.path(), "old").unwrap();
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 3, "operation {n}: {names:?}");
    }
    assert!(failures > 15, "{failures}");
}
