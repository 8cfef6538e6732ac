//! Runs in which something stops learning: told when it happens, in the outcome, the report and the autopsy; and what only
//! looks like it is not told.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{fail, json as run_json, mantissa, root, sampled, stderr, succeed, text, write};

/// Settings of a short run of a model of four layers, or of a mixture of 16 experts.
fn settings(dir: &Path, experts: bool) -> String {
    let tokenizer = root().join("tests/data/tiny/llama2-gqa-tied");
    let model: Value = serde_json::from_slice(&fs::read(tokenizer.join("config.json")).unwrap()).unwrap();
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": model["vocab_size"], "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    if experts {
        config["architectures"] = json!(["MixtralForCausalLM"]);
        config["model_type"] = json!("mixtral");
        config["num_local_experts"] = json!(16);
        config["num_experts_per_tok"] = json!(2);
        config["intermediate_size"] = json!(32);
    }
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let line = |i: usize| format!("Line {} says that {} is before {}.\n==\n", i, i % 10, (i + 1) % 10);
    fs::write(dir.join("text.txt"), (0..100).map(line).collect::<String>()).unwrap();
    let toml = format!(
        "seed = 3\nout = \"runs/a\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\n[data]\nfiles = [\"text.txt\"]\n\
         split = \"==\"\nlength = 32\nbatch = 2\n[optimizer]\nlr = 1e-3\n[schedule]\nsteps = 6\nwarmup = 2\n\
         [checkpoint]\nevery = 3\n[telemetry]\nevery = 3\n",
        text(&tokenizer)
    );
    let path = dir.join("run.toml");
    fs::write(&path, toml).unwrap();
    text(&path).to_owned()
}

/// Arguments of the run with these settings, whose folder is `runs/NAME`.
fn arguments(config: &str, name: &str, set: &[&str]) -> Vec<String> {
    let out = format!("out=runs/{name}");
    let sets = set.iter().copied().chain([out.as_str()]).flat_map(|set| ["--set".to_owned(), set.to_owned()]);
    ["train".to_owned(), config.to_owned()].into_iter().chain(sets.collect::<Vec<_>>()).collect()
}

fn train(config: &str, name: &str, set: &[&str], more: &[&str]) -> std::process::Output {
    let more = more.iter().map(|more| (*more).to_owned());
    mantissa(&arguments(config, name, set).into_iter().chain(more).collect::<Vec<_>>())
}

/// Trains; returns the report and standard error.
fn done(config: &str, name: &str, set: &[&str]) -> (Value, String) {
    let output = train(config, name, set, &["--json"]);
    assert!(output.status.success(), "{set:?}: {}", stderr(&output));
    (serde_json::from_slice(&output.stdout).unwrap(), stderr(&output))
}

