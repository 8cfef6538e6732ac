//! Main workflow: quantize, verify, eval, run, on the repository's tiny models.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::doctor::never_accused;
use crate::inspect::complete;
use crate::support::{File, fail, json, mantissa, root, sampled, stderr, strict_json, succeed, text, whole};

pub fn tiny(name: &str) -> PathBuf {
    root().join("tests/data/tiny").join(name)
}

/// Token windows for the tiny models, whose vocabularies have at least 64 ids.
pub fn windows(dir: &Path) -> String {
    let path = dir.join("windows.json");
    let window =
        |seed: u64| (0..24).map(|i| mantissa_num::round::random_u32(seed, i) % 64).collect::<Vec<_>>();
    std::fs::write(&path, serde_json::json!({ "w": [window(1), window(2), window(3)] }).to_string()).unwrap();
    format!("{}:w", text(&path))
}

#[test]
fn quantize_verify_and_measure() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama2-gqa-tied"), temp.path().join("q"));
    let (model, out) = (text(&model), text(&out));
    let done = json(&["quantize", model, "--recipe", "rtn-int4-g8", "--out", out, "--json", "--quiet"]);
    assert_eq!(done["verification"]["ok"], true);
    assert_eq!(done["linear_bits_per_weight"], 8.0);
    assert_eq!(done["layers"].as_array().unwrap().len(), 14);
    assert!(done["layers"][0]["sqnr_db"].as_f64().unwrap() > 15.0);
    let found = json(&["verify", out, "--reference", model, "--json"]);
    assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])));
    let tokens = windows(temp.path());
    let result = json(&["eval", out, "--reference", model, "--tokens", &tokens, "--json", "--quiet"]);
    assert_eq!((&result["tokens"], &result["windows"]), (&69.into(), &3.into()));
    for field in ["nll", "nll_se", "ppl", "kl", "kl_se", "kl_p99", "top1", "delta_nll", "delta_nll_se"] {
        assert!(result[field].is_f64(), "{field}: {result}");
    }
    let inspected = json(&["inspect", out, "--json"]);
    // Includes the two int64 values of `weight_shape`, which matter in a layer this small.
    let bits = inspected["linear_bits_per_weight"].as_f64().unwrap();
    assert!((8.0..8.2).contains(&bits), "{bits}");
    let stored = done["linear_stored_bits_per_weight"].as_f64().unwrap();
    assert!((stored - bits).abs() < 1e-9, "{stored} {bits}");
}

/// Reported bits as stored include a format's zero points, group indices and shapes, and match `inspect` on
/// the file.
#[test]
fn stored_bits_match_the_file() {
    let temp = TempDir::new().unwrap();
    let model = crate::lint::synthetic_of(temp.path(), "bf16");
    for (i, (recipe, format, by_scheme, shown)) in [
        // Per 32 weights: 128 bits of codes, 16 of scale and 4 of the zero point that symmetric codes store
        // too; 32 per column.
        ("rtn-int4-g32", "gptq", 4.5, true),
        ("rtn-int4-g32-asym", "gptq", 4.625, true),
        ("rtn-int4-g32-asym", "awq", 4.625, false),
        // 8-bit zero points next to 4-bit codes.
        ("rtn-int4-g32-asym", "native", 5.125, true),
        // A scale and a minimum in f16.
        ("hqq-int4-g32", "native", 5.0, false),
        ("rtn-int4-g32", "compressed-tensors", 4.5, true),
        ("rtn-mxfp4", "mlx", 4.25, false),
        ("nf4", "bitsandbytes", 4.5, true),
        ("rtn-q4_0", "gguf", 4.5, false),
    ]
    .into_iter()
    .enumerate()
    {
        let end = if format == "gguf" { ".gguf" } else { "" };
        let out = temp.path().join(format!("out-{i}{end}"));
        let quantize =
            ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)];
        let planned = json(&[&quantize[..], &["--dry-run", "--json"]].concat());
        let done = json(&[&quantize[..], &["--json", "--quiet"]].concat());
        let stored = done["linear_stored_bits_per_weight"].as_f64().unwrap();
        let bits = done["linear_bits_per_weight"].as_f64().unwrap();
        println!("{recipe} {format}: {bits} by scheme, {stored} stored");
        let inspected = json(&["inspect", text(&out), "--json"])["linear_bits_per_weight"].as_f64().unwrap();
        assert!((stored - inspected).abs() < 1e-9, "{recipe} in {format}: {stored} {inspected}");
        assert!((bits - by_scheme).abs() < 1e-9, "{recipe} in {format}: {bits}");
        assert_eq!(planned["linear_stored_bits_per_weight"], done["linear_stored_bits_per_weight"]);
        let layers = done["layers"].as_array().unwrap();
        let of_layers: f64 = layers
            .iter()
            .map(|l| {
                let weights = l["shape"][0].as_f64().unwrap() * l["shape"][1].as_f64().unwrap();
                l["stored_bits_per_weight"].as_f64().unwrap() * weights
            })
            .sum();
        let weights: f64 =
            layers.iter().map(|l| l["shape"][0].as_f64().unwrap() * l["shape"][1].as_f64().unwrap()).sum();
        assert!((of_layers / weights - stored).abs() < 1e-9, "{recipe} in {format}");
        let said = succeed(&[&quantize[..], &["--quiet", "--restart"]].concat());
        let both = format!("{stored:.3} bits per weight as stored ({bits:.3} by scheme)");
        assert_eq!(said.contains(&both), shown, "{said}");
        assert!(shown || said.contains(&format!("{bits:.3} bits per weight")), "{said}");
    }
}

