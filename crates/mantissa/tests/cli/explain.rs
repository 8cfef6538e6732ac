//! `mantissa explain`: topics with the figures of a model, numbers in their formats, and what the recipes of the field are.

use serde_json::Value;

use crate::support::{command, fail, json, mantissa, stderr, succeed};

/// Names of all topics.
fn topics() -> Vec<String> {
    let listed = json(&["explain", "--json"]);
    let topics = listed["topics"].as_array().unwrap();
    topics.iter().map(|topic| topic["topic"].as_str().unwrap().to_owned()).collect()
}

/// Topics of one group stand together below its title.
#[test]
fn topics_are_listed_in_groups() {
    let (listed, shown) = (json(&["explain", "--json"]), succeed(&["explain"]));
    let topics = listed["topics"].as_array().unwrap();
    let mut groups: Vec<&str> = topics.iter().map(|topic| topic["group"].as_str().unwrap()).collect();
    groups.dedup();
    assert!(groups.len() >= 5, "{groups:?}");
    for group in groups {
        assert_eq!(shown.matches(&format!("{group}\n  ")).count(), 1, "{group}: {shown}");
    }
}

#[test]
fn every_topic_answers_for_a_model_and_hardware() {
    let all = topics();
    assert!(all.len() >= 50, "{}", all.len());
    let listed = succeed(&["explain"]);
    for topic in &all {
        assert!(listed.contains(topic.as_str()), "{topic}");
        let answer = json(&["explain", topic, "demo", "--hardware", "rtx4090", "--json"]);
        assert_eq!(answer["model"], "demo");
        assert!(answer["answer"].as_array().unwrap().len() >= 2, "{answer}");
    }
}

/// This CPU is measured only for answers that have its figures.
#[test]
fn answers_without_figures_measure_nothing() {
    for topic in ["mx", "mistakes"] {
        let done = mantissa(&["explain", topic]);
        assert!(done.status.success() && !stderr(&done).contains("GB/s"), "{}", stderr(&done));
    }
    assert!(succeed(&["explain", "memory", "--hardware", "rtx4090"]).contains("Figures of "));
    let nvfp4 = succeed(&["explain", "what is nvfp4?"]);
    assert!(nvfp4.contains("mantissa schemes nvfp4"), "{nvfp4}");
}

