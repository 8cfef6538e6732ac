//! Outputs appear complete or not at all: replacement, refusal, faults and kills.
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mantissa_store::error::OutputFault;
use mantissa_store::{
    Checkpoint, Dtype, Error, ErrorClass, JobKey, MANIFEST_NAME, Manifest, Mismatch, Output,
    SafetensorsWriter, StagedFile, Staging, TensorSpec, refuse_overlap, verify_manifest, write_file_atomic,
};
use serde_json::{Map, json};

/// A path where outputs of this test may be replaced, as with --overwrite.
fn output(path: impl AsRef<Path>) -> Output {
    Output::of_job(path.as_ref(), JobKey::of("test"), true)
}

/// Writes an output whose every byte depends on `value`.
fn produce(target: &Path, value: u8, bytes: usize) -> Result<(), Error> {
    let mut staging = Staging::begin(&output(target))?;
    fill(&mut staging, value, bytes)?;
    staging.commit(Map::from_iter([("value".to_owned(), json!(value))])).map(|_| ())
}

fn fill(staging: &mut Staging, value: u8, bytes: usize) -> Result<(), Error> {
    let specs = vec![TensorSpec::new("w", Dtype::U8, [bytes])];
    let path = staging.path().join("model.safetensors");
    let mut writer = SafetensorsWriter::create(&path, specs, BTreeMap::new())?;
    writer.write("w", &vec![value; bytes])?;
    let digest = writer.finish()?;
    staging.record("model.safetensors", digest);
    staging.write("config.json", format!("{{\"value\":{value}}}").as_bytes())
}

/// The value that a complete, undamaged output was made of.
fn value_of(target: &Path) -> u64 {
    assert_eq!(verify_manifest(target).unwrap(), []);
    let manifest = Manifest::read(target).unwrap();
    let model = Checkpoint::open(target).unwrap();
    let value = model.config().unwrap()["value"].as_u64().unwrap();
    assert_eq!(manifest.run["value"].as_u64(), Some(value));
    assert!(model.read("w").unwrap().iter().all(|&b| u64::from(b) == value));
    value
}

fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[track_caller]
fn output_fault<T: std::fmt::Debug>(result: Result<T, Error>) -> OutputFault {
    match result.unwrap_err() {
        Error::Output { fault, .. } => fault,
        other => panic!("{other}"),
    }
}

#[test]
fn a_new_output_appears_whole_and_an_old_one_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("made/on/the/way/out");
    produce(&out, 1, 1000).unwrap();
    assert_eq!(value_of(&out), 1);
    produce(&out, 2, 500).unwrap();
    assert_eq!(value_of(&out), 2);
    assert_eq!(names_in(out.parent().unwrap()), ["out"], "no lock, no partial, no old");
    assert_eq!(names_in(&out), ["config.json", MANIFEST_NAME, "model.safetensors"]);
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let outs = ["a", "b"].map(|name| dir.path().join(name));
    for out in &outs {
        produce(out, 3, 100).unwrap();
    }
    for name in names_in(&outs[0]) {
        assert_eq!(fs::read(outs[0].join(&name)).unwrap(), fs::read(outs[1].join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn a_dropped_staging_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    drop(Staging::begin(&output(&out)).unwrap());
    assert!(names_in(dir.path()).is_empty());
    produce(&out, 1, 10).unwrap();
    let mut staging = Staging::begin(&output(&out)).unwrap();
    fill(&mut staging, 2, 10).unwrap();
    assert_eq!(value_of(&out), 1, "while it is written");
    drop(staging);
    assert_eq!(value_of(&out), 1);
    assert_eq!(names_in(dir.path()), ["out"]);
}

#[test]
fn one_writer_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let first = Staging::begin(&output(&out)).unwrap();
    let error = Staging::begin(&output(&out)).unwrap_err();
    assert_eq!(error.class(), ErrorClass::Environment);
    let owner = std::process::id().to_string();
    assert!(error.to_string().contains(&format!("process {owner} (started ")), "{error}");
    assert!(matches!(output_fault(Err::<(), _>(error)), OutputFault::Busy { .. }));
    let other = Staging::begin(&output(dir.path().join("other"))).unwrap();
    drop((first, other));
    Staging::begin(&output(&out)).unwrap();
}

#[test]
fn folders_that_only_have_the_name_of_an_orphan_are_left() {
    let dir = tempfile::tempdir().unwrap();
    let names =
        [".other.mantissa-partial-4000000", ".out.mantissa-partial-4000000", ".out.mantissa-partial-x"];
    for name in names {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("thesis.tex"), "years of work").unwrap();
    }
    produce(&dir.path().join("out"), 1, 10).unwrap();
    assert_eq!(names_in(dir.path())[..3], names);
    assert!(names.iter().all(|name| dir.path().join(name).join("thesis.tex").exists()));
}

