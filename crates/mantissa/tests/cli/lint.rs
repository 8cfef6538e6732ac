//! `lint` on checkpoints with planted faults, and `quantize --for`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::convention::gguf::to_hf_order;
use mantissa_store::{Dtype, Gguf, SafeTensors, SafetensorsWriter, TensorSpec};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, mantissa, stderr, strict_json, succeed, text};

/// Llama of two layers whose rows are whole groups of 32: 64 columns, 128 in the MLP.
fn synthetic(dir: &Path) -> PathBuf {
    synthetic_of(dir, "bf16")
}

/// The same in another dtype.
pub fn synthetic_of(dir: &Path, dtype: &str) -> PathBuf {
    let path = dir.join("model");
    let sizes = [
        "--hidden",
        "64",
        "--ffn",
        "128",
        "--layers",
        "2",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--vocab",
        "64",
    ];
    let rest =
        ["--preset", "tiny", "--context", "64", "--tied=false", "--seed", "3", "--dtype", dtype, "--quiet"];
    succeed(&[&["synth", "--out", text(&path)][..], &sizes, &rest].concat());
    path
}

/// Lints a model; returns the exit code and the report of the only engine.
fn lint(model: &Path, arguments: &[&str]) -> (i32, Value) {
    let output = mantissa(&[&["lint", text(model), "--json", "--quiet"], arguments].concat());
    let report = strict_json::parse(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    assert_eq!(report["reports"].as_array().unwrap().len(), 1);
    (output.status.code().unwrap(), report["reports"][0].clone())
}

/// Returns the tensors of a rule's findings.
fn tensors<'a>(report: &'a Value, rule: &str) -> Vec<&'a str> {
    let findings = report["findings"].as_array().unwrap().iter();
    findings.filter(|f| f["rule"] == rule).map(|f| f["tensor"].as_str().unwrap()).collect()
}

/// Rewrites a safetensors file, applying `change` to each tensor's bytes.
pub fn rewrite(path: &Path, change: impl Fn(&str, &mut Vec<u8>)) {
    let file = SafeTensors::open(path).unwrap();
    let metas: Vec<_> = file.tensors().to_vec();
    let mut all: BTreeMap<String, Vec<u8>> =
        metas.iter().map(|meta| (meta.name.clone(), file.read(meta).unwrap())).collect();
    all.iter_mut().for_each(|(name, bytes)| change(name, bytes));
    let specs = metas.iter().map(|m| TensorSpec::new(&m.name, m.dtype, m.shape.clone())).collect();
    let metadata = file.metadata().clone();
    fs::remove_file(path).unwrap();
    let mut writer = SafetensorsWriter::create(path, specs, metadata).unwrap();
    all.iter().for_each(|(name, bytes)| writer.write(name, bytes).unwrap());
    writer.finish().unwrap();
}

#[test]
fn unequal_global_scales_of_joined_layers_are_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "nvfp4", "--out", text(&out), "--quiet"]);
    let (code, report) = lint(&out, &["--for", "vllm"]);
    assert_eq!((code, &report["findings"]), (0, &serde_json::json!([])), "{report}");
    let planted = "model.layers.1.mlp.up_proj";
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name == format!("{planted}.weight_global_scale") {
            let scale = f32::from_le_bytes(bytes[..4].try_into().unwrap());
            *bytes = (scale * 1.5).to_le_bytes().to_vec();
        }
    });
    let (code, report) = lint(&out, &["--for", "vllm"]);
    assert_eq!((code, tensors(&report, "nvfp4-global")), (1, vec![planted]), "{report}");
    let finding = &report["findings"][0];
    assert_eq!(finding["severity"], "wrong");
    assert!(
        finding["source"].as_str().unwrap().contains("vllm") && finding["cure"].as_str().unwrap().len() > 10
    );
    // The report names the tensor; the error only the rule.
    let arguments = ["lint", text(&out), "--for", "vllm", "--quiet"];
    let line = fail(1, &arguments);
    assert_eq!(line, format!("error: {}: 1 rule broken for vllm: nvfp4-global\n", text(&out)));
    let shown = String::from_utf8(mantissa(&arguments).stdout).unwrap();
    assert!(
        shown.contains(&format!("got       {planted}: scale")) && shown.contains("expected  "),
        "{shown}"
    );
}