fn log(run: &Path) -> Vec<Value> {
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn page(run: &Path) -> String {
    succeed(&["report", text(run), "--quiet"]);
    fs::read_to_string(run.join("report.html")).unwrap()
}

const UNSCALED: [&str; 4] =
    ["precision.policy=fp8-current", "precision.dgrad.dy=\"fp8-e4m3\"", "model.std=0.005", "data.batch=32"];

/// Output gradients in E4M3 without a scale: below the last layer nothing arrives.
#[test]
fn a_run_whose_layers_stop_learning_says_so() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    let (report, said) = done(&config, "a", &UNSCALED);
    let run = temp.path().join("runs/a");
    let outcome = report["outcome"].as_str().unwrap();
    assert!(outcome.starts_with("done, but 28 of 38 parameters stopped learning"), "{outcome}");
    // Behind the products of dgrad: all but down_proj, o_proj, the embedding and the last norm.
    let dead = report["learning"]["dead"].as_array().unwrap();
    assert_eq!((&report["learning"]["parameters"], dead.len()), (&38.into(), 28), "{report}");
    let learns = ["down_proj", "o_proj", "embed_tokens", "model.norm"];
    let names = dead.iter().map(|dead| dead["parameter"].as_str().unwrap());
    assert!(names.clone().all(|name| learns.iter().all(|part| !name.contains(part))), "{dead:?}");
    // At the step where it happens, once.
    let warnings: Vec<&str> = said.lines().filter(|line| line.starts_with("warning: step ")).collect();
    assert!(
        warnings[0].starts_with("warning: step 1: ") && warnings[0].contains("have a gradient of 0"),
        "{said}"
    );
    assert!(warnings[0].contains(&format!("mantissa train --autopsy {}", run.display())), "{said}");
    let lines = log(&run);
    let first = &lines[0]["not_learning"];
    assert_eq!(first["parameters"], 38);
    assert_eq!(first["lost"][0]["operand"], "dgrad dy", "{first}");
    // The cells stay, and say it.
    let html = page(&run);
    assert!(html.contains(">dead</td>") && html.contains("Done, but "), "no dead cell");
    assert_eq!(report["worst_gemms"][0]["state"], "dead", "{report}");
    let told = String::from_utf8(train(&config, "told", &UNSCALED, &["--quiet"]).stdout).unwrap();
    assert!(
        told.starts_with("outcome     done, but ") && told.contains("cause       mantissa train --autopsy"),
        "{told}"
    );
    // The step is chosen, and the first dead operand explained.
    let found = run_json(&["train", "--autopsy", text(&run), "--json", "--quiet"]);
    assert_eq!(found["step"], 1);
    let (culprit, lost) = (&found["culprits"][0], &found["dead"][0]);
    assert_eq!((&culprit["gemm"], &culprit["operand"]), (&"dgrad".into(), &"dy".into()), "{found}");
    assert_eq!((&culprit["linear"], &lost["operand"]), (&lost["linear"], &"dgrad dy".into()), "{found}");
    assert!(
        culprit["linear"].as_str().unwrap().starts_with("model.layers.3."),
        "the nearest to the loss: {culprit}"
    );
    assert!(found["summary"].as_str().unwrap().contains("lost their signal"), "{found}");
    // With the setting that it proposes, all learn.
    let set: Vec<String> = culprit["remedy"]["set"]
        .as_array()
        .unwrap()
        .iter()
        .map(|set| set.as_str().unwrap().to_owned())
        .collect();
    let set: Vec<&str> = UNSCALED.iter().copied().chain(set.iter().map(String::as_str)).collect();
    assert_eq!(done(&config, "b", &set).0["outcome"], "done");
    assert!(
        fail(2, &["train", "--autopsy", text(&temp.path().join("runs/b")), "--quiet"])
            .contains("every parameter got a gradient")
    );
}

/// Under --strict the run ends at the step, with a checkpoint from which it goes on without.
#[test]
fn a_strict_run_ends_where_layers_stop_learning() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    // Tokens that fill their windows, so that nothing is lost of the data.
    let tokens = (0..32 * 80 + 1u16).flat_map(|i| (i % 61 * (i % 7 + 1) % 64).to_le_bytes()).collect();
    write(&temp.path().join("exact.safetensors"), &[("tokens", Dtype::U16, &[32 * 80 + 1], tokens)]);
    let exact = "data.files=[\"exact.safetensors\"]";
    let set = [&UNSCALED[..], &[exact]].concat();
    let output = train(&config, "a", &set, &["--strict", "--quiet"]);
    let line = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(line.contains("--strict: expected no warnings, got 1; first: step 1: "), "{line}");
    let run = temp.path().join("runs/a");
    assert_eq!(log(&run).len(), 1);
    assert_eq!(run_json(&["train", "--autopsy", text(&run), "--json", "--quiet"])["step"], 1);
    let resumed = train(&config, "a", &set, &["--json", "--quiet", "--resume"]);
    let report: Value = serde_json::from_slice(&resumed.stdout).unwrap();
    assert!(report["outcome"].as_str().unwrap().starts_with("done, but "), "{report}");
    assert_eq!((&report["steps"], &report["learning"]["updates"]), (&6.into(), &6.into()), "{report}");
    assert!(train(&config, "sound", &[exact], &["--strict", "--quiet"]).status.success());
}

