//! Calibrated methods through the command line.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_model::Bos;
use tempfile::TempDir;

use crate::support::{
    command, fail, json, levels_and_threads, mantissa, root, stderr, strict_json, succeed, text,
};

/// A model with a tokenizer.
fn model() -> PathBuf {
    root().join("tests/data/tiny/llama2-gqa-tied")
}

fn calibration_text(dir: &Path) -> PathBuf {
    let path = dir.join("calibration.txt");
    let line =
        |i: usize| format!("Line {i} of a text to calibrate on, with {} words and a stop.\n", i * i % 17);
    fs::write(&path, (0..60).map(line).collect::<String>()).unwrap();
    path
}

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&p).unwrap()))
        .collect();
    all.sort();
    all
}

#[test]
fn gptq_from_text_has_the_same_bytes_on_any_number_of_threads() {
    let temp = TempDir::new().unwrap();
    let (model, calibration) = (model(), calibration_text(temp.path()));
    let quantize = |name: &str, more: &[&str]| {
        let out = temp.path().join(name);
        let mut arguments = vec!["quantize", text(&model), "--recipe", "gptq-int4-g8", "--out", text(&out)];
        arguments.extend(["--calibration", text(&calibration), "--length", "24", "--json"]);
        arguments.extend(more);
        (json(&arguments), files(&out))
    };
    let (done, one) = quantize("one", &["--samples", "9", "--threads", "1"]);
    assert_eq!(done["verification"]["ok"], true);
    assert_eq!((&done["method"], &done["layers"][0]["method"]), (&"gptq".into(), &"gptq".into()));
    assert!(done["layers"][0]["output_error"].as_f64().unwrap() > 0.0);
    assert_eq!(quantize("two", &["--samples", "9", "--threads", "2"]).1, one);
    // Other windows of the same text are a different calibration.
    assert_ne!(quantize("more", &["--samples", "12"]).1, one);
}

