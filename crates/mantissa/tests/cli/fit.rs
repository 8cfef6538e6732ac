//! `mantissa fit`: schemes chosen by measured KL under a budget.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{fail, json, mantissa, root, stderr, succeed, text};

fn kl(report: &Value, unit: &Value, scheme: &str) -> f64 {
    let candidates = unit["candidates"].as_array().unwrap();
    let found = candidates.iter().find(|candidate| candidate["scheme"] == scheme);
    found.unwrap_or_else(|| panic!("{scheme} in {report}"))["kl"].as_f64().unwrap()
}

#[test]
fn the_budget_goes_where_it_saves_most() {
    let temp = TempDir::new().unwrap();
    let (model, out, tokens) = (tiny("llama2-gqa-tied"), temp.path().join("fit"), windows(temp.path()));
    let (model, out_text, recipe) = (text(&model), text(&out), temp.path().join("found.toml"));
    // int2-g8, int4-g8 and int8-g8 with f32 scales take 6, 8 and 12 bits.
    let fit = ["fit", model, "--schemes", "int2-g8,int4-g8,int8-g8", "--tokens", &tokens, "--quiet"];
    let page = temp.path().join("fit.html");
    let asked = ["--budget", "9bpw", "--out", out_text, "--save-recipe", text(&recipe), "--json"];
    let done = json(&[&fit[..], &asked, &["--html", text(&page)]].concat());
    let html = fs::read_to_string(&page).unwrap();
    let parts =
        ["<h1>Fit of", "on held-out windows", "Predicted loss by size", ">chosen</text>", "int8-g8: 12 bits"];
    for part in parts {
        assert!(html.contains(part), "{part}: {html}");
    }
    assert!(html.matches("<svg").count() >= 3 && !html.contains("://") && !html.contains("<script"));
    assert!(done["linear_bits_per_weight"].as_f64().unwrap() <= 9.0, "{done}");
    let units = done["units"].as_array().unwrap();
    // Two layers of q+k+v, o, gate+up and down.
    assert_eq!(units.len(), 8);
    let schemes: Vec<_> = units.iter().map(|unit| unit["scheme"].as_str().unwrap()).collect();
    assert!(schemes.iter().any(|scheme| *scheme != schemes[0]), "{schemes:?}");
    let sum: f64 = units.iter().map(|unit| kl(&done, unit, unit["scheme"].as_str().unwrap())).sum();
    let uniform: f64 = units.iter().map(|unit| kl(&done, unit, "int4-g8")).sum();
    let predicted = done["predicted_kl"].as_f64().unwrap();
    assert!((sum - predicted).abs() < 1e-9 && predicted <= uniform, "{predicted} {uniform}");
    assert_eq!(done["predicted_kl"], done["predicted_kl_bound"]);
    assert_eq!((done["windows"].as_u64(), done["verification"]["ok"].as_bool()), (Some(2), Some(true)));
    assert_eq!(done["evaluation"]["text"]["windows"], 1);
    assert!(!temp.path().join("fit.fit").exists());
    assert!(done["source_bytes"].as_u64() > done["bytes"].as_u64(), "{done}");
    let next: Vec<&str> = done["next"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(next.iter().any(|command| command.starts_with("mantissa run ")), "{next:?}");
    assert!(done["loads_in"].as_array().unwrap().iter().any(|name| name == "mantissa"), "{done}");
    // The KL of a unit equals that of a model with only this unit quantized.
    let unit = &units[7];
    assert_eq!(unit["modules"], serde_json::json!(["model.layers.1.mlp.down_proj"]));
    let alone = temp.path().join("alone.toml");
    let rule = "weights = \"int2-g8\"\nkeep = [\"*.layers.0.*\", \"*.q_proj\", \"*.k_proj\", \"*.v_proj\", \"*.o_proj\", \"*.gate_proj\", \"*.up_proj\"]\n";
    fs::write(&alone, rule).unwrap();
    let one = temp.path().join("one");
    succeed(&["quantize", model, "--recipe", text(&alone), "--out", text(&one), "--quiet"]);
    let all: Value = serde_json::from_slice(&fs::read(temp.path().join("windows.json")).unwrap()).unwrap();
    let measured = serde_json::json!({ "w": [all["w"][0], all["w"][2]] }).to_string();
    fs::write(temp.path().join("measured.json"), measured).unwrap();
    let measured = format!("{}:w", text(&temp.path().join("measured.json")));
    let eval = json(&["eval", text(&one), "--reference", model, "--tokens", &measured, "--json", "--quiet"]);
    let (found, expected) = (kl(&done, unit, "int2-g8"), eval["kl"].as_f64().unwrap());
    assert!((found - expected).abs() <= 1e-6 * expected, "{found} {expected}");
    // The saved recipe gives the same weights.
    let again = temp.path().join("again");
    succeed(&["quantize", model, "--recipe", text(&recipe), "--out", text(&again), "--quiet"]);
    let weights = |dir: &std::path::Path| fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&out) == weights(&again));
    let said = succeed(&[&fit[..], &["--budget", "1MB", "--out", text(&temp.path().join("large"))]].concat());
    assert!(said.contains("int8-g8") && said.contains("KL of each unit alone"), "{said}");
}