/// Tiny models that only other tests run: of the most common architectures, multimodal ones, and further variants of some.
const VARIANTS: [&str; 31] = [
    "bitnet-relu2",
    "bitnet-silu",
    "gemma3-vision",
    "gemma3n-vision",
    "gemma4-vision",
    "jamba-wide",
    "llama-bias",
    "llama-headdim",
    "llama-rope-linear",
    "llama-yarn",
    "llama-yarn-attention-factor",
    "llama-yarn-mscale",
    "llama1-mha",
    "llama2-gqa-tied",
    "llama3-rope",
    "llava",
    "mistral-window",
    "mistral3",
    "mqa",
    "qwen2-bias",
    "qwen2-window",
    "qwen2.5-vl",
    "qwen3-5-moe-square",
    "qwen3-5-moe-vision",
    "qwen3-5-square",
    "qwen3-moe-fused",
    "qwen3-next-square",
    "qwen3-qknorm",
    "qwen3-vl",
    "qwen3-vl-moe",
    "seed-oss-biases",
];

/// Every committed tiny model.
fn tiny_models() -> Vec<String> {
    let folders = std::fs::read_dir(root().join("tests/data/tiny")).unwrap();
    let mut names: Vec<_> =
        folders.map(|folder| folder.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every architecture: the quantized model verifies against its source and loses little.
#[test]
fn architectures_quantize_verify_and_measure() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    // Those that all other tests run.
    let mut covered: BTreeSet<String> =
        ["llama", "mistral", "qwen2", "qwen3", "bitnet"].map(str::to_owned).into();
    let all = tiny_models();
    for name in sampled(all.iter().map(String::as_str).filter(|name| !VARIANTS.contains(name)), 6) {
        let (model, out) = (tiny(name), temp.path().join(name));
        let config = std::fs::read(model.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        covered.insert(config["model_type"].as_str().unwrap().to_owned());
        let (model, out) = (text(&model), text(&out));
        let planned = json(&["quantize", model, "--recipe", "nf4", "--out", out, "--dry-run", "--json"]);
        assert!(planned["predicted_peak_memory"].as_u64().unwrap() > 0, "{name}: {planned}");
        let fast = [
            "eval",
            model,
            "--reference",
            model,
            "--engine",
            "fast",
            "--tokens",
            &tokens,
            "--json",
            "--quiet",
        ];
        let kl = json(&fast)["kl"].as_f64().unwrap();
        println!("{name:20} {:20} {kl:.1e}", "fast engine");
        assert!(kl < 0.01, "{name}: fast engine {kl}");
        let gptq = ["gptq-int4-g8", "--calibration-tokens", &tokens];
        // In a format that servers read, and in one that allows ragged groups.
        for (recipe, format, most) in
            [(&["rtn-int8-channel"][..], "compressed-tensors", 0.05), (&gptq, "native", 0.2)]
        {
            let _ = std::fs::remove_dir_all(out);
            let quantize =
                [&["quantize", model, "--out", out, "--format", format, "--json", "--recipe"], recipe];
            let done = json(&quantize.concat());
            assert_eq!(done["verification"]["ok"], true, "{name}");
            let layers = done["layers"].as_array().unwrap();
            assert_eq!(layers.len(), linears(Path::new(model)), "{name}: every linear layer, experts too");
            let found = json(&["verify", out, "--reference", model, "--json"]);
            assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])), "{name}");
            let result = json(&["eval", out, "--reference", model, "--tokens", &tokens, "--json", "--quiet"]);
            let kl = result["kl"].as_f64().unwrap();
            println!("{name:20} {format:20} {kl:.4}");
            assert!(kl > 0.0 && kl < most, "{name}: {kl}");
            never_accused(out, &["--reference", model]);
            let inspected = complete(Path::new(out), Path::new(model));
            assert!(inspected["linear_bits_per_weight"].as_f64().unwrap() < 14.0, "{name}: {inspected}");
            let linted = mantissa(&["lint", out, "--for", "vllm", "--json"]);
            assert!(matches!(linted.status.code(), Some(0 | 1)), "{name}");
        }
    }
    let missing: Vec<_> = mantissa_model::Architecture::all()
        .map(|row| row.name)
        .filter(|name| whole() && !covered.contains(*name))
        .collect();
    assert!(missing.is_empty(), "architectures that this test leaves out: {missing:?}");
}

