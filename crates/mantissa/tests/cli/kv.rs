//! `--kv`: KV cache schemes.

use std::path::Path;

use mantissa_store::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, root, shared, stderr, succeed, text};

/// Runs `eval demo --reference demo` on a short text.
fn eval(more: &[&str]) -> Value {
    let held_out = root().join("crates/mantissa-jobs/calibration/held-out.txt");
    let fixed = ["eval", "demo", "--reference", "demo", "--text", text(&held_out), "--context", "64"];
    json(&[&fixed[..], &["--limit", "300", "--json", "--quiet"], more].concat())
}

fn number(report: &Value, field: &str) -> f64 {
    report[field].as_f64().unwrap()
}

/// Five layers of four heads of 32: the reported bytes are those of the scheme.
#[test]
fn fewer_bits_cost_more_and_take_less() {
    let mut least = 0.0;
    for (scheme, bytes) in [("int8-head", 1440.0), ("int4-head-asym", 840.0), ("int2-head,scales=f16", 400.0)]
    {
        let report = eval(&["--kv", scheme]);
        assert_eq!((number(&report, "kv_bytes_per_token"), &report["kv"]), (bytes, &Value::from(scheme)));
        assert!(number(&report, "kl") > 4.0 * least, "{scheme}: {report}");
        least = number(&report, "kl");
    }
    assert_eq!(number(&eval(&["--kv", "f32"]), "kl"), 0.0);
}

#[test]
fn a_window_is_measured_by_decoding() {
    let line = fail(
        2,
        &[
            "eval",
            "demo",
            "--text",
            text(&root().join("crates/mantissa-jobs/calibration/held-out.txt")),
            "--kv",
            "int4-head,window=8",
        ],
    );
    assert!(line.contains("--prefill"), "{line}");
    let decode = |kv: &str| eval(&["--prefill", "16", "--kv", kv]);
    let (all, some, none) =
        (decode("int4-head"), decode("int4-head,window=24"), decode("int4-head,window=64"));
    assert!(number(&none, "kl") < 1e-9 && number(&none, "kl") < number(&some, "kl"), "{none} {some}");
    assert!(number(&some, "kl") < number(&all, "kl"), "{some} {all}");
    assert_eq!(all["prefill"], 16);
    // Positions count from the last prompt token on.
    let whole = eval(&["--kv", "int4-head"]);
    assert!(number(&all, "tokens") < number(&whole, "tokens"));
}

#[test]
fn run_says_how_it_kept_keys_and_values() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("run.json");
    let report = format!("--json={}", out.display());
    let mut arguments = vec!["run", "demo", "-p", "Once upon a time", "-n", "24", "--overwrite", &report];
    let plain = mantissa(&arguments);
    assert!(!stderr(&plain).contains("KV cache"), "{}", stderr(&plain));
    arguments.extend(["--kv", "keys=int8-g4-asym,values=int8-head,window=8,sinks=2,channel-keys,rotate"]);
    let quantized = mantissa(&arguments);
    assert!(quantized.status.success() && !quantized.stdout.is_empty());
    assert!(stderr(&quantized).contains("bytes per token"), "{}", stderr(&quantized));
    let report: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    // Per layer: groups of four tokens of each of 128 channels take 4 + 4 + 1 bytes, and a head 32 + 4.
    assert_eq!(report["kv_bytes_per_token"], 5.0 * (128.0 * 9.0 / 4.0 + 4.0 * 36.0));
    for kv in ["int8-head,window", "fp8-e4m3-tensor", "int8-tensor@static", "keys=int8-head,channel-keys"] {
        let line = fail(2, &["run", "demo", "-p", "a", "-n", "2", "--kv", kv]);
        assert!(line.contains("expected"), "{line}");
    }
}

