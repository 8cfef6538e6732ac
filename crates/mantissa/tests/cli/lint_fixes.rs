//! Every fix that `lint` and `quantize --for` propose is run, and the result passes.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::support::{mantissa, root, sampled, stderr, strict_json, succeed, text, whole};

/// Recipes of artifacts, with a format if it is not the recipe's own.
const ARTIFACTS: [(&str, &str); 12] = [
    ("rtn-int4-g32", ""),
    ("rtn-int4-g32-asym", ""),
    ("rtn-int3-g32", ""),
    ("rtn-int8-channel", ""),
    ("w8a8", ""),
    ("fp8-weight", ""),
    ("fp8-dynamic", ""),
    ("rtn-nvfp4", ""),
    ("rtn-mxfp4", ""),
    ("rtn-nf4", "native"),
    ("rtn-int4-g32-asym", "gptq"),
    ("rtn-q8_0", "gguf"),
];

const ENGINES: [&str; 12] = [
    "vllm",
    "vllm:tp=4",
    "vllm:gpu=h100",
    "sglang",
    "sglang:tp=2,gpu=a100",
    "lmdeploy",
    "transformers",
    "tensorrt-llm",
    "tensorrt-llm:gpu=h100",
    "llama.cpp",
    "mlx",
    "exllamav2",
];

/// Returns the words of a proposed command after `mantissa`; `None` for other advice. Text after `#` is a comment.
fn words(fix: &str) -> Option<Vec<String>> {
    let words = fix.strip_prefix("mantissa ")?;
    let words = words.split_once(" # ").map_or(words, |(words, _)| words);
    Some(words.split(' ').map(|word| word.trim_matches('\'').to_owned()).collect())
}

/// Runs a proposed command, and lints what it wrote for `engine`.
fn run(fix: &str, engine: &str, shown: &str) {
    let words = words(fix).unwrap();
    let output = mantissa(&words);
    assert!(output.status.success(), "{shown}: {fix}: {}", stderr(&output));
    if let Some(at) = words.iter().position(|word| word == "--out") {
        let out = Path::new(&words[at + 1]);
        // A GGUF file appears in a folder that is not named as a file.
        let file = std::fs::read_dir(out).ok().and_then(|mut files| {
            files.find_map(|file| {
                Some(file.ok()?.path()).filter(|path| path.extension().is_some_and(|e| e == "gguf"))
            })
        });
        let linted = mantissa(&["lint", text(file.as_deref().unwrap_or(out)), "--for", engine, "--quiet"]);
        assert!(linted.status.success(), "{shown}: {fix}: {}", stderr(&linted));
        let removed = if out.is_dir() { std::fs::remove_dir_all(out) } else { std::fs::remove_file(out) };
        removed.unwrap();
    }
}

#[test]
fn fixes_of_artifacts_are_commands_that_work() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let (mut ran, mut again) = (0, std::collections::BTreeSet::new());
    for (i, (recipe, format)) in sampled(ARTIFACTS.into_iter().enumerate(), 4) {
        let out = quantized(temp.path(), &model, i, recipe, format);
        for engine in ENGINES {
            for source in [None, Some(&model)] {
                let mut arguments = vec!["lint", text(&out), "--for", engine, "--json", "--quiet"];
                arguments.extend(source.iter().flat_map(|path| ["--reference", text(path)]));
                let output = mantissa(&arguments);
                let report = strict_json::parse(&output.stdout).unwrap();
                let shown = format!("{recipe} {format} for {engine}");
                let mut fixes: Vec<_> = failing(&report).collect();
                fixes.sort_unstable();
                fixes.dedup();
                for fix in fixes {
                    if let Some(tp) = served(fix) {
                        let (name, options) = engine.split_once(':').unwrap();
                        let fewer = options.split(',').map(|option| match option.starts_with("tp=") {
                            true => format!("tp={tp}"),
                            false => option.to_owned(),
                        });
                        let fewer = format!("{name}:{}", fewer.collect::<Vec<_>>().join(","));
                        assert!(mantissa(&["lint", text(&out), "--for", &fewer]).status.success(), "{fix}");
                        continue;
                    }
                    if let Some(target) = fix.strip_prefix("mantissa quantize SOURCE --for ") {
                        again.insert(target.to_owned());
                        assert!(
                            source.is_none() && target.split(' ').next() == Some(engine),
                            "{shown}: {fix}"
                        );
                        continue;
                    }
                    assert!(
                        !fix.contains("--requantize") || fix.ends_with(" # rounds a second time"),
                        "{fix}"
                    );
                    // Without the source, some engines take nothing that rounding again can make.
                    if words(fix).is_none() && source.is_none() {
                        continue;
                    }
                    assert!(words(fix).is_some(), "{shown}: {fix}");
                    run(fix, engine, &shown);
                    ran += 1;
                }
            }
        }
    }
    assert!(!whole() || ran > 50 && again.len() > 5, "{ran} {again:?}");
    assert!(ran > 5 && !again.is_empty(), "{ran} {again:?}");
    // The synthetic model has no tokenizer to calibrate with.
    for target in again {
        let words: Vec<_> = target.split(' ').collect();
        succeed(&[&["quantize", "demo", "--dry-run", "--quiet", "--for"][..], &words].concat());
    }
}

/// Returns the number of GPUs of a command that serves a model.
fn served(fix: &str) -> Option<&str> {
    let flags = [" --tensor-parallel-size ", " --tp ", " --tp_size "];
    flags.iter().find_map(|flag| Some(fix.split_once(flag)?.1))
}