/// Integers without a group take the default one of the model, as the default schemes do, and the note names it.
#[test]
fn integers_take_the_default_group() {
    let temp = TempDir::new().unwrap();
    let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    let sample = temp.path().join("sample.txt");
    fs::write(&sample, stories.chars().take(3000).collect::<String>()).unwrap();
    let fit = |schemes: &str, out: &str| {
        let out = temp.path().join(out);
        let first =
            ["fit", "demo", "--budget", "6bpw", "--method", "rtn", "--windows", "1", "--context", "64"];
        let output = mantissa(
            &[&first[..], &["--text", text(&sample), "--schemes", schemes, "--out", text(&out), "--json"]]
                .concat(),
        );
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let of = |candidate: &Value| candidate["scheme"].as_str().unwrap().to_owned();
        let found: Vec<String> =
            report["units"][0]["candidates"].as_array().unwrap().iter().map(of).collect();
        (found, report["kl"].clone(), said)
    };
    let (found, kl, said) = fit("int4,int8-asym", "short");
    assert_eq!(found, ["int4-g128", "int8-g128-asym"]);
    assert!(said.contains("--schemes int4,int8-asym: with the default groups of this model, g128"), "{said}");
    let (whole, same, said) = fit("int4-g128,int8-g128-asym", "whole");
    assert_eq!((whole, same), (found, kl));
    assert!(!said.contains("default groups"), "{said}");
    let line = fail(2, &["fit", "demo", "--budget", "6bpw", "--schemes", "int99", "--out", text(&sample)]);
    assert!(line.contains("int99"), "{line}");
}

/// Every method of recipe names works, and the saved recipe names it.
#[test]
fn every_recipe_method_is_accepted() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama2-gqa-tied"), windows(temp.path()));
    for (method, said) in [
        ("gptaq", "method = \"gptaq\""),
        ("smooth-gptq", "method = \"gptq\"\nweights = \"int4-g8\"\ntransform = \"smooth\""),
    ] {
        let (out, recipe) = (temp.path().join(method), temp.path().join("found.toml"));
        let mut fit = vec!["fit", text(&model), "--schemes", "int4-g8,int8-g8", "--budget", "8.5bpw"];
        fit.extend(["--method", method, "--calibration-tokens", &tokens, "--tokens", &tokens]);
        fit.extend(["--out", text(&out), "--save-recipe", text(&recipe), "--overwrite", "--json", "--quiet"]);
        let done = json(&fit);
        assert_eq!(done["verification"]["ok"], true, "{done}");
        let found = fs::read_to_string(&recipe).unwrap();
        assert!(found.contains(said), "{found}");
        // The saved recipe gives the same weights.
        let again = temp.path().join("again");
        let quantize = ["quantize", text(&model), "--recipe", text(&recipe), "--calibration-tokens", &tokens];
        succeed(&[&quantize[..], &["--out", text(&again), "--overwrite", "--quiet"]].concat());
        let weights = |dir: &std::path::Path| fs::read(dir.join("model.safetensors")).unwrap();
        assert!(weights(&out) == weights(&again), "{method}");
        fs::remove_dir_all(&again).unwrap();
    }
}

#[test]
fn an_impossible_budget_is_refused() {
    let temp = TempDir::new().unwrap();
    let (model, out, tokens) = (tiny("llama1-mha"), temp.path().join("fit"), windows(temp.path()));
    let base = ["fit", text(&model), "--schemes", "int4-g8,int8-g8", "--out", text(&out), "--quiet"];
    let line = fail(2, &[&base[..], &["--budget", "5bpw", "--tokens", &tokens]].concat());
    assert!(line.contains("--budget") && line.contains("at least 8.000 bits per weight"), "{line}");
    let line = fail(2, &[&base[..], &["--budget", "1k", "--tokens", &tokens]].concat());
    assert!(line.contains("more than") && line.contains("kept"), "{line}");
    let line = fail(2, &[&base[..], &["--budget", "9bpw"]].concat());
    assert!(line.contains("--text"), "{line}");
    let single = temp.path().join("single.json");
    std::fs::write(&single, "[[1, 2, 3, 4]]").unwrap();
    let line = fail(2, &[&base[..], &["--budget", "9bpw", "--tokens", text(&single)]].concat());
    assert!(line.contains("one window") && line.contains("two windows"), "{line}");
    assert!(!out.exists());
}

