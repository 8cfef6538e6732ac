//! `mantissa finetune` through the command line: adapters that are written, merged, quantized, killed and resumed.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_num::round::random_u32;
use serde_json::Value;
use tempfile::TempDir;

use crate::stops::stopped_at_any_time;
use crate::support::{fail, json, succeed, text};

/// Writes a text per line, all in one voice.
fn data(dir: &Path) -> PathBuf {
    let line = |i: usize| {
        let words = ["thou art", "the king", "my lord", "good night", "sweet love", "no more"];
        let said = (0..12).map(|k| words[(i * 5 + k * k) % words.len()]).collect::<Vec<_>>().join(", ");
        serde_json::json!({ "text": format!("HAMLET:\nO {said}!\n\n") }).to_string() + "\n"
    };
    let path = dir.join("voice.jsonl");
    fs::write(&path, (0..60).map(line).collect::<String>()).unwrap();
    path
}

const SMALL: [&str; 10] = ["--length", "64", "--batch", "2", "--steps", "24", "--lr", "4e-3", "--rank", "4"];

/// Returns [`SMALL`] without the options that `more` gives, and `more`.
fn with_small<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let kept = SMALL.chunks(2).filter(|option| !more.contains(&option[0])).flatten().copied();
    kept.chain(more.iter().copied()).collect()
}

fn arguments<'a>(data: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let first = ["finetune", "demo", "--data", text(data), "--out", text(out), "--quiet"];
    [&first[..], &with_small(more)].concat()
}

fn losses(run: &Path) -> Vec<f64> {
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap()).collect()
}

/// Questions with answers under other names are told by the renaming that makes them trainable, and a field of a text is taken
/// where it is named.
#[test]
fn pairs_of_other_names_are_refused_with_their_renaming() {
    let temp = TempDir::new().unwrap();
    let (file, out) = (temp.path().join("pairs.jsonl"), temp.path().join("run"));
    let write = |asked: &str, answer: &str| {
        let line = |i: usize| {
            format!("{{\"{asked}\": \"What is {i} and {i}? \", \"{answer}\": \"It is {}.\"}}\n", 2 * i)
        };
        fs::write(&file, (0..40).map(line).collect::<String>()).unwrap();
    };
    for (asked, answer) in [("question", "answer"), ("input", "output"), ("Query", "Response")] {
        write(asked, answer);
        let line = fail(2, &arguments(&file, &out, &[]));
        let fix = format!("fix: rename \"{asked}\" to \"prompt\" and \"{answer}\" to \"completion\"");
        assert!(
            line.contains(&fix) && line.contains("pairs.jsonl: line 1: expected one of {\"messages\""),
            "{line}"
        );
    }
    write("prompt", "response");
    let line = fail(2, &arguments(&file, &out, &[]));
    assert!(line.contains("fix: rename \"response\" to \"completion\""), "{line}");
    write("prompt", "completion");
    let done = json(&arguments(&file, &out, &["--steps", "1", "--json"]));
    assert_eq!(done["data"]["conversations"], 40, "{done}");
    // A text of another name, without a number of steps: its tokens are counted for them.
    write("title", "body");
    let line = fail(2, &arguments(&file, &out, &["--restart"]));
    assert!(line.contains("fix: name the field of the text (--set data.field=NAME)"), "{line}");
    let passes =
        ["finetune", "demo", "--data", text(&file), "--out", text(&out), "--quiet", "--json", "--restart"];
    let done = json(&[&passes[..], &["--length", "32", "--set", "data.field=title"]].concat());
    assert_eq!(done["data"]["documents"], 40, "{done}");
}