/// Quantizes the model with cache scales from the calibration text.
fn quantize(out: &Path, recipe: &str, more: &[&str]) {
    let model = root().join("tests/data/tiny/llama2-gqa-tied");
    let fixed = ["quantize", text(&model), "--recipe", recipe, "--out", text(out), "--quiet"];
    let windows = out.with_extension("json");
    let tokens: Vec<Vec<usize>> =
        (0..3).map(|w| (0..24).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
    std::fs::write(&windows, serde_json::json!(tokens).to_string()).unwrap();
    succeed(&[&fixed[..], &["--calibration-tokens", text(&windows)], more].concat());
}

fn scale(dir: &Path, name: &str) -> Vec<f32> {
    let file = SafeTensors::open(&dir.join("model.safetensors")).unwrap();
    let bytes = file.read(file.get(name).unwrap()).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// Static scales come from the calibration text, are read back, and survive conversions.
#[test]
fn cache_scales_are_stored_and_carried() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let fp8 = "rtn-fp8-e4m3-channel+fp8-e4m3-token+kv-fp8-e4m3-tensor@static";
    quantize(&at("ct"), fp8, &[]);
    let ct = scale(&at("ct"), "model.layers.0.self_attn.k_scale");
    assert!(ct.len() == 1 && ct[0] > 0.0 && ct[0] < 1.0, "{ct:?}");
    let inspected = json(&["inspect", text(&at("ct")), "--json"]);
    assert_eq!(inspected["kv_cache"], "fp8-e4m3-tensor@static");
    let convert = |from: &str, format: &str, to: &str| {
        succeed(&["convert", text(&at(from)), "--format", format, "--out", text(&at(to)), "--quiet"])
    };
    convert("ct", "modelopt", "mo");
    assert_eq!(scale(&at("mo"), "model.layers.0.self_attn.k_proj.k_scale"), ct);
    convert("mo", "native", "own");
    convert("own", "compressed-tensors", "back");
    for layer in 0..2 {
        for side in ["k_scale", "v_scale"] {
            let name = format!("model.layers.{layer}.self_attn.{side}");
            assert_eq!(scale(&at("back"), &name), scale(&at("ct"), &name), "{name}");
        }
    }
    let nll = |name: &str| {
        let windows = at("ct").with_extension("json");
        let report = json(&["eval", text(&at(name)), "--tokens", text(&windows), "--json", "--quiet"]);
        number(&report, "nll")
    };
    assert!(["mo", "own", "back"].iter().all(|name| nll(name) == nll("ct")));
    let line = fail(2, &["convert", text(&at("ct")), "--format", "deepseek-fp8", "--out", text(&at("no"))]);
    assert!(line.contains("cannot record a KV-cache scheme"), "{line}");
}

/// Per-head scales, integers, and dynamic schemes are stored in the native format only.
#[test]
fn recipes_name_schemes_of_the_cache() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    quantize(&at("heads"), "rtn-int8-channel+kv-int8-head@static", &[]);
    let heads = scale(&at("heads"), "model.layers.1.self_attn.v_scale");
    assert!(heads.len() > 1 && heads.iter().any(|scale| *scale != heads[0]), "{heads:?}");
    quantize(&at("whole"), "rtn-int8-channel+kv-int8-tensor@static", &["--threads", "2"]);
    let whole = scale(&at("whole"), "model.layers.1.self_attn.v_scale");
    assert_eq!(whole, [heads.iter().fold(0f32, |most, scale| most.max(*scale))]);
    quantize(&at("dynamic"), "rtn-int4-g8+kv-int8-head", &[]);
    let inspected = json(&["inspect", text(&at("dynamic")), "--json"]);
    assert_eq!((&inspected["kv_cache"], &inspected["convention"]), (&"int8-head".into(), &"native".into()));
    quantize(&at("short"), "rtn-int4-g8+kv-fp8", &[]);
    assert_eq!(json(&["inspect", text(&at("short")), "--json"])["kv_cache"], "fp8-e4m3-head");
    let model = root().join("tests/data/tiny/llama2-gqa-tied");
    for (recipe, format, why) in [
        ("rtn-int4-g8+kv-int8-head", "compressed-tensors", "native"),
        ("rtn-q8_0+kv-fp8-e4m3-tensor@static", "gguf", "cannot record"),
    ] {
        let out = at("none");
        let arguments =
            ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)];
        let line = fail(2, &arguments);
        assert!(line.contains(why) && !out.exists(), "{line}");
    }
}

/// Compares with llm-compressor's FP8 cache: same recipe, same windows. Its observer averages the extremes of
/// windows, ours takes the maximum: never lower beyond weight rounding, and little higher.
#[test]
fn cache_scales_are_near_those_of_llm_compressor() {
    let (Some(artifacts), Some(models), Some(peers)) =
        (shared("artifacts"), shared("models"), shared("reference/peers"))
    else {
        return;
    };
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let tokens = format!("{}:calib", peers.join("babyllama-105-tokens.json").display());
    let model = models.join("babyllama-105");
    let recipe = "rtn-int8-channel+kv-fp8-e4m3-tensor@static";
    let arguments = ["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"];
    succeed(&[&arguments[..], &["--calibration-tokens", &tokens]].concat());
    for layer in 0..5 {
        for side in ["k_scale", "v_scale"] {
            let name = format!("model.layers.{layer}.self_attn.{side}");
            let (ours, theirs) =
                (scale(&out, &name)[0], scale(&artifacts.join("llmc_kv_fp8_static"), &name)[0]);
            assert!((0.995..1.065).contains(&(ours / theirs)), "{name}: {ours} for {theirs}");
        }
    }
}

