//! `gguf_blocks`: every block type decoded, and those with a published formula encoded.

use mantissa_num::{Codes, Given, Quantized, Scheme, TensorError, quantize};
use safetensors::SafeTensors;

use crate::support::{Get, assert_bytes, assert_same, open};

/// Types whose bytes are a formula of the block; the rest are read only.
const WRITTEN: [&str; 13] = [
    "Q1_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q8_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    "BF16",
];

fn scheme(kind: &str) -> Scheme {
    let name = match kind {
        "MXFP4" | "NVFP4" => format!("gguf-{}", kind.to_lowercase()),
        _ => kind.to_lowercase(),
    };
    name.parse().unwrap()
}

fn decode(kind: &str, bytes: Vec<u8>, elements: usize) -> Vec<f32> {
    let format = scheme(kind).format;
    let codes = match format.codec() {
        Some(_) => Codes::Packed(bytes),
        None => Codes::from_le_bytes(2, &bytes),
    };
    Quantized { codes, ..Quantized::empty(format, 1, elements) }.dequantize().unwrap()
}

/// Every stored pair of bytes and values, whoever wrote the bytes.
#[test]
fn every_block_type_decodes() {
    let mut kinds = std::collections::BTreeSet::new();
    for file in open("gguf_blocks.safetensors") {
        let t = file.tensors();
        for name in t.names() {
            let Some(bytes_name) = bytes_of(name) else { continue };
            let kind = name.split('.').next().unwrap();
            let values = t.f32(name).unwrap();
            let found = decode(kind, t.u8(&bytes_name).unwrap(), values.len());
            assert_same(name, &found, &values, true);
            kinds.insert(kind.to_string());
        }
    }
    // All of formats.md but Q1_0, Q8_1 and Q8_K, whose bytes come without values, and Q2_0, of which there is no data.
    assert_eq!(kinds.len(), 24, "{kinds:?}");
}

/// The tensor of bytes that a tensor of values belongs to.
fn bytes_of(values: &str) -> Option<String> {
    if let Some(base) = values.strip_suffix(".random_bytes.dequant") {
        return Some(format!("{base}.random_bytes"));
    }
    if let Some(base) = values.strip_suffix(".all_scales.ggml_c_dequant") {
        return Some(format!("{base}.all_scales.bytes"));
    }
    values.ends_with("_dequant").then(|| values.replace("_dequant", "_bytes"))
}

#[test]
fn written_types_have_the_bytes_of_the_reference() {
    let mut checked = 0;
    for file in open("gguf_blocks.safetensors") {
        let t = file.tensors();
        for kind in WRITTEN {
            for input in ["edge", "gaussian", "student_t3"] {
                // Where both are there they differ only in the sign of the scale of a block of negative zeros: see below.
                let names = ["ggml_c_bytes", "gguf_py_bytes"].map(|p| format!("{kind}.{input}.{p}"));
                let Some(name) = names.iter().find(|name| t.u8(name).is_some()) else { continue };
                encode_matches(&t, kind, input, name);
                checked += 1;
            }
        }
    }
    assert!(checked >= WRITTEN.len(), "{checked}");
}

fn encode_matches(t: &SafeTensors<'_>, kind: &str, input: &str, name: &str) {
    let expected = t.u8(name).unwrap();
    let x_name = format!("input.{input}");
    let (_, cols) = t.shape2(&x_name);
    // The C reference has fewer rows of some types than there are inputs.
    let (rows, _) = t.shape2(name);
    let x = &t.f32(&x_name).unwrap()[..rows * cols];
    let found = encode(kind, x, rows, cols);
    let row_bytes = expected.len() / rows;
    for row in 0..rows {
        let x = &x[row * cols..][..cols];
        let (found, expected) =
            (&found[row * row_bytes..][..row_bytes], &expected[row * row_bytes..][..row_bytes]);
        if kind == "MXFP4" {
            compare_mxfp4(&format!("{name} row {row}"), x, found, expected);
        } else {
            assert_bytes(&format!("{name} row {row}"), found, expected);
        }
    }
}

/// The bytes, with scales past the largest f16 as infinity, which the reference writes and `quantize` refuses.
fn encode(kind: &str, x: &[f32], rows: usize, cols: usize) -> Vec<u8> {
    let quantized = quantize(&scheme(kind), x, rows, cols, Given::default());
    let Some(codec) = scheme(kind).format.codec() else { return quantized.unwrap().codes.to_le_bytes() };
    let mut bytes = vec![0; codec.total_bytes(rows, cols).unwrap()];
    codec.encode(x, &mut bytes).unwrap();
    match quantized {
        Ok(q) => assert!(q.codes.to_le_bytes() == bytes, "{kind}"),
        Err(error) => {
            assert!(matches!(error, TensorError::ScaleOverflow { .. }), "{kind}: {error}");
            assert!(decode(kind, bytes.clone(), x.len()).iter().any(|v| !v.is_finite()), "{kind}");
        }
    }
    bytes
}

/// Below 2^-125 the reference's scale byte wraps around; there ours is clamped, and the error no larger.
fn compare_mxfp4(what: &str, x: &[f32], found: &[u8], expected: &[u8]) {
    for ((x, found), expected) in x.chunks(32).zip(found.chunks(17)).zip(expected.chunks(17)) {
        let amax = x.iter().fold(0f32, |a, v| a.max(v.abs()));
        if amax > 0.0 && amax < 2f32.powi(-125) {
            let error = |bytes: &[u8]| -> f64 {
                let values = decode("MXFP4", bytes.to_vec(), 32);
                values.iter().zip(x).map(|(v, x)| (f64::from(*v) - f64::from(*x)).powi(2)).sum()
            };
            assert!(error(found) <= error(expected), "{what}");
        } else {
            assert_bytes(what, found, expected);
        }
    }
}

/// The bytes of the integer types come without values: their codes times their scale must be near the input.
#[test]
fn activation_types_decode_what_they_encode() {
    for kind in ["Q8_1", "Q8_K", "Q1_0"] {
        for file in open("gguf_blocks.safetensors") {
            let t = file.tensors();
            let x = t.f32("input.gaussian").unwrap();
            let (rows, cols) = t.shape2("input.gaussian");
            let Some(bytes) = t.u8(&format!("{kind}.gaussian.ggml_c_bytes")) else { continue };
            let values = decode(kind, bytes, rows * cols);
            for (i, (v, x)) in values.iter().zip(&x).enumerate() {
                let amax = x.abs().max(5.0);
                let close =
                    if kind == "Q1_0" { v.signum() == x.signum() } else { (v - x).abs() < amax / 127.0 };
                assert!(close, "{kind}[{i}]: {v} for {x}");
            }
        }
    }
}
