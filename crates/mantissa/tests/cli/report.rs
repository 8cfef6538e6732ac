//! `report`: pages that replace each other, what the terminal says, and commands that work.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::support::{command, fail, root, stderr, succeed, text};

/// Copies a small model to `dir` and quantizes it there; returns the standard output.
fn quantized(dir: &Path, model: &str, more: &[&str]) -> String {
    let source = dir.join("source model");
    fs::create_dir(&source).unwrap();
    for file in fs::read_dir(root().join("tests/data/tiny").join(model)).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
    }
    succeed_in(dir, &[&["quantize", "source model", "--quiet"], more].concat())
}

fn succeed_in(dir: &Path, arguments: &[&str]) -> String {
    let output = command().current_dir(dir).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the command after "next", without quotes, that starts with `start`.
fn next<'a>(out: &'a str, start: &str) -> &'a str {
    let mut commands = out.lines().filter_map(|line| line.strip_prefix("next        "));
    commands.find(|command| command.starts_with(start)).unwrap_or_else(|| panic!("{start}: {out}"))
}

#[test]
fn a_page_replaces_one_of_the_same_model_and_no_other_file() {
    let temp = TempDir::new().unwrap();
    let at = temp.path();
    let out = quantized(at, "llama2-gqa-tied", &["--recipe", "rtn-int4-channel", "--out", "int4"]);
    // The recommended command names the source, and its page takes the place of one without it.
    succeed_in(at, &["report", "int4"]);
    assert_eq!(next(&out, "mantissa report"), "mantissa report int4 --reference 'source model'");
    succeed_in(at, &["report", "int4", "--reference", "source model"]);
    let page = at.join("int4.report.html");
    assert!(fs::read_to_string(&page).unwrap().contains("<dt>source</dt><dd>source model</dd>"));
    succeed_in(at, &["quantize", "source model", "--quiet", "--recipe", "rtn-int8-channel", "--out", "int8"]);
    // Another model is no source: its texts beside these figures would mislead.
    for other in [root().join("tests/data/tiny/smollm3"), at.join("int8")] {
        let line = fail(2, &["report", text(&at.join("int4")), "--reference", text(&other)]);
        assert!(line.contains("was quantized from, got another one"), "{line}");
    }
    let refused = |arguments: &[&str]| {
        let line = fail(2, arguments);
        assert!(line.contains("that this job did not write") && line.contains("--overwrite"), "{line}");
    };
    let (int8, int4) = (at.join("int8"), at.join("int4"));
    refused(&["report", text(&int8), "--out", text(&page)]);
    fs::write(&page, "my notes").unwrap();
    refused(&["report", text(&int4)]);
    assert_eq!(fs::read(&page).unwrap(), b"my notes");
}

