//! Fixes that messages propose: each is applied to the command that failed, and must work.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::main_job::windows;
use crate::support::{fail, mantissa, sampled, stderr, succeed, text};

/// Model whose down projections have 96 inputs: groups of 64 and 128 do not divide them, groups of 32 do.
fn ragged(dir: &Path) -> String {
    let path = dir.join("ragged");
    let sizes = "--hidden 64 --ffn 96 --layers 2 --heads 4 --kv-heads 2 --vocab 64 --preset tiny --context 64 --tied=false --seed 3";
    let arguments: Vec<&str> = sizes.split(' ').collect();
    succeed(&[&["synth", "--out", text(&path), "--quiet"][..], &arguments].concat());
    text(&path).to_owned()
}

/// Returns the fixes of a message that are commands or options: `mantissa …`, `--option value`.
fn fixes(line: &str) -> Vec<Vec<String>> {
    let runs = |text: &str| text.starts_with("mantissa ") || text.starts_with("--");
    let after = line.split("; fix: ").skip(1);
    let alternatives = after.flat_map(|fix| fix.split(", or ").map(str::to_owned).collect::<Vec<_>>());
    let texts =
        alternatives.map(|fix| fix.trim_start_matches("use ").trim().to_owned()).filter(|fix| runs(fix));
    texts
        .map(|fix| {
            let end = fix.find(", ").or(fix.find(';')).unwrap_or(fix.len());
            let words = fix[..end].split_whitespace().map(str::to_owned);
            if !fix.starts_with("--") {
                return words.collect();
            }
            // Words after the values of the options explain them.
            let words: Vec<String> = words.collect();
            words.chunks(2).take_while(|pair| pair[0].starts_with("--")).flatten().cloned().collect()
        })
        .collect()
}

/// Applies options to a command: replaces those that it has, appends the others.
fn applied(command: &[String], fix: &[String]) -> Vec<String> {
    if fix[0] == "mantissa" {
        return fix[1..].to_vec();
    }
    let mut command = command.to_vec();
    for pair in fix.chunks(2) {
        match command.iter().position(|word| *word == pair[0]) {
            Some(at) => drop(command.splice(at..at + 2, pair.iter().cloned())),
            None => command.extend(pair.iter().cloned()),
        }
    }
    command
}

/// Every refusal here proposes at least one fix, and each fix works.
#[test]
fn every_proposed_fix_works() {
    let temp = TempDir::new().unwrap();
    let (model, ragged) = (synthetic_of(temp.path(), "bf16"), ragged(temp.path()));
    let (model, tokens) = (text(&model), windows(temp.path()));
    let path = |name: &str| text(&temp.path().join(name)).to_owned();
    let (int4, nf4) = (path("int4"), path("nf4"));
    succeed(&["quantize", model, "--recipe", "rtn-int4-g32-asym", "--out", &int4, "--quiet"]);
    succeed(&["quantize", model, "--recipe", "nf4", "--format", "bitsandbytes", "--out", &nf4, "--quiet"]);
    let calibration = format!("--calibration-tokens {tokens}");
    let cases = [
        format!("quantize {model} --recipe nf4 --format compressed-tensors"),
        format!("quantize {model} --recipe nf4 --format gguf"),
        format!("quantize {model} --recipe rtn-int4-g32 --format gguf"),
        format!("quantize {model} --recipe rtn-int8-channel+int8-token --format gguf"),
        format!("quantize {model} --recipe rtn-int4-g32 --format bitsandbytes"),
        format!("quantize {model} --recipe rtn-int4-g32 --format mxfp4"),
        format!("quantize {model} --recipe rtn-nvfp4 --format gptq"),
        format!("quantize {model} --recipe rtn-mxint8 --format compressed-tensors"),
        format!("quantize {model} --recipe rtn-int4-g32+kv-int8-head --format gptq"),
        format!("quantize {model} --recipe rotate-int4-g32 --format gptq"),
        format!("quantize {model} --recipe rotate-int4-g32 --format onnx"),
        format!("quantize {model} --recipe spqr-int4-g32 --format gptq {calibration}"),
        format!("quantize {model} --recipe hqq-int4-g64 --format exl2"),
        format!("quantize {ragged} --recipe rtn-int4-g128"),
        format!("quantize {ragged} --recipe w4a16"),
        format!("quantize {ragged} --recipe rtn-int4-g64 --format gptq"),
        format!("quantize {ragged} --recipe gptq-int4-g128 {calibration}"),
        format!("quantize {ragged} --recipe awq-int4-g128-asym --format awq {calibration}"),
        format!("quantize {ragged} --recipe hqq-int4-g64 --format mlx"),
        format!("quantize {ragged} --recipe rtn-int4-g64-asym --format modelopt"),
        // Groups of 256 do not divide the rows of 128.
        "quantize demo --recipe gptq-int4-g256".to_owned(),
        "quantize demo --recipe awq-int4-g256-asym --format awq".to_owned(),
        format!("fit {ragged} --budget 7bpw --schemes int4-g128,int8-g128 --format gptq --tokens {tokens}"),
        format!("convert {int4} --format gguf"),
        format!("convert {int4} --format modelopt"),
        format!("convert {nf4} --format compressed-tensors"),
        format!("convert {nf4} --format gptq"),
        format!("convert {model} --format compressed-tensors"),
    ];
    for (i, case) in sampled(cases.iter().enumerate(), 3) {
        let out = path(&format!("out-{i}"));
        let mut command: Vec<String> = case.split(' ').map(str::to_owned).collect();
        command.extend(["--out".to_owned(), out.clone(), "--quiet".to_owned()]);
        let line = fail(2, &command);
        let all = fixes(&line);
        assert!(!all.is_empty(), "{case}: {line}");
        assert!(line.len() < 700 && line.matches("fix: ").count() == 1, "{case}: {line}");
        for (j, fix) in all.iter().enumerate() {
            let mut fixed = applied(&command, fix);
            let new = format!("{out}-{j}");
            match fixed.iter().position(|word| *word == out) {
                Some(at) => fixed[at] = new,
                None => fixed.extend(["--out".to_owned(), new]),
            }
            let output = mantissa(&fixed);
            assert!(output.status.success(), "{case}: {line}{fixed:?}: {}", stderr(&output));
        }
    }
}