/// A word of one topic answers by it; of several, lists them; terms of the glossary, schemes and recipes are named.
#[test]
fn words_lead_to_topics_terms_and_commands() {
    let run = |word: &str| {
        let output = command().args(["explain", word]).output().unwrap();
        assert!(output.status.success(), "{word}: {}", stderr(&output));
        (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
    };
    for word in ["rotation", "Rotations", "ROTATION"] {
        let (answer, said) = run(word);
        assert!(answer.starts_with("What do rotations do"), "{answer}");
        assert_eq!(said.contains("showing the topic rotations"), word != "Rotations", "{said}");
    }
    let (several, _) = run("nvfp4");
    for part in [
        "block-scales",
        "What are microscaling (MX) formats and NVFP4?",
        "mantissa schemes nvfp4",
        "mantissa recipes nvfp4",
    ] {
        assert!(several.contains(part), "{part}: {several}");
    }
    let (term, _) = run("KL");
    assert!(
        term.contains("KL divergence (KL): ")
            && term.contains("p ln(p / q)")
            && term.contains("mantissa help glossary"),
        "{term}"
    );
    let report = json(&["explain", "kl", "--json"]);
    assert_eq!(report["term"]["term"], "KL divergence (KL)");
    assert!(report["topics"].as_array().unwrap().is_empty(), "{report}");
    let line = fail(2, &["explain", "xyzzy"]);
    assert!(
        line.contains("expected a number, or one of ") && line.contains("mantissa help glossary"),
        "{line}"
    );
}

/// Returns the commands of a line: `…; check: mantissa …`.
fn commands(line: &str) -> impl Iterator<Item = &str> {
    let parts = line.split("; ").map(|part| part.trim_start_matches("check: "));
    parts.filter(|part| part.starts_with("mantissa "))
}

/// Splits a command into its arguments, without the name of the binary. MODEL is a size for `plan`, else a missing folder.
fn arguments(command: &str) -> Vec<String> {
    let model = if command.starts_with("mantissa plan ") { "--params 8B" } else { "missing" };
    let quoted = |(index, part): (usize, &str)| match index % 2 {
        0 => part.split_whitespace().map(str::to_owned).collect(),
        _ => vec![part.to_owned()],
    };
    let command = command.replace("MODEL", model);
    command.split('"').enumerate().flat_map(quoted).skip(1).collect::<Vec<String>>()
}

/// Every command that an answer prints runs as printed, in an empty folder: it succeeds, or misses a file that it names.
#[test]
fn printed_commands_run() {
    let empty = tempfile::TempDir::new().unwrap();
    let mut run = std::collections::BTreeSet::new();
    for topic in topics() {
        let answer = json(&["explain", &topic, "--params", "8B", "--hardware", "rtx4090", "--json"]);
        let lines = answer["answer"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
        for line in lines.chain([answer["measure"].as_str().unwrap()]) {
            run.extend(commands(line).map(str::to_owned));
        }
    }
    assert!(run.len() >= 40, "{run:?}");
    for printed in run {
        let output = command().args(arguments(&printed)).current_dir(empty.path()).output().unwrap();
        let error = stderr(&output);
        let misses = error.contains("no such file") || error.contains("got no config.toml");
        assert!(output.status.success() || misses, "{printed}: {error}");
    }
}

#[test]
fn answers_follow_model_and_hardware() {
    let long = |tokens| {
        json(&["explain", "kv-cache", "--params", "8B", "--hardware", "h100", "--context", tokens, "--json"])
    };
    assert_eq!(long("32k"), long("32768"));
    let text = |model: &str, hardware: &str| {
        succeed(&["explain", "w4a16", "--params", model, "--hardware", hardware])
    };
    let (large, small) = (text("32B", "rtx4090"), text("8B", "h100"));
    assert!(large.contains("Figures of 32B, 32.8 B parameters (shape of Qwen2.5-32B"), "{large}");
    assert!(large.contains("RTX 4090 can do 164") && small.contains("H100 SXM can do 295"), "{large}{small}");
    assert!(large.contains("measure it: mantissa bench MODEL --batch 1,4,16"));
    assert!(large.contains("Often said wrongly:"));
    let memory = succeed(&["explain", "memory", "--params", "Llama-2-7B", "--hardware", "a100"]);
    assert!(memory.contains("6.74 B parameters × 2 bytes = 13.5 GB in bf16"), "{memory}");
}

#[test]
fn a_number_is_taken_apart() {
    let shown = succeed(&["explain", "0.1", "--as", "bf16,fp8-e4m3,nvfp4"]);
    for part in ["0 01111011 1001101", "0.100097656", "0 0011 101", "0.1015625", "measure it: mantissa cast "]
    {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let report = json(&["explain", "-0.1", "--as", "int4-g32", "--amax", "2.5", "--json"]);
    let format = &report["formats"][0];
    let number = |field: &str| format[field].as_f64().unwrap();
    assert!(number("below") < number("value") && number("value") < number("above"), "{format}");
    assert!((number("error") - (number("value") + 0.1)).abs() < 1e-6);
    let all = json(&["explain", "1e-6", "--json"]);
    let notes: Vec<&Value> =
        all["formats"].as_array().unwrap().iter().map(|format| &format["note"]).collect();
    assert!(
        notes.iter().any(|note| note.as_str().is_some_and(|note| note.contains("subnormal"))),
        "{notes:?}"
    );
    let double = json(&["explain", "0.1", "--as", "f64", "--json"]);
    assert_eq!(
        (double["formats"][0]["value"].as_f64(), double["formats"][0]["error"].as_f64()),
        (Some(0.1), Some(0.0))
    );
    assert!(succeed(&["explain", "1e300", "--as", "f64"]).contains("f64"));
    let scaled = succeed(&["explain", "0.1", "--as", "nvfp4", "--tensor-amax", "1"]);
    assert!(scaled.contains("is rounded too") && scaled.contains("is clipped to"), "{scaled}");
    // Beyond the magnitude that the scale comes from: 127 × 0.8 / 127.
    let clipped = json(&["explain", "8", "--as", "int8-channel:restricted", "--amax", "0.8", "--json"]);
    let format = &clipped["formats"][0];
    assert!((format["error"].as_f64().unwrap() + 7.2).abs() < 1e-6 && format["clipped"] == true, "{format}");
    for (arguments, part) in [
        (vec!["explain", "4", "--as", "nvfp4", "--tensor-amax", "1"], "largest magnitude of the block"),
        (vec!["explain", "nonsense"], "mantissa explain lists"),
        (vec!["explain", "0.1", "--as", "q4_k"], "codes blocks"),
        (vec!["explain", "1e300"], "range of f32"),
        (vec!["explain", "4", "--as", "int8-g32", "--amax", "0"], "above 0"),
        (vec!["explain", "w4a16", "--as", "bf16"], "a number to show"),
    ] {
        let error = fail(2, &arguments);
        assert!(error.contains(part), "{arguments:?}: {error}");
    }
}

/// Statements on recipes that are often said wrongly (training.md, section 5): the policies print what is right.
#[test]
fn policies_are_those_of_their_papers() {
    let policy = |name: &str| succeed(&["train", "--show-policy", name]);
    let part = |text: &str, product: &str| {
        let (_, rest) = text.split_once(&format!("[precision.{product}]")).unwrap();
        rest.split("\n[").next().unwrap().to_owned()
    };
    // 13: stochastic rounding of gradients only.
    let nvfp4 = policy("nvfp4");
    assert!(!part(&nvfp4, "fprop").contains("stochastic"));
    for product in ["dgrad", "wgrad"] {
        let lines = part(&nvfp4, product);
        let rounded: Vec<&str> = lines.lines().filter(|line| line.contains("stochastic")).collect();
        assert_eq!(rounded.len(), 1, "{lines}");
        assert!(rounded[0].starts_with("dy = "));
    }
    // 31: about 16 % of the layers stay in bf16.
    assert!(nvfp4.contains("keep = { first = 0.03, last = 0.13, dtype = \"bf16\" }"));
    // 14: E5M2 for gradients under one scale per tensor only.
    assert!(part(&policy("fp8-delayed"), "dgrad").contains("dy = { scheme = \"fp8-e5m2-tensor"));
    for name in ["fp8-blockwise", "fp8-rowwise", "mxfp8"] {
        assert!(!policy(name).contains("e5m2"), "{name}");
    }
    // 16: MXFP4 in all three products, Hadamard of 32, stochastic in the backward.
    let quartet = policy("quartet");
    for product in ["fprop", "dgrad", "wgrad"] {
        let lines = part(&quartet, product);
        assert_eq!(lines.matches("scheme = \"mxfp4\"").count(), 2, "{lines}");
        assert!(lines.contains("order = 32") && !lines.contains("int4"));
    }
    // 19: delayed scaling keeps a history; its scale still comes from the tensor.
    assert!(policy("fp8-delayed").contains("@delayed1024"));
    // 28: f16 has a master, a loss scale and sums in f32.
    let half = policy("fp16");
    for fact in ["master = \"f32\"", "scaling = ", "accumulator = \"f32\""] {
        assert!(half.contains(fact), "{fact}: {half}");
    }
    // 21, 23: master and residual stream are not FP8.
    assert!(policy("fp8-blockwise").contains("weights = \"f32\""));
}
