//! Single messages and options that once confused.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::main_job::{tiny, windows};
use crate::support::{fail, json, left_to_nightly, mantissa, stderr, succeed, text};

#[test]
fn options_that_token_windows_ignore_are_named() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let out = temp.path().join("out");
    let quantize = [
        "quantize",
        text(&model),
        "--recipe",
        "gptq-int4-g32",
        "--calibration-tokens",
        &tokens,
        "--out",
        text(&out),
    ];
    let said = stderr(&mantissa(&[&quantize[..], &["--samples", "4", "--length", "16"]].concat()));
    assert!(
        said.contains("warning: --samples, --length: ignored, because the windows of --calibration-tokens"),
        "{said}"
    );
    fs::remove_dir_all(&out).unwrap();
    assert!(!stderr(&mantissa(&quantize)).contains("ignored"));
    let eval = ["eval", text(&model), "--tokens", &tokens, "--context", "8", "--stride", "4"];
    let said = stderr(&mantissa(&eval));
    assert!(
        said.contains("warning: --context, --stride: ignored, because the windows of --tokens"),
        "{said}"
    );
}

#[test]
fn a_pattern_without_a_layer_is_quoted_as_written() {
    let temp = TempDir::new().unwrap();
    let recipe = temp.path().join("r.toml");
    fs::write(
        &recipe,
        "weights = \"int4-g32\"\n[[layers]]\nmodules = [\"*.nothing\"]\nweights = \"int8-g32\"\n",
    )
    .unwrap();
    let output = mantissa(&["quantize", "demo", "--recipe", text(&recipe), "--dry-run"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("recipe pattern \"*.nothing\" matches no layer"), "{said}");
}

#[test]
fn settings_of_training_are_named_without_brackets_of_the_parser() {
    let temp = TempDir::new().unwrap();
    let file = temp.path().join("t.toml");
    let whole = "out = \"run\"\n[model]\nconfig = \"c\"\ntokenizer = \"t\"\n[data]\nfiles = [\"a\"]\nlength = 8\nbatch = 1\n[optimizer]\nlr = 0.1\n[schedule]\nsteps = 1\n";
    fs::write(&file, format!("{whole}[lora]\nrank = 4\n")).unwrap();
    let line = fail(2, &["train", text(&file)]);
    assert!(line.contains("t.toml: settings: unknown key `lora`, expected one of `seed`"), "{line}");
    fs::write(&file, whole.replace("[optimizer]\nlr = 0.1\n", "")).unwrap();
    let line = fail(2, &["train", text(&file)]);
    assert!(line.contains("t.toml: settings: missing keys, such as optimizer.lr = 1e-3; fix: "), "{line}");
    fs::write(&file, whole.replace("lr = 0.1", "lr = \"x\"")).unwrap();
    let line = fail(2, &["train", text(&file)]);
    assert!(line.contains("t.toml: optimizer.lr: expected a number, got \"x\""), "{line}");
}

#[test]
fn training_from_a_quantized_folder_is_refused_by_name() {
    let temp = TempDir::new().unwrap();
    let dense = tiny("llama2-gqa-tied");
    let init = temp.path().join("init");
    succeed(&["quantize", text(&dense), "--recipe", "rtn-int4-g8", "--out", text(&init), "--quiet"]);
    fs::write(temp.path().join("a.txt"), "the cat sat on the mat\n".repeat(50)).unwrap();
    let settings = format!(
        "out = \"run\"\n[model]\nconfig = \"{0}/config.json\"\ntokenizer = \"{0}\"\ninit = \"init\"\n[data]\nfiles = [\"a.txt\"]\nlength = 8\nbatch = 1\n[optimizer]\nlr = 0.1\n[schedule]\nsteps = 1\n",
        text(&dense)
    );
    let file = temp.path().join("t.toml");
    fs::write(&file, settings).unwrap();
    let line = fail(2, &["train", text(&file)]);
    let expected =
        "model.init: expected a dense model folder, got weights in format compressed-tensors; fix: ";
    assert!(line.contains(expected), "{line}");
}

/// A GGUF file, and a folder with a quantized embedding, become folders that train by the command of the error; the adapter fits the
/// file too.
#[test]
fn what_cannot_be_fine_tuned_is_converted_by_the_fix() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    fs::write(at("a.txt"), "the cat sat on the mat\n".repeat(50)).unwrap();
    let (file, folder) = (at("m.gguf"), at("m"));
    let quantize = ["quantize", "demo", "--embeddings", "q8_0", "--quiet", "--recipe"];
    succeed(&[&quantize[..], &["rtn-q4_1", "--out", text(&file)]].concat());
    succeed(&["convert", text(&file), "--format", "native", "--out", text(&folder), "--quiet"]);
    for (i, (model, found)) in
        [(&file, "a GGUF file"), (&folder, "a quantized model.embed_tokens")].iter().enumerate()
    {
        let (plain, out) = (at(&format!("plain-{i}")), at(&format!("out-{i}")));
        let tune = |model: &str| {
            let short =
                ["--length", "16", "--batch", "1", "--steps", "2", "--validation", "0", "--quiet", "--out"];
            let arguments =
                ["finetune", model, "--data", text(&at("a.txt")), "--adapter", "lora"].map(str::to_owned);
            let short = short.map(str::to_owned);
            arguments.into_iter().chain(short).chain([text(&out).to_owned()]).collect::<Vec<_>>()
        };
        let line = fail(2, &tune(text(model)));
        assert!(
            line.contains("model.init: expected ") && line.contains(&format!("got {found}; fix: ")),
            "{line}"
        );
        let fix = line.split("fix: mantissa ").nth(1).unwrap().split(',').next().unwrap();
        let fix = fix.trim().replace("FOLDER", text(&plain));
        let fix: Vec<&str> = fix.split(' ').chain(["--quiet"]).collect();
        succeed(&fix);
        succeed(&tune(text(&plain)));
        let adapter = out.join("adapter");
        succeed(&["run", text(model), "--adapter", text(&adapter), "-p", "the cat", "-n", "2", "--quiet"]);
    }
}

