//! Corrupt safetensors headers, by section of the file, each group beside a counterpart that must be accepted.
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{error_of, f32s, file_of, file_with, header_fault, open, tensor_fault};
use mantissa_store::error::{ForeignKind, HeaderFault, TensorFault};
use mantissa_store::{Dtype, Error, SafeTensors};

#[test]
fn length_field() {
    assert!(open(&file_of(b"{}", b"")).is_ok());
    assert_eq!(header_fault(b""), HeaderFault::TooShort { found: 0 });
    assert_eq!(header_fault(&[0; 7]), HeaderFault::TooShort { found: 7 });
    let cap = 100_000_000;
    assert_eq!(header_fault(&[0xff; 10]), HeaderFault::TooLong { found: u64::MAX, cap });
    let over = [(cap + 1).to_le_bytes().as_slice(), b"{}"].concat();
    assert_eq!(header_fault(&over), HeaderFault::TooLong { found: cap + 1, cap });
    let long = [1000_u64.to_le_bytes().as_slice(), b"{}"].concat();
    assert_eq!(header_fault(&long), HeaderFault::PastEnd { found: 1000, available: 2 });
    assert!(matches!(header_fault(&[0; 8]), HeaderFault::Json { position: 0, .. }));
}

#[test]
fn header_text() {
    assert!(open(&file_of(b"  {}  \n", b"")).is_ok());
    assert_eq!(header_fault(&file_of(b"{\"\xff\":1}", b"")), HeaderFault::NotUtf8 { position: 2 });
    for (text, at) in [
        (&b"[]"[..], 0),
        (b"{", 0),
        (b"null", 3),
        (b"{} x", 3),
        (b"{}\n\n{}", 4),
        (b"{\"a\":1,}", 0),
        (b"\xef\xbb\xbf{}", 0),
    ] {
        match error_of(&file_of(text, b"")) {
            Error::Header { fault: HeaderFault::Json { position, .. }, .. } if at > 0 => {
                assert_eq!(position, at);
            }
            Error::Header { fault: HeaderFault::Json { .. }, .. } | Error::Tensor { .. } => {}
            other => panic!("{other}"),
        }
    }
    let deep = ["{\"a\":", &"[".repeat(100_000), &"]".repeat(100_000), "}"].concat();
    let fault = tensor_fault(&file_of(deep.as_bytes(), b""), "a");
    assert!(matches!(fault, TensorFault::Entry { position: 4..=5, .. }), "{fault}");
    let deep = ["{\"__metadata__\":", &"{\"a\":".repeat(100_000)].concat();
    assert!(matches!(header_fault(&file_of(deep.as_bytes(), b"")), HeaderFault::Metadata { .. }));
}