/// `recalibrate` recomputes the scales on other windows and changes nothing else.
#[test]
fn recalibration_changes_only_scales() {
    let temp = TempDir::new().unwrap();
    let (old, new, same) = (temp.path().join("old"), temp.path().join("new"), temp.path().join("same"));
    quantize(&old, "rtn-int8-channel+int8-tensor@static+kv-fp8-e4m3-tensor@static", &[]);
    let recalibrate = |windows: &Path, out: &Path| {
        let arguments = ["recalibrate", text(&old), "--tokens", text(windows), "--out", text(out)];
        json(&[&arguments[..], &["--json", "--quiet"]].concat())
    };
    let windows = temp.path().join("other.json");
    std::fs::write(&windows, serde_json::json!([(3..40).collect::<Vec<usize>>()]).to_string()).unwrap();
    let report = recalibrate(&windows, &new);
    assert_eq!((&report["input_scales"], &report["cache_scales"]), (&14.into(), &4.into()));
    recalibrate(&old.with_extension("json"), &same);
    // The quality report is copied without the measured figures.
    assert_eq!(json(&["verify", text(&new), "--json", "--quiet"])["ok"], true);
    let quality: serde_json::Value =
        serde_json::from_slice(&std::fs::read(new.join("quality.json")).unwrap()).unwrap();
    assert_eq!((&quality["calibration"]["name"], &quality["evaluation"]), (&"other.json".into(), &().into()));
    let clipped = temp.path().join("clipped");
    let arguments = ["recalibrate", text(&old), "--tokens", text(&windows), "--out", text(&clipped)];
    json(&[&arguments[..], &["--observer", "percentile-90", "--json", "--quiet"]].concat());
    let scale = |dir: &Path| {
        crate::support::File::open(&dir.join("model.safetensors"))
            .f32("model.layers.1.mlp.down_proj.input_scale")[0]
    };
    assert!(scale(&clipped) < 0.9 * scale(&new) && scale(&clipped) > 0.0);
    let misspelt = [&arguments[..], &["--observer", "percentile-9"]].concat();
    assert!(fail(2, &misspelt).contains("percentile-P with P from 50 to 100"));
    let open = |dir: &Path| SafeTensors::open(&dir.join("model.safetensors")).unwrap();
    let (old, new, same) = (open(&old), open(&new), open(&same));
    let mut changed = 0;
    for meta in old.tensors() {
        let of = |file: &SafeTensors| file.read(file.get(&meta.name).unwrap()).unwrap();
        let is_scale = ["input_scale", "k_scale", "v_scale"].iter().any(|end| meta.name.ends_with(end));
        assert!(is_scale || of(&old) == of(&new), "{}", meta.name);
        changed += usize::from(of(&old) != of(&new));
        // Equals what quantize computes on the same windows.
        assert!(!meta.name.contains("attn.k_scale") || of(&old) == of(&same), "{}", meta.name);
    }
    assert!(changed >= 10, "{changed}");
    let model = root().join("tests/data/tiny/llama2-gqa-tied");
    let none = temp.path().join("none");
    let line = fail(2, &["recalibrate", text(&model), "--tokens", text(&windows), "--out", text(&none)]);
    assert!(line.contains("expected static scales of inputs, keys or values") && !none.exists(), "{line}");
}