/// A group size that does not divide a row is answered once, with one that does, in the same format.
#[test]
fn ragged_groups_are_answered_with_a_smaller_group() {
    let temp = TempDir::new().unwrap();
    let ragged = ragged(temp.path());
    let out = temp.path().join("out");
    let refused = |recipe: &str| fail(2, &["quantize", &ragged, "--recipe", recipe, "--out", text(&out)]);
    let line = refused("rtn-int4-g128");
    assert!(line.contains("14 of 14 layers cannot be stored in compressed-tensors"), "{line}");
    assert!(line.contains("96 columns are not a multiple of 128 (2 layers, first "), "{line}");
    assert!(line.trim_end().ends_with("; fix: --recipe rtn-int4-g32"), "{line}");
    let recipe = temp.path().join("r.toml");
    fs::write(&recipe, "weights = \"int4-g64\"\n").unwrap();
    let line = refused(text(&recipe));
    assert!(line.contains(&format!("fix: weights = \"int4-g32\" in {}", text(&recipe))), "{line}");
}

/// A file name in `.gguf` is a GGUF file, any other path a folder.
#[test]
fn the_name_of_the_output_says_file_or_folder() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let model = text(&model);
    let path = |name: &str| text(&temp.path().join(name)).to_owned();
    let quantize = |recipe: &str, out: &str| {
        ["quantize", model, "--recipe", recipe, "--out", out, "--quiet"].map(str::to_owned)
    };
    let line = fail(2, &quantize("rtn-int4-g32", &path("y.gguf")));
    assert!(line.contains("--out: expected a folder, got a file name for rtn-int4-g32"), "{line}");
    for fix in fixes(&line) {
        succeed(&applied(&quantize("rtn-int4-g32", &path("y.gguf")), &fix));
    }
    assert!(temp.path().join("y/config.json").is_file() && temp.path().join("y.gguf").is_file());
    // GGUF in a folder has the name of model and recipe; the folder may exist or not.
    for out in ["new", "old"] {
        fs::create_dir_all(temp.path().join("old")).unwrap();
        succeed(&quantize("q8_0", &path(out)));
        assert!(temp.path().join(out).join("model-q8_0.gguf").is_file(), "{out}");
    }
    // A scheme that GGUF holds is stored there if the name asks for it.
    succeed(&quantize("bf16", &path("plain.gguf")));
    assert!(temp.path().join("plain.gguf").is_file());
    let int4 = path("int4");
    succeed(&quantize("rtn-int4-g32", &int4));
    let converted = ["convert", &int4, "--format", "gguf", "--out", &path("converted"), "--quiet"];
    succeed(&converted);
    assert!(temp.path().join("converted/int4-converted.gguf").is_file());
    let line = fail(2, &["convert", &int4, "--format", "gptq", "--out", &path("z.gguf")]);
    assert!(line.contains("--out: expected a folder") && line.contains("fix: --out "), "{line}");
}

/// A preview writes nothing, so it needs no place.
#[test]
fn a_dry_run_needs_no_output() {
    let shown = succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--dry-run"]);
    assert!(shown.contains("layers quantized by rtn-int4-g32"), "{shown}");
}