#[test]
fn the_terminal_says_the_verdict_and_where_the_page_is() {
    let temp = TempDir::new().unwrap();
    let at = temp.path();
    succeed_in(
        at,
        &["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", "int4", "--quiet", "--max-kl", "9"],
    );
    let said = succeed_in(at, &["report", "int4"]);
    assert!(said.starts_with("verdict     visible: KL 0."), "{said}");
    for part in ["built-in text (held-out part)\n", "size        2.66 MB → ", "report      "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let page = fs::read_to_string(at.join("int4.report.html")).unwrap();
    for part in [
        "<dt>source</dt><dd>demo (built in)</dd>",
        "<dt>recipe</dt><dd>rtn-int4-g128</dd>",
        "<dt>format</dt><dd>compressed-tensors</dd>",
        "<dt>loads in</dt><dd>vLLM, ",
        "Text: the built-in text (held-out part), ",
        "Loaded in a test with transformers ",
        "By its source code; not loaded in a test.",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // Every file of the model has its hash on the page.
    for file in fs::read_dir(at.join("int4")).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        assert!(page.contains(&format!("output: {name}</th>")), "{name}");
    }
    assert!(!page.contains("(held out)"), "a name of the code");
}

#[test]
fn a_missing_folder_is_named_as_missing() {
    let line = fail(2, &["report", "no/such/run"]);
    assert!(line.contains("no/such/run: expected ") && line.contains("got no such file or folder"), "{line}");
}

#[test]
fn commands_of_a_gguf_file_load_a_file() {
    let temp = TempDir::new().unwrap();
    let at = temp.path();
    let recipe = ["--recipe", "q4_k_m", "--for", "vllm", "--for", "transformers"];
    let out = quantized(at, "llama2-gqa-tied", &[&recipe[..], &["--out", "m.gguf"]].concat());
    assert!(next(&out, "pip install 'vllm[extra-quant]' && vllm serve ").ends_with("m.gguf"), "{out}");
    assert!(next(&out, "python -i -c ").ends_with(", gguf_file=\"m.gguf\")'"), "{out}");
    // Files are compared with files.
    let before = fs::metadata(at.join("source model/model.safetensors")).unwrap().len();
    let after = fs::metadata(at.join("m.gguf")).unwrap().len();
    let size = format!("size        {} → {}, ", mantissa_jobs::bytes(before), mantissa_jobs::bytes(after));
    assert!(succeed_in(at, &["report", "m.gguf"]).contains(&size), "{size}");
    // Every layer falls back: the terminal and the top of the page say so.
    let said = succeed_in(at, &["report", "m.gguf"]);
    assert!(said.contains("fallbacks   14 of 14 layers: "), "{said}");
    let page = fs::read_to_string(at.join("m.gguf.report.html")).unwrap();
    let top = page.split("<h2>").next().unwrap();
    assert!(top.contains("<p class=\"caution\">Fallbacks from the recipe: 14 of 14 layers: "), "{top}");
    assert!(top.contains("<dt>source</dt><dd>source model</dd>"), "the name in the metadata: {top}");
    for part in [
        "gguf_file=&quot;m.gguf&quot;",
        "pip install &#39;vllm[extra-quant]&#39; &amp;&amp; vllm serve m.gguf",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("transformers chat"), "it loads no file");
    succeed(&["lint", text(&at.join("m.gguf")), "--for", "transformers", "--quiet"]);
}

/// Reports of other tools are those of `compare` here: candidates on one page, a section for a model card.
#[test]
fn candidates_and_cards_lead_to_compare() {
    let temp = TempDir::new().unwrap();
    let at = temp.path();
    for (recipe, out) in [("rtn-int4-g32", "a"), ("rtn-int8-channel", "b c")] {
        succeed_in(at, &["quantize", "demo", "--recipe", recipe, "--out", out, "--quiet"]);
    }
    let refused = |arguments: &[&str]| {
        let output = command().current_dir(at).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    };
    let line = refused(&["report", "a", "b c"]);
    assert!(line.ends_with("fix: mantissa compare SOURCE a 'b c' --html candidates.html\n"), "{line}");
    fs::write(at.join("cmp.json"), "{}").unwrap();
    assert!(refused(&["report", "cmp.json"]).contains("fix: --html page.html"));
    let line = refused(&["report", "a", "--out", "README.md"]);
    assert!(
        line.contains("mantissa compare MODEL OUTPUT --markdown=FILE") && !at.join("README.md").exists(),
        "{line}"
    );
    for words in [&["report", "a", "--card"][..], &["card"], &["help", "card"]] {
        assert!(refused(words).contains("mantissa compare MODEL OUTPUT --markdown="), "{words:?}");
    }
    let line = refused(&["compare", "demo", "--recipe", "a"]);
    assert!(line.contains("got a, a model") && line.ends_with("fix: a without --recipe\n"), "{line}");
    let line = refused(&["quantize", "demo", "--recipe", "nf4", "--out", "x.safetensors"]);
    assert!(line.contains("fix: --out x, a folder"), "{line}");
}

/// A method that lowers the error of outputs is ranked by that, with what it means.
#[test]
fn calibrated_layers_are_ranked_by_the_error_of_outputs() {
    let temp = TempDir::new().unwrap();
    let at = temp.path();
    let recipe = ["quantize", "demo", "--recipe", "gptq-int4-g32", "--samples", "8", "--quiet"];
    let said = succeed_in(at, &[&recipe[..], &["--out", "q"]].concat());
    let (_, table) = said.split_once("10 of 35 layers, largest error vs RTN first").unwrap();
    let ranked: Vec<f64> = table
        .lines()
        .filter(|row| row.contains(" int4-g32"))
        .map(|row| row.split_whitespace().last().unwrap().parse().unwrap())
        .collect();
    assert!(ranked.len() == 10 && ranked.is_sorted_by(|a, b| a >= b), "{said}");
    let whole = said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(whole.contains("squared error of the layer's outputs on the calibration inputs"), "{said}");
    succeed_in(at, &["report", "q"]);
    let page = fs::read_to_string(at.join("q.report.html")).unwrap();
    assert!(page.contains("error vs RTN</th>") && page.contains("Layers with the largest error vs RTN (10)"));
}