/// Learned or density-based levels lose less than uniform ones of the same width; learned ones need a text.
#[test]
fn levels_are_found_on_a_text_or_known() {
    let held_out = root().join("crates/mantissa-jobs/calibration/held-out.txt");
    let text = text(&held_out);
    let calibrated =
        |kv: &str| eval(&["--kv", kv, "--calibration", text, "--samples", "4", "--length", "64"]);
    let even = eval(&["--kv", "int3-token-asym:minmax"]);
    let (plain, kept) = (calibrated("nuq3,pre-rope"), calibrated("nuq3-1%,pre-rope"));
    assert!(number(&plain, "kl") < 0.7 * number(&even, "kl"), "{plain} {even}");
    assert!(number(&kept, "kl") < number(&plain, "kl"), "{kept} {plain}");
    // Five layers of 128 values: 48 bytes of codes for keys and as many for values with a range, and two elements of each kept.
    assert_eq!(number(&plain, "kv_bytes_per_token"), 5.0 * (48.0 + 48.0 + 4.0));
    assert_eq!(number(&kept, "kv_bytes_per_token"), 5.0 * (48.0 + 48.0 + 4.0 + 4.0 * 4.0));
    let (sphere, even) = (eval(&["--kv", "turbo3"]), eval(&["--kv", "int3-head,scales=f16"]));
    assert_eq!(number(&sphere, "kv_bytes_per_token"), number(&even, "kv_bytes_per_token"));
    assert!(number(&sphere, "kl") < number(&even, "kl"), "{sphere} {even}");
    let line = fail(2, &["run", "demo", "-p", "a", "-n", "2", "--kv", "nuq4-1%"]);
    assert!(line.contains("--calibration"), "{line}");
    let run = ["run", "demo", "-p", "a", "-n", "2", "--kv", "nuq4-1%", "--calibration", text];
    succeed(&[&run[..], &["--samples", "2", "--length", "64"]].concat());
}

/// Levels are learned once and stored with the model, which then runs as with the same text.
#[test]
fn levels_go_along_with_a_model() {
    const POLICY: &str = "nuq3-10%,pre-rope";
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let windows = at("with").with_extension("json");
    let recipe = format!("rtn-int4-g8+kv-{POLICY}");
    quantize(&at("with"), &recipe, &[]);
    quantize(&at("again"), &recipe, &["--threads", "2"]);
    quantize(&at("plain"), "rtn-int4-g8", &["--format", "native"]);
    let bytes = |name: &str| std::fs::read(at(name).join("model.safetensors")).unwrap();
    assert!(bytes("with") == bytes("again"));
    let inspected = json(&["inspect", text(&at("with")), "--json"]);
    assert_eq!((&inspected["kv_cache"], &inspected["convention"]), (&POLICY.into(), &"native".into()));
    let nll = |name: &str, more: &[&str]| {
        let model = at(name);
        let arguments = ["eval", text(&model), "--tokens", text(&windows), "--json", "--quiet"];
        json(&[&arguments[..], more].concat())
    };
    let started = nll("plain", &["--kv", POLICY, "--calibration-tokens", text(&windows)]);
    let stored = nll("with", &[]);
    for field in ["nll", "kv", "kv_bytes_per_token"] {
        assert_eq!(stored[field], started[field], "{field}");
    }
    assert_eq!(nll("with", &["--kv", POLICY])["nll"], started["nll"], "without a text");
    assert_ne!(nll("plain", &[])["nll"], started["nll"]);
    assert_eq!(nll("with", &["--kv", "f32"])["nll"], nll("plain", &[])["nll"], "in place of what it brings");
    let line = fail(2, &["eval", text(&at("with")), "--tokens", text(&windows), "--kv", "nuq2"]);
    assert!(line.contains("--calibration"), "{line}");
    assert_eq!(json(&["verify", text(&at("with")), "--json", "--quiet"])["ok"], true);
    // Adding levels keeps the weights; the same text gives the same levels.
    let recalibrate = |from: &str, tokens: &Path, more: &[&str], to: &str| {
        let (from, to) = (at(from), at(to));
        let arguments = ["recalibrate", text(&from), "--tokens", text(tokens), "--out", text(&to), "--json"];
        json(&[&arguments[..], &["--quiet"], more].concat())
    };
    let report = recalibrate("plain", &windows, &["--kv", POLICY], "added");
    assert_eq!((&report["cache_levels"], &report["cache_scales"]), (&true.into(), &0.into()));
    assert_eq!(nll("added", &[])["nll"], started["nll"]);
    assert_eq!(json(&["verify", text(&at("added")), "--json", "--quiet"])["ok"], true);
    let other = at("other.json");
    std::fs::write(&other, serde_json::json!([(3..40).collect::<Vec<usize>>()]).to_string()).unwrap();
    recalibrate("with", &other, &[], "moved");
    recalibrate("moved", &windows, &[], "back");
    let open = |name: &str| SafeTensors::open(&at(name).join("model.safetensors")).unwrap();
    let (first, added, moved, back) = (open("with"), open("added"), open("moved"), open("back"));
    let mut levels = 0;
    for meta in first.tensors() {
        let of = |file: &SafeTensors| file.read(file.get(&meta.name).unwrap()).unwrap();
        let is_level = ["k_levels", "k_ranges", "v_levels"].iter().any(|end| meta.name.ends_with(end));
        assert!(of(&first) == of(&added) && of(&first) == of(&back), "{}", meta.name);
        assert_eq!(of(&first) == of(&moved), !is_level, "{}", meta.name);
        levels += usize::from(is_level);
    }
    assert_eq!(levels, 6, "three of each layer");
    // In a sharded model the last file has the levels.
    let arguments = ["--format", "native", "--max-shard-size", "20000"];
    quantize(&at("sharded"), "rtn-int4-g8", &arguments);
    recalibrate("sharded", &windows, &["--kv", POLICY], "sharded-levels");
    assert_eq!(nll("sharded-levels", &[])["nll"], started["nll"]);
    assert_eq!(json(&["verify", text(&at("sharded-levels")), "--json", "--quiet"])["ok"], true);
}

