//! `mantissa fit` with several methods: each unit takes the scheme and the method of least KL.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{File, command, json, stderr, strict_json, succeed, text};

const SCHEMES: &str = "int2-g8,int4-g8,int8-g8";

/// Writes a calibration of few tokens, on which GPTQ is better than RTN for some units and worse for others.
fn few(dir: &Path) -> String {
    let path = dir.join("few.json");
    fs::write(&path, "[[36, 17, 50, 23, 1, 63]]").unwrap();
    text(&path).to_owned()
}

/// Options of a fit of `model` by `methods`, calibrated on `few` and measured on `tokens`.
fn options<'a>(model: &'a str, methods: &'a str, [few, tokens]: [&'a str; 2]) -> Vec<&'a str> {
    let mut options =
        vec!["fit", model, "--method", methods, "--schemes", SCHEMES, "--budget", "9bpw", "--quiet"];
    options.extend(["--calibration-tokens", few, "--tokens", tokens, "--threads", "1"]);
    options
}

fn fit(model: &str, methods: &str, tokens: [&str; 2], out: &Path, more: &[&str]) -> Value {
    let last = ["--out", text(out), "--json"];
    json(&[&options(model, methods, tokens)[..], &last, more].concat())
}

/// Returns the method of each module that `quality` reports.
fn methods(report: &Value) -> BTreeMap<String, String> {
    let name = |layer: &Value, key: &str| layer[key].as_str().unwrap().to_owned();
    let layers = report["layers"].as_array().unwrap().iter();
    layers.map(|layer| (name(layer, "module"), name(layer, "method"))).collect()
}

fn weights(dir: &Path) -> Vec<u8> {
    fs::read(dir.join("model.safetensors")).unwrap()
}