/// Returns the linear layers of a model's decoder layers.
fn linears(model: &Path) -> usize {
    let files = mantissa_store::convention::ModelFiles::open(model).unwrap();
    mantissa_model::load_config(&files).unwrap().decoder_linears().count()
}

/// DeepSeek-V4: projections of entries, indexers, groups of heads, tables of experts and what mixes streams stay as they are.
#[test]
fn compressed_attention_stays_unquantized_but_for_its_linear_layers() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("deepseek-v4"), temp.path().join("q"));
    let (model, out) = (text(&model), text(&out));
    let planned = mantissa(&["quantize", model, "--recipe", "rtn-int8-channel", "--out", out, "--dry-run"]);
    let said = String::from_utf8_lossy(&planned.stdout).into_owned();
    for kept in ["attn.wo_a", "attn.compressor.wkv", "attn.indexer.compressor.wgate", "attn.indexer.wq_b"] {
        assert!(said.contains(kept), "{kept}: {said}");
    }
    succeed(&["quantize", model, "--recipe", "rtn-int8-channel", "--out", out, "--quiet"]);
    let file = |folder: &str| File::open(&Path::new(folder).join("model.safetensors"));
    let (theirs, ours) = (file(model), file(out));
    let is_linear = |name: &str| {
        let parts = [".wq_a.", ".wq_b.", ".wkv.", ".wo_b.", ".w1.", ".w2.", ".w3."];
        let inner = name.contains("compressor") || name.contains("indexer");
        !inner && parts.iter().any(|part| name.contains(part))
    };
    let kept: Vec<_> = theirs.names().into_iter().filter(|name| !is_linear(name)).collect();
    assert!(kept.iter().any(|name| name.ends_with("tid2eid")), "{kept:?}");
    for name in kept {
        assert_eq!(ours.bytes(&name), theirs.bytes(&name), "{name}");
    }
    let bench = ["bench", out, "--prompt", "40", "--gen", "4", "--reps", "1", "--json", "--quiet"];
    assert!(json(&bench)["tg_tokens_per_s"].as_f64().unwrap() > 0.0);
    let refused = mantissa(&[&bench[..], &["--kv", "int8"]].concat());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("no layer caches keys and values"), "{said}");
}

