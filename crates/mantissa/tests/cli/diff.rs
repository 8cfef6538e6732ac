//! `mantissa diff`: first token at which two models part.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, root, succeed, text};

const PROMPT: &str = "Once upon a time";

/// Quantizes the embedded model coarsely, so that its texts part early.
fn coarse(dir: &Path) -> String {
    let out = dir.join("int3");
    succeed(&["quantize", "demo", "--recipe", "rtn-int3-g32", "--out", text(&out), "--quiet"]);
    text(&out).to_owned()
}

fn tokens(side: &Value) -> Vec<u64> {
    side["tokens"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
}

#[test]
fn the_first_difference_is_that_of_the_greedy_texts() {
    let temp = TempDir::new().unwrap();
    let other = coarse(temp.path());
    let report = json(&["diff", "demo", &other, "-p", PROMPT, "-n", "80", "--json", "--quiet"]);
    let found = &report["prompts"][0];
    // Both continuations are those of `run` on the same engine.
    for (side, model) in [("a", "demo"), ("b", other.as_str())] {
        let run =
            json(&["run", model, "-p", PROMPT, "-n", "80", "--engine", "reference", "--json", "--quiet"]);
        assert_eq!(found[side]["tokens"], run["tokens"]);
        assert_eq!(found[side]["text"], run["text"]);
        assert_eq!(found["prompt_tokens"], run["prompt_tokens"]);
    }
    let (a, b) = (tokens(&found["a"]), tokens(&found["b"]));
    let equal = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
    assert!(equal < 80, "int3 must differ from the source: {found}");
    assert_eq!(found["equal_tokens"], equal);
    let at = &found["difference"];
    assert_eq!(at["position"], equal);
    assert!(at["kl"].as_f64().unwrap() > 0.0 && found["kl_mean"].as_f64().unwrap() > 0.0);
    for (side, chosen) in [("a", a[equal]), ("b", b[equal])] {
        let top = at[side].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["token"]), (5, &chosen.into()));
        let p: Vec<f64> = top.iter().map(|choice| choice["p"].as_f64().unwrap()).collect();
        assert!(p.is_sorted_by(|a, b| a >= b) && p.iter().sum::<f64>() <= 1.0 + 1e-9 && p[4] > 0.0);
        assert!(top[0]["p"].as_f64() > top[0]["p_other"].as_f64() || top[0]["text"] != "");
    }
    // A token in both lists has the same two probabilities, the other way round.
    let (of_a, of_b) = (at["a"].as_array().unwrap(), at["b"].as_array().unwrap());
    for choice in of_a {
        for same in of_b.iter().filter(|same| same["token"] == choice["token"]) {
            assert_eq!((&choice["p"], &choice["p_other"]), (&same["p_other"], &same["p"]));
        }
    }
    let whole = |side: &str| found[side]["text"].as_str().unwrap().to_owned();
    let own = |side: &str| found[side]["own_text"].as_str().unwrap();
    let start = found["equal_text"].as_str().unwrap();
    assert_eq!((whole("a"), whole("b")), (start.to_owned() + own("a"), start.to_owned() + own("b")));

    let shown = succeed(&["diff", "demo", &other, "-p", PROMPT, "-n", "80", "--quiet"]);
    assert!(
        shown.contains(&format!("token {} differs", equal + 1)) && shown.contains("KL(A || B)"),
        "{shown}"
    );
    assert!(shown.contains(" │ B: ") && shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
}

#[test]
fn equal_models_do_not_differ() {
    let report = json(&["diff", "demo", "demo", "-p", PROMPT, "--tokens", "20", "--json", "--quiet"]);
    let found = &report["prompts"][0];
    assert_eq!((&found["equal_tokens"], &found["kl_mean"]), (&20.into(), &0.0.into()));
    assert!(found.get("difference").is_none());
    assert_eq!(found["a"], found["b"]);
    assert!(succeed(&["diff", "demo", "demo", "-p", PROMPT, "-n", "5"]).contains("No difference"));
}

#[test]
fn prompts_come_from_a_file() {
    let temp = TempDir::new().unwrap();
    let other = coarse(temp.path());
    let file = temp.path().join("prompts.txt");
    fs::write(&file, "Once upon a time\n\nThe little dog\n").unwrap();
    let arguments = ["diff", "demo", &other, "--prompts", text(&file), "-n", "12"];
    let report = json(&[&arguments[..], &["--json", "--quiet"]].concat());
    let prompts = report["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 2);
    let single = json(&["diff", "demo", &other, "-p", "The little dog", "-n", "12", "--json", "--quiet"]);
    assert_eq!(prompts[1], single["prompts"][0]);
    assert!(succeed(&arguments).contains("of 2 prompts differ"));
    fs::write(&file, " \n").unwrap();
    assert!(fail(2, &arguments).contains("at least one prompt"));
}

#[test]
fn models_with_other_tokens_are_refused() {
    let temp = TempDir::new().unwrap();
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    let line = fail(2, &["diff", "demo", text(&tiny), "-p", PROMPT]);
    assert!(line.contains("vocabularies of") && line.contains("same tokenizer"), "{line}");

    // The same number of tokens, two of which have changed places.
    let swapped = temp.path().join("swapped");
    fs::create_dir(&swapped).unwrap();
    for file in fs::read_dir(root().join("crates/mantissa-jobs/demo/model")).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, swapped.join(path.file_name().unwrap())).unwrap();
    }
    let path = swapped.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let last: Vec<String> = vocabulary
        .iter()
        .filter(|(_, id)| id.as_u64().unwrap() >= vocabulary.len() as u64 - 2)
        .map(|(name, _)| name.clone())
        .collect();
    let [one, two] = <[String; 2]>::try_from(last).unwrap();
    let (first, second) = (vocabulary[&one].clone(), vocabulary[&two].clone());
    vocabulary[&one] = second;
    vocabulary[&two] = first;
    fs::write(&path, tokenizer.to_string()).unwrap();
    let line = fail(2, &["diff", "demo", text(&swapped), "-p", PROMPT]);
    assert!(line.contains("in one and") && line.contains("same tokenizer"), "{line}");
    fail(2, &["diff", "demo", "demo", "-p", PROMPT, "-n", "0"]);
    fail(2, &["diff", "demo", "demo"]);
}