#[test]
fn each_unit_takes_scheme_and_method() {
    let temp = TempDir::new().unwrap();
    let (model, few, tokens) = (tiny("llama2-gqa-tied"), few(temp.path()), windows(temp.path()));
    let (model, at, texts) = (text(&model), |name: &str| temp.path().join(name), [&*few, &*tokens]);
    let (page, recipe, kept) = (at("fit.html"), at("found.toml"), at("measured"));
    let keeping = ["--measurements", text(&kept)];
    let more = [&keeping[..], &["--html", text(&page), "--save-recipe", text(&recipe)]].concat();
    let mixed = fit(model, "rtn,gptq", texts, &at("mixed"), &more);
    let single = ["rtn", "gptq"].map(|method| fit(model, method, texts, &at(method), &keeping));
    let units = mixed["units"].as_array().unwrap();
    assert_eq!((units.len(), units[0]["candidates"].as_array().unwrap().len()), (8, 6));
    let chosen = |unit: &Value| {
        let same = |c: &&Value| c["scheme"] == unit["scheme"] && c["method"] == unit["method"];
        unit["candidates"].as_array().unwrap().iter().find(same).unwrap()["kl"].as_f64().unwrap()
    };
    let predicted = |report: &Value| report["predicted_kl"].as_f64().unwrap();
    assert!((units.iter().map(chosen).sum::<f64>() - predicted(&mixed)).abs() < 1e-9);
    // Each method's candidates are those of a fit by it alone, those of one scheme times one factor.
    for report in &single {
        for candidate in report["units"][3]["candidates"].as_array().unwrap() {
            let factor = |unit: usize| {
                let same =
                    |c: &&Value| c["scheme"] == candidate["scheme"] && c["method"] == candidate["method"];
                let kl = |of: &Value| {
                    let all = of["units"][unit]["candidates"].as_array().unwrap();
                    all.iter().find(same).unwrap()["kl"].as_f64().unwrap()
                };
                kl(&mixed) / kl(report)
            };
            let (one, other) = (factor(3), factor(5));
            assert!(one > 0.0 && (one - other).abs() < 1e-6 * one, "{candidate}: {one} {other}");
        }
        assert!(report.get("apart").is_none());
    }
    assert!(mixed["linear_bits_per_weight"].as_f64().unwrap() <= 9.0 && mixed.get("apart").is_none());
    // The output's layers have the chosen methods, which the report names.
    let made = methods(&mixed);
    let mut seen: Vec<&str> = Vec::new();
    for unit in units {
        let method = unit["method"].as_str().unwrap();
        seen.push(method);
        for module in unit["modules"].as_array().unwrap() {
            let layer = &mixed["layers"].as_array().unwrap().iter().find(|l| l["module"] == *module).unwrap();
            let fallen = layer["fallback"].is_string();
            assert!(made[module.as_str().unwrap()] == method || fallen, "{module}: {layer}");
        }
    }
    assert!(seen.contains(&"rtn") && seen.contains(&"gptq"), "{seen:?}");
    assert_eq!(mixed["method"], "rtn, gptq");
    assert!(mixed["front"].as_array().unwrap().iter().any(|point| point["method"] == "rtn, gptq"), "{mixed}");
    let page = fs::read_to_string(&page).unwrap();
    for part in ["rtn, gptq", "<th scope=\"col\">method</th>", "gptq-int4-g8"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    let recipe_text = fs::read_to_string(&recipe).unwrap();
    assert!(recipe_text.matches("method = ").count() >= 2, "{recipe_text}");
    // The saved recipe, and the record in quality.json, give the same bytes.
    let (again, rebuilt) = (at("again"), at("rebuilt"));
    let quantize = ["quantize", model, "--recipe", text(&recipe), "--calibration-tokens", &few, "--quiet"];
    let dry = succeed(&[&quantize[..], &["--out", text(&again), "--dry-run"]].concat());
    assert!(dry.contains("methods: ") && dry.contains(" by gptq") && dry.contains(" by rtn"), "{dry}");
    succeed(&[&quantize[..], &["--out", text(&again)]].concat());
    assert!(weights(&again) == weights(&at("mixed")));
    let (mixed_path, file) = (at("mixed"), format!("few.json={few}"));
    let rebuild = ["rebuild", text(&mixed_path), "--source", model, "--file", &file, "--json", "--quiet"];
    let found = json(&[&rebuild[..], &["--out", text(&rebuilt)]].concat());
    assert_eq!(found["identical"], true, "{found}");
    assert!(weights(&rebuilt) == weights(&at("mixed")));
}

/// Rounded modules are those of RTN's run, and the first input's those of GPTQ's.
#[test]
fn a_recipe_of_two_methods_has_the_modules_of_both() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama2-gqa-tied"), windows(temp.path()));
    let recipe = temp.path().join("mixed.toml");
    let rule = "method = \"gptq\"\nweights = \"int4-g8\"\n[[layers]]\nmodules = [\"*.o_proj\", \"*.up_proj\"]\nmethod = \"rtn\"\nweights = \
                \"int4-g8\"\n";
    fs::write(&recipe, rule).unwrap();
    let run = |recipe: &str, out: &str| {
        let out = temp.path().join(out);
        let line = ["quantize", text(&model), "--recipe", recipe, "--calibration-tokens", &tokens];
        let report = json(&[&line[..], &["--out", text(&out), "--quiet", "--json"]].concat());
        (File::open(&out.join("model.safetensors")), report)
    };
    let (mixed, report) = run(text(&recipe), "mixed");
    let (rtn, gptq) = (run("rtn-int4-g8", "rtn").0, run("gptq-int4-g8", "gptq").0);
    let (mut rounded, mut solved) = (0, 0);
    for name in mixed.names() {
        if name.contains("o_proj") || name.contains("up_proj") {
            assert_eq!(mixed.bytes(&name), rtn.bytes(&name), "{name}");
            rounded += 1;
        } else if name.contains("layers.0.self_attn.") {
            assert_eq!(mixed.bytes(&name), gptq.bytes(&name), "{name}");
            solved += 1;
        }
    }
    assert!(rounded >= 8 && solved >= 6, "{rounded} {solved}");
    assert_eq!(report["method"], "gptq, rtn");
    assert_eq!(methods(&report)["model.layers.0.self_attn.o_proj"], "rtn");
    let config = temp.path().join("mixed");
    let verified = json(&["verify", text(&config), "--reference", text(&model), "--json"]);
    assert_eq!(verified["ok"], true, "{verified}");
}

