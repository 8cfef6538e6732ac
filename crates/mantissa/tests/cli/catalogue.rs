//! Every scheme of the catalogue, and rules that store something else: cast, and quantized into the native
//! format, verified and evaluated.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mantissa_num::grammar::catalogue;
use mantissa_num::{Given, Scheme, quantize};
use mantissa_store::convention::native;
use mantissa_store::{Dtype, SafeTensors, SafetensorsWriter, TensorSpec};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{
    File, fail, json, le, mantissa, sampled, stderr, strict_json, succeed, text, values, whole, write,
    write_x,
};

/// Schemes of the catalogue, and variants that are stored differently.
fn schemes() -> Vec<Scheme> {
    let more = [
        "int8-tensor",
        "int8-channel-asym",
        "int4-g32-asym",
        "int5-t16x32",
        "int4-g32-asym:minmax",
        "int8-channel-asym:minmax",
        "int2-g48-asym:minmax",
        "ternary-channel",
        "ternary-g64:amax",
        "fp8-e4m3-tensor",
        "fp8-e4m3-t128x128",
        "fp8-e4m3-t128x128:ue8m0",
        "fp8-e4m3-t1x128:floor1e-12",
        "fp4-e2m1-g32:deepgemm",
        "fp6-e3m2-g48",
        "nf4-g100",
        "nf4-g128-dq",
        "fp4-bnb-dq",
        "dyn8:cpu",
        "dyn8-unsigned-g64",
        "dyn8-tensor",
        "lin8-g48",
        "nvfp4:te",
        "nvfp4:torchao",
        "nvfp4:torchao-1level",
        "nvfp4:te-2d",
        "nvfp4:4over6",
    ];
    let mx = ["mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxint8"];
    let rules = ["ceil", "even", "rceil", "torchao-rceil", "ct"];
    let mx = mx.iter().flat_map(|mx| rules.map(|rule| format!("{mx}:{rule}")));
    let all = more.iter().map(|text| (*text).to_owned()).chain(mx);
    catalogue().into_iter().chain(all.map(|text| text.parse().unwrap())).collect()
}

#[test]
fn every_scheme_is_cast() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let shape = [3, 41, 256];
    let x = values(shape.iter().product());
    write_x(&input, &shape, &x);
    for scheme in sampled(schemes(), 9) {
        succeed(&[
            "cast",
            text(&input),
            "--scheme",
            &scheme.to_string(),
            "--overwrite",
            "--out",
            text(&out),
            "--packed",
            "--quiet",
        ]);
        let file = File::open(&out);
        let q = quantize(&scheme, &x, 123, 256, Given::default()).unwrap();
        assert!(file.bytes("x.dequant") == le(&q.dequantize().unwrap()), "{scheme}: dequant");
        assert!(file.bytes("x.packed") == native::pack_codes(&q), "{scheme}: packed");
        let mut names = vec!["x.dequant".to_owned(), "x.packed".to_owned()];
        if scheme.format.codec().is_none() {
            assert!(file.bytes("x.codes") == q.codes.to_le_bytes(), "{scheme}: codes");
            assert_eq!(file.shape("x.codes"), shape, "{scheme}");
            names.push("x.codes".to_owned());
        }
        for (spec, (name, bytes)) in
            native::scale_specs("x", &scheme.format, 123, 256).iter().zip(native::scale_tensors("x", &q))
        {
            assert_eq!(
                (&spec.name, file.dtype(&name), file.shape(&name)),
                (&name, spec.dtype, spec.shape.clone())
            );
            assert!(file.bytes(&name) == bytes, "{scheme}: {name}");
            names.push(name);
        }
        names.sort();
        assert_eq!(file.names(), names, "{scheme}");
    }
}

#[test]
fn names_and_dtypes_of_side_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    write_x(&input, &[80, 256], &values(80 * 256));
    let cast = |scheme: &str| {
        succeed(&["cast", text(&input), "--scheme", scheme, "--overwrite", "--out", text(&out), "--quiet"]);
        File::open(&out)
    };
    let file = cast("nf4-dq");
    assert_eq!((file.dtype("x.scale"), file.shape("x.scale")), (Dtype::U8, vec![320]));
    assert_eq!((file.shape("x.nested_scale"), file.shape("x.nested_offset")), (vec![2], vec![1]));
    let file = cast("int4-g32-asym:minmax");
    assert_eq!((file.dtype("x.bias"), file.shape("x.bias")), (Dtype::F32, vec![80, 8]));
    assert!(!file.has("x.zero"));
    let file = cast("q8_0");
    assert_eq!(file.names(), ["x.dequant", "x.packed"]);
    assert_eq!((file.dtype("x.packed"), file.shape("x.packed")), (Dtype::U8, vec![80 * 8 * 34]));
    let file = cast("fp8-e4m3-t128x128:ue8m0");
    assert_eq!((file.dtype("x.scale"), file.shape("x.scale")), (Dtype::U8, vec![1, 2]));
    assert_eq!(cast("f64").dtype("x.codes"), Dtype::U64);
    assert_eq!(cast("tf32").dtype("x.codes"), Dtype::U32);
    assert!(cast("nvfp4:torchao").has("x.global") && !cast("nvfp4:torchao-1level").has("x.global"));
}