/// Lines fit the terminal, reasons are given once, and rules about weights that the model does not have are left out.
#[test]
fn the_report_fits_the_terminal_and_says_each_reason_once() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    let shown = |engine: &str| {
        let output = crate::support::command()
            .current_dir(temp.path())
            .env("COLUMNS", "80")
            .args(["lint", "q", "--for", engine])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let vllm = shown("vllm");
    assert!(vllm.contains("not checked marlin-gpu: needs the name of the GPU\n"), "{vllm}");
    assert_eq!((vllm.matches("gpu=h100").count(), vllm.contains("fp8-gpu")), (1, false), "{vllm}");
    assert!(vllm.contains("not checked bos-rule: no tokenizer, or none that states add_bos_token"), "{vllm}");
    for engine in ["vllm", "vllm:tp=3", "tensorrt-llm", "mlx", "llama.cpp"] {
        let text = shown(engine);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
}

#[test]
fn without_an_engine_all_that_read_the_model_are_checked() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    assert!(succeed(&["lint", "demo"]).ends_with("reasons: mantissa lint demo --for llama.cpp\n"));
    let shown = succeed(&["lint", text(&out)]);
    let lines: Vec<_> = shown.lines().collect();
    assert!(lines[0].starts_with("vllm: ok (") && lines[1].starts_with("sglang: ok ("), "{shown}");
    assert!(
        shown.contains("does not load in llama.cpp, ") && shown.contains(" --for llama.cpp\n"),
        "{shown}"
    );
    // A fault that an engine of the format would meet fails.
    configure(&out, |config| config["tie_word_embeddings"] = true.into());
    let output = mantissa(&["lint", text(&out)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("rule broken for vllm: tied-head"), "{}", stderr(&output));
}

#[test]
fn groups_that_do_not_divide_a_partition_are_refused_before_and_after() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    let quantize = ["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"];
    let line = fail(1, &[&quantize[..], &["--for", "vllm:tp=4"]].concat());
    assert!(
        line.contains("[tp-group]") && line.contains("16 columns of 64 on 4 GPUs, groups of 32"),
        "{line}"
    );
    assert!(!out.exists());
    succeed(&[&quantize[..], &["--for", "vllm"]].concat());
    let (code, report) = lint(&out, &["--for", "vllm:tp=4"]);
    let found = tensors(&report, "tp-group");
    assert_eq!(code, 1);
    assert!(
        found.contains(&"model.layers.0.self_attn.o_proj") && !found.iter().any(|t| t.contains("q_proj")),
        "{found:?}"
    );
    assert_eq!(lint(&out, &["--for", "vllm"]).0, 0);
    // A format that the engine does not read.
    let (code, report) = lint(&out, &["--for", "llama.cpp"]);
    assert_eq!((code, tensors(&report, "llama-cpp-convention")), (1, vec!["quantization_config"]));
}

#[test]
fn a_gguf_file_whose_rows_were_not_permuted_is_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("m.gguf"));
    let quantize = [
        "quantize",
        text(&model),
        "--recipe",
        "rtn-q8_0",
        "--format",
        "gguf",
        "--out",
        text(&out),
        "--quiet",
    ];
    succeed(&quantize);
    let against = ["--for", "llama.cpp", "--reference", text(&model)];
    let (code, report) = lint(&out, &against);
    assert_eq!((code, tensors(&report, "gguf-row-order")), (0, vec![]), "{report}");
    // The synthetic model has no tokenizer.
    assert_eq!(tensors(&report, "gguf-no-vocabulary"), ["tokenizer.ggml.model"], "{report}");
    let mut bytes = fs::read(&out).unwrap();
    for layer in 0..2 {
        for name in ["attn_q", "attn_k"] {
            let file = Gguf::open(&out).unwrap();
            let tensor = file.get(&format!("blk.{layer}.{name}.weight")).unwrap();
            let (at, stored) = (tensor.offset as usize, file.read(tensor).unwrap());
            let rows = tensor.shape[0];
            let heads = if name == "attn_q" { 4 } else { 2 };
            bytes[at..at + stored.len()].copy_from_slice(&to_hf_order(&stored, stored.len() / rows, heads));
        }
    }
    fs::write(&out, bytes).unwrap();
    let (code, report) = lint(&out, &against);
    let named = ["blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.1.attn_q.weight", "blk.1.attn_k.weight"];
    assert_eq!((code, tensors(&report, "gguf-row-order")), (1, named.to_vec()), "{report}");
    // Without the source this rule is reported as unchecked.
    let (_, report) = lint(&out, &["--for", "llama.cpp"]);
    let unchecked = report["unchecked"].to_string();
    assert!(unchecked.contains("gguf-row-order") && unchecked.contains("doctor"), "{unchecked}");
}