#[test]
fn qlora_learns_and_writes_what_peft_and_run_read() {
    let temp = TempDir::new().unwrap();
    let (data, out) = (data(temp.path()), temp.path().join("tuned"));
    let planned = json(&arguments(&data, &out, &["--dry-run", "--json"]));
    let memory = &planned["memory"];
    let bytes = |name: &str| memory[name].as_u64().unwrap();
    assert!(!out.exists());
    // 984k linear weights in 4.127 bits, and 264k values in bf16.
    assert!((1_000_000..1_100_000).contains(&bytes("frozen weights")), "{planned}");
    assert!(bytes("optimizer state") < 1_100_000 && bytes("parameters") < 300_000, "{planned}");
    let done = json(&arguments(&data, &out, &["--merge", "--requantize", "int4-g32", "--json"]));
    let losses = losses(&out);
    assert!(losses.len() == 24 && losses[23] < 0.8 * losses[0], "{losses:?}");
    let settings: Value =
        serde_json::from_slice(&fs::read(out.join("adapter/adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&settings["peft_type"], &settings["r"], &settings["lora_alpha"]),
        (&"LORA".into(), &4.into(), &32.into())
    );
    let tensors = json(&["inspect", text(&out.join("adapter/adapter_model.safetensors")), "--json"]);
    assert!(tensors.to_string().contains("lora_A"), "{tensors}");
    // Merging rounds to bf16, as the source is stored; 4 bits lose more.
    let kl = |name: &str| done[name].as_f64().unwrap();
    assert!(kl("merged_kl") < 1e-3 && kl("quantized_kl") > 3.0 * kl("merged_kl"), "{done}");
    let prompt = ["-p", "HAMLET:", "-n", "8", "--quiet"];
    for model in ["model", "quantized"] {
        succeed(&[&["run", text(&out.join(model))][..], &prompt].concat());
    }
    // A finished run is not started again unless requested.
    let again = json(&arguments(&data, &out, &["--merge", "--requantize", "int4-g32", "--json"]));
    assert_eq!(again["already_complete"], true);
    for figure in ["merged_kl", "quantized_kl", "loss", "adapter", "model", "quantized", "parameters", "next"]
    {
        assert!(!done[figure].is_null() && done[figure] == again[figure], "{figure}: {again}");
    }
    // The base that adapters are trained on is not the one that they are put on.
    let planned = succeed(&arguments(&data, &temp.path().join("plan"), &["--dry-run"]));
    assert!(planned.contains("adapter qlora, rank 4, alpha 32, on weights rounded to nf4-dq"), "{planned}");
    let line = fail(2, &arguments(&data, &out, &["--merge"]));
    assert!(line.contains("finished its 24 steps with other settings (adapter.requantize"), "{line}");
    assert!(line.contains("fix: --out FOLDER for another run"), "{line}");
    succeed(&arguments(&data, &out, &["--restart", "--steps", "1"]));
    assert!(out.join("adapter").exists() && !out.join("model").exists() && !out.join("quantized").exists());
}

/// Every kind of fine-tuning, from a dense and from a quantized model.
#[test]
fn every_kind_of_adapter_trains() {
    let temp = TempDir::new().unwrap();
    let data = data(temp.path());
    for (i, more) in [
        &[
            "--adapter",
            "lora",
            "--policy",
            "fp32",
            "--dropout",
            "0.1",
            "--target",
            "q_proj",
            "--target",
            "down_proj",
        ][..],
        &["--adapter", "dora", "--base-scheme", "int3-g32", "--rslora", "--train-module", "*norm"],
        &[
            "--adapter",
            "qlora",
            "--base-scheme",
            "int2-g32",
            "--loftq",
            "2",
            "--optimizer",
            "sgd",
            "--lr",
            "0.3",
        ],
        &["--adapter", "none", "--lr", "1e-3"],
    ]
    .into_iter()
    .enumerate()
    {
        let out = temp.path().join(i.to_string());
        succeed(&arguments(&data, &out, &[more, &["--steps", "8"]].concat()));
        let losses = losses(&out);
        assert!(losses[7] < losses[0], "{more:?}: {losses:?}");
        let full = more.contains(&"none");
        assert_eq!(out.join("adapter/adapter_model.safetensors").is_file(), !full);
        assert_eq!(out.join("model/model.safetensors").is_file(), full);
    }
    // A quantized model is taken as it is.
    let quantized = temp.path().join("q");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&quantized), "--quiet"]);
    let out = temp.path().join("over");
    let first = ["finetune", text(&quantized), "--data", text(&data), "--out", text(&out), "--quiet"];
    succeed(&[&first[..], &with_small(&["--adapter", "lora", "--steps", "4"])].concat());
    let losses = losses(&out);
    assert!(losses[3] < losses[0], "{losses:?}");
}