/// Weights in bf16 without a master copy take no step of a millionth: the run says so at the first step near the peak of the
/// learning rate, with a fix that works.
#[test]
fn updates_that_are_lost_in_rounding_are_told() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    let slow = ["precision.policy=bf16-pure", "optimizer.lr=1e-6", "schedule.kind=constant"];
    for (name, telemetry) in [("a", "telemetry.every=3"), ("b", "telemetry.every=0")] {
        let (report, said) = done(&config, name, &[&slow[..], &[telemetry]].concat());
        let told = "the updates of 29 of 38 parameters change next to no weight";
        assert!(report["outcome"].as_str().unwrap().starts_with(&format!("done, but {told}")), "{report}");
        assert_eq!(report["learning"]["lost_updates"].as_array().unwrap().len(), 29, "{report}");
        // Two steps of warm-up: a third and two thirds of the peak.
        assert!(said.contains(&format!("warning: step 2: {told}")), "{said}");
        assert!(said.contains("fix: --set 'precision.master=\"f32\"'"), "{said}");
        assert_eq!(said.lines().filter(|line| line.starts_with("warning: step")).count(), 1, "{said}");
        let lines = log(&temp.path().join("runs").join(name));
        assert_eq!(lines[1]["not_learning"]["without_update"], 29);
        assert!(page(&temp.path().join("runs").join(name)).contains("updates of 29 of 38"));
    }
    // In f32 nothing is lost in rounding; updates below the last bit of a weight are 0.
    let (report, said) = done(&config, "c", &["optimizer.lr=1e-30", "schedule.kind=constant"]);
    assert!(report["outcome"].as_str().unwrap().contains("parameters are all 0 (first: "), "{report}");
    assert!(said.contains("fix: an optimizer.lr above 1e-30"), "{said}");
    for set in ["precision.master=\"f32\"", "precision.policy=bf16-pure-sr", "optimizer.lr=1e-3"] {
        let (report, said) = done(&config, set.split('=').next().unwrap(), &[&slow[..], &[set]].concat());
        assert_eq!(report["outcome"], "done", "{set}: {report}");
        assert!(!said.contains("warning: step"), "{said}");
        assert_eq!(report["learning"]["lost_updates"], json!([]));
    }
}

/// Inputs, weights and gradients in formats that keep nothing of them; each is found where it is made.
#[test]
fn lost_operands_of_every_matmul_are_found() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    let base = "precision.policy=fp8-current";
    for (i, (set, operand)) in [
        ("precision.fprop.w=\"fp8-e4m3fnuz\"", None),
        ("precision.fprop.w=\"fp4-e2m1\"", Some("fprop w")),
        ("precision.fprop.x=\"fp4-e2m1\"", Some("fprop x")),
        ("precision.wgrad.dy=\"fp8-e4m3\"", Some("wgrad dy")),
        ("precision.dgrad.w=\"fp4-e2m1\"", Some("dgrad w")),
        ("precision.wgrad.x=\"fp8-e4m3\"", None),
    ]
    .into_iter()
    .enumerate()
    {
        let (report, _) = done(&config, &i.to_string(), &[base, set]);
        let lost = report["learning"]["lost"].as_array().unwrap();
        match operand {
            None => assert_eq!(report["outcome"], "done", "{set}: {report}"),
            Some(operand) => {
                assert!(
                    lost.iter().all(|lost| lost["operand"] == operand) && !lost.is_empty(),
                    "{set}: {report}"
                );
                assert!(
                    report["outcome"].as_str().unwrap().contains("lost the signal in rounding"),
                    "{report}"
                );
            }
        }
    }
}

/// A sound run of each policy is done, without a warning; so is a fine-tuning, whose A has no gradient while B is 0.
#[test]
fn sound_runs_are_done() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    for policy in sampled(mantissa_train::Policy::names(), 3) {
        let (report, said) = done(&config, policy, &[&format!("precision.policy={policy}")]);
        assert_eq!(report["outcome"], "done", "{policy}: {report}");
        assert!(!said.contains("warning: step"), "{policy}: {said}");
        assert_eq!(report["learning"]["dead"], json!([]), "{policy}");
    }
    let data = temp.path().join("text.txt");
    for (adapter, more) in
        [("lora", &["--train-module", "*norm"][..]), ("dora", &[]), ("qlora", &["--rslora"])]
    {
        let out = temp.path().join(adapter);
        let tune = ["finetune", "demo", "--data", text(&data), "--out", text(&out), "--adapter", adapter];
        let short = ["--length", "32", "--batch", "2", "--steps", "3", "--json", "--quiet"];
        let report = run_json(&[&tune[..], &short, more].concat());
        assert_eq!(report["outcome"], "done", "{adapter}: {report}");
    }
}