#[test]
fn heads_and_names_that_do_not_fit_the_config_are_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"]);
    let path = out.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["tie_word_embeddings"] = true.into();
    config["quantization_config"]["ignore"] = serde_json::json!(["lm_head", "language_model.head"]);
    fs::write(&path, config.to_string()).unwrap();
    let (code, report) = lint(&out, &["--for", "transformers"]);
    assert_eq!((code, tensors(&report, "transformers-tied-head")), (0, vec!["lm_head.weight"]), "{report}");
    assert_eq!(tensors(&report, "ignored-names"), ["language_model.head"]);
    let said = mantissa(&["lint", text(&out), "--for", "transformers", "--for", "vllm:gpu=t4"]);
    let said = String::from_utf8(said.stdout).unwrap();
    for part in ["FAIL", "expected", "fix", "source", "vllm-project/vllm", "vllm:gpu=t4: "] {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn a_gptq_checkpoint_with_the_wrong_label_is_named() {
    let temp = TempDir::new().unwrap();
    let (model, dir) = (synthetic(temp.path()), temp.path().join("g"));
    fs::create_dir(&dir).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    // Zero points of 8 as v2 and as v1 store them, each under its own label and under the other's.
    for (zeros, right, wrong) in [(0x88, "gptq_v2", "gptq"), (0x77, "gptq", "gptq_v2")] {
        let layers = gptq_files(&model, &dir, zeros);
        for (label, findings) in [(wrong, layers), (right, 0)] {
            config["quantization_config"] = serde_json::json!({
                "quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": false, "sym": true, "checkpoint_format": label,
            });
            fs::write(dir.join("config.json"), config.to_string()).unwrap();
            let (code, report) = lint(&dir, &["--for", "transformers"]);
            let found = tensors(&report, "gptq-zero-points");
            assert_eq!((code, found.len()), (i32::from(findings > 0), findings), "{label}: {report}");
            assert!(found.iter().all(|tensor| tensor.ends_with(".qzeros")), "{found:?}");
        }
        fs::remove_file(dir.join("model.safetensors")).unwrap();
    }
}

/// Reads the tensors of a safetensors file for editing.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Rewrites a safetensors file, applying `change` to its tensors.
fn edit(path: &Path, change: impl FnOnce(&mut Tensors)) {
    let file = SafeTensors::open(path).unwrap();
    let read = |meta: &mantissa_store::TensorMeta| {
        (meta.name.clone(), (meta.dtype, meta.shape.clone(), file.read(meta).unwrap()))
    };
    let mut all: Tensors = file.tensors().iter().map(read).collect();
    change(&mut all);
    fs::remove_file(path).unwrap();
    let list: Vec<_> = all
        .iter()
        .map(|(name, (dtype, shape, bytes))| (name.as_str(), *dtype, shape.as_slice(), bytes.clone()))
        .collect();
    crate::support::write(path, &list);
}

fn configure(model: &Path, change: impl FnOnce(&mut Value)) {
    let path = model.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn a_head_that_is_missing_is_named() {
    let temp = TempDir::new().unwrap();
    let model = synthetic(temp.path());
    assert_eq!(lint(&model, &["--for", "vllm"]).0, 0);
    edit(&model.join("model.safetensors"), |tensors| {
        tensors.remove("lm_head.weight").unwrap();
    });
    let (code, report) = lint(&model, &["--for", "vllm"]);
    assert_eq!((code, tensors(&report, "head")), (1, vec!["lm_head.weight"]), "{report}");
}

#[test]
fn a_router_that_is_quantized_is_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (crate::support::root().join("tests/data/tiny/mixtral"), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"]);
    assert_eq!(tensors(&lint(&out, &["--for", "vllm"]).1, "router-dense"), Vec::<&str>::new());
    edit(&out.join("model.safetensors"), |tensors| {
        let router = tensors.keys().find(|name| name.ends_with("gate.weight")).unwrap().clone();
        tensors.insert(format!("{router}_scale"), (Dtype::BF16, vec![4, 1], vec![0; 8]));
    });
    let (code, report) = lint(&out, &["--for", "vllm"]);
    let found = tensors(&report, "router-dense");
    assert!(code == 1 && found.len() == 1 && found[0].ends_with(".gate"), "{report}");
}

/// An FP8 KV cache: engines use 1 for missing scales, and only some kernels read per-head scales.
#[test]
fn scales_of_the_cache_that_are_missing_or_many_are_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    configure(&out, |config| {
        config["quantization_config"]["kv_cache_scheme"] = serde_json::json!({
            "num_bits": 8, "type": "float", "symmetric": true, "strategy": "tensor", "dynamic": false,
        });
    });
    let (code, report) = lint(&out, &["--for", "vllm"]);
    let missing =
        [0, 1].map(|layer| ["k_scale", "v_scale"].map(|s| format!("model.layers.{layer}.self_attn.{s}")));
    assert_eq!(
        (code, tensors(&report, "cache-scale-missing")),
        (0, missing.as_flattened().iter().map(String::as_str).collect()),
        "{report}"
    );
    edit(&out.join("model.safetensors"), |tensors| {
        for name in missing.as_flattened() {
            tensors.insert(name.clone(), (Dtype::BF16, vec![1], vec![0x80, 0x3f]));
        }
    });
    let (_, report) = lint(&out, &["--for", "vllm"]);
    assert_eq!(tensors(&report, "cache-scale-missing"), Vec::<&str>::new(), "{report}");
    edit(&out.join("model.safetensors"), |tensors| {
        let name = missing.as_flattened()[0].clone();
        tensors.insert(name, (Dtype::BF16, vec![2, 1, 1], vec![0x80, 0x3f, 0x80, 0x3f]));
    });
    let (_, report) = lint(&out, &["--for", "vllm"]);
    assert_eq!(tensors(&report, "cache-scale"), ["model.layers.0.self_attn.k_scale"], "{report}");
    // A shape that no engine reads does not load here either.
    edit(&out.join("model.safetensors"), |tensors| {
        let name = missing.as_flattened()[0].clone();
        tensors.insert(name, (Dtype::BF16, vec![3], vec![0x80, 0x3f, 0x80, 0x3f, 0x80, 0x3f]));
    });
    let line = fail(2, &["lint", text(&out), "--for", "vllm", "--quiet"]);
    assert!(line.contains("model.layers.0.self_attn.k_scale") && line.contains("[3]"), "{line}");
}

#[test]
fn fp8_on_a_gpu_without_it_is_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic(temp.path()), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "fp8-dynamic", "--out", text(&out), "--quiet"]);
    let (code, report) = lint(&out, &["--for", "tensorrt-llm:gpu=a100"]);
    assert_eq!(
        (code, tensors(&report, "trtllm-fp8-gpu")),
        (1, vec!["model.layers.0.self_attn.q_proj"]),
        "{report}"
    );
    let (code, report) = lint(&out, &["--for", "vllm:gpu=a100"]);
    assert_eq!((code, tensors(&report, "fp8-gpu").len()), (0, 1), "{report}");
    assert_eq!(tensors(&lint(&out, &["--for", "vllm:gpu=h100"]).1, "fp8-gpu"), Vec::<&str>::new());
    // Also before any work.
    let again = temp.path().join("again");
    let line = fail(
        1,
        &[
            "quantize",
            text(&model),
            "--recipe",
            "fp8-dynamic",
            "--for",
            "tensorrt-llm:gpu=a100",
            "--out",
            text(&again),
            "--quiet",
        ],
    );
    assert!(line.contains("[trtllm-fp8-gpu]") && !again.exists(), "{line}");
}