/// Writes thirty prompts with answers.
fn answers(dir: &Path) -> PathBuf {
    let line = |i: usize| {
        let (name, word) = [("Ann", "red"), ("Bob", "blue"), ("Cid", "green")][i % 3];
        serde_json::json!({ "prompt": format!("The hat of {name} is"), "completion": format!(" {word}.") })
    };
    let data = dir.join("answers.jsonl");
    fs::write(&data, (0..30).map(|i| line(i).to_string() + "\n").collect::<String>()).unwrap();
    data
}

/// Prompts with answers: the loss counts the answers, and short lines share a window.
#[test]
fn answers_are_learned() {
    let temp = TempDir::new().unwrap();
    let data = answers(temp.path());
    let out = temp.path().join("tuned");
    let more = ["--batch", "1", "--policy", "fp32", "--merge", "--json"];
    let done = json(&arguments(&data, &out, &more));
    let losses = losses(&out);
    assert!(losses[23] < 0.5 * losses[0], "{losses:?}");
    // Fewer targets than inputs.
    assert!(done["tokens"].as_u64().unwrap() < 24 * 64 / 2, "{done}");
    assert!(done["merged_kl"].as_f64().unwrap() < 1e-3, "{done}");
    succeed(&arguments(&data, &out, &[&more[..5], &["--resume"]].concat()));
}

/// Returns the losses and the bytes of the adapter.
fn result(run: &Path) -> (Vec<f64>, Vec<u8>) {
    (losses(run), fs::read(run.join("adapter/adapter_model.safetensors")).unwrap())
}

/// QLoRA with dropout and 8-bit moments on texts.
#[test]
fn a_run_killed_at_any_time_resumes_bit_exactly() {
    let temp = TempDir::new().unwrap();
    let more = ["--moments", "8bit", "--dropout", "0.1", "--set", "checkpoint.every=5"];
    stopped_run_ends_alike(temp.path(), &data(temp.path()), &more);
}

/// QLoRA with 4-bit moments on prompts, a tenth of which is held out.
#[test]
fn a_run_with_validation_stopped_at_any_time_resumes_bit_exactly() {
    let temp = TempDir::new().unwrap();
    let more = ["--moments", "4bit", "--validation", "0.1", "--set", "checkpoint.every=5", "--batch", "1"];
    stopped_run_ends_alike(temp.path(), &answers(temp.path()), &more);
    let log = fs::read_to_string(temp.path().join("killed/log.jsonl")).unwrap();
    let held = |run: &str| fs::read(temp.path().join(run).join("validation.safetensors")).unwrap();
    assert_eq!(log.matches("validation_loss").count(), 8, "{log}");
    assert_eq!(held("whole"), held("killed"));
}

/// Stops a run at random steps, by SIGKILL and SIGTERM in turn; losses and adapter are those of a whole run.
fn stopped_run_ends_alike(dir: &Path, data: &Path, more: &[&str]) {
    let (whole, out) = (dir.join("whole"), dir.join("killed"));
    succeed(&arguments(data, &whole, &[more, &["--threads", "1"]].concat()));
    // Waits longer each time, so that a busy machine also reaches its first checkpoint.
    let wait = |trial| 60 + 30 * trial + u64::from(random_u32(5, trial) % 300);
    let kills = stopped_at_any_time(&out, &arguments(data, &out, more), wait);
    println!("{kills} kills");
    assert!(result(&out) == result(&whole), "after {kills} kills");
}

