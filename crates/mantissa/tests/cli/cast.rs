//! `mantissa cast`: layout, panels, rounding, refusals.

use std::fs;
use std::path::Path;

use mantissa_num::{Given, Scheme, quantize};
use mantissa_store::Dtype;
use mantissa_store::convention::native;

use crate::support::{File, fail, json, le, stderr, succeed, text, values, write, write_x};

/// Casts `x` and opens the output.
fn cast(dir: &Path, shape: &[usize], x: &[f32], scheme: &str, more: &[&str]) -> File {
    let (input, out) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    let _ = fs::remove_file(&input);
    write_x(&input, shape, x);
    let mut arguments =
        vec!["cast", text(&input), "--scheme", scheme, "--overwrite", "--out", text(&out), "--quiet"];
    arguments.extend(more);
    succeed(&arguments);
    File::open(&out)
}

#[test]
fn tensors_have_the_documented_shapes_and_dtypes() {
    let dir = tempfile::tempdir().unwrap();
    let x = values(2 * 3 * 70);
    let cases: [(&str, Dtype, &[usize], Dtype); 9] = [
        ("int8-tensor", Dtype::U8, &[1], Dtype::F32),
        ("int4-channel", Dtype::U8, &[6, 1], Dtype::F32),
        ("int4-g32", Dtype::U8, &[6, 3], Dtype::F32),
        ("fp8-e4m3-t4x32", Dtype::U8, &[2, 3], Dtype::F32),
        ("mxfp4", Dtype::U8, &[6, 3], Dtype::U8),
        ("nvfp4", Dtype::U8, &[6, 5], Dtype::U8),
        ("nf4", Dtype::U8, &[7], Dtype::F32),
        ("bf16", Dtype::U16, &[], Dtype::F32),
        ("f32", Dtype::U32, &[], Dtype::F32),
    ];
    for (scheme, code_dtype, scale_shape, scale_dtype) in cases {
        let file = cast(dir.path(), &[2, 3, 70], &x, scheme, &[]);
        assert_eq!((file.dtype("x.codes"), file.shape("x.codes")), (code_dtype, vec![2, 3, 70]), "{scheme}");
        assert_eq!(
            (file.dtype("x.dequant"), file.shape("x.dequant")),
            (Dtype::F32, vec![2, 3, 70]),
            "{scheme}"
        );
        assert_eq!(file.has("x.scale"), !scale_shape.is_empty(), "{scheme}");
        if file.has("x.scale") {
            assert_eq!(
                (file.shape("x.scale"), file.dtype("x.scale")),
                (scale_shape.to_vec(), scale_dtype),
                "{scheme}"
            );
        }
        assert!(!file.has("x.zero") && !file.has("x.packed"), "{scheme}");
        assert_eq!(file.has("x.global"), scheme == "nvfp4");
        assert_eq!(file.metadata("scheme"), Some(scheme));
        assert_eq!((file.metadata("rounding"), file.metadata("seed")), (Some("nearest"), None));
    }
    let file = cast(dir.path(), &[2, 3, 70], &x, "int4-g32-asym", &["--packed"]);
    assert_eq!((file.dtype("x.zero"), file.shape("x.zero")), (Dtype::I32, vec![6, 3]));
    // Rows of 70 four-bit codes fill nine 32-bit words.
    assert_eq!((file.dtype("x.packed"), file.shape("x.packed")), (Dtype::U8, vec![6 * 36]));
}

#[test]
fn ranks_0_and_1_are_one_row_and_empty_tensors_pass() {
    let dir = tempfile::tempdir().unwrap();
    let file = cast(dir.path(), &[], &[3.5], "int8-channel", &[]);
    assert_eq!((file.shape("x.codes"), file.shape("x.scale")), (vec![], vec![1, 1]));
    assert_eq!(file.bytes("x.codes"), [127]);
    let file = cast(dir.path(), &[5], &values(5), "int4-g2", &[]);
    assert_eq!(file.shape("x.scale"), [1, 3]);
    for scheme in
        ["int8-channel", "int4-g32-asym", "mxfp4", "nvfp4", "nf4", "f16", "int8-tensor", "fp8-e4m3-t2x2"]
    {
        let file = cast(dir.path(), &[4, 0], &[], scheme, &["--packed"]);
        assert_eq!(file.bytes("x.codes"), [0u8; 0], "{scheme}");
        let file = cast(dir.path(), &[0, 64], &[], scheme, &["--packed"]);
        assert_eq!(file.bytes("x.dequant"), [0u8; 0], "{scheme}");
    }
    // The number of scales of a tensor without elements is bounded.
    let huge = dir.path().join("huge.safetensors");
    write(&huge, &[("x", Dtype::F32, &[1 << 40, 0], Vec::new())]);
    let out = dir.path().join("huge-out.safetensors");
    let line =
        fail(2, &["cast", text(&huge), "--scheme", "int8-channel", "--overwrite", "--out", text(&out)]);
    assert!(line.contains("\"x\""), "{line}");
}