/// A tokenizer whose two files disagree on the BOS token, and a GGUF file without the rule.
#[test]
fn a_tokenizer_without_a_rule_for_bos_is_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    succeed(&["quantize", "demo", "--recipe", "rtn-int8-g32", "--out", text(&out), "--quiet"]);
    let path = out.join("tokenizer_config.json");
    let mut own: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let findings = [true, false].map(|stated| {
        own["add_bos_token"] = stated.into();
        fs::write(&path, own.to_string()).unwrap();
        tensors(&lint(&out, &["--for", "transformers"]).1, "bos-rule").len()
    });
    // tokenizer.json either adds a BOS or not.
    assert_eq!(findings.iter().sum::<usize>(), 1);
    // A GGUF file without the key, as converters may leave it.
    let gguf = temp.path().join("m.gguf");
    succeed(&[
        "quantize",
        "demo",
        "--recipe",
        "rtn-q8_0",
        "--format",
        "gguf",
        "--out",
        text(&gguf),
        "--quiet",
    ]);
    assert_eq!(tensors(&lint(&gguf, &["--for", "llama.cpp"]).1, "gguf-bos-rule"), Vec::<&str>::new());
    let mut bytes = fs::read(&gguf).unwrap();
    let key = b"tokenizer.ggml.add_bos_token";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    bytes[at..at + key.len()].copy_from_slice(b"tokenizer.ggml.xxx_bos_token");
    fs::write(&gguf, bytes).unwrap();
    let (code, report) = lint(&gguf, &["--for", "llama.cpp"]);
    assert_eq!(
        (code, tensors(&report, "gguf-bos-rule")),
        (0, vec!["tokenizer.ggml.add_bos_token"]),
        "{report}"
    );
}

