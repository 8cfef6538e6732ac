//! Quantized embedding and output head: every format whose readers take them, and the refusals of the others.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::SafeTensors;
use serde_json::{Value, json as value};
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, stderr, succeed, text};

/// Makes a model with a head of its own, whose layers take groups of 32.
fn own_head(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    let sizes = ["--hidden", "64", "--ffn", "128", "--heads", "4", "--layers", "2", "--vocab", "128"];
    let synth = ["synth", "--preset", "tiny", "--tied=false", "--dtype", "f16", "--out", text(&out)];
    succeed(&[&synth[..], &sizes].concat());
    out
}

/// Quantizes `model`; returns the output folder or file.
fn quantize(dir: &Path, model: &Path, recipe: &str, name: &str, more: &[&str]) -> PathBuf {
    let out = dir.join(name);
    let arguments = ["quantize", text(model), "--recipe", recipe, "--out", text(&out), "--quiet"];
    succeed(&[&arguments[..], more].concat());
    out
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn tensors(folder: &Path) -> Vec<String> {
    let file = SafeTensors::open(&folder.join("model.safetensors")).unwrap();
    file.tensors().iter().map(|tensor| tensor.name.clone()).collect()
}

/// Verifies an output against its source: both readers decode the head alike, within the scheme's bound, and compute
/// the same logits.
fn verified(model: &Path, out: &Path) {
    let report = json(&["verify", text(out), "--reference", text(model), "--json"]);
    assert_eq!(report["ok"], true, "{report}");
    assert!(report["max_logit_difference"].as_f64().unwrap() < 1e-4, "{report}");
}

#[test]
fn heads_are_quantized_in_every_format_that_takes_them() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let weights = |recipe: &str, name: &str| {
        let out = quantize(temp.path(), &model, recipe, name, &["--format", name]);
        json(&["verify", text(&out), "--reference", text(&model), "--json"])["weights"].as_u64().unwrap()
    };
    for (format, recipe, head, bits) in [
        ("compressed-tensors", "rtn-int4-g32", "int8", 9.0),
        ("gptq", "rtn-int4-g32", "int8-channel", 9.0),
        ("bitsandbytes", "nf4", "nf4", 5.0),
        ("mlx", "rtn-int4-g32-asym:minmax", "int8-g32-asym:minmax", 10.5),
        ("native", "rtn-int4-g32", "mxint8", 8.5),
    ] {
        let dense = weights(recipe, format);
        let name = format!("{format}-head");
        let out = quantize(temp.path(), &model, recipe, &name, &["--format", format, "--head", head]);
        let report = json(&["verify", text(&out), "--reference", text(&model), "--json"]);
        assert_eq!((&report["ok"], &report["weights"]), (&true.into(), &(dense + 1).into()), "{report}");
        verified(&model, &out);
        let quality = read(&out.join("quality.json"));
        let tables = quality["tables"].as_array().unwrap();
        assert_eq!(
            (tables.len(), &tables[0]["module"], &tables[0]["method"]),
            (1, &"lm_head".into(), &"rtn".into())
        );
        let stored = tables[0]["stored_bits_per_weight"].as_f64().unwrap();
        assert!(stored > 4.0 && stored < bits, "{format}: {stored}");
        let dense = |name: &String| name == "lm_head.weight" && format != "bitsandbytes" && format != "mlx";
        assert!(!tensors(&out).iter().any(dense), "{format}: {:?}", tensors(&out));
        let config = read(&out.join("config.json"));
        let quantization = config["quantization_config"].clone();
        match format {
            "compressed-tensors" => assert_eq!(quantization["ignore"], value!([])),
            "gptq" => assert_eq!(quantization["lm_head"], true),
            "bitsandbytes" => assert_eq!(quantization["llm_int8_skip_modules"], value!([])),
            _ => {}
        }
        // The loss is that of an output with its head quantized, not more.
        let windows = temp.path().join("windows.json");
        fs::write(&windows, value!([(0..32).collect::<Vec<_>>()]).to_string()).unwrap();
        let kl = |of: &Path| {
            let arguments = [
                "eval",
                text(of),
                "--reference",
                text(&model),
                "--tokens",
                text(&windows),
                "--json",
                "--quiet",
            ];
            json(&arguments)["kl"].as_f64().unwrap()
        };
        assert!(kl(&out) < 10.0 * kl(&temp.path().join(format)) + 0.05, "{format}");
    }
}