#[test]
fn f64_codes_keep_every_bit_of_an_f64_source() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let bytes: Vec<u8> = (1..=300).flat_map(|i| (1.0 / f64::from(i)).to_le_bytes()).collect();
    write(&input, &[("x", Dtype::F64, &[3, 100], bytes.clone())]);
    succeed(&["cast", text(&input), "--scheme", "f64", "--overwrite", "--out", text(&out), "--quiet"]);
    assert!(File::open(&out).bytes("x.codes") == bytes);
}

#[test]
fn block_types_that_cannot_be_written_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    write_x(&input, &[4, 48], &values(4 * 48));
    let refused = |input: &Path, scheme: &str| {
        fail(2, &["cast", text(input), "--scheme", scheme, "--overwrite", "--out", text(&out)])
    };
    let line = refused(&input, "q4_0");
    assert!(line.contains("expected rows of multiples of 32 elements"), "{line}");
    assert!(refused(&input, "q4_k").contains("multiples of 256"));
    let mut x = values(4 * 64);
    x[130] = 3e7;
    write_x(&dir.path().join("large.safetensors"), &[4, 64], &x);
    let large = dir.path().join("large.safetensors");
    let line = fail(2, &["cast", text(&large), "--scheme", "q8_0", "--overwrite", "--out", text(&out)]);
    assert!(line.contains("\"x\"") && line.contains("1 blocks") && line.contains("element 128"), "{line}");
    assert!(!out.exists());
}

/// Model of one layer whose rows every block size divides.
fn model(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    let sizes = [
        "--hidden", "256", "--layers", "1", "--ffn", "256", "--heads", "4", "--vocab", "80", "--dtype", "f32",
    ];
    succeed(&[&["synth", "--out", text(&out), "--preset", "tiny"], &sizes[..]].concat());
    out
}

/// Writes `model` with fake-quantized linear weights to `out`.
fn fake_quantized(model: &Path, scheme: &Scheme, out: &Path) {
    let source = SafeTensors::open(&model.join("model.safetensors")).unwrap();
    let specs = source.tensors().iter().map(|t| TensorSpec::new(&t.name, t.dtype, t.shape.clone())).collect();
    let _ = fs::remove_file(out.join("model.safetensors"));
    let mut writer =
        SafetensorsWriter::create(&out.join("model.safetensors"), specs, BTreeMap::new()).unwrap();
    for meta in source.tensors() {
        let mut w = source.read_f32(meta).unwrap();
        if meta.name.ends_with("_proj.weight") {
            mantissa_num::fake_quantize(scheme, &mut w, meta.shape[0], meta.shape[1], Given::default())
                .unwrap();
        }
        writer.write(&meta.name, &le(&w)).unwrap();
    }
    writer.finish().unwrap();
}

/// Fused layers share NVFP4's global scale, which single layers would not have.
fn is_shared(scheme: &Scheme) -> bool {
    scheme.has_outer_scale()
}

#[test]
fn every_scheme_round_trips_in_the_native_format() {
    let temp = TempDir::new().unwrap();
    let (model, dense) = (model(temp.path()), temp.path().join("dense"));
    fs::create_dir(&dense).unwrap();
    fs::copy(model.join("config.json"), dense.join("config.json")).unwrap();
    let tokens = temp.path().join("windows.json");
    let window: Vec<u32> = (0..48).map(|i| mantissa_num::round::random_u32(3, i) % 80).collect();
    fs::write(&tokens, serde_json::json!([window]).to_string()).unwrap();
    let nll = |model: &Path| {
        let result = json(&["eval", text(model), "--tokens", text(&tokens), "--json", "--quiet"]);
        result["nll"].as_f64().unwrap()
    };
    let plain = nll(&model);
    let mut moved = 0;
    let mut tried = 0;
    for scheme in sampled(schemes(), 9) {
        let out = temp.path().join("q");
        let recipe = format!("rtn-{scheme}");
        let arguments = [
            "quantize",
            text(&model),
            "--recipe",
            &recipe,
            "--format",
            "native",
            "--overwrite",
            "--out",
            text(&out),
            "--json",
            "--quiet",
        ];
        let output = mantissa(&arguments);
        // Casts without a scale may hold none of the weights, which are small.
        if stderr(&output).contains("the tensor would be lost") {
            assert!(
                scheme.to_string().split('-').count() <= 2 && output.status.code() == Some(2),
                "{scheme}"
            );
            continue;
        }
        assert!(output.status.success(), "{scheme}: {}", stderr(&output));
        tried += 1;
        let done = strict_json::parse(&output.stdout).unwrap();
        assert_eq!(done["verification"]["ok"], true, "{scheme}: {done}");
        assert_eq!(done["verification"]["weights"], 7, "{scheme}");
        let found: Value = json(&["verify", text(&out), "--reference", text(&model), "--json"]);
        assert_eq!(
            (&found["ok"], &found["max_logit_difference"]),
            (&true.into(), &0.0.into()),
            "{scheme}: {found}"
        );
        let quantized = nll(&out);
        moved += usize::from(quantized != plain);
        if !is_shared(&scheme) {
            fake_quantized(&model, &scheme, &dense);
            let expected = nll(&dense);
            assert!((quantized - expected).abs() < 1e-5 * expected, "{scheme}: {quantized} {expected}");
        }
        fs::remove_dir_all(&out).unwrap();
    }
    // All except casts that hold every f32.
    assert!(moved + 3 >= tried && tried >= if whole() { 60 } else { 6 }, "{moved} of {tried}");
}