/// Tensors of several panels, in every split, equal one call of the reference.
#[test]
fn panels_match_the_whole_tensor_at_any_thread_count() {
    let dir = tempfile::tempdir().unwrap();
    let schemes = [
        "int4-g32-asym",
        "int3-g7",
        "int8-tensor",
        "int8-tensor-asym",
        "int8-channel:restricted",
        "fp8-e4m3-t128x128",
        "fp6-e3m2",
        "mxfp4:rceil",
        "nvfp4:te",
        "nf4-g33",
        "bf16",
    ];
    for shape in [&[701, 1000][..], &[650_001], &[3, 90_000]] {
        let x = values(shape.iter().product());
        let (rows, cols) = (shape[..shape.len() - 1].iter().product(), shape[shape.len() - 1]);
        for text in schemes {
            let one = cast(dir.path(), shape, &x, text, &["--packed", "--threads", "1"]);
            let bytes = fs::read(dir.path().join("out.safetensors")).unwrap();
            cast(dir.path(), shape, &x, text, &["--packed", "--threads", "3"]);
            assert!(bytes == fs::read(dir.path().join("out.safetensors")).unwrap(), "{text} {shape:?}");

            let scheme: Scheme = text.parse().unwrap();
            let q = quantize(&scheme, &x, rows, cols, Given::default()).unwrap();
            assert!(one.bytes("x.codes") == q.codes.to_le_bytes(), "{text} {shape:?}: codes");
            assert!(one.bytes("x.dequant") == le(&q.dequantize().unwrap()), "{text} {shape:?}: dequant");
            assert!(one.bytes("x.packed") == native::pack_codes(&q), "{text} {shape:?}: packed");
            for (name, expected) in native::scale_tensors("x", &q) {
                assert!(one.bytes(&name) == expected, "{text} {shape:?}: {name}");
            }
        }
    }
}

#[test]
fn stochastic_rounding_follows_the_seed() {
    let dir = tempfile::tempdir().unwrap();
    let x = values(300_000);
    let bytes = |seed: &str, threads: &str| {
        let more = ["--round", "stochastic", "--seed", seed, "--threads", threads];
        let file = cast(dir.path(), &[300, 1000], &x, "int4-g50", &more);
        assert_eq!((file.metadata("rounding"), file.metadata("seed")), (Some("stochastic"), Some(seed)));
        fs::read(dir.path().join("out.safetensors")).unwrap()
    };
    let first = bytes("7", "1");
    assert!(first == bytes("7", "2"));
    assert!(first != bytes("8", "1"));
    // Nearest rounding does not depend on the seed.
    cast(dir.path(), &[300, 1000], &x, "int4-g50", &["--seed", "1"]);
    let nearest = fs::read(dir.path().join("out.safetensors")).unwrap();
    cast(dir.path(), &[300, 1000], &x, "int4-g50", &["--seed", "2"]);
    assert!(nearest == fs::read(dir.path().join("out.safetensors")).unwrap());
    assert!(nearest != first);
}

#[test]
fn sqnr_is_the_ratio_of_energies() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let x = values(64 * 640);
    write_x(&input, &[64, 640], &x);
    let report =
        json(&["cast", text(&input), "--scheme", "int4-g32", "--overwrite", "--out", text(&out), "--json"]);
    let tensor = &report["tensors"][0];
    let dequant = File::open(&out).f32("x.dequant");
    let energy = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>();
    let noise = energy(&mut x.iter().zip(&dequant).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    let expected = 10.0 * (energy(&mut x.iter().map(|&v| f64::from(v))) / noise).log10();
    assert!((tensor["sqnr_db"].as_f64().unwrap() - expected).abs() < 1e-9, "{tensor}");
    assert_eq!((&tensor["bits_per_weight"], &tensor["name"]), (&5.0.into(), &"x".into()));
    assert!(tensor["max_abs_error"].as_f64().unwrap() > 0.0);
    let exact =
        json(&["cast", text(&input), "--scheme", "f32", "--overwrite", "--out", text(&out), "--json"]);
    assert_eq!(exact["tensors"][0]["sqnr_db"], serde_json::Value::Null);
    assert_eq!(exact["tensors"][0]["max_abs_error"], 0.0);
}

