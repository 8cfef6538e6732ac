//! `mantissa train --autopsy`: the operand at fault is named, and the setting that it proposes helps.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, root, succeed, text};

/// Settings of a run of two layers whose second one rounds output gradients to E4M3 without a scale.
fn settings(dir: &Path) -> String {
    let tokenizer = root().join("tests/data/tiny/llama2-gqa-tied");
    let model: Value = serde_json::from_slice(&fs::read(tokenizer.join("config.json")).unwrap()).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": model["vocab_size"], "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let line = |i: usize| format!("Line {} says that {} is before {}.\n==\n", i, i % 10, (i + 1) % 10);
    fs::write(dir.join("text.txt"), (0..100).map(line).collect::<String>()).unwrap();
    let toml = format!(
        "seed = 3\nout = \"runs/a\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\nstd = 0.08\n[data]\n\
         files = [\"text.txt\"]\nsplit = \"==\"\nlength = 32\nbatch = 2\n[precision]\nfprop.x = \"fp8-e4m3-token\"\n\
         dgrad.dy = \"fp8-e4m3\"\nkeep = {{ first = 0.5, dtype = \"f32\" }}\n[optimizer]\nlr = 5e-3\n[schedule]\nsteps = 6\n\
         warmup = 2\n[checkpoint]\nevery = 3\n[telemetry]\nevery = 3\n",
        text(&tokenizer)
    );
    let path = dir.join("run.toml");
    fs::write(&path, toml).unwrap();
    text(&path).to_owned()
}

/// Names and bytes of all files of a folder.
fn content(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => all.extend(content(&path)),
            false => all.push((text(&path).to_owned(), fs::read(&path).unwrap())),
        }
    }
    all.sort();
    all
}

#[test]
fn the_operand_at_fault_is_named_and_the_proposed_setting_helps() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path());
    let done = json(&["train", &config, "--json", "--quiet"]);
    let worst = &done["worst_gemms"][0];
    assert_eq!(
        (&worst["gemm"], worst["state"] == "dead" || worst["sqnr_db"].as_f64().unwrap() < 3.0),
        (&"dgrad dx".into(), true),
        "{done}"
    );
    let run = temp.path().join("runs/a");
    let before = content(&run);
    let found = json(&["train", "--autopsy", text(&run), "--step", "5", "--json", "--quiet"]);
    assert!(content(&run) == before, "the run's folder is unchanged");
    let culprit = &found["culprits"][0];
    assert_eq!(
        (&culprit["layer"], &culprit["gemm"], &culprit["operand"]),
        (&1.into(), &"dgrad".into(), &"dy".into()),
        "{found}"
    );
    assert!(culprit["health"]["underflowed"].as_f64().unwrap() > 0.5, "{culprit}");
    assert!(found["checkpoint"].as_str().unwrap().ends_with("step-0000000003.safetensors"), "{found}");
    // The replay has the run's loss, bit for bit.
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    let line: Value = serde_json::from_str(log.lines().nth(4).unwrap()).unwrap();
    assert_eq!(found["loss"]["run"], line["loss"]);
    let told = succeed(&["train", "--autopsy", text(&run), "--step", "5"]);
    assert!(told.contains("dgrad.dy") && told.contains("fix "), "{told}");
    // The proposed setting makes the step sound.
    let set: Vec<&str> =
        culprit["remedy"]["set"].as_array().unwrap().iter().map(|set| set.as_str().unwrap()).collect();
    assert_eq!(set, ["precision.dgrad.dy=\"fp8-e4m3-token\""]);
    succeed(&["train", &config, "--set", "out=runs/b", "--set", set[0], "--quiet"]);
    let sound =
        json(&["train", "--autopsy", text(&temp.path().join("runs/b")), "--step", "5", "--json", "--quiet"]);
    assert_eq!(
        (&sound["verdict"], sound["culprits"].as_array().unwrap().len()),
        (&"sound".into(), 0),
        "{sound}"
    );
    // The page shows the matmuls.
    succeed(&["report", text(&run), "--quiet"]);
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert!(page.contains("<h2>Matmuls</h2>") && page.contains("dgrad dx"), "no map of the matmuls");
}

/// The packed lines of the run are replayed.
#[test]
fn a_run_on_prompts_is_examined() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path());
    let line = |i: usize| {
        serde_json::json!({ "prompt": format!("Line {i}"), "completion": format!(" is before {}", i + 1) })
            .to_string()
            + "\n"
    };
    fs::write(temp.path().join("chat.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
    let chat = ["--set", "data.chat=true", "--set", "data.files=[\"chat.jsonl\"]", "--quiet"];
    succeed(&[&["train", &config][..], &chat].concat());
    let run = temp.path().join("runs/a");
    let found = json(&["train", "--autopsy", text(&run), "--step", "5", "--json", "--quiet"]);
    let culprit = &found["culprits"][0];
    assert_eq!((&culprit["gemm"], &culprit["operand"]), (&"dgrad".into(), &"dy".into()), "{found}");
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    let line: Value = serde_json::from_str(log.lines().nth(4).unwrap()).unwrap();
    assert_eq!(found["loss"]["run"], line["loss"]);
}

#[test]
fn steps_and_folders_that_cannot_be_examined_are_refused() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path());
    let scaled = "precision.dgrad.dy=\"fp8-e4m3-token\"";
    succeed(&["train", &config, "--set", scaled, "--quiet"]);
    let run = temp.path().join("runs/a");
    let line = fail(2, &["train", "--autopsy", text(&run), "--step", "8", "--quiet"]);
    assert!(line.contains("--step: expected 1 to 7"), "{line}");
    let line = fail(2, &["train", "--autopsy", text(&run), "--quiet"]);
    assert!(line.contains("fix: name the step with --step"), "{line}");
    let line = fail(2, &["train", "--autopsy", text(temp.path()), "--quiet"]);
    assert!(line.contains("the folder of a training run"), "{line}");
}