/// Conv1D is reported as known to GPTQ readers only, and the GPTQ format holds it.
#[test]
fn transposed_weights_and_stacked_experts_are_reported() {
    let temp = TempDir::new().unwrap();
    let said = |name: &str, format: &str| {
        let (model, out) = (tiny(name), temp.path().join(format!("{name}-{format}")));
        let arguments =
            ["quantize", text(&model), "--recipe", "rtn-int4-g8", "--format", format, "--out", text(&out)];
        let output = mantissa(&arguments);
        assert_eq!(output.status.code(), Some(0), "{}", crate::support::stderr(&output));
        crate::support::stderr(&output)
    };
    assert!(said("gpt2", "compressed-tensors").contains("Conv1D"));
    assert!(!said("gpt2", "gptq").contains("Conv1D"));
    assert!(said("gpt-oss", "native").contains("the source stacks in one tensor"));
}

#[test]
fn gates_decide_the_exit_code_and_still_report() {
    let temp = TempDir::new().unwrap();
    let (model, out, tokens) = (tiny("llama1-mha"), temp.path().join("q"), windows(temp.path()));
    let (model, out) = (text(&model), text(&out));
    succeed(&["quantize", model, "--recipe", "rtn-int3-g8", "--out", out, "--quiet"]);
    let with = |gate: &str| {
        mantissa(&["eval", out, "--reference", model, "--tokens", &tokens, "--quiet", "--json", gate])
    };
    let passed = with("--max-kl=100");
    assert_eq!(passed.status.code(), Some(0));
    let failed = with("--max-kl=1e-9");
    assert_eq!(failed.status.code(), Some(1));
    let report = strict_json::parse(&failed.stdout).unwrap();
    assert!(report["kl"].as_f64().unwrap() > 1e-9);
    assert!(String::from_utf8_lossy(&failed.stderr).starts_with("error: KL: expected at most "));
    assert_eq!(with("--max-ppl-increase=-2").status.code(), Some(1));
}

/// DeepSeek Sparse Attention: indexers stay as they are, and windows longer than `index_topk` run.
#[test]
fn indexers_stay_unquantized() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("glm-moe-dsa-sparse"), temp.path().join("q"));
    let (model, out) = (text(&model), text(&out));
    let planned = mantissa(&["quantize", model, "--recipe", "rtn-int8-channel", "--out", out, "--dry-run"]);
    let said = String::from_utf8_lossy(&planned.stdout).into_owned();
    assert!(said.contains("self_attn.indexer.wq_b (2, 1.28 k parameters): indexer"), "{said}");
    succeed(&["quantize", model, "--recipe", "rtn-int8-channel", "--out", out, "--quiet"]);
    let file = |folder: &str| File::open(&Path::new(folder).join("model.safetensors"));
    let (theirs, ours) = (file(model), file(out));
    let indexers: Vec<_> = theirs.names().into_iter().filter(|name| name.contains(".indexer.")).collect();
    // Layer 1 shares the choice of layer 0.
    assert_eq!(indexers.len(), 10, "{indexers:?}");
    for name in indexers {
        assert_eq!(ours.bytes(&name), theirs.bytes(&name), "{name}");
    }
    let config: Value =
        serde_json::from_slice(&std::fs::read(Path::new(out).join("config.json")).unwrap()).unwrap();
    assert_eq!(config["index_topk"], 8);
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    assert!(ignored.contains(&"model.layers.2.self_attn.indexer.wq_b".into()), "{ignored:?}");
    let tokens = windows(temp.path());
    succeed(&["eval", out, "--tokens", &tokens, "--quiet"]);
}

#[test]
fn a_damaged_output_does_not_verify() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--quiet"]);
    let weights = out.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let at = bytes.len() - 9;
    bytes[at] ^= 0x80;
    std::fs::write(&weights, bytes).unwrap();
    let line = fail(1, &["verify", text(&out), "--quiet"]);
    assert!(line.contains("SHA-256"), "{line}");
}

#[test]
fn a_dry_run_writes_nothing() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    let arguments = [
        "quantize",
        text(&tiny("llama1-mha")),
        "--recipe",
        "rtn-int4-g8-asym",
        "--out",
        text(&out),
        "--dry-run",
        "--json",
    ]
    .map(str::to_owned);
    let plan = json(&arguments);
    assert_eq!(plan["linear_bits_per_weight"], 8.5);
    assert!(plan["predicted_peak_memory"].as_u64().unwrap() > 0 && !out.exists());
}