#[test]
fn folders_of_other_origin_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    drop(Staging::begin(&output(&out)).expect("an empty folder may be replaced"));
    // A model folder without a manifest was written by somebody else, and --overwrite does not cover it.
    fs::write(out.join("config.json"), "{}").unwrap();
    // So the refusal without it does not advise it.
    let plain = || Output::of_job(&out, JobKey::of("another"), false);
    for output in [output(&out), plain(), Output::new(&out)] {
        assert_eq!(output_fault(Staging::begin(&output)), OutputFault::NoManifest);
    }
    fs::remove_file(out.join("config.json")).unwrap();
    // Nor does a manifest cover a file that it does not list.
    produce(&out, 1, 10).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let notes = OutputFault::NotOurs { entry: "notes.txt".into() };
    assert_eq!(output_fault(produce(&out, 2, 10)), notes);
    assert_eq!(output_fault(Staging::begin(&plain())), notes);
    assert_eq!(fs::read_to_string(out.join("notes.txt")).unwrap(), "mine");
}

#[test]
fn a_folder_is_replaced_by_the_job_that_wrote_it_or_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let of = |job: &str| Output::of_job(&out, JobKey::of(job), false);
    let write = |job: &str, value| {
        let mut staging = Staging::begin(&of(job))?;
        fill(&mut staging, value, 10)?;
        staging.commit(Map::from_iter([("value".to_owned(), json!(value))])).map(drop)
    };
    write("a", 1).unwrap();
    let exists = OutputFault::Exists { what: "a folder" };
    assert_eq!(output_fault(write("b", 2)), exists);
    assert_eq!(output_fault(Staging::begin(&Output::new(&out))), exists);
    if write("a", 3).is_err() {
        println!("skipped: no extended attributes here");
        return;
    }
    assert_eq!(value_of(&out), 3);
    fs::write(out.join("config.json"), "{}").unwrap();
    assert_eq!(output_fault(write("a", 4)), exists, "edited since");
    produce(&out, 5, 10).unwrap();
    assert_eq!(value_of(&out), 5);
    assert_eq!(names_in(dir.path()), ["out"]);
}

#[test]
fn a_file_put_into_the_target_meanwhile_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    produce(&out, 1, 10).unwrap();
    let mut staging = Staging::begin(&output(&out)).unwrap();
    fill(&mut staging, 2, 10).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    assert_eq!(output_fault(staging.commit(Map::new())), OutputFault::Changed);
    assert_eq!(fs::read_to_string(out.join("notes.txt")).unwrap(), "mine");
    assert_eq!(names_in(dir.path()), ["out"]);
}

#[test]
fn kinds_of_targets() {
    let dir = tempfile::tempdir().unwrap();
    let file = crate::common::write(dir.path(), "file", b"text");
    assert!(matches!(Staging::begin(&output(&file)).unwrap_err(), Error::WrongKind { found: "a file", .. }));
    assert!(matches!(
        StagedFile::begin(&output(dir.path())).unwrap_err(),
        Error::WrongKind { found: "a folder", .. }
    ));
    assert_eq!(output_fault(Staging::begin(&output(Path::new("/")))), OutputFault::NoName);
    let below_a_file = Staging::begin(&output(file.join("out"))).unwrap_err();
    assert_eq!(below_a_file.class(), ErrorClass::Environment);
    // Through a link, the folder that it names is replaced and the link stays.
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    produce(&real, 1, 10).unwrap();
    symlink("real", &link).unwrap();
    produce(&link, 2, 10).unwrap();
    assert_eq!(value_of(&real), 2);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    assert!(Staging::begin(&output(dir.path().join("dangling"))).is_err());
}

#[test]
fn single_files_are_replaced_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("report.json");
    write_file_atomic(&output(&path), b"one").unwrap();
    let staged = StagedFile::begin(&output(&path)).unwrap();
    fs::write(staged.path(), b"two, incomplete").unwrap();
    drop(staged);
    assert_eq!(fs::read(&path).unwrap(), b"one");
    write_file_atomic(&output(&path), b"three").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"three");
    assert_eq!(names_in(dir.path()), ["report.json"]);
}

#[test]
fn damage_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    produce(&out, 1, 100).unwrap();
    let weights = out.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, &bytes).unwrap();
    let found = verify_manifest(&out).unwrap();
    assert!(matches!(&found[..], [Mismatch::Hash { file, .. }] if file == "model.safetensors"), "{found:?}");
    fs::write(&weights, &bytes[..50]).unwrap();
    let found = verify_manifest(&out).unwrap();
    assert!(matches!(&found[..], [Mismatch::Length { found: 50, .. }]), "{found:?}");
    fs::rename(&weights, out.join("renamed")).unwrap();
    let found = verify_manifest(&out).unwrap();
    assert!(matches!(&found[..], [Mismatch::Missing { .. }, Mismatch::Unlisted { .. }]), "{found:?}");
    fs::remove_file(out.join(MANIFEST_NAME)).unwrap();
    assert!(matches!(verify_manifest(&out), Err(Error::Missing { .. })));
}