/// Only the native format stores levels.
#[test]
fn levels_that_have_no_place_are_refused() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let windows = at("with").with_extension("json");
    quantize(&at("with"), "rtn-int4-g8+kv-nuq3", &[]);
    quantize(&at("ct"), "rtn-int8-channel", &[]);
    quantize(&at("scaled"), "rtn-int8-channel+kv-int8-head@static", &["--format", "native"]);
    let model = root().join("tests/data/tiny/llama2-gqa-tied");
    let (no, tokens) = (at("no"), text(&windows));
    let refused = |arguments: &[&str], says: &str| {
        let line = fail(2, &[arguments, &["--out", text(&no)]].concat());
        assert!(line.contains(says) && !no.exists(), "{says}: {line}");
    };
    let quantizing = ["quantize", text(&model), "--recipe", "rtn-int4-g8+kv-nuq3"];
    let elsewhere = ["--format", "compressed-tensors", "--calibration-tokens", tokens];
    refused(&[&quantizing[..], &elsewhere].concat(), "native");
    refused(&["convert", text(&at("with")), "--format", "compressed-tensors"], "levels of nuq3");
    for (from, kv, says) in [
        ("ct", "nuq4", "convert --format native"),
        ("scaled", "nuq4", "int8-head@static"),
        ("with", "int8-head", "nuq4"),
    ] {
        refused(&["recalibrate", text(&at(from)), "--tokens", tokens, "--kv", kv], says);
    }
    // Requantizing drops the levels and says so.
    let (with, anew) = (at("with"), at("anew"));
    let arguments = ["convert", text(&with), "--format", "native", "--requantize", "int8-channel"];
    let done = json(&[&arguments[..], &["--out", text(&anew), "--json", "--quiet"]].concat());
    assert!(done["notes"].to_string().contains("levels of the KV cache are left out"), "{done}");
    assert!(json(&["inspect", text(&anew), "--json"])["kv_cache"].is_null());
    // A model whose config and tensors disagree.
    let config = at("with").join("config.json");
    let wrong = std::fs::read_to_string(&config).unwrap().replace("\"nuq3\"", "\"nuq4\"");
    std::fs::write(&config, wrong).unwrap();
    let line = fail(2, &["eval", text(&at("with")), "--tokens", tokens]);
    assert!(line.contains("nuq4") && line.contains("one level per code"), "{line}");
}

/// 8-bit attention operands, and FP8 accumulators of matrix units.
#[test]
fn arithmetic_is_simulated() {
    let (all, weights) =
        (eval(&["--attention-operands", "fp8"]), eval(&["--attention-operands", "p=fp8-e4m3"]));
    assert_eq!(weights["attention_operands"], "p=fp8-e4m3");
    assert!(number(&weights, "kl") > 0.0 && number(&weights, "kl") < number(&all, "kl"), "{weights} {all}");
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("fp8");
    let recipe = ["quantize", "demo", "--recipe", "rtn-fp8-e4m3-channel+fp8-e4m3-token"];
    succeed(&[&recipe[..], &["--out", text(&out)]].concat());
    let held_out = root().join("crates/mantissa-jobs/calibration/held-out.txt");
    let kl = |accumulator: &str| {
        let model =
            ["eval", text(&out), "--reference", text(&out), "--text", text(&held_out), "--context", "64"];
        let more = ["--limit", "100", "--json", "--quiet", "--accumulator", accumulator];
        number(&json(&[&model[..], &more].concat()), "kl")
    };
    let (hopper, promoted) = (kl("hopper"), kl("hopper-32"));
    assert_eq!(kl("f32"), 0.0);
    assert!(hopper > promoted && promoted > 0.0, "{hopper} {promoted}");
    let line = fail(2, &["eval", "demo", "--text", text(&held_out), "--accumulator", "hopper"]);
    assert!(line.contains("FP8"), "{line}");
}