#[test]
fn bad_input_is_named_and_leaves_nothing() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    let (model, out_text) = (text(&model), text(&out));
    let quantize = |recipe: &str, extra: &[&str]| {
        let mut arguments = vec!["quantize", model, "--recipe", recipe, "--out", out_text, "--quiet"];
        arguments.extend(extra);
        fail(2, &arguments)
    };
    assert!(quantize("rtn-int4-g32", &[]).contains("down_proj"));
    assert!(quantize("gptz-int4", &[]).contains("mantissa recipes"));
    assert!(quantize("nf4", &["--format", "compressed-tensors"]).contains("code books"));
    assert!(quantize("nf4", &["--format", "nativ"]).contains("expected native, "));
    assert!(!out.exists());
    assert!(fail(2, &["eval", model]).contains("--text"));
    assert!(fail(2, &["eval", model, "--tokens", "/nowhere.json:x"]).contains("/nowhere.json"));
    assert!(fail(2, &["eval", text(temp.path()), "--tokens", &windows(temp.path())]).contains("error"));
    // The output must not be the input.
    let line = fail(2, &["quantize", model, "--recipe", "nf4", "--out", model, "--quiet"]);
    assert!(line.contains("llama1-mha"), "{line}");
}

#[test]
fn memory_is_refused_before_the_work() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    let line = fail(3, &["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--memory", "1M"]);
    assert!(line.contains("at most 1.00 MB of memory (--memory)") && !out.exists(), "{line}");
}

#[test]
fn strict_makes_notes_errors() {
    let temp = TempDir::new().unwrap();
    let recipe = temp.path().join("r.toml");
    std::fs::write(&recipe, "weights = \"nf4\"\nkeep = [\"*.no_such_proj\"]\n").unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    let arguments = ["quantize", text(&model), "--recipe", text(&recipe), "--out", text(&out)];
    let output = mantissa(&arguments);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("no_such_proj"));
    std::fs::remove_dir_all(&out).unwrap();
    assert_eq!(mantissa(&[&arguments[..], &["--strict"]].concat()).status.code(), Some(1));
    assert!(!out.exists());
}

#[test]
fn text_is_cut_into_documents_or_windows() {
    let temp = TempDir::new().unwrap();
    let path = temp.path().join("t.txt");
    std::fs::write(&path, "the cat sat\n==\nthe dog ran home\n==\na bird\n").unwrap();
    let model = tiny("llama2-gqa-tied");
    let eval = |extra: &[&str]| {
        let mut arguments = vec!["eval", text(&model), "--text", text(&path), "--json", "--quiet"];
        arguments.extend(extra);
        json(&arguments)
    };
    assert_eq!(eval(&["--split", "==", "--bos", "always"])["windows"], 3);
    let two = eval(&["--split", "==", "--docs", "2..3", "--bos", "always"]);
    assert_eq!(two["windows"], 2);
    // With or without overlap, every token after the first window's context is predicted once.
    let whole = eval(&["--bos", "never", "--context", "8", "--stride", "4"]);
    assert!(whole["tokens"].as_u64().unwrap() > 7);
    let limited = eval(&["--bos", "never", "--context", "8", "--limit", "5"]);
    assert_eq!(limited["tokens"], 5);
    let line = fail(2, &["eval", text(&model), "--text", text(&path), "--split", "==", "--docs", "2..9"]);
    assert!(line.contains("1..3"), "{line}");
}

#[test]
fn window_sums_and_logits_can_be_kept() {
    let temp = TempDir::new().unwrap();
    let (sums, logits) = (temp.path().join("w.json"), temp.path().join("l.safetensors"));
    let model = tiny("qwen2-bias");
    let tokens = windows(temp.path());
    let arguments = [
        "eval",
        text(&model),
        "--tokens",
        &tokens,
        "--per-window",
        text(&sums),
        "--logits",
        text(&logits),
        "--json",
        "--quiet",
    ];
    let result = json(&arguments);
    let sums: Value = serde_json::from_slice(&std::fs::read(&sums).unwrap()).unwrap();
    let total: f64 = sums["windows"].as_array().unwrap().iter().map(|w| w["nll_sum"].as_f64().unwrap()).sum();
    assert!((total / 69.0 - result["nll"].as_f64().unwrap()).abs() < 1e-12);
    let file = mantissa_store::SafeTensors::open(&logits).unwrap();
    assert_eq!(file.get("logits").unwrap().shape[..2], [3, 24]);
}