#[test]
fn another_budget_reuses_the_measurements() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama2-gqa-tied"), windows(temp.path()));
    let kept = temp.path().join("measured");
    let base = ["fit", text(&model), "--tokens", &tokens, "--quiet", "--measurements", text(&kept)];
    let fit = |budget: &str, schemes: &str, out: &str| {
        let out = temp.path().join(out);
        json(
            &[&base[..], &["--budget", budget, "--schemes", schemes, "--out", text(&out), "--json"]].concat(),
        )
    };
    let first = fit("9bpw", "int2-g8,int4-g8,int8-g8", "first");
    let lines = fs::read_to_string(&kept).unwrap();
    assert_eq!(lines.lines().count(), 4, "{lines}");
    // A measured KL is taken from the file: twice the KL there is twice the KL in the report.
    let line: Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
    let (scheme, was) = (line["scheme"].as_str().unwrap(), line["costs"][0]["kl"].as_f64().unwrap());
    assert!((kl(&first, &first["units"][0], scheme) - was).abs() < 1e-12);
    let second = fit("7.5bpw", "int2-g8,int4-g8,int8-g8", "second");
    assert_eq!(fs::read_to_string(&kept).unwrap(), lines);
    for (a, b) in first["units"].as_array().unwrap().iter().zip(second["units"].as_array().unwrap()) {
        assert_eq!(a["candidates"], b["candidates"]);
    }
    assert!(second["linear_bits_per_weight"].as_f64().unwrap() <= 7.5);
    // Other schemes add to the file.
    fit("8bpw", "int3-g8,int4-g8", "third");
    assert_eq!(fs::read_to_string(&kept).unwrap().lines().count(), 5);
    fs::write(temp.path().join("other"), "something else").unwrap();
    let other = temp.path().join("other");
    let args = ["fit", text(&model), "--tokens", &tokens, "--budget", "9bpw", "--schemes", "int4-g8"];
    let refused = fail(
        2,
        &[&args[..], &["--measurements", text(&other), "--out", text(&temp.path().join("n"))]].concat(),
    );
    assert!(refused.contains("other"), "{refused}");
    assert_eq!(fs::read_to_string(&other).unwrap(), "something else");
}

#[test]
fn memory_is_shared_by_weights_and_kv_cache() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama2-gqa-tied"), windows(temp.path()));
    let base =
        ["fit", text(&model), "--tokens", &tokens, "--schemes", "int4-g8,int8-g8", "--format", "native"];
    let fit = |memory: &str, out: &str| {
        let (budget, out) = (format!("{memory} with 256 context and 64 sequences"), temp.path().join(out));
        json(&[&base[..], &["--budget", &budget, "--out", text(&out), "--json", "--quiet"]].concat())
    };
    let wide = fit("1GB", "wide");
    let served = &wide["served"];
    assert_eq!((served["kv"]["scheme"].as_str(), served["sequences"].as_u64()), (Some("f16"), Some(64)));
    let bytes = |served: &Value| {
        ["weights", "kv_bytes", "activations"].iter().map(|part| served[part].as_u64().unwrap()).sum::<u64>()
    };
    // With a tenth of the cache's bytes less, something must become narrower, and the sum stays within the budget.
    let all = bytes(served);
    let least = all - served["kv_bytes"].as_u64().unwrap() / 10;
    let narrow = fit(&format!("{:.3}kB", least as f64 / 1e3), "narrow");
    assert!(bytes(&narrow["served"]) <= least, "{narrow}");
    let kv = narrow["served"]["kv"]["scheme"].as_str().unwrap();
    let config = fs::read_to_string(temp.path().join("narrow/config.json")).unwrap();
    assert_eq!(kv != "f16", config.contains(kv), "{kv}: {config}");
    let refused = fail(
        2,
        &[
            &base[..],
            &["--budget", "60kB with 256 context and 64 sequences", "--out", text(&temp.path().join("no"))],
        ]
        .concat(),
    );
    assert!(refused.contains("60") && refused.contains("activations"), "{refused}");
}
