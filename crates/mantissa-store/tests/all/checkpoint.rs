//! Model folders: their files, valid indexes, and refusals.
use std::fs;
use std::path::Path;

use crate::common::{f32s, file_with, write};
use mantissa_store::error::{ForeignKind, IndexFault, JsonFault};
use mantissa_store::{Checkpoint, Error, ErrorClass};

const ONE: &str = "model-00001-of-00002.safetensors";
const TWO: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Two shards, `a` of 2 floats in the first, `b` of 1 in the second, and the given index.
fn sharded(dir: &Path, index: &str) {
    write(dir, ONE, &file_with(&[("a", &f32s(2, 0))], &[1; 8]));
    write(dir, TWO, &file_with(&[("b", &f32s(1, 0))], &[2; 4]));
    write(dir, INDEX, index.as_bytes());
}

fn good_index() -> String {
    format!(r#"{{"metadata":{{"total_size":12}},"weight_map":{{"b":"{TWO}","a":"{ONE}"}}}}"#)
}

fn refused(dir: &Path) -> Error {
    let error = Checkpoint::open(dir).expect_err("must be refused");
    let text = error.to_string();
    assert_eq!((error.class(), text.lines().count()), (ErrorClass::Input, 1), "{text}");
    assert!(text.contains("expected ") && text.contains(", got "), "{text}");
    error
}

fn index_fault(index: &str) -> IndexFault {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), index);
    match refused(dir.path()) {
        Error::Index { fault, path } => {
            assert!(path.ends_with(INDEX));
            fault
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_sharded_folder_reads_in_order() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), &good_index());
    write(dir.path(), "config.json", br#"{"model_type":"llama"}"#);
    let model = Checkpoint::open(dir.path()).unwrap();
    let names: Vec<&str> = model.tensors().map(|meta| meta.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!((model.total_bytes(), model.warnings().len(), model.files().count()), (12, 0, 2));
    assert_eq!(model.config().unwrap()["model_type"], "llama");
    assert_eq!(model.read("b").unwrap(), [2; 4]);
    let mut buf = [0; 3];
    model.read_range("a", 5, &mut buf).unwrap();
    assert_eq!(buf, [1; 3]);
    assert!(model.locate("b").unwrap().0.path().ends_with(TWO));
    assert!(model.get("c").is_none());
    assert!(matches!(model.read("c").unwrap_err(), Error::NoTensor { .. }));
}

#[test]
fn shard_names_stay_inside_the_folder() {
    for bad in [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        r"a\\b.safetensors",
        "..",
        "",
        "x.bin",
    ] {
        let fault = index_fault(&format!(r#"{{"weight_map":{{"a":"{bad}"}}}}"#));
        assert!(matches!(fault, IndexFault::ShardName { .. }), "{bad}: {fault}");
    }
}

#[test]
fn index_and_shards_must_agree() {
    let of = |map: &str| index_fault(&format!(r#"{{"weight_map":{{{map}}}}}"#));
    let (a, b) = (format!(r#""a":"{ONE}""#), format!(r#""b":"{TWO}""#));
    assert!(matches!(of(&format!(r#"{a},"b":"gone.safetensors""#)), IndexFault::MissingShard { .. }));
    assert!(matches!(of(&format!(r#"{a},{b},"c":"{ONE}""#)), IndexFault::LacksTensor { .. }));
    assert!(matches!(
        of(&format!(r#"{a},"b":"{ONE}","c":"{TWO}""#)),
        IndexFault::LacksTensor { .. } | IndexFault::Unlisted { .. }
    ));
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), &good_index());
    write(dir.path(), TWO, &file_with(&[("b", &f32s(1, 0)), ("x", &f32s(1, 4))], &[2; 8]));
    let error = refused(dir.path());
    assert!(matches!(error, Error::Index { fault: IndexFault::Unlisted { .. }, .. }), "{error}");
    write(dir.path(), TWO, &file_with(&[("b", &f32s(1, 0)), ("a", &f32s(1, 4))], &[2; 8]));
    let error = refused(dir.path());
    assert!(matches!(error, Error::Index { fault: IndexFault::TwoShards { .. }, .. }), "{error}");
}

#[test]
fn malformed_indexes_are_refused() {
    for index in [r#"{"weight_map":[]}"#, "{}", "[]", r#"{"weight_map":{"a":1}}"#] {
        let dir = tempfile::tempdir().unwrap();
        sharded(dir.path(), index);
        let error = refused(dir.path());
        assert!(matches!(error, Error::Field(_)), "{error}");
    }
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), &format!(r#"{{"weight_map":{{"a":"{ONE}","a":"{TWO}"}}}}"#));
    let error = refused(dir.path());
    assert!(matches!(error, Error::Json { fault: JsonFault::Duplicate { .. }, .. }), "{error}");
}

#[test]
fn a_wrong_total_is_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    sharded(dir.path(), &good_index().replace("12", "13"));
    let model = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(model.warnings().len(), 1);
    assert!(
        model.warnings()[0].contains("expected 12, the bytes of the tensors, got 13"),
        "{:?}",
        model.warnings()
    );
}

#[test]
fn links_inside_the_folder_are_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (dir.path().join("blobs"), dir.path().join("snapshot"));
    fs::create_dir(&blobs).unwrap();
    fs::create_dir(&snapshot).unwrap();
    write(&blobs, "0a1b", &file_with(&[("a", &f32s(1, 0))], &[1; 4]));
    std::os::unix::fs::symlink("../blobs/0a1b", snapshot.join("model.safetensors")).unwrap();
    assert_eq!(Checkpoint::open(&snapshot).unwrap().read("a").unwrap(), [1; 4]);
    fs::remove_file(blobs.join("0a1b")).unwrap();
    // A link to nothing is named as one.
    assert!(matches!(refused(&snapshot), Error::WrongKind { .. }));
}

#[test]
fn which_file_a_folder_means() {
    let dir = tempfile::tempdir().unwrap();
    let weights = file_with(&[("a", &f32s(1, 0))], &[1; 4]);
    assert!(matches!(refused(dir.path()), Error::NoWeights { .. }));
    write(dir.path(), "pytorch_model.bin", b"\x80\x02}.");
    let error = refused(dir.path());
    assert!(matches!(error, Error::Foreign { kind: ForeignKind::Pickle, .. }), "{error}");
    assert!(error.to_string().contains("safe_serialization=True"), "{error}");
    write(dir.path(), "quantized.safetensors", &weights);
    let only = Checkpoint::open(dir.path()).unwrap();
    assert!(only.warnings()[0].contains("only weights"));
    write(dir.path(), "other.safetensors", &weights);
    let error = refused(dir.path());
    assert!(matches!(error, Error::Ambiguous { count: 2, .. }), "{error}");
    write(dir.path(), "model.safetensors", &weights);
    assert_eq!(Checkpoint::open(dir.path()).unwrap().warnings().len(), 0);
    write(dir.path(), INDEX, b"not even JSON");
    assert!(Checkpoint::open(dir.path()).unwrap().warnings()[0].contains("ignored"));
}

#[test]
fn bare_files() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "config.json", b"broken");
    let path = write(dir.path(), "w.safetensors", &file_with(&[("a", &f32s(1, 0))], &[1; 4]));
    let model = Checkpoint::open(&path).unwrap();
    assert_eq!((model.config(), model.dir()), (None, dir.path()));
    let pickle = write(dir.path(), "w.pt", b"anything");
    assert!(matches!(refused(&pickle), Error::Foreign { kind: ForeignKind::Pickle, .. }));
    for (bytes, expected) in [
        (&b"PK\x03\x04"[..], ForeignKind::Zip),
        (b"\x80\x02}q\0.", ForeignKind::Pickle),
        (b"tjgg\x03\0\0\0", ForeignKind::Ggml),
        (b"\0\x01\0\0floats of llama2.c", ForeignKind::Bin),
        (b"", ForeignKind::Bin),
    ] {
        let bin = write(dir.path(), "w.bin", bytes);
        let error = refused(&bin);
        assert!(matches!(error, Error::Foreign { kind, .. } if kind == expected), "{error}");
    }
    assert!(matches!(refused(&dir.path().join("none")), Error::Missing { .. }));
}

#[test]
fn configs_are_strict() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "model.safetensors", &file_with(&[("a", &f32s(1, 0))], &[1; 4]));
    assert!(Checkpoint::open(dir.path()).unwrap().config().is_none());
    write(dir.path(), "config.json", br#"{"a":{"b":1,"b":2}}"#);
    let error = refused(dir.path());
    assert!(matches!(error, Error::Json { fault: JsonFault::Duplicate { .. }, .. }), "{error}");
    assert!(error.to_string().contains("config.json: expected each key once, got \"b\" twice"), "{error}");
    write(dir.path(), "config.json", b"[]");
    assert!(matches!(refused(dir.path()), Error::Field(_)));
    write(dir.path(), "config.json", &vec![b' '; (16 << 20) + 1]);
    let error = refused(dir.path());
    assert!(matches!(error, Error::Json { fault: JsonFault::TooLarge { .. }, .. }), "{error}");
}

/// Every model of the reference collections opens, if they exist beside the repository.
#[test]
fn reference_models_open() {
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let mut opened = 0;
    for collection in ["models", "artifacts"] {
        let Ok(entries) = fs::read_dir(shared.join(collection)) else {
            println!("skipped: no {collection} beside the repository");
            return;
        };
        for path in entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()) {
            let model = Checkpoint::open(&path).unwrap();
            assert!(model.config().is_some() && model.total_bytes() > 0, "{}", path.display());
            assert!(model.warnings().is_empty(), "{:?}", model.warnings());
            opened += 1;
        }
    }
    assert!(opened > 20, "{opened}");
}