#[test]
fn the_head_of_a_model_with_quantized_inputs_keeps_its_own_input() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let out =
        quantize(temp.path(), &model, "w8a8", "w8a8", &["--head", "int8", "--format", "compressed-tensors"]);
    verified(&model, &out);
    let groups = read(&out.join("config.json"))["quantization_config"]["config_groups"].clone();
    let of_head = groups.as_object().unwrap().values().find(|group| group["targets"] == value!(["lm_head"]));
    assert_eq!(of_head.unwrap()["input_activations"], Value::Null, "{groups}");
}

#[test]
fn the_kl_of_the_head_is_shown_apart() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let windows = temp.path().join("windows.json");
    fs::write(&windows, value!([(0..100).collect::<Vec<_>>()]).to_string()).unwrap();
    let measured = |name: &str, more: &[&str]| {
        let windows = ["--tokens", text(&windows)];
        let out = quantize(temp.path(), &model, "rtn-int4-g32", name, &[&windows, more].concat());
        read(&out.join("quality.json"))["evaluation"].clone()
    };
    let (plain, with) = (measured("plain", &[]), measured("with", &["--head", "int4-g32"]));
    assert!(plain["kl_without_tables"].is_null());
    // The layers are the same, so without the quantized head it is the same model.
    assert!(
        (&with["kl_without_tables"], true) == (&plain["kl"], with["kl"] != plain["kl"]),
        "{with} {plain}"
    );
    let untied =
        ["quantize", "demo", "--recipe", "rtn-int4-g128", "--head", "int4-g32", "--untie", "--quiet"];
    let out = temp.path().join("untied");
    let shown = succeed(&[&untied[..], &["--tokens", text(&windows), "--out", text(&out)]].concat());
    assert!(shown.contains("by embedding and head"), "{shown}");
}

#[test]
fn a_rule_with_the_full_name_is_the_same_and_a_glob_is_not() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let recipe = |name: &str, modules: &str| {
        let path = temp.path().join(name);
        let rule = format!("[[layers]]\nmodules = [\"{modules}\"]\nweights = \"int8-channel\"\n");
        fs::write(&path, format!("method = \"rtn\"\nweights = \"int4-g32\"\n{rule}")).unwrap();
        text(&path).to_owned()
    };
    let bytes = |out: &Path| fs::read(out.join("model.safetensors")).unwrap();
    let flag = quantize(temp.path(), &model, "rtn-int4-g32", "flag", &["--head", "int8"]);
    let named = quantize(temp.path(), &model, &recipe("named.toml", "lm_head"), "named", &[]);
    assert_eq!(bytes(&flag), bytes(&named));
    let glob = quantize(temp.path(), &model, &recipe("glob.toml", "lm_*"), "glob", &[]);
    assert!(tensors(&glob).contains(&"lm_head.weight".to_owned()));
}