/// The reader follows the data, so the text shows no fault; the label misleads other readers.
#[test]
fn doctor_reports_a_wrong_checkpoint_format() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("g");
    succeed(&[
        "quantize",
        "demo",
        "--recipe",
        "rtn-int4-g32",
        "--format",
        "gptq",
        "--out",
        text(&out),
        "--quiet",
    ]);
    succeed(&["doctor", text(&out), "--quiet"]);
    for name in ["config.json", "quantize_config.json"] {
        let file = out.join(name);
        let old = fs::read_to_string(&file).unwrap();
        assert!(old.contains("\"checkpoint_format\": \"gptq\""), "{old}");
        fs::write(
            &file,
            old.replace("\"checkpoint_format\": \"gptq\"", "\"checkpoint_format\": \"gptq_v2\""),
        )
        .unwrap();
    }
    for more in [&[][..], &["--reference", "demo"]] {
        let output = mantissa(&[&["doctor", text(&out), "--quiet"], more].concat());
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        let said = stderr(&output);
        assert!(
            said.contains("quantization_config.checkpoint_format: zero points are stored minus one"),
            "{said}"
        );
        assert!(said.contains("fix: set checkpoint_format to \"gptq\""), "{said}");
    }
}

#[test]
fn run_has_long_names_and_takes_negative_numbers() {
    let short = succeed(&["run", "demo", "-p", "Once", "-n", "4", "--quiet"]);
    for name in ["--max-tokens", "--n-predict"] {
        assert_eq!(succeed(&["run", "demo", "-p", "Once", name, "4", "--quiet"]), short);
    }
    let line = fail(2, &["run", "demo", "-p", "Once", "--temperature", "-1"]);
    assert!(line.contains("temperature: expected 0 or a finite number greater than 0, got -1"), "{line}");
}

#[test]
fn help_of_help_is_help() {
    let plain = succeed(&["help"]);
    for arguments in [["help", "--help"], ["help", "-h"]] {
        assert_eq!(succeed(&arguments), plain);
    }
    assert!(succeed(&["help", "run", "--help"]).contains("--temperature"));
}

/// Methods that learn with the model cannot rotate at run time; a name then rotates only what folds into weights.
#[test]
fn learned_methods_follow_rotations_without_a_recipe_file() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "f32"), windows(temp.path()));
    for recipe in ["rotate-autoround-int4-g32", "spin-autoround-int4-g32"] {
        let arguments =
            ["quantize", text(&model), "--recipe", recipe, "--calibration-tokens", &tokens, "--dry-run"];
        assert!(succeed(&arguments).contains("layers quantized by"), "{recipe}");
    }
    let file = temp.path().join("r.toml");
    fs::write(
        &file,
        "method = \"autoround\"\nweights = \"int4-g32\"\ntransform = \"rotate\"\n[rotate]\nonline = true\n",
    )
    .unwrap();
    let line = fail(
        2,
        &["quantize", text(&model), "--recipe", text(&file), "--calibration-tokens", &tokens, "--dry-run"],
    );
    assert!(line.contains("online = false in [rotate] of the recipe file"), "{line}");
}

#[test]
fn fallbacks_of_small_shapes_are_in_the_summary_and_k_quants_in_the_report() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q.gguf");
    let arguments = ["quantize", "demo", "--recipe", "q2_k", "--out", text(&out), "--quiet"];
    let shown = succeed(&arguments);
    assert!(shown.contains("35 of 35 layers: ") && shown.contains("iq4_nl instead of q2_k"), "{shown}");
    let quality = fs::read_to_string(temp.path().join("q.gguf.quality.json")).unwrap();
    let quality: Value = serde_json::from_str(&quality).unwrap();
    assert_eq!((&quality["recipe"], &quality["method"]), (&"q2_k".into(), &"k-quant".into()));
    let found = json(&["verify", text(&out), "--reference", "demo", "--json", "--quiet"]);
    assert_eq!(found["ok"], true, "{found}");
    for (recipe, method) in [("iq4_nl", "i-quant"), ("q8_0", "rtn")] {
        let out = temp.path().join(format!("{recipe}.gguf"));
        let done = json(&["quantize", "demo", "--recipe", recipe, "--out", text(&out), "--json", "--quiet"]);
        assert_eq!(done["method"], method, "{recipe}");
    }
}