/// Adapters of a model whose gradients a policy loses, and a student.
#[test]
fn fine_tuning_and_distillation_are_watched() {
    let temp = TempDir::new().unwrap();
    settings(temp.path(), false);
    let data = temp.path().join("text.txt");
    let short = ["--length", "32", "--batch", "2", "--steps", "2", "--json"];
    let unscaled = ["--policy", "fp8-current", "--set", "precision.dgrad.dy=\"fp4-e2m1\""];
    for (i, command) in
        [vec!["finetune", "demo", "--adapter", "lora"], vec!["distill", "demo", "demo"]].iter().enumerate()
    {
        let out = temp.path().join(format!("out-{i}"));
        let output = mantissa(
            &[&command[..], &["--data", text(&data), "--out", text(&out)], &short, &unscaled].concat(),
        );
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["outcome"].as_str().unwrap().starts_with("done, but "), "{report}");
        assert!(
            stderr(&output).contains("warning: step 1: ")
                && stderr(&output).contains("fix: --set 'precision.dgrad.dy=\"bf16\"'")
        );
        // An autopsy cannot replay it; its error names the operand and the field.
        let line = fail(2, &["train", "--autopsy", text(&out), "--quiet"]);
        let (field, other) = [("adapter", "--adapter none"), ("distill", "mantissa finetune")][i];
        assert!(line.contains(&format!("{}: {field}: expected a run ", out.display())), "{line}");
        assert!(
            line.contains("fix: --set 'precision.dgrad.dy=\"bf16\"', as dgrad dy of ")
                && line.contains(other),
            "{line}"
        );
    }
}

/// Experts without tokens in a step are not dead; those that no token chose in the run are told.
#[test]
fn experts_that_no_token_chose_are_told() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), true);
    let (report, said) = done(&config, "a", &["data.length=4", "data.batch=1"]);
    assert!(!said.contains("warning: step"), "{said}");
    assert_eq!(report["learning"]["dead"], json!([]), "{report}");
    let unused = report["learning"]["unused_experts"].as_array().unwrap();
    assert!(!unused.is_empty(), "{report}");
    let outcome = report["outcome"].as_str().unwrap();
    assert!(outcome.contains("experts in the run (first: expert "), "{outcome}");
    // A resumed run counts from the beginning.
    let resumed = train(&config, "a", &["data.length=4", "data.batch=1"], &["--json", "--quiet", "--resume"]);
    let again: Value = serde_json::from_slice(&resumed.stdout).unwrap();
    assert_eq!(again["learning"], report["learning"]);
    assert!(page(&temp.path().join("runs/a")).contains("no token chose"));
    // With more tokens there are fewer.
    let more = done(&config, "b", &["data.length=64", "data.batch=8", "schedule.steps=20"]).0;
    let count = |report: &Value| {
        let layers = report["learning"]["unused_experts"].as_array().unwrap().clone();
        layers.iter().map(|layer| layer["experts"].as_array().unwrap().len()).sum::<usize>()
    };
    assert!(count(&more) < count(&report) / 2, "{more}");
}

/// A learning rate that throws the weights away is named, not an operand, whether the run ends by it or not.
#[test]
fn a_learning_rate_that_is_too_high_is_named() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), false);
    for (i, policy) in ["fp8-current", "bf16", "nvfp4"].iter().enumerate() {
        let set = [&format!("precision.policy={policy}")[..], "optimizer.lr=5.0", "schedule.warmup=0"];
        let trained = train(&config, &i.to_string(), &set, &["--quiet"]);
        // A run that ends far above its start says so, with the command that names the cause.
        let said = String::from_utf8_lossy(&trained.stdout).into_owned();
        let rose = said.contains("the loss rose from ") && said.contains("train --autopsy");
        assert!(!trained.status.success() || rose, "{policy}: {said}");
        let run: PathBuf = temp.path().join(format!("runs/{i}"));
        let found = run_json(&["train", "--autopsy", text(&run), "--json", "--quiet"]);
        assert_eq!(
            (&found["verdict"], &found["culprits"]),
            (&"rate".into(), &json!([])),
            "{policy}: {found}"
        );
        assert!(
            found["summary"].as_str().unwrap().starts_with("the learning rate: at lr 5 the update of step "),
            "{found}"
        );
        let told = succeed(&["train", "--autopsy", text(&run), "--quiet"]);
        assert!(told.contains("--set optimizer.lr="), "{told}");
    }
}
