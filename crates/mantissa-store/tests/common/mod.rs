//! Helpers shared by the integration tests.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::error::{HeaderFault, TensorFault};
use mantissa_store::{Error, ErrorClass, SafeTensors};

/// A safetensors file: the length of `header`, `header`, `data`.
pub fn file_of(header: &[u8], data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length[..], header, data].concat()
}

/// A file of one header entry per `(name, fields)`.
pub fn file_with(entries: &[(&str, &str)], data: &[u8]) -> Vec<u8> {
    let entries: Vec<String> =
        entries.iter().map(|(name, fields)| format!("\"{name}\":{{{fields}}}")).collect();
    file_of(format!("{{{}}}", entries.join(",")).as_bytes(), data)
}

/// The fields of an F32 tensor of `n` elements from byte `start`.
pub fn f32s(n: u64, start: u64) -> String {
    format!(r#""dtype":"F32","shape":[{n}],"data_offsets":[{start},{}]"#, start + 4 * n)
}

pub fn write(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// Opens the bytes as a file named `m.safetensors`.
pub fn open(bytes: &[u8]) -> Result<SafeTensors, Error> {
    let dir = tempfile::tempdir().unwrap();
    SafeTensors::open(&write(dir.path(), "m.safetensors", bytes))
}

/// The error of opening the bytes, checked for what every message must have.
pub fn error_of(bytes: &[u8]) -> Error {
    let error = open(bytes).expect_err("must be refused");
    let text = error.to_string();
    assert!(text.contains("m.safetensors: "), "names the file: {text}");
    assert!(text.contains("expected ") && text.contains(", got "), "{text}");
    assert!(text.lines().count() == 1 && text.len() < 1200, "one short line: {text}");
    assert_eq!(error.class(), ErrorClass::Input, "{text}");
    error
}

pub fn header_fault(bytes: &[u8]) -> HeaderFault {
    match error_of(bytes) {
        Error::Header { fault, .. } => fault,
        other => panic!("not a header fault: {other}"),
    }
}

/// The fault of tensor `name`, which the message must show.
pub fn tensor_fault(bytes: &[u8], name: &str) -> TensorFault {
    let error = error_of(bytes);
    let text = error.to_string();
    match error {
        Error::Tensor { fault, tensor, .. } => {
            assert_eq!(tensor, name);
            assert!(text.contains(&format!("tensor \"{name}\": ")), "{text}");
            fault
        }
        other => panic!("not a tensor fault: {other}"),
    }
}