/// Statistics, solver and rounding give the same bytes at every instruction set level and thread count.
#[test]
fn methods_that_calibrate_have_the_same_bytes_at_every_level() {
    let temp = TempDir::new().unwrap();
    let windows = temp.path().join("w.json");
    let tokens: Vec<Vec<usize>> =
        (0..5).map(|w| (0..40).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
    fs::write(&windows, serde_json::json!(tokens).to_string()).unwrap();
    let [learned, turned] = ["learned.toml", "turned.toml"].map(|name| temp.path().join(name));
    fs::write(&learned, "method = \"autoround\"\nweights = \"int4-g8\"\n[autoround]\niterations = 8\n")
        .unwrap();
    let spin =
        "transform = \"spin\"\nmethod = \"gptq\"\nweights = \"int4-channel\"\nactivations = \"int4-token\"\n";
    fs::write(&turned, format!("{spin}[spin]\niterations = 4\n")).unwrap();
    for (name, recipe, dtype) in [
        ("gemma2", "gptq-int4-g8", "f32"),
        ("qwen3-moe", "gptq-int4-g8", "f32"),
        ("deepseek-v3", "gptq-int4-g8", "f32"),
        ("gpt2", "gptq-int4-g8", "f32"),
        ("gemma2", "gptaq-int4-g8", "f32"),
        ("qwen3-moe", "gptaq-int4-g8+int8-token", "f32"),
        ("gemma2", "scalesweep-gptaq-nvfp4", "f32"),
        ("gpt2", "soar-gptq-mxfp4", "f32"),
        ("gpt2", "foem-int4-g8", "f32"),
        ("gpt2", "awq-int4-g8-asym", "f32"),
        ("qwen3-moe", "awq-int4-g8-asym", "f32"),
        ("gemma", "smooth-int8-channel+int8-token", "f32"),
        ("mixtral", "rotate-gptq-int4-channel+int4-token", "f32"),
        ("qwen3-qknorm", text(&learned), "f32"),
        ("qwen3-qknorm", text(&turned), "f32"),
        ("gpt2", "gptq-int4-g8", "bf16"),
        ("qwen3-moe", "gptaq-int4-g8", "bf16"),
        ("gemma2", "awq-int4-g8-asym", "bf16"),
        ("mixtral", "rotate-gptq-int4-channel+int4-token:clip85", "bf16"),
    ] {
        let model = root().join("tests/data/tiny").join(name);
        let mut first: Option<Vec<(String, Vec<u8>)>> = None;
        for (level, threads) in levels_and_threads() {
            let stem = Path::new(recipe).file_stem().unwrap().to_str().unwrap();
            let out = temp.path().join(format!("{name}-{stem}-{dtype}-{level}-{threads}"));
            let mut command = command();
            command.env("MANTISSA_ISA", level.name());
            command.args(["quantize", text(&model), "--out", text(&out)]);
            command.args(["--recipe", recipe, "--format", "native", "--threads", threads]);
            command.args(["--calibration-tokens", text(&windows), "--calibration-dtype", dtype]);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", stderr(&output));
            let files = files(&out);
            let same = first.get_or_insert_with(|| files.clone()) == &files;
            assert!(same, "{name}, {recipe}, {dtype}: {level}, {threads} threads");
        }
    }
}

/// bf16 calibration differs and is recorded; recipes that cannot use it say so.
#[test]
fn a_calibration_in_bf16_is_recorded_or_refused() {
    let temp = TempDir::new().unwrap();
    let (model, calibration) = (model(), calibration_text(temp.path()));
    let arguments = |recipe: &str, out: &Path, dtype: &str| -> Vec<String> {
        let all = ["quantize", text(&model), "--recipe", recipe, "--out", text(out), "--calibration"];
        let more =
            [text(&calibration), "--length", "24", "--samples", "20", "--json", "--calibration-dtype", dtype];
        all.iter().chain(&more).map(|argument| (*argument).to_owned()).collect()
    };
    let [f32, bf16] = ["f32", "bf16"].map(|dtype| {
        let out = temp.path().join(dtype);
        (json(&arguments("gptq-int4-g8", &out, dtype)), files(&out))
    });
    assert_eq!((&f32.0["calibration_dtype"], &bf16.0["calibration_dtype"]), (&().into(), &"bf16".into()));
    let error = |done: &serde_json::Value| done["layers"][0]["output_error"].as_f64().unwrap();
    assert!((error(&f32.0) / error(&bf16.0) - 1.0).abs() < 0.1, "{} {}", error(&f32.0), error(&bf16.0));
    assert_ne!(f32.1, bf16.1);
    for (recipe, why) in [
        ("autoround-int4-g8", "autoround learns in f32"),
        ("rtn-int4-g8", "no method solves on inputs of layers"),
    ] {
        let said = fail(2, &arguments(recipe, &temp.path().join("none"), "bf16"));
        let found = format!("recipe \"{recipe}\": expected calibration products in f32, got bf16: {why}");
        assert!(said.contains(&found), "{said}");
    }
}

/// Learned rounding lowers the layers' output error, and gives the same bytes at every level and thread count
/// and after a resume. An architecture without a backward pass is refused before any work.
#[test]
fn autoround_learns_and_has_the_same_bytes_however_it_is_run() {
    let temp = TempDir::new().unwrap();
    let model = crate::lint::synthetic_of(temp.path(), "bf16");
    let windows = temp.path().join("w.json");
    let tokens: Vec<Vec<usize>> =
        (0..6).map(|w| (0..30 + w).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
    fs::write(&windows, serde_json::json!(tokens).to_string()).unwrap();
    let recipe = temp.path().join("r.toml");
    let table =
        "method = \"autoround\"\nweights = \"int3-g32\"\n[autoround]\niterations = 30\nbatch_tokens = 70\n";
    fs::write(&recipe, table).unwrap();
    let arguments = |out: &Path, threads: &str| -> Vec<String> {
        let all = ["quantize", text(&model), "--recipe", text(&recipe), "--out", text(out)];
        let more = ["--calibration-tokens", text(&windows), "--threads", threads, "--json", "--quiet"];
        all.iter().chain(&more).map(|argument| (*argument).to_owned()).collect()
    };
    let mut first: Option<Vec<(String, Vec<u8>)>> = None;
    for (level, threads) in levels_and_threads() {
        let out = temp.path().join(format!("{level}-{threads}"));
        let mut command = command();
        command.env("MANTISSA_ISA", level.name()).args(arguments(&out, threads));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let done = strict_json::parse(&output.stdout).unwrap();
        assert_eq!(done["verification"]["ok"], true, "{done}");
        for layer in done["layers"].as_array().unwrap() {
            let note = layer["notes"][0].as_str().unwrap();
            assert!(note.starts_with("mean error under the Fisher metric"), "{note}");
            let mut errors = note.rsplit("output ").next().unwrap().split(" → ");
            let mut next = || errors.next().unwrap().parse::<f64>().unwrap();
            let (before, after) = (next(), next());
            assert!(after < 0.8 * before, "{note}");
        }
        let files = files(&out);
        assert!(first.get_or_insert_with(|| files.clone()) == &files, "{level}, {threads} threads");
    }
    fs::write(&recipe, format!("{table}metric = \"mse\"\n")).unwrap();
    let out = temp.path().join("mse");
    let done = json(&arguments(&out, "1"));
    let note = done["layers"][0]["notes"][0].as_str().unwrap();
    assert!(note.starts_with("mean squared error"), "{note}");
    assert!(first != Some(files(&out)), "what errors cost decides");
    let gemma = root().join("tests/data/tiny/gemma2");
    let out = temp.path().join("gemma");
    let refused = fail(
        2,
        &[
            "quantize",
            text(&gemma),
            "--recipe",
            "autoround-int4-g8",
            "--out",
            text(&out),
            "--calibration-tokens",
            text(&windows),
        ],
    );
    assert!(refused.contains("norm") && refused.contains("gptq") && !out.exists(), "{refused}");
}

/// Experts are calibrated on the tokens routed to them. With one token most see none, which is reported per
/// expert.
#[test]
fn experts_are_calibrated_on_their_own_tokens() {
    let temp = TempDir::new().unwrap();
    let windows = temp.path().join("w.json");
    for (name, unseen) in [("mixtral", 2 * 2), ("qwen3-moe", 2 * 3), ("deepseek-v3", 4)] {
        let (model, out) = (root().join("tests/data/tiny").join(name), temp.path().join(name));
        let quantize = |content: &str, out: &Path| {
            fs::write(&windows, content).unwrap();
            let recipe = ["--recipe", "gptq-int8-channel", "--calibration-tokens", text(&windows), "--json"];
            let done = json(&[&["quantize", text(&model), "--out", text(out)][..], &recipe[..]].concat());
            assert_eq!(done["verification"]["ok"], true, "{name}");
            let layers = done["layers"].as_array().unwrap().clone();
            let why = |layer: &serde_json::Value| layer["fallback"].as_str().unwrap_or_default().to_owned();
            layers.iter().filter(|layer| why(layer).contains("no calibration token")).count()
        };
        assert_eq!(quantize("[[7]]", &out), 3 * unseen, "{name}");
        let many: Vec<Vec<usize>> =
            (0..8).map(|w| (0..40).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
        let all = temp.path().join(format!("{name}-all"));
        assert!(quantize(&serde_json::json!(many).to_string(), &all) < unseen, "{name}");
    }
}

/// Static activation scales come from the calibration and survive a round trip. A format without a place for
/// them is refused, and nothing starts without a calibration.
#[test]
fn static_scales_of_inputs_are_calibrated() {
    let temp = TempDir::new().unwrap();
    // NVFP4 rows must be whole blocks of 16.
    let model = crate::lint::synthetic_of(temp.path(), "bf16");
    let windows = temp.path().join("w.json");
    let many: Vec<Vec<usize>> =
        (0..4).map(|w| (0..30).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
    fs::write(&windows, serde_json::json!(many).to_string()).unwrap();
    for (recipe, format, suffix) in [
        ("rtn-fp8-e4m3-tensor+fp8-e4m3-tensor@static", "compressed-tensors", "input_scale"),
        ("rtn-fp8-e4m3-tensor+fp8-e4m3-tensor@static", "modelopt", "input_scale"),
        ("rtn-int8-channel+int8-tensor@static", "compressed-tensors", "input_scale"),
        ("rtn-int8-channel+int8-tensor-asym@static", "compressed-tensors", "input_scale"),
        ("rtn-int8-channel+int8-tensor-asym@static", "native", "input_scale"),
        ("rtn-nvfp4+nvfp4", "compressed-tensors", "input_global_scale"),
        ("rtn-nvfp4+nvfp4", "modelopt", "input_scale"),
        ("rtn-int8-channel+int8-tensor@static", "native", "input_scale"),
        ("rtn-nvfp4+nvfp4:4over6", "native", "input_scale"),
    ] {
        let asymmetric = recipe.contains("-asym");
        let name = format!("{}-{format}-{asymmetric}", &recipe[4..8]);
        let quantize = |out: &Path, threads: &'static str| {
            let mut arguments = vec!["quantize", text(&model), "--recipe", recipe, "--format", format];
            arguments.extend(["--out", text(out), "--calibration-tokens", text(&windows)]);
            let done = json(&[&arguments[..], &["--threads", threads, "--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{recipe} {format}: {done}");
        };
        let (one, two) = (temp.path().join(format!("{name}-1")), temp.path().join(format!("{name}-2")));
        quantize(&one, "1");
        quantize(&two, "2");
        let weights = |dir: &Path| fs::read(dir.join("model.safetensors")).unwrap();
        assert!(weights(&one) == weights(&two), "{recipe} {format}");
        let file = crate::support::File::open(&one.join("model.safetensors"));
        let scales: Vec<_> = file.names().into_iter().filter(|name| name.ends_with(suffix)).collect();
        assert_eq!(scales.len(), 14, "{recipe} {format}");
        // q, k and v read the same input.
        let of = |module: &str| file.f32(&format!("model.layers.1.self_attn.{module}.{suffix}"));
        assert_eq!(of("q_proj"), of("v_proj"));
        assert!(of("q_proj")[0] > 0.0 && of("q_proj") != of("o_proj"));
        let zeros = file.names().into_iter().filter(|name| name.ends_with("input_zero_point")).count();
        assert_eq!(zeros, if asymmetric { 14 } else { 0 }, "{recipe} {format}");
        if asymmetric {
            let new = temp.path().join(format!("{name}-new"));
            succeed(&[
                "recalibrate",
                text(&one),
                "--calibration-tokens",
                text(&windows),
                "--observer",
                "mse",
                "--out",
                text(&new),
            ]);
            let changed = crate::support::File::open(&new.join("model.safetensors"));
            let scale = "model.layers.1.self_attn.q_proj.input_scale";
            assert!(changed.f32(scale)[0] <= file.f32(scale)[0], "{recipe} {format}");
            succeed(&["verify", text(&new)]);
        }
        let out = temp.path().join("other");
        let without = ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)];
        assert!(fail(2, &without).contains("--calibration TEXT"), "{recipe}");
        assert!(!out.exists());
    }
    // Round trip: the same tensors, each global scale within one unit of the other's reciprocal.
    let (from, there, back) =
        (temp.path().join("nvfp-modelopt-false-1"), temp.path().join("there"), temp.path().join("back"));
    for (from, format, out) in [(&from, "compressed-tensors", &there), (&there, "modelopt", &back)] {
        let done =
            json(&["convert", text(from), "--format", format, "--out", text(out), "--json", "--quiet"]);
        assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
    }
}

/// NVFP4 with FP8 attention: each layer has its own weights and inputs, in every format that holds both.
#[test]
fn layers_may_have_other_inputs() {
    let temp = TempDir::new().unwrap();
    let model = crate::lint::synthetic_of(temp.path(), "bf16");
    let windows = temp.path().join("w.json");
    let many: Vec<Vec<usize>> =
        (0..4).map(|w| (0..30).map(|i| 3 + (i * i + w * 17) % 60).collect()).collect();
    fs::write(&windows, serde_json::json!(many).to_string()).unwrap();
    for format in ["compressed-tensors", "modelopt", "native"] {
        let out = temp.path().join(format);
        let mut arguments = vec!["quantize", text(&model), "--recipe", "nvfp4-fp8-attention"];
        arguments.extend(["--format", format, "--out", text(&out), "--json", "--quiet"]);
        assert!(fail(2, &arguments).contains("--calibration TEXT"), "{format}");
        arguments.extend(["--calibration-tokens", text(&windows)]);
        let done = json(&arguments);
        assert_eq!(done["verification"]["ok"], true, "{format}: {done}");
        assert_eq!(done["activations"], "nvfp4, fp8-e4m3-tensor@static", "{format}: {done}");
        let scheme_of = |module: &str| {
            let layers = done["layers"].as_array().unwrap();
            let name = format!("model.layers.1.{module}");
            layers.iter().find(|layer| layer["module"] == name).unwrap()["scheme"].clone()
        };
        assert_eq!(scheme_of("self_attn.q_proj"), "fp8-e4m3-tensor", "{format}");
        // Formats have rules of their own for its scales.
        assert!(scheme_of("mlp.up_proj").as_str().unwrap().starts_with("nvfp4"), "{format}");
        let back = temp.path().join(format!("{format}-back"));
        let other = if format == "modelopt" { "compressed-tensors" } else { "modelopt" };
        let done =
            json(&["convert", text(&out), "--format", other, "--out", text(&back), "--json", "--quiet"]);
        assert_eq!(done["verification"]["ok"], true, "{format} to {other}: {done}");
    }
    let recipe = temp.path().join("r.toml");
    let rule = "[[layers]]\nmodules = [\"*.mlp.*\"]\nweights = \"int8-channel\"\nactivations = \"none\"\n";
    fs::write(&recipe, format!("weights = \"int8-channel\"\nactivations = \"int8-token\"\n{rule}")).unwrap();
    let out = temp.path().join("none");
    succeed(&["quantize", text(&model), "--recipe", text(&recipe), "--out", text(&out), "--quiet"]);
    let config = fs::read_to_string(out.join("config.json")).unwrap();
    assert!(config.contains("group_1") && config.contains("\"input_activations\": null"), "{config}");
    fs::write(
        &recipe,
        format!("method = \"gptq\"\nweights = \"int8-channel\"\nactivations = \"int8-token\"\n{rule}"),
    )
    .unwrap();
    let no = temp.path().join("no");
    let arguments = ["quantize", text(&model), "--recipe", text(&recipe), "--out", text(&no)];
    let message = fail(2, &[&arguments[..], &["--calibration-tokens", text(&windows)]].concat());
    assert!(message.contains("layers.activations"), "{message}");
}

#[test]
fn a_calibration_is_checked() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (model(), temp.path().join("out"));
    let refused = |code: i32, more: &[&str]| {
        let mut arguments = vec!["quantize", text(&model), "--recipe", "gptq-int4-g8", "--out", text(&out)];
        arguments.extend(more);
        let message = fail(code, &arguments);
        assert!(!out.exists());
        message
    };
    assert!(refused(2, &["--calibration", "nowhere.txt"]).contains("got no such file"));
    let empty = temp.path().join("empty.txt");
    fs::write(&empty, " \n").unwrap();
    assert!(refused(2, &["--calibration", text(&empty)]).contains("empty.txt"));
    let calibration = calibration_text(temp.path());
    let with = |more: [&'static str; 2]| ["--calibration", text(&calibration), more[0], more[1]];
    assert!(refused(2, &with(["--samples", "0"])).contains("--samples"));
    assert!(refused(2, &with(["--length", "1"])).contains("--length: expected 2 to"));
    assert!(refused(2, &with(["--length", "99999999"])).contains("the model's context"));
    let windows = temp.path().join("w.json");
    fs::write(&windows, "[[1, 2, 99999]]").unwrap();
    let message = refused(2, &["--calibration-tokens", text(&windows)]);
    assert!(message.contains("w.json: window 0: token 2: ") && message.contains("got 99999"), "{message}");
    // Too few windows are a warning, and an error under --strict.
    let mut arguments =
        vec!["quantize", text(&model), "--recipe", "gptq-int4-g8", "--out", text(&out), "--strict"];
    arguments.extend(with(["--samples", "100000"]));
    let strict = mantissa(&arguments);
    assert_eq!(strict.status.code(), Some(1));
    assert!(
        stderr(&strict).contains("expected 100000 calibration samples") && !out.exists(),
        "{}",
        stderr(&strict)
    );
}

#[test]
fn token_windows_are_used_unchanged() {
    let temp = TempDir::new().unwrap();
    let (model, out, windows) = (model(), temp.path().join("out"), temp.path().join("w.json"));
    fs::write(&windows, "{\"a\": [[1, 2, 3, 4, 5], [6]], \"b\": [[7, 8, 9]]}").unwrap();
    let done = mantissa(&[
        "quantize",
        text(&model),
        "--recipe",
        "gptq-int8-channel",
        "--out",
        text(&out),
        "--calibration-tokens",
        &format!("{}:a", text(&windows)),
        // Not comparable here.
        "--samples",
        "1",
        "--length",
        "2",
    ]);
    assert_eq!(done.status.code(), Some(0), "{}", stderr(&done));
    // Six tokens are too few for a Hessian this wide.
    assert!(stderr(&done).contains("w.json:a: 6 tokens for layers of"), "{}", stderr(&done));
}

/// Coverage gaps are reported before any layer is solved, with the consequence, and are an error under
/// --strict.
#[test]
fn coverage_is_reported_before_solving() {
    let temp = TempDir::new().unwrap();
    let (windows, out) = (temp.path().join("w.json"), temp.path().join("out"));
    fs::write(&windows, "[[7, 9, 11], [5]]").unwrap();
    for (name, experts_of_a_token) in [("mixtral", 2), ("qwen3-moe", 3)] {
        let model = root().join("tests/data/tiny").join(name);
        let arguments = [
            "quantize",
            text(&model),
            "--recipe",
            "gptq-int8-channel",
            "--calibration-tokens",
            text(&windows),
            "--out",
            text(&out),
        ];
        let strict = mantissa(&[&arguments[..], &["--strict"]].concat());
        assert_eq!(strict.status.code(), Some(1), "{}", stderr(&strict));
        assert!(stderr(&strict).contains("--strict"), "{}", stderr(&strict));
        let left: Vec<_> =
            fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["w.json"], "nothing was begun");
        let run = mantissa(&[&arguments[..], &["--json"]].concat());
        let said = stderr(&run);
        assert!(
            said.contains("calibration: 4 tokens in 2 windows") && said.contains("expert down"),
            "{said}"
        );
        assert!(said.contains("are reached by no token, first model.layers.0"), "{said}");
        assert!(said.contains("its layers are rounded to nearest"), "{said}");
        let done = strict_json::parse(&run.stdout).unwrap();
        let coverage = &done["coverage"];
        assert_eq!((&coverage["tokens"], &coverage["tokens_run"]), (&4.into(), &4.into()));
        let inputs = coverage["inputs"].as_array().unwrap();
        let of = |site: &str, layer: usize| -> Vec<(u64, String)> {
            let layer = format!("model.layers.{layer}.");
            let of_layer = |input: &&serde_json::Value| {
                input["site"] == site && input["modules"][0].as_str().unwrap().starts_with(&layer)
            };
            let figures = |input: &serde_json::Value| {
                let fallback = input["fallback"].as_str().unwrap_or_default().to_owned();
                (input["tokens"].as_u64().unwrap(), fallback)
            };
            inputs.iter().filter(of_layer).map(figures).collect()
        };
        let experts = of("expert gate up", 1);
        assert_eq!(experts.iter().map(|(tokens, _)| tokens).sum::<u64>(), 4 * experts_of_a_token, "{name}");
        assert!(experts.iter().all(|(tokens, why)| (*tokens == 0) == why.contains("rounded to nearest")));
        assert_eq!(of("q k v", 0)[0].0, 4);
        // The output matches the report.
        let unseen = experts.iter().filter(|(tokens, _)| *tokens == 0).count();
        let fell_back = done["fallbacks"].as_array().unwrap().iter();
        let fell_back = fell_back.filter(|module| module.as_str().unwrap().contains("layers.1.")).count();
        assert_eq!(fell_back, 3 * unseen, "{name}");
        fs::remove_dir_all(&out).unwrap();

        // Routed to all experts, every expert sees every token.
        let all = json(&[&arguments[..], &["--route-all-experts", "--json"]].concat());
        let inputs = all["coverage"]["inputs"].as_array().unwrap();
        assert!(inputs.iter().all(|input| input["tokens"] == 4), "{name}: {inputs:?}");
        assert_eq!(
            (&all["route_all_experts"], &done["route_all_experts"]),
            (&true.into(), &serde_json::Value::Null)
        );
        let unseen = all["layers"].as_array().unwrap().iter().filter(|layer| {
            layer["fallback"].as_str().is_some_and(|why| why.contains("no calibration token"))
        });
        assert_eq!(unseen.count(), 0, "{name}");
        fs::remove_dir_all(&out).unwrap();
    }
    let plain = model();
    let dense = [
        "quantize",
        text(&plain),
        "--recipe",
        "gptq-int8-channel",
        "--calibration-tokens",
        text(&windows),
        "--out",
        text(&out),
        "--route-all-experts",
    ];
    let run = mantissa(&dense);
    assert!(
        stderr(&run).contains("--route-all-experts: not used: the model has no experts"),
        "{}",
        stderr(&run)
    );
}

/// Several texts share the samples by weight; distance to another text; held-out windows.
#[test]
fn texts_are_mixed_compared_and_held_out() {
    let temp = TempDir::new().unwrap();
    let model = model();
    let (a, b) = (calibration_text(temp.path()), temp.path().join("b.txt"));
    fs::write(&b, "Quite another text, about ships and the sea, without any numbers. ".repeat(40)).unwrap();
    let out = temp.path().join("out");
    let arguments = |more: &[&str]| {
        let all = [
            "quantize",
            text(&model),
            "--recipe",
            "gptq-int4-g8",
            "--overwrite",
            "--out",
            text(&out),
            "--length",
            "24",
        ];
        [&all[..], more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let (first, second) = (format!("{}:3", text(&a)), format!("{}:1", text(&b)));
    let mixed = ["--calibration", &first, "--calibration", &second, "--samples", "12", "--json"];
    let done = json(&arguments(&[&mixed[..], &["--traffic", text(&b)]].concat()));
    let calibration = &done["calibration"];
    assert_eq!(
        (&calibration["name"], &calibration["windows"]),
        (&"calibration.txt:3 + b.txt:1".into(), &12.into())
    );
    let known = &done["coverage"]["traffic"];
    assert!(known["tokens"].as_u64().unwrap() > 100, "{known}");
    let alone =
        ["--calibration", text(&a), "--samples", "12", "--json", "--hold-out", "3", "--traffic", text(&b)];
    let done = json(&arguments(&alone));
    assert_eq!((&done["calibration"]["windows"], &done["held_out"]["windows"]), (&12.into(), &3.into()));
    let judged = &done["layers"][0]["judged"];
    assert_eq!((&judged["of"], &judged["windows"]), (&"layer".into(), &"held-out".into()));
    // Without any of that text, more of it is unseen.
    let other = &done["coverage"]["traffic"];
    let figure = |of: &serde_json::Value, name: &str, i: usize| of[name][i].as_f64().unwrap();
    for i in 0..3 {
        assert!(figure(known, "unseen", i) < figure(other, "unseen", i), "{known} {other}");
    }
    assert!(figure(known, "distance", 1) < figure(other, "distance", 1), "{known} {other}");
    let refused = |more: &[&str]| fail(2, &arguments(&[more, &["--quiet"]].concat()));
    let all = ["--calibration", text(&a), "--samples", "3", "--hold-out", "100000"];
    assert!(refused(&all).contains("--hold-out: expected fewer than"));
    assert!(refused(&["--calibration", &format!("{}:-1", text(&a))]).contains("weight"));
    let empty = temp.path().join("empty.txt");
    fs::write(&empty, "").unwrap();
    assert!(refused(&["--calibration", text(&a), "--traffic", text(&empty)]).contains("got no token"));
}

/// Samples that the model generates extend the calibration, the same ones on any number of threads.
#[test]
fn generated_samples_extend_the_calibration() {
    let temp = TempDir::new().unwrap();
    let (model, a) = (model(), calibration_text(temp.path()));
    let quantized = |name: &str, more: &[&str]| {
        let out = temp.path().join(name);
        let all =
            ["quantize", text(&model), "--recipe", "gptq-int4-g8", "--out", text(&out), "--length", "24"];
        let all = [&all[..], &["--samples", "3", "--calibration", text(&a), "--json"], more].concat();
        (json(&all)["calibration"].clone(), fs::read(out.join("model.safetensors")).unwrap())
    };
    let (_, plain) = quantized("plain", &[]);
    let (calibration, more) = quantized("more", &["--generated-samples", "5", "--threads", "1"]);
    assert_eq!(calibration["windows"], 8, "{calibration}");
    assert_eq!(calibration["name"], "calibration.txt + 5 generated");
    assert!(plain != more);
    assert!(more == quantized("threads", &["--generated-samples", "5", "--threads", "3"]).1);
    assert!(more != quantized("seed", &["--generated-samples", "5", "--seed", "1"]).1);
    let alone =
        ["quantize", text(&model), "--recipe", "gptq-int4-g8", "--generated-samples", "5", "--out", "x"];
    let output = command().args(alone).current_dir(temp.path()).output().unwrap();
    assert!(output.status.success() && stderr(&output).contains("built-in text"), "{}", stderr(&output));
}

/// Conversations are rendered with the model's chat template, documents used as they are; the same tokens
/// passed by hand give the same bytes.
#[test]
fn conversations_are_calibrated_on_in_the_form_of_the_template() {
    let temp = TempDir::new().unwrap();
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}!{% endif %}";
    let folder = temp.path().join("m");
    fs::create_dir(&folder).unwrap();
    let folder = crate::chat::model(&folder, &template.into());
    let said = temp.path().join("said.jsonl");
    let lines = [
        serde_json::json!({"messages": [{"role": "user", "content": "Is it far?"}, {"role": "assistant", "content": "No."}]}),
        serde_json::json!({"text": "A plain document."}),
    ];
    fs::write(&said, format!("{}\n\n{}\n", lines[0], lines[1])).unwrap();
    let out = temp.path().join("out");
    let arguments = |more: [&str; 2], out: &Path| {
        let all = [
            "quantize",
            &folder,
            "--recipe",
            "gptq-int4-g8",
            "--overwrite",
            "--out",
            text(out),
            "--json",
            "--quiet",
        ];
        [&all[..], &more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let done = json(&arguments(["--calibration", text(&said)], &out));
    assert_eq!(
        (&done["calibration"]["name"], &done["calibration"]["windows"]),
        (&"said.jsonl".into(), &2.into())
    );
    let tokenizer = mantissa_model::Tokenizer::load(Path::new(&folder)).unwrap();
    let ids = |content: &str, bos: Bos| tokenizer.encode(content, bos).unwrap();
    let rendered = "<s>[user] Is it far?</s>[assistant] No.</s>";
    let windows = serde_json::json!([ids(rendered, Bos::Never), ids("A plain document.", Bos::Auto)]);
    let by_hand = temp.path().join("w.json");
    fs::write(&by_hand, windows.to_string()).unwrap();
    let other = temp.path().join("other");
    let same = json(&arguments(["--calibration-tokens", text(&by_hand)], &other));
    assert_eq!(done["calibration"]["sha256"], same["calibration"]["sha256"], "{windows}");
    assert_eq!(done["hashes"]["weights"], same["hashes"]["weights"]);
    fs::write(&said, "{\"text\": 3}\n").unwrap();
    let refused = fail(2, &arguments(["--calibration", text(&said)], &out));
    assert!(refused.contains("said.jsonl: line 1: expected"), "{refused}");
}