#[test]
fn metadata() {
    let good = open(&file_of(br#"{"__metadata__":{"format":"pt"}}"#, b"")).unwrap();
    assert_eq!(good.metadata()["format"], "pt");
    assert!(good.tensors().is_empty());
    let fault = |text: &[u8]| header_fault(&file_of(text, b""));
    assert_eq!(fault(br#"{"__metadata__":{},"__metadata__":{}}"#), HeaderFault::DuplicateMetadata);
    let twice = HeaderFault::DuplicateMetadataKey { key: "k".into() };
    assert_eq!(fault(br#"{"__metadata__":{"k":"1","k":"1"}}"#), twice);
    assert!(matches!(fault(br#"{"__metadata__":{"k":1}}"#), HeaderFault::Metadata { position: 21, .. }));
    assert!(matches!(fault(br#"{"__metadata__":null}"#), HeaderFault::Metadata { .. }));
}

#[test]
fn other_files_are_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n";
    for (bytes, expected, hint) in [
        (&pointer[..], ForeignKind::GitLfsPointer, "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", ForeignKind::Html, "download it again"),
        (b"PK\x03\x04\x00\x00\x08\x08\x00\x00\x00", ForeignKind::Zip, "safe_serialization"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j", ForeignKind::Pickle, "never read"),
        (b"\x93NUMPY\x01\0v\0{'descr': '|O'", ForeignKind::Numpy, "safetensors.numpy.save_file"),
        (b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", ForeignKind::Gguf, "model it was made from"),
        (b"GGUF", ForeignKind::Gguf, "model it was made from"),
    ] {
        let error = error_of(bytes);
        assert!(matches!(error, Error::Foreign { kind, .. } if kind == expected), "{error}");
        assert!(error.to_string().contains(hint), "{error}");
    }
}

#[test]
fn entry_fields() {
    let entry = |fields: &str| file_with(&[("a", fields)], &[0; 16]);
    assert!(open(&entry(&f32s(4, 0))).is_ok());
    let fault = |fields: &str| tensor_fault(&entry(fields), "a");
    assert_eq!(fault(r#""dtype":"F32","shape":[4]"#), TensorFault::MissingField { field: "data_offsets" });
    assert_eq!(fault(r#""shape":[4],"data_offsets":[0,16]"#), TensorFault::MissingField { field: "dtype" });
    let twice = format!(r#"{},"shape":[4]"#, f32s(4, 0));
    assert_eq!(fault(&twice), TensorFault::DuplicateField { field: "shape" });
    let extra = format!(r#"{},"strides":[1]"#, f32s(4, 0));
    assert_eq!(fault(&extra), TensorFault::UnknownField { field: "strides".into() });
    for bad in
        [r#""dtype":7"#, r#""shape":"4""#, r#""shape":[[4]]"#, r#""shape":["4"]"#, r#""data_offsets":{}"#]
    {
        assert!(matches!(fault(bad), TensorFault::Entry { .. }), "{bad}");
    }
    let not_an_object = file_of(br#"{"a":"F32"}"#, b"");
    assert!(matches!(tensor_fault(&not_an_object, "a"), TensorFault::Entry { position: 9, .. }));
}

#[test]
fn dtypes() {
    let entry = |dtype: &str, n: u64, len: u64| {
        let fields = format!(r#""dtype":"{dtype}","shape":[{n}],"data_offsets":[0,{len}]"#);
        file_with(&[("a", &fields)], &vec![0; len as usize])
    };
    for dtype in Dtype::ALL {
        assert!(open(&entry(dtype.name(), 8, dtype.bits())).is_ok(), "{dtype}");
    }
    let unknown = error_of(&entry("F4_E9M9", 8, 8));
    assert!(unknown.to_string().contains("F8_E4M3 "), "lists what is known: {unknown}");
    assert_eq!(tensor_fault(&entry("f32", 1, 4), "a"), TensorFault::UnknownDtype { found: "f32".into() });
    let fault = tensor_fault(&entry("F4", 3, 2), "a");
    assert_eq!(fault, TensorFault::PartialByte { shape: "[3]".into(), dtype: Dtype::F4, bits: 12 });
}

#[test]
fn shapes() {
    let entry = |shape: &str, len: usize| {
        let fields = format!(r#""dtype":"F32","shape":{shape},"data_offsets":[0,{len}]"#);
        file_with(&[("a", &fields)], &vec![0; len])
    };
    for (shape, len) in [("[]", 4), ("[0]", 0), ("[2,0,3]", 0), ("[1,1,1,2]", 8)] {
        assert!(open(&entry(shape, len)).is_ok(), "{shape}");
    }
    for (shape, found) in [
        ("[-1]", "-1"),
        ("[4.0]", "4.0"),
        ("[1e3]", "1000.0"),
        ("[18446744073709551615]", "18446744073709551615"),
        ("[9223372036854775808]", "9223372036854775808"),
        ("[99999999999999999999]", "1e20"),
    ] {
        let expected = TensorFault::Dimension { found: found.into() };
        assert_eq!(tensor_fault(&entry(shape, 16), "a"), expected);
    }
    for shape in ["[4294967296,4294967296]", "[2305843009213693952]", "[0,4294967296,4294967296]"] {
        let fault = tensor_fault(&entry(shape, 0), "a");
        assert!(matches!(fault, TensorFault::Overflow { .. }), "{shape}: {fault}");
    }
}

#[test]
fn offsets() {
    let two = |a: &str, b: &str, len: usize| file_with(&[("a", a), ("b", b)], &vec![0; len]);
    let at = |start: u64, end: u64| format!(r#""dtype":"F32","shape":[4],"data_offsets":[{start},{end}]"#);
    assert!(open(&two(&at(0, 16), &at(16, 32), 32)).is_ok());
    assert!(open(&two(&at(16, 32), &at(0, 16), 32)).is_ok(), "header order is free");

    let fault = |a: &str, b: &str, len, name| tensor_fault(&two(a, b, len), name);
    assert_eq!(fault(&at(16, 0), &at(16, 32), 32, "a"), TensorFault::Reversed { start: 16, end: 0 });
    assert_eq!(fault(&at(0, 12), &at(12, 28), 28, "a"), TensorFault::Size { found: 12, expected: 16 });
    assert_eq!(
        fault(&at(0, 16), &at(12, 28), 28, "b"),
        TensorFault::Overlap { start: 12, end: 16, previous: "a".into() }
    );
    assert_eq!(
        fault(&at(0, 16), &at(0, 16), 16, "b"),
        TensorFault::Overlap { start: 0, end: 16, previous: "a".into() }
    );
    assert_eq!(fault(&at(0, 16), &at(20, 36), 36, "b"), TensorFault::Hole { start: 20, end: 16 });
    assert_eq!(fault(&at(4, 20), &at(20, 36), 36, "a"), TensorFault::Hole { start: 4, end: 0 });
    assert_eq!(fault(&at(0, 16), &at(16, 32), 31, "b"), TensorFault::PastEnd { end: 32, available: 31 });
    assert_eq!(
        header_fault(&two(&at(0, 16), &at(16, 32), 33)),
        HeaderFault::TrailingBytes { found: 33, used: 32 }
    );
    for bad in ["[0]", "[0,16,32]", "[]", "[-1,15]", "[0,16.0]", "[0,18446744073709551615]"] {
        let fields = format!(r#""dtype":"F32","shape":[4],"data_offsets":{bad}"#);
        let fault = tensor_fault(&file_with(&[("a", &fields)], &[0; 16]), "a");
        assert!(matches!(fault, TensorFault::Offset { .. }), "{bad}: {fault}");
    }
}

#[test]
fn names() {
    let twice = file_with(&[("a", &f32s(4, 0)), ("a", &f32s(4, 0))], &[0; 16]);
    assert_eq!(tensor_fault(&twice, "a"), TensorFault::Duplicate);
    let escaped = file_with(&[("a", &f32s(1, 0)), ("\\u0061", &f32s(1, 4))], &[0; 8]);
    assert_eq!(tensor_fault(&escaped, "a"), TensorFault::Duplicate);

    let long = "n".repeat(1 << 20);
    for (written, name) in [
        ("", ""),
        ("../../etc/passwd", "../../etc/passwd"),
        ("/abs", "/abs"),
        (r"nul\u0000esc\u001b\n", "nul\0esc\u{1b}\n"),
        (&long, &long),
    ] {
        let opened = open(&file_with(&[(written, &f32s(1, 0))], &[1, 2, 3, 4])).unwrap();
        let meta = opened.get(name).expect("opaque key");
        assert_eq!(opened.read(meta).unwrap(), [1, 2, 3, 4]);
    }
    // In a message such a name is escaped and cut.
    let bad = file_with(&[(r"x\n\u001b[2J", &f32s(1, 4))], &[0; 8]);
    assert!(error_of(&bad).to_string().contains(r#"tensor "x\u{a}\u{1b}[2J""#));
    error_of(&file_with(&[(&long, &f32s(1, 4))], &[0; 8]));
}

#[test]
fn many_names_and_duplicates_are_not_quadratic() {
    let started = Instant::now();
    let entries: Vec<String> = (0..200_000)
        .map(|i| format!(r#""t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let opened = open(&file_of(format!("{{{}}}", entries.join(",")).as_bytes(), b"")).unwrap();
    assert_eq!(opened.tensors().len(), 200_000);
    assert!(opened.get("t199999").is_some() && opened.get("t200000").is_none());
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[test]
fn paths_that_are_not_files() {
    let dir = tempfile::tempdir().unwrap();
    let error = SafeTensors::open(&dir.path().join("none.safetensors")).unwrap_err();
    assert!(matches!(error, Error::Missing { .. }), "{error}");
    let error = SafeTensors::open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::WrongKind { found: "a folder, not a regular file", .. }), "{error}");
    let error = SafeTensors::open(Path::new("/dev/zero")).unwrap_err();
    assert!(matches!(error, Error::WrongKind { .. }), "{error}");
}

#[test]
fn reads_stay_within_the_tensor_and_the_file() {
    let bytes = file_with(&[("a", &f32s(2, 0)), ("b", &f32s(1, 8))], &[1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]);
    let dir = tempfile::tempdir().unwrap();
    let opened = SafeTensors::open(&crate::common::write(dir.path(), "m.safetensors", &bytes)).unwrap();
    let meta = opened.get("a").unwrap().clone();
    let mut buf = [0; 3];
    opened.read_range(&meta, 5, &mut buf).unwrap();
    assert_eq!(buf, [6, 7, 8]);
    for offset in [6, 8, u64::MAX] {
        let error = opened.read_range(&meta, offset, &mut buf).unwrap_err();
        assert!(matches!(error, Error::Range { .. }), "{error}");
    }
    let mut forged = meta;
    forged.len = 1 << 62;
    assert!(matches!(opened.read(&forged), Err(Error::Range { .. })));
    assert!(matches!(opened.read_f32(&forged), Err(Error::Range { .. })));
}

/// Files of the reference collection, if it exists beside the repository.
#[test]
fn reference_collection() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/reference/hostile-files");
    let Ok(expectations) = std::fs::read_to_string(dir.join("EXPECT.tsv")) else {
        println!("skipped: no reference collection beside the repository");
        return;
    };
    let mut seen = 0;
    for line in expectations.lines().filter(|line| line.contains(".safetensors")) {
        let (file, expected) = line.split_once('\t').unwrap();
        let started = Instant::now();
        let opened = SafeTensors::open(&dir.join(file));
        assert!(started.elapsed() < Duration::from_secs(1), "{file}");
        match expected {
            "accept" => assert!(opened.is_ok(), "{file}: {}", opened.unwrap_err()),
            "reject" => assert!(opened.is_err(), "{file}"),
            _ => {}
        }
        seen += 1;
    }
    assert!(seen >= 15, "{seen} files");
}