/// LoftQ changes the base: the adapter runs on the base written with it, and on no other.
#[test]
fn an_adapter_of_loftq_runs_on_its_own_base_only() {
    let temp = TempDir::new().unwrap();
    let (data, out) = (data(temp.path()), temp.path().join("tuned"));
    let more = ["--base-scheme", "int3-g32", "--loftq", "2", "--steps", "4", "--merge", "--json"];
    let done = json(&arguments(&data, &out, &more));
    let (base, adapter) = (out.join("base"), out.join("adapter"));
    assert_eq!(done["base"], text(&base));
    let prompt = ["-p", "HAMLET:", "-n", "8", "--quiet"];
    let line = fail(2, &[&["run", "demo", "--adapter", text(&adapter)][..], &prompt].concat());
    assert!(line.contains(text(&base)) && line.contains("SHA-256") && line.contains("fix: give"), "{line}");
    succeed(&[&["run", text(&base), "--adapter", text(&adapter)][..], &prompt].concat());
    // The merged model is stored in 16 bits.
    let model = out.join("model");
    let compare = ["--reference", text(&model), "--text", "default", "--context", "64", "--json", "--quiet"];
    let kl = |more: &[&str]| json(&[&["eval", text(&base)], more, &compare].concat())["kl"].as_f64().unwrap();
    let (adapted, without) = (kl(&["--adapter", text(&adapter)]), kl(&[]));
    assert!(adapted < 1e-3 && without > 10.0 * adapted, "{adapted} {without}");
    let settings: Value =
        serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(settings["base_model_name_or_path"], text(&base));
}

/// Training, merging and the comparison of both, within 5 % of the prediction.
#[test]
fn the_memory_of_a_run_matches_the_dry_run() {
    let temp = TempDir::new().unwrap();
    let data = data(temp.path());
    for (i, more) in [&[][..], &["--merge"], &["--requantize", "int4-g32"]].into_iter().enumerate() {
        let out = temp.path().join(i.to_string());
        let small = ["--length", "256", "--steps", "2", "--threads", "1", "--json"];
        let done = json(&arguments(&data, &out, &[&small[..], more].concat()));
        let Some(measured) = done["measured_peak_memory"].as_f64() else {
            println!("skipped: the system does not say what memory a process has had");
            return;
        };
        let ratio = measured / done["predicted_peak_memory"].as_f64().unwrap();
        println!("{more:?}: {measured:.3e} measured, {ratio:.3} of the prediction");
        assert!((0.95..=1.05).contains(&ratio), "{more:?}: {done}");
    }
}

#[test]
fn options_at_fault_are_named_and_leave_nothing() {
    let temp = TempDir::new().unwrap();
    let (data, out) = (data(temp.path()), temp.path().join("tuned"));
    for (more, part) in [
        (&["--base-scheme", "nf3"][..], "adapter.base"),
        (&["--target", "wq"], "targets: expected names of this model's linear layers (q_proj, k_proj, "),
        (&["--validation", "0.6"], "--validation: expected a share from 0 to 0.5"),
        (&["--patience", "2", "--validation", "0"], "--patience"),
        (&["--rank", "0"], "adapter.rank: expected a whole number from 1 to 65536, got 0"),
        (&["--adapter", "lora", "--loftq", "1"], "base scheme such as nf4-dq"),
        (&["--adapter", "none", "--merge"], "--merge"),
        (&["--policy", "fp4"], "precision.policy"),
        (&["--length", "4096"], "max_position_embeddings"),
        (&["--requantize", "int99"], "adapter.requantize"),
    ] {
        let line = fail(2, &arguments(&data, &out, more));
        assert!(line.contains(part), "{more:?}: {line}");
        assert!(!out.join("config.toml").exists(), "{more:?}");
    }
    let named_text = temp.path().join("voice.txt");
    fs::copy(&data, &named_text).unwrap();
    let line = fail(2, &arguments(&named_text, &out, &[]));
    assert!(line.contains("voice.txt: expected a text, or a name that ends in .jsonl or .json"), "{line}");
    let none = temp.path().join("none.jsonl");
    let line = fail(2, &arguments(&none, &out, &[]));
    assert!(line.contains("none.jsonl"), "{line}");
}