#[test]
fn other_float_dtypes_are_widened_and_the_rest_reported_as_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let tensors: [(&str, Dtype, &[usize], Vec<u8>); 4] = [
        ("half", Dtype::F16, &[2], vec![0x00, 0x3c, 0x00, 0xc0]),
        ("brain", Dtype::BF16, &[2], vec![0x80, 0x3f, 0x00, 0xc0]),
        ("eight", Dtype::F8E4M3, &[2], vec![0x38, 0xc0]),
        ("index", Dtype::I64, &[1], vec![0; 8]),
    ];
    write(&input, &tensors);
    let arguments = ["cast", text(&input), "--scheme", "f32", "--overwrite", "--out", text(&out)];
    let output = crate::support::mantissa(&arguments);
    assert!(output.status.success());
    assert!(stderr(&output).contains("\"index\" skipped: I64"), "{}", stderr(&output));
    let file = File::open(&out);
    for name in ["half", "brain", "eight"] {
        assert_eq!(file.f32(&format!("{name}.dequant")), [1.0, -2.0], "{name}");
    }
    assert_eq!(file.names().len(), 6);
    let strict = [&arguments[..], &["--strict", "--quiet"]].concat();
    assert!(fail(1, &strict).contains("--strict"));
}

#[test]
fn invalid_casts_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let mut x = values(128);
    x[70] = f32::INFINITY;
    x[90] = f32::NAN;
    write_x(&input, &[2, 64], &x);
    let cast = |scheme: &str, more: &[&str]| {
        let arguments =
            [&["cast", text(&input), "--scheme", scheme, "--overwrite", "--out", text(&out)], more].concat();
        let line = fail(2, &arguments);
        assert!(!out.exists());
        line
    };
    for scheme in ["int4-g32", "int8-tensor", "nf4", "nvfp4", "fp8-e4m3-channel"] {
        let line = cast(scheme, &[]);
        assert!(line.contains("\"x\"") && line.contains("got 2 non-finite"), "{line}");
        assert!(line.contains("element 70"), "{line}");
    }
    assert!(cast("int9-g32", &[]).contains("int9-g32"));
    assert!(cast("int4-g32:floor", &[]).contains(":full"));
    assert!(cast("nf4", &["--round", "stochastic"]).contains("nf4"));
    assert!(cast("int8-tensor@static", &[]).contains("@static"));
    let same = fail(2, &["cast", text(&input), "--scheme", "f16", "--out", text(&input)]);
    assert!(same.contains("is the input"), "{same}");
    // MX scales and plain casts have codes for NaN.
    succeed(&["cast", text(&input), "--scheme", "mxfp8-e4m3", "--overwrite", "--out", text(&out)]);
    assert!(File::open(&out).f32("x.dequant")[90].is_nan());
}

/// Files take more than the scheme, which is said; the packed bytes and scales alone take no more.
#[test]
fn the_size_of_the_file_and_that_of_the_scheme_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    write_x(&input, &[64, 256], &values(64 * 256));
    let cast = ["cast", text(&input), "--scheme", "int4-g32", "--overwrite", "--out", text(&out)];
    let said = succeed(&cast);
    assert!(said.contains("65.5 kB are F32 copies (.dequant)") && said.contains("takes 10.2 kB"), "{said}");
    let inspected = succeed(&["inspect", text(&out)]);
    assert!(inspected.contains("written by mantissa cast"), "{inspected}");
    let said = succeed(&[&cast[..], &["--packed-only"]].concat());
    assert!(said.contains("packed codes and scales: 10.2 kB"), "{said}");
    let file = File::open(&out);
    assert!(file.has("x.packed") && file.has("x.scale") && !file.has("x.codes") && !file.has("x.dequant"));
    assert_eq!(file.shape("x.packed"), [64 * 256 / 2]);
    assert!(fs::metadata(&out).unwrap().len() < 11_000);
}