/// No fix rounds weights of few bits a second time, or for a warning about speed.
#[test]
fn narrow_weights_are_not_rounded_twice() {
    let temp = TempDir::new().unwrap();
    let (int4, nvfp4) = (temp.path().join("int4"), temp.path().join("nvfp4"));
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&int4), "--quiet"]);
    succeed(&["quantize", "demo", "--recipe", "nvfp4", "--out", text(&nvfp4), "--quiet"]);
    let cure = |model: &Path, engine: &str| {
        let output = mantissa(&["lint", text(model), "--for", engine, "--json", "--quiet"]);
        let report = strict_json::parse(&output.stdout).unwrap();
        report["reports"][0]["findings"][0]["cure"].as_str().unwrap().to_owned()
    };
    assert_eq!(cure(&int4, "llama.cpp"), "mantissa quantize SOURCE --for llama.cpp");
    assert!(cure(&nvfp4, "vllm:gpu=a100").starts_with("none needed: "), "{}", cure(&nvfp4, "vllm:gpu=a100"));
    let serve = format!("vllm serve {} --tensor-parallel-size 2", text(&int4));
    assert_eq!(cure(&int4, "vllm:tp=3"), serve);
}

/// Returns the fixes of the findings that fail.
fn failing(report: &Value) -> impl Iterator<Item = &str> {
    let findings = report["reports"][0]["findings"].as_array().unwrap().iter();
    findings.filter(|f| f["severity"] != "warning").map(|f| f["cure"].as_str().unwrap())
}

fn quantized(dir: &Path, model: &Path, i: usize, recipe: &str, format: &str) -> PathBuf {
    let out = dir.join(format!("q{i}{}", if format == "gguf" { ".gguf" } else { "" }));
    let mut arguments = vec!["quantize", text(model), "--recipe", recipe, "--out", text(&out), "--quiet"];
    if !format.is_empty() {
        arguments.extend(["--format", format]);
    }
    let output = mantissa(&arguments);
    assert!(output.status.success(), "{recipe} {format}: {}", stderr(&output));
    out
}

#[test]
fn fixes_of_plans_are_commands_that_work() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let tokens = temp.path().join("t.json");
    let window: Vec<u32> = (0..64).collect();
    std::fs::write(&tokens, serde_json::to_string(&[&window, &window]).unwrap()).unwrap();
    let mut ran = 0;
    let artifacts = ARTIFACTS.into_iter().chain([("gptq-int3-g32", "")]).enumerate();
    for (i, (recipe, format)) in sampled(artifacts, 3) {
        for engine in ENGINES {
            let out = temp.path().join(format!("p{i}"));
            let mut arguments = vec![
                "quantize",
                text(&model),
                "--recipe",
                recipe,
                "--out",
                text(&out),
                "--for",
                engine,
                "--quiet",
            ];
            if !format.is_empty() {
                arguments.extend(["--format", format]);
            }
            if recipe.starts_with("gptq") {
                arguments.extend(["--calibration-tokens", text(&tokens)]);
            }
            arguments.push("--dry-run");
            let output = mantissa(&arguments);
            if output.status.success() {
                continue;
            }
            let line = stderr(&output);
            let shown = format!("{recipe} {format} for {engine}");
            let fix = line.trim().rsplit_once("; fix: ").unwrap_or_else(|| panic!("{shown}: {line}")).1;
            assert!(words(fix).is_some(), "{shown}: {line}");
            let target = words(fix).unwrap();
            let target =
                target.iter().position(|word| word == "--for").map(|at| target[at + 1].clone()).unwrap();
            run(&fix.replace(" --dry-run", ""), &target, &shown);
            ran += 1;
        }
    }
    assert!(ran > if whole() { 40 } else { 8 }, "{ran}");
}

#[test]
fn the_engine_of_a_fix_is_the_one_that_was_given() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let out = quantized(temp.path(), &model, 0, "fp8-dynamic", "");
    let output = mantissa(&["lint", text(&out), "--for", "sglang", "--json", "--quiet"]);
    let report = strict_json::parse(&output.stdout).unwrap();
    let unchecked = report["reports"][0]["unchecked"].to_string();
    assert!(
        unchecked.contains(&format!("mantissa lint {} --for sglang:gpu=h100", text(&out))),
        "{unchecked}"
    );
    assert!(!unchecked.contains("vllm"), "{unchecked}");
}

/// Blocks that do not divide the model: the format that holds them is refused by the engine, so that the fix is a recipe with
/// other blocks, of the same codes.
#[test]
fn a_format_that_the_engine_refuses_is_not_advised() {
    let temp = TempDir::new().unwrap();
    let model = root().join("tests/data/tiny/llama2-gqa-tied");
    let out = temp.path().join("out");
    let command = |recipe: &str, more: &[&str]| {
        let base = ["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"];
        mantissa(&[&base[..], more].concat())
    };
    let advised = |refused: &std::process::Output| {
        let line = stderr(refused);
        assert_eq!(refused.status.code(), Some(2), "{line}");
        line.trim().rsplit_once("; fix: ").unwrap_or_else(|| panic!("{line}")).1.to_owned()
    };
    assert!(advised(&command("fp8-block", &[])).starts_with("--format "));
    for engine in ["vllm", "sglang"] {
        let fix = advised(&command("FP8_BLOCK", &["--for", engine]));
        assert_eq!(fix, "--recipe rtn-fp8-e4m3-channel+fp8-e4m3-token", "{engine}");
        let fixed = command(fix.strip_prefix("--recipe ").unwrap(), &["--for", engine]);
        assert!(fixed.status.success(), "{engine}: {}", stderr(&fixed));
        std::fs::remove_dir_all(&out).unwrap();
    }
    // The format is there, the engine refuses it: FP8 stays FP8.
    let refused = command("fp8-block", &["--format", "deepseek-fp8", "--for", "vllm"]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    let line = stderr(&refused);
    assert!(line.contains("fp8-e4m3-channel") && !line.contains("int8"), "{line}");
}