#[test]
fn a_tied_head_is_refused_with_a_fix_that_works() {
    let temp = TempDir::new().unwrap();
    let demo = ["quantize", "demo", "--recipe", "rtn-int4-g128", "--quiet", "--head", "int8", "--out"];
    let out = |name: &str| temp.path().join(name);
    let line = fail(2, &[&demo[..], &[text(&out("a"))]].concat());
    assert!(line.contains("no head of its own") && line.contains("--untie"), "{line}");
    let untied = out("untied");
    let shown = succeed(&[&demo[..], &[text(&untied), "--untie"]].concat());
    assert!(
        shown.contains("lm_head: int8-channel") && shown.contains("tied to the embedding before"),
        "{shown}"
    );
    assert_eq!(read(&untied.join("config.json"))["tie_word_embeddings"], false);
    verified(Path::new("demo"), &untied);
    // In formats with quantized embeddings, both are quantized as one.
    let line = fail(2, &[&demo[..], &[text(&out("b")), "--format", "native"]].concat());
    assert!(line.contains("--embeddings SCHEME"), "{line}");
    let both = out("both");
    let native = [
        "quantize",
        "demo",
        "--recipe",
        "rtn-int4-g128",
        "--quiet",
        "--format",
        "native",
        "--out",
        text(&both),
    ];
    succeed(&[&native[..], &["--embeddings", "int8"]].concat());
    verified(Path::new("demo"), &both);
    let (smaller, larger) = (read(&both.join("quality.json")), read(&untied.join("quality.json")));
    assert!(smaller["bytes"].as_u64() < larger["bytes"].as_u64());
    // An untied head may stay unquantized.
    let dense = out("dense");
    let plain =
        ["quantize", "demo", "--recipe", "rtn-int4-g128", "--untie", "--quiet", "--out", text(&dense)];
    succeed(&plain);
    assert!(tensors(&dense).contains(&"lm_head.weight".to_owned()));
    verified(Path::new("demo"), &dense);
}

#[test]
fn formats_whose_readers_take_no_quantized_head_refuse_it() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let run = |format: &str, recipe: &str, more: &[&str]| {
        let out = temp.path().join("out");
        let arguments = [
            "quantize",
            text(&model),
            "--recipe",
            recipe,
            "--format",
            format,
            "--out",
            text(&out),
            "--quiet",
        ];
        fail(2, &[&arguments[..], more].concat())
    };
    let line = run("awq", "rtn-int4-g32-asym", &["--head", "int4-g32-asym"]);
    assert!(line.contains("lm_head") && line.contains("leave out --head, or use --format native"), "{line}");
    let line = run("compressed-tensors", "rtn-int4-g32", &["--embeddings", "int8"]);
    assert!(line.contains("model.embed_tokens") && line.contains("--format native"), "{line}");
    quantize(
        temp.path(),
        &model,
        "rtn-int4-g32",
        "fix",
        &["--format", "native", "--embeddings", "int8", "--head", "fp8"],
    );
    verified(&model, &temp.path().join("fix"));
    // A conversion keeps the codes of a head, or names it and a fix that works.
    let ct = quantize(temp.path(), &model, "rtn-int4-g32", "ct", &["--head", "int8"]);
    let out = temp.path().join("converted");
    let line = fail(2, &["convert", text(&ct), "--format", "awq", "--out", text(&out)]);
    assert!(line.contains("lm_head") && line.contains("fix: --format native"), "{line}");
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, "[[1, 5, 9, 2, 7, 3, 8, 100, 64, 31]]").unwrap();
    let nll = |model: &Path| {
        json(&["eval", text(model), "--tokens", text(&tokens), "--json", "--quiet"])["nll"].as_f64().unwrap()
    };
    for (format, name) in [("gptq", "c-gptq"), ("native", "c-native"), ("gguf", "c.gguf")] {
        let out = temp.path().join(name);
        succeed(&["convert", text(&ct), "--format", format, "--out", text(&out), "--quiet"]);
        assert_eq!(nll(&out), nll(&ct), "{format}");
        let stored = json(&["inspect", text(&out), "--json", "--tensors"]).to_string();
        assert!(stored.contains("lm_head") || stored.contains("output.weight"), "{format}: {stored}");
    }
}