#[test]
fn text_is_generated_greedily_or_by_seed() {
    let model = tiny("llama2-gqa-tied");
    let run = |extra: &[&str]| {
        let mut arguments = vec!["run", text(&model), "-p", "the cat", "-n", "12", "--json", "--quiet"];
        arguments.extend(extra);
        json(&arguments)["tokens"].clone()
    };
    assert_eq!(run(&[]), run(&["--seed", "5"]));
    let drawn = |seed: &str| run(&["--temperature", "1.5", "--seed", seed]);
    assert_eq!(drawn("1"), drawn("1"));
    assert_ne!(drawn("1"), drawn("2"));
    assert_eq!(run(&["--temperature", "2", "--top-k", "1"]), run(&[]));
    assert!(fail(2, &["run", text(&model), "-p", "x", "-n", "2", "--top-p", "0"]).contains("top"));
}

#[test]
fn recipes_and_schemes_are_listed() {
    let recipes = json(&["recipes", "--json"]);
    let row = recipes["recipes"].as_array().unwrap().iter().find(|r| r["name"] == "w4a16").unwrap().clone();
    assert_eq!((&row["bits_per_weight"], &row["format"]), (&4.125.into(), &"compressed-tensors".into()));
    assert!(succeed(&["recipes"]).contains("vLLM"));
    let four = json(&["recipes", "--for", "vllm", "--bits", "4", "--json"]);
    let rows = four["recipes"].as_array().unwrap();
    let has = |name: &str| rows.iter().any(|row| row["name"] == name);
    assert!(has("gptq-int4-g128") && !has("fp8-dynamic") && !has("rotate-w4a4"), "{four}");
    assert!(rows.iter().all(|row| row["loads_in"].as_str().unwrap().contains("vLLM")), "{four}");
    let measured = rows.iter().find(|row| row["name"] == "gptq-int4-g128").unwrap();
    assert!(measured["measured_kl"].as_f64().unwrap() > 0.0, "{measured}");
    let methods = recipes["methods"].as_array().unwrap();
    assert!(["gptaq", "scalesweep-gptaq"].iter().all(|name| methods.iter().any(|method| method == name)));
    assert!(fail(2, &["recipes", "vllm"]).trim_end().ends_with("fix: mantissa recipes --for vllm"));
    assert!(fail(2, &["recipes", "--for", "exllamav2", "--bits", "16"]).contains("fix: mantissa quantize"));
    assert!(fail(2, &["inspect", "demo", "--for", "vllm"]).contains("mantissa lint MODEL --for ENGINE"));
}

/// Recipes that are listed as needing a calibration are those that `quantize` calibrates on the built-in text if none is given.
#[test]
fn recipes_need_a_calibration_exactly_where_quantize_does() {
    let listed = json(&["recipes", "--json"]);
    let (mut needed, mut checked) = (Vec::new(), 0);
    for row in listed["recipes"].as_array().unwrap() {
        let name = row["name"].as_str().unwrap();
        let command = ["quantize", "demo", "--recipe", name, "--dry-run"];
        let bare = mantissa(&command);
        // A mixture of experts has nothing to quantize in a dense model.
        if !bare.status.success() && name == "int4-experts" {
            continue;
        }
        assert!(bare.status.success(), "{name}: {}", stderr(&bare));
        let calibrated = stderr(&bare).contains("calibration on the built-in text");
        assert_eq!(row["calibration"], calibrated, "{name}: {}", stderr(&bare));
        // Named, the text is that of all of them: one in three is enough.
        let told = needed.len().is_multiple_of(if whole() { 1 } else { 3 });
        if calibrated && told {
            let named = mantissa(&[&command[..], &["--calibration", "default"]].concat());
            assert!(named.status.success(), "{name}: {}", stderr(&named));
            assert!(!stderr(&named).contains("calibration on the built-in text"));
        }
        needed.extend(calibrated.then(|| name.to_owned()));
        checked += 1;
    }
    assert!(checked > 60, "{checked}");
    for name in
        ["w8a8-static", "fp8-kv-fp8", "w4a16-kv-fp8", "nvfp4-w4a4", "nvfp4-fp8-attention", "spin-w4a4"]
    {
        assert!(needed.iter().any(|needed| needed == name), "{name}: {needed:?}");
        let said = succeed(&["recipes", name]);
        assert!(
            said.contains("calibration needed") && said.contains(" --calibration default --out"),
            "{said}"
        );
    }
    assert!(
        !["w8a8", "w4a16-kv-int8", "nvfp4"].iter().any(|name| needed.iter().any(|needed| needed == name))
    );
}

