//! Formats of single packages: written, verified by the second decoder, and read back to the same figures.

use std::fs;

use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::support::{fail, json, root, text};

#[test]
fn outputs_verify_and_compute_the_same() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let tokens = crate::main_job::windows(temp.path());
    for (i, (recipe, format)) in [
        ("rtn-int4-g32", "onnx"),
        ("rtn-int4-g32-asym", "onnx"),
        ("rtn-int8-channel", "onnx"),
        ("rtn-fp8-e4m3-channel", "onnx"),
        ("rtn-int4-g32", "exl2"),
        ("rtn-int2-g64", "exl2"),
        ("rtn-int4-g32-asym:minmax", "mlx"),
        ("rtn-mxfp4", "mlx"),
        ("rtn-nvfp4:torchao-1level", "mlx"),
    ]
    .into_iter()
    .enumerate()
    {
        let (out, native) = (temp.path().join(format!("{i}")), temp.path().join(format!("{i}-native")));
        let quantize = |format: &str, out: &std::path::Path| {
            let arguments =
                ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(out)];
            let done = json(&[&arguments[..], &["--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{recipe} {format}: {done}");
            assert_eq!(done["verification"]["weights"], 14, "{recipe} {format}");
        };
        quantize(format, &out);
        let verified = json(&["verify", text(&out), "--reference", text(&model), "--json", "--quiet"]);
        assert_eq!(verified["ok"], true, "{recipe} {format}: {verified}");
        // EXL2 has its own scales; the others hold what the native format does.
        quantize("native", &native);
        let compared = json(&[
            "eval",
            text(&out),
            "--reference",
            text(&native),
            "--tokens",
            &tokens,
            "--json",
            "--quiet",
        ]);
        let kl = compared["kl"].as_f64().unwrap();
        let most = if format == "exl2" { 0.5 } else { 1e-9 };
        assert!(kl.abs() < most, "{recipe} {format}: {kl}");
    }
    let out = temp.path().join("refused");
    let searched =
        ["quantize", text(&model), "--recipe", "rtn-mse-int4-g32", "--format", "exl2", "--out", text(&out)];
    assert!(fail(2, &searched).contains("which only rtn and gptq"));
    // An ONNX graph records the place of each tensor in the weight file.
    let graph = fs::read(temp.path().join("1/model.onnx")).unwrap();
    let file = mantissa_store::SafeTensors::open(&temp.path().join("1/model.safetensors")).unwrap();
    let has = |part: &str| graph.windows(part.len()).any(|window| window == part.as_bytes());
    for meta in file.tensors().iter().filter(|meta| meta.name.contains("_proj.weight_")) {
        assert!(
            has(&meta.name) && has(&meta.offset.to_string()) && has(&meta.len.to_string()),
            "{}",
            meta.name
        );
    }
    assert!(has("DequantizeLinear") && has("block_size") && has("model.safetensors"));
}

/// GPTQ with EXL2 scales and two widths in one model is closer to the source than RTN at the same widths.
#[test]
fn gptq_into_exl2_loses_less_than_rounding() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let tokens = crate::main_job::windows(temp.path());
    let kl = |method: &str| {
        let (recipe, out) = (temp.path().join(format!("{method}.toml")), temp.path().join(method));
        let rules = "[[layers]]\nmodules = [\"*down_proj\"]\nweights = \"int5-g32\"\n";
        let lines = format!("method = \"{method}\"\nweights = \"int2-g32\"\nformat = \"exl2\"\n\n{rules}");
        fs::write(&recipe, lines).unwrap();
        let of_method = ["quantize", text(&model), "--recipe", text(&recipe), "--out", text(&out)];
        let given = ["--calibration-tokens", &tokens, "--json", "--quiet"];
        let done = json(&[&of_method[..], &given].concat());
        assert_eq!(done["verification"]["ok"], true, "{method}: {done}");
        let quality: serde_json::Value =
            serde_json::from_slice(&fs::read(out.join("quality.json")).unwrap()).unwrap();
        let layers = quality["layers"].as_array().unwrap();
        assert!(layers.iter().all(|layer| layer["method"] == method), "{quality}");
        let compared =
            ["eval", text(&out), "--reference", text(&model), "--tokens", &tokens, "--json", "--quiet"];
        json(&compared)["kl"].as_f64().unwrap()
    };
    let (rounded, solved) = (kl("rtn"), kl("gptq"));
    assert!(solved < rounded, "{solved} {rounded}");
}

#[test]
fn onnx_keeps_codes_and_scales() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let (first, there, back) = (temp.path().join("a"), temp.path().join("b"), temp.path().join("c"));
    let quantize = ["quantize", text(&model), "--recipe", "rtn-int4-g32-asym", "--out", text(&first)];
    crate::support::succeed(&[&quantize[..], &["--quiet"]].concat());
    for (from, format, out) in [(&first, "onnx", &there), (&there, "compressed-tensors", &back)] {
        let done =
            json(&["convert", text(from), "--format", format, "--out", text(out), "--json", "--quiet"]);
        assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
    }
    let weights = |dir: &std::path::Path| fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&back));
}

/// Modules as hqq and optimum-quanto store them, decoded by both readers to the same bits.
#[test]
fn the_second_decoder_reads_files_of_other_packages() {
    use mantissa_quant::verify::decode;
    use mantissa_store::convention::{ModelFiles, Weight};
    let data = root().join("tests/data/conventions");
    let module = "model.layers.0.mlp.up_proj";
    let mut seen = 0;
    for entry in fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        if !name.starts_with("hqq") && !name.starts_with("quanto") {
            continue;
        }
        let (rows, cols) = if name.ends_with("g128") { (16, 256) } else { (32, 96) };
        let files = ModelFiles::open(&entry).unwrap();
        let ordinary = match files.linear(module, rows, cols, false).unwrap().weight {
            Weight::Quantized(q) => q.dequantize().unwrap(),
            Weight::F32(values) => values,
            _ => panic!("{name}: another storage"),
        };
        assert!(decode(&files, module, rows, cols).unwrap() == ordinary, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 13);
}

/// Outputs that no engine or reader could run are refused before anything is written.
#[test]
fn unsupported_requests_are_not_accepted() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (root().join("tests/data/tiny/llama1-mha"), temp.path().join("q"));
    let refused = |recipe: &str, more: &[&str]| {
        let all = ["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"];
        let line = fail(2, &[&all[..], more].concat());
        assert!(!out.exists());
        line
    };
    for plan in [&[][..], &["--dry-run"]] {
        let line = refused("rtn-int8-channel+nf4", plan);
        assert!(line.contains("nf4") && line.contains("per token"), "{line}");
    }
    let experts = root().join("tests/data/tiny/gpt-oss");
    let onnx =
        ["quantize", text(&experts), "--recipe", "rtn-int8-channel", "--format", "onnx", "--out", text(&out)];
    assert!(fail(2, &onnx).contains("stacks its experts") && !out.exists());
    for recipe in ["rtn-nf4", "hqq-int4-g8", "autoround-int4-g8"] {
        let line = refused(recipe, &["--round", "stochastic"]);
        assert!(line.contains("stochastic") && line.contains("nearest"), "{line}");
    }
}