#[test]
fn a_gguf_file_has_the_types_of_its_tables() {
    let temp = TempDir::new().unwrap();
    let scheme_of = |file: &Path, tensor: &str| {
        let quality = read(&PathBuf::from(format!("{}.quality.json", file.display())));
        let found = quality["tensors"].as_array().unwrap().iter().find(|t| t["tensor"] == tensor).cloned();
        found.unwrap()["scheme"].as_str().unwrap().to_owned()
    };
    let model = own_head(temp.path());
    let out = quantize(temp.path(), &model, "rtn-q4_0", "own.gguf", &["--head", "int8"]);
    assert_eq!(scheme_of(&out, "lm_head.weight"), "q8_0");
    let demo = Path::new("demo");
    let out = quantize(temp.path(), demo, "rtn-q4_0", "tied.gguf", &["--embeddings", "q4_1"]);
    assert_eq!(scheme_of(&out, "model.embed_tokens.weight"), "q4_1");
    json(&["verify", text(&out), "--reference", "demo", "--json"]);
    let refused = temp.path().join("refused.gguf");
    let arguments = ["quantize", "demo", "--recipe", "rtn-q4_0", "--out", text(&refused), "--quiet"];
    let line = fail(2, &[&arguments[..], &["--head", "q8_0"]].concat());
    assert!(line.contains("--embeddings SCHEME"), "{line}");
    assert!(fail(2, &[&arguments[..], &["--untie"]].concat()).contains("leave out --untie"));
}

#[test]
fn lint_knows_which_engines_load_the_head() {
    let temp = TempDir::new().unwrap();
    let model = own_head(temp.path());
    let verdict = |out: &Path, engine: &str| {
        let output = mantissa(&["lint", text(out), "--for", engine]);
        let text = String::from_utf8(output.stdout.clone()).unwrap() + &stderr(&output);
        (output.status.code(), text)
    };
    let heads = |text: &str| text.contains("lm_head");
    let ct = quantize(temp.path(), &model, "rtn-int4-g32", "ct", &["--head", "int8"]);
    let fp8 = quantize(temp.path(), &model, "rtn-int4-g32", "fp8", &["--head", "fp8"]);
    let same = quantize(temp.path(), &model, "rtn-int4-g32", "same", &["--head", "int4-g32"]);
    for engine in ["vllm", "sglang", "transformers"] {
        for out in [&ct, &fp8, &same] {
            let (_, said) = verdict(out, engine);
            assert!(!heads(&said), "{engine}: {said}");
        }
    }
    let (code, said) = verdict(&ct, "lmdeploy");
    assert!(code == Some(1) && heads(&said) && said.contains("4 bits"), "{said}");
    assert!(!heads(&verdict(&same, "lmdeploy").1));
    // The class of the layers does not cover the head, so servers need its name.
    let config = same.join("config.json");
    let named = fs::read_to_string(&config).unwrap();
    assert_eq!(
        read(&config)["quantization_config"]["config_groups"]["group_0"]["targets"],
        value!(["Linear", "lm_head"])
    );
    let mut unnamed = read(&config);
    unnamed["quantization_config"]["config_groups"]["group_0"]["targets"] = value!(["Linear"]);
    fs::write(&config, unnamed.to_string()).unwrap();
    for engine in ["vllm", "sglang"] {
        let (code, said) = verdict(&same, engine);
        assert!(code == Some(1) && said.contains("targets Linear"), "{engine}: {said}");
    }
    fs::write(&config, named).unwrap();
    let gptq =
        quantize(temp.path(), &model, "rtn-int4-g32", "gptq", &["--format", "gptq", "--head", "int4-g32"]);
    assert!(!heads(&verdict(&gptq, "vllm").1) && !heads(&verdict(&gptq, "sglang").1));
    assert!(heads(&verdict(&gptq, "transformers").1));
    // The plan is refused before any work.
    let out = temp.path().join("refused");
    let arguments = ["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"];
    let line = fail(1, &[&arguments[..], &["--head", "fp8", "--for", "lmdeploy"]].concat());
    assert!(heads(&line) && !out.exists(), "{line}");
}