#[test]
fn a_recorded_digest_of_another_length_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let mut staging = Staging::begin(&output(&out)).unwrap();
    fs::create_dir(staging.path().join("deep")).unwrap();
    fs::write(staging.path().join("deep/file"), "text").unwrap();
    staging.record("deep/file", mantissa_store::FileDigest::of(b"other text"));
    let committed = staging.commit(Map::new()).unwrap();
    assert_eq!(committed.manifest.files.keys().collect::<Vec<_>>(), ["deep/file"]);
    assert_eq!(verify_manifest(&out).unwrap(), []);
}

#[test]
fn output_and_input_are_kept_apart() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in");
    fs::create_dir(&input).unwrap();
    symlink("in", dir.path().join("alias")).unwrap();
    let at = |name: &str| dir.path().join(name);
    assert!(refuse_overlap(&input, &at("out")).is_ok());
    assert!(
        refuse_overlap(&input, &at("inside-out/new/deep")).is_ok(),
        "a common prefix of names is no overlap"
    );
    for (output, expected) in [
        ("in", "is"),
        ("alias", "is"),
        ("alias/deep/new", "lies inside"),
        ("in/.", "is"),
        ("in/../in/x", "lies inside"),
        ("", "contains"),
    ] {
        let fault = output_fault(refuse_overlap(&input, &at(output)));
        assert!(
            matches!(fault, OutputFault::Overlap { relation, .. } if relation == expected),
            "{output}: {fault}"
        );
    }
    assert!(matches!(refuse_overlap(&at("none"), &at("out")), Err(Error::Missing { .. })));
}

#[test]
fn a_read_only_folder_is_an_environment_error() {
    let dir = tempfile::tempdir().unwrap();
    let closed = dir.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(closed.join("probe"), "").is_ok() {
        println!("skipped: permissions do not bind this user");
        return;
    }
    let error = Staging::begin(&output(closed.join("out"))).unwrap_err();
    assert!(matches!(error, Error::Io { operation: "create lock file", .. }), "{error}");
    assert_eq!(error.class(), ErrorClass::Environment);
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o755)).unwrap();
}

const CHILD_OUT: &str = "MANTISSA_STORE_TEST_OUT";

/// Not a test: the process that the two tests below start, starve and kill.
#[test]
#[ignore = "started by other tests"]
fn child() {
    let Some(out) = std::env::var_os(CHILD_OUT) else {
        println!("skipped: not started by another test");
        return;
    };
    let out = PathBuf::from(out);
    if std::env::var_os("MANTISSA_STORE_TEST_FOREVER").is_none() {
        if let Err(error) = produce(&out, 2, 20_000) {
            assert_eq!(error.class(), ErrorClass::Environment, "{error}");
            std::process::exit(3);
        }
        return;
    }
    for value in (0..=250).cycle() {
        produce(&out, value, 20_000).unwrap();
    }
}

fn child_command(shell: &str, out: &Path) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{shell} exec \"$0\" --exact commit::child --ignored")]);
    command.arg(std::env::current_exe().unwrap()).env(CHILD_OUT, out);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Writes fail from byte n of any file on, for n in 512-byte (or 1 KiB) steps, as on a full disk.
#[test]
fn failing_writes_leave_the_old_output() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    produce(&out, 1, 1000).unwrap();
    let mut failures = 0;
    for blocks in 0..200 {
        let status = child_command(&format!("trap '' XFSZ; ulimit -f {blocks};"), &out).status().unwrap();
        assert_eq!(names_in(dir.path()), ["out"], "limit {blocks}");
        if status.success() {
            break;
        }
        assert_eq!(status.code(), Some(3), "limit {blocks}");
        assert_eq!(value_of(&out), 1, "limit {blocks}");
        failures += 1;
    }
    assert!((10..199).contains(&failures), "{failures}");
    assert_eq!(value_of(&out), 2);
}

#[test]
fn a_kill_at_any_time_leaves_a_whole_output() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    produce(&out, 251, 20_000).unwrap();
    let mut cleaned = 0;
    for trial in 0..60 {
        let mut child = child_command("", &out).env("MANTISSA_STORE_TEST_FOREVER", "1").spawn().unwrap();
        std::thread::sleep(Duration::from_micros(8_000 + trial * 997));
        child.kill().unwrap();
        child.wait().unwrap();
        value_of(&out);
        let staging = Staging::begin(&output(&out)).expect("a dead owner locks nobody out");
        cleaned += staging.cleaned().len();
        drop(staging);
        assert_eq!(names_in(dir.path()), ["out"], "trial {trial}");
    }
    assert!(value_of(&out) != 251, "the child made progress");
    assert!(cleaned > 0, "some kills left a partial output");
}