/// Checkpoints of other tools pass for the engines they were written for.
#[test]
fn artifacts_of_public_tools_break_no_rule_of_their_engines() {
    let Some(artifacts) = crate::support::shared("artifacts") else { return };
    let mut linted = 0;
    for entry in fs::read_dir(&artifacts).unwrap() {
        let path = entry.unwrap().path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let engines: &[&str] = match name {
            // SGLang has no 3-bit kernel since plain GPTQ is gone; vLLM refuses act-order and 3-bit GPTQ.
            "gptqm_w3_g32_sym_gar" | "gptqm_w4_g32_sym_descact" => &["transformers"],
            // Packed zero points, at which from_pretrained stops (tests/interop/README.md).
            "llmc_gptq_w3_g32_asym_static" => &["vllm"],
            "llmc_rtn_w4_g32_asym" => &["vllm", "sglang"],
            // SGLang's README: MX linears are not supported yet.
            "llmc_mxfp4" | "llmc_mxfp8" => &["transformers", "vllm"],
            "mo_INT4_AWQ_g32" => &["tensorrt-llm"],
            _ if name.starts_with("mo_") => &["tensorrt-llm", "vllm", "sglang"],
            // vLLM 0.33 has no bitsandbytes.
            _ if name.starts_with("bnb_") => &["transformers", "sglang"],
            _ if path.is_dir() => &["transformers", "vllm", "sglang"],
            _ => continue,
        };
        for engine in engines {
            let (code, report) = lint(&path, &["--for", engine]);
            assert_eq!(code, 0, "{name} for {engine}: {}", report["findings"]);
            linted += 1;
        }
    }
    assert!(linted > 35, "{linted}");
}

/// Writes a GPTQ checkpoint with the model's shapes, all codes 9, two zero points per byte `zeros`; returns
/// the number of layers.
fn gptq_files(model: &Path, dir: &Path, zeros: u8) -> usize {
    let source = SafeTensors::open(&model.join("model.safetensors")).unwrap();
    let (mut specs, mut all, mut layers) = (Vec::new(), Vec::new(), 0);
    for meta in source.tensors() {
        let Some(module) = meta.name.strip_suffix("_proj.weight").map(|name| format!("{name}_proj")) else {
            specs.push(TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()));
            all.push((meta.name.clone(), source.read(meta).unwrap()));
            continue;
        };
        layers += 1;
        let (n, k) = (meta.shape[0], meta.shape[1]);
        let groups = k / 8;
        let words = |n: usize, byte: u8| vec![byte; 4 * n];
        let half = [0x00u8, 0x2c]; // 1/16 in f16
        for (part, dtype, shape, bytes) in [
            ("qweight", Dtype::I32, vec![k / 8, n], words(k / 8 * n, 0x99)),
            ("qzeros", Dtype::I32, vec![groups, n / 8], words(groups * n / 8, zeros)),
            ("scales", Dtype::F16, vec![groups, n], half.repeat(groups * n)),
            ("g_idx", Dtype::I32, vec![k], (0..k).flat_map(|i| ((i / 8) as i32).to_le_bytes()).collect()),
        ] {
            specs.push(TensorSpec::new(format!("{module}.{part}"), dtype, shape));
            all.push((format!("{module}.{part}"), bytes));
        }
    }
    let mut writer =
        SafetensorsWriter::create(&dir.join("model.safetensors"), specs, BTreeMap::new()).unwrap();
    all.iter().for_each(|(name, bytes)| writer.write(name, bytes).unwrap());
    writer.finish().unwrap();
    layers
}