/// A calibration that rounding to nearest ignores is answered with the recipe that uses it.
#[test]
fn an_unused_calibration_names_the_recipe_that_calibrates() {
    for (recipe, fix) in [
        ("w4a16", "; fix: --recipe gptq-int4-g128"),
        ("rotate-int8-channel+int8-token", "; fix: --recipe rotate-gptq-int8-channel+int8-token"),
        ("rtn-int4-g128+kv-int8", "; fix: --recipe gptq-int4-g128+kv-int8-head"),
    ] {
        let command = ["quantize", "demo", "--dry-run", "--calibration", "default", "--recipe"];
        let said = succeed(&[&command[..], &[recipe]].concat());
        let line =
            said.lines().find(|line| line.contains("does not calibrate")).unwrap_or_else(|| panic!("{said}"));
        assert!(line.ends_with(fix), "{line}");
        let fixed = succeed(&[&command[..], &[fix.rsplit(' ').next().unwrap()]].concat());
        assert!(!fixed.contains("does not calibrate"), "{fixed}");
    }
}

#[test]
fn a_gguf_file_is_written_verified_and_run() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama2-gqa-tied"), temp.path().join("m.gguf"));
    let (model, out) = (text(&model), text(&out));
    let done = json(&[
        "quantize", model, "--recipe", "rtn-f32", "--format", "gguf", "--out", out, "--json", "--quiet",
    ]);
    assert_eq!((&done["verification"]["ok"], &done["verification"]["files"]), (&true.into(), &2.into()));
    assert_eq!(done["verification"]["compared"], done["verification"]["weights"]);
    let tokens = windows(temp.path());
    let result = json(&["eval", out, "--reference", model, "--tokens", &tokens, "--json", "--quiet"]);
    assert!(result["kl"].as_f64().unwrap() < 1e-9 && result["top1"] == 1.0, "{result}");
    let found = json(&["verify", out, "--reference", model, "--json"]);
    assert_eq!((&found["faults"], &found["notes"]), (&serde_json::json!([]), &serde_json::json!([])));
    assert_eq!(found["files"], 2, "{found}");
}

#[test]
fn a_damaged_gguf_file_does_not_verify() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama2-gqa-tied"), temp.path().join("m.gguf"));
    succeed(&[
        "quantize",
        text(&model),
        "--recipe",
        "rtn-f16",
        "--format",
        "gguf",
        "--out",
        text(&out),
        "--quiet",
    ]);
    let whole = std::fs::read(&out).unwrap();
    // Damage in the data, in the version (unreadable file), and truncation.
    for (at, more) in [(whole.len() - 9, ""), (4, "version")] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x80;
        std::fs::write(&out, bytes).unwrap();
        let line = fail(1, &["verify", text(&out), "--quiet"]);
        assert!(line.contains("SHA-256") && line.contains(more), "{line}");
    }
    std::fs::write(&out, &whole[..whole.len() - 40]).unwrap();
    let line = fail(1, &["verify", text(&out), "--quiet"]);
    assert!(line.contains("expected ") && line.contains(" bytes"), "{line}");
    // Without manifest and quality.json nothing is recorded.
    for suffix in ["mantissa-manifest.json", "quality.json"] {
        std::fs::remove_file(temp.path().join(format!("m.gguf.{suffix}"))).unwrap();
    }
    assert!(fail(2, &["verify", text(&out), "--quiet"]).contains("m.gguf"));
    std::fs::write(&out, &whole).unwrap();
    let found = json(&["verify", text(&out), "--json"]);
    assert!(
        found["ok"] == true && found["notes"][0].as_str().unwrap().contains("not checked for damage"),
        "{found}"
    );
}