#[test]
fn methods_that_cannot_be_mixed_stay_apart() {
    let temp = TempDir::new().unwrap();
    let (model, few, tokens) = (tiny("llama2-gqa-tied"), few(temp.path()), windows(temp.path()));
    let out = temp.path().join("out");
    let methods = "rtn,autoround,rotate-rtn,omniquant";
    let done = fit(text(&model), methods, [&few, &tokens], &out, &[]);
    let apart: Vec<&str> =
        done["apart"].as_array().unwrap().iter().map(|why| why.as_str().unwrap()).collect();
    assert_eq!(apart.len(), 2, "{apart:?}");
    assert!(apart[0].contains("rotate-rtn") && apart[0].contains("whole model"), "{apart:?}");
    assert!(apart[1].contains("omniquant") && apart[1].contains("as autoround does"), "{apart:?}");
    assert_eq!(done["verification"]["ok"], true);
    let units = done["units"].as_array().unwrap();
    let first = units[0]["candidates"].as_array().unwrap();
    let names: Vec<_> = first.iter().map(|c| c["method"].as_str().unwrap()).collect();
    let one = |name: &str| names.iter().all(|method| *method == name);
    let mixed = names.contains(&"rtn") && names.contains(&"autoround");
    assert!(mixed || one("rotate-rtn") || one("omniquant"), "{names:?}");
}

/// A method that learns whole decoder layers takes all units of a layer or none.
#[test]
fn layers_are_learned_as_a_whole() {
    let temp = TempDir::new().unwrap();
    let (model, few, tokens) = (tiny("llama2-gqa-tied"), few(temp.path()), windows(temp.path()));
    let out = temp.path().join("out");
    let done = fit(text(&model), "gptq,autoround,rtn", [&few, &tokens], &out, &[]);
    assert_eq!((done.get("apart"), &done["verification"]["ok"]), (None, &Value::Bool(true)));
    for layer in ["layers.0.", "layers.1."] {
        let units = done["units"].as_array().unwrap().iter();
        let own = units.filter(|unit| unit["unit"].as_str().unwrap().contains(layer));
        let learned: Vec<bool> = own.map(|unit| unit["method"] == "autoround").collect();
        assert_eq!(learned.len(), 4);
        assert!(learned.iter().all(|one| *one == learned[0]), "{learned:?}");
    }
}

/// A fit that is stopped at any time goes on where it was: with the same measurements, and to the same bytes.
#[test]
fn an_interrupted_fit_resumes() {
    let temp = TempDir::new().unwrap();
    let (model, few, tokens) = (tiny("llama2-gqa-tied"), few(temp.path()), windows(temp.path()));
    let (whole, out) = (temp.path().join("whole"), temp.path().join("out"));
    let expected = fit(text(&model), "rtn,gptq", [&few, &tokens], &whole, &[]);
    let line =
        [&options(text(&model), "rtn,gptq", [&few, &tokens])[..], &["--out", text(&out), "--json"]].concat();
    let (mut kills, mut last) = (0, None);
    for trial in 0..60u64 {
        let mut child = command().args(&line).stdout(std::process::Stdio::piped()).spawn().unwrap();
        sleep(Duration::from_millis(40 + 20 * trial));
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            last = Some(strict_json::parse(&output.stdout).unwrap());
            break;
        }
        assert_eq!(output.status.code(), None, "{}", stderr(&output));
        kills += 1;
    }
    println!("{kills} kills");
    let last = last.unwrap_or_else(|| json(&line));
    assert!(kills > 0);
    for key in ["units", "predicted_kl", "method", "evaluation", "layers"] {
        assert_eq!(last[key], expected[key], "{key}");
    }
    assert!(weights(&out) == weights(&whole));
    let beside = fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = beside.filter(|name| name.to_string_lossy().contains(".mantissa-")).collect();
    assert!(left.is_empty(), "{left:?}");
}
