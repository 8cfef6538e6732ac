//! Transforms and search methods without a text, through the pipeline: outputs verify against their source for any
//! number of threads and interruptions, and impossible requests are refused before any work.
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{calibration, files, model};
use mantissa_quant::verify::verify;
use mantissa_quant::{Options, Outcome, Plan, QuantError, Recipe, Start, run};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, ModelFiles, exl2, gptq, mlx, native};
use tempfile::TempDir;

const RECORD: &str = "mantissa-transform.json";

fn options(threads: usize, container: Option<Container>) -> Options {
    Options { threads, container, calibration: Some(calibration()), ..Options::default() }
}

/// Runs for `steps` steps, or to the end.
fn quantize(
    model: &Path,
    recipe: &str,
    out: &Path,
    options: Options,
    steps: usize,
) -> Result<Outcome, QuantError> {
    let source = ModelFiles::open(model)?;
    let plan = Plan::new(&source, Recipe::load(recipe)?, options)?;
    let mut left = steps;
    run(
        &plan,
        &source,
        &mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true),
        Start::Resume,
        &mut |_| {
            left = left.saturating_sub(1);
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )
}

/// Writes a recipe file in `dir`.
fn file(dir: &Path, text: &str) -> String {
    let path = dir.join("recipe.toml");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn every_transform_verifies_for_any_number_of_threads() {
    let temp = TempDir::new().unwrap();
    let searched = "transform = \"smooth\"\nweights = \"int4-channel\"\nactivations = \"int8-token\"\nformat = \"native\"\n[smooth]\nalpha = \"search\"";
    let kept = "transform = \"awq\"\nweights = \"int4-g32\"\nkeep = [\"*.0.self_attn.v_proj\", \"*.1.mlp.gate_proj\"]";
    let kept = {
        fs::create_dir(temp.path().join("kept")).unwrap();
        file(&temp.path().join("kept"), kept)
    };
    let searched = file(temp.path(), searched);
    let learned = |name: &str, text: &str| {
        fs::create_dir(temp.path().join(name)).unwrap();
        let text =
            format!("transform = \"spin\"\nmethod = \"gptq\"\n{text}\niterations = 4\nbatch_tokens = 64\n");
        file(&temp.path().join(name), &text)
    };
    let spun = learned("spun", "weights = \"int4-channel\"\nactivations = \"int4-token\"\n[spin]");
    let offline = learned("offline", "weights = \"int4-g32\"\n[spin]\nonline = false");
    for (i, (recipe, container)) in [
        ("smooth-int8-channel+int8-token", None),
        ("w8a8-smooth", Some(native::CONTAINER)),
        (searched.as_str(), None),
        ("awq-int4-g32-asym", None),
        ("awq-int4-g32-asym", Some(gptq::CONTAINER)),
        (kept.as_str(), None),
        ("awq-gptq-int3-g16", Some(native::CONTAINER)),
        ("awq-nvfp4", None),
        ("rotate-int8-channel+int8-token", None),
        ("rotate-gptq-int4-channel+int4-token", None),
        ("rotate-hqq-int4-g32", None),
        (spun.as_str(), None),
        (offline.as_str(), Some(gptq::CONTAINER)),
        ("hqq-int4-g32", Some(mlx::CONTAINER)),
        ("hqq-int3-channel-asym", None),
        ("rtn-mse-int4-g32", None),
    ]
    .into_iter()
    .enumerate()
    {
        let dtype = if i % 2 == 0 { Dtype::BF16 } else { Dtype::F32 };
        let source = temp.path().join(format!("source-{i}"));
        fs::create_dir(&source).unwrap();
        let source = model(&source, dtype, 3 + i as u64);
        let (out, other) = (temp.path().join("out"), temp.path().join("other"));
        let outcome = quantize(&source, recipe, &out, options(1, container), usize::MAX).unwrap();
        let found = verify(&out, Some(&source), 2).unwrap();
        assert!(found.ok, "{recipe} {dtype}: {:?}", found.faults);
        assert_eq!(found.weights, if recipe == kept { 12 } else { 14 }, "{recipe}");
        quantize(&source, recipe, &other, options(3, container), usize::MAX).unwrap();
        assert_eq!(files(&out), files(&other), "{recipe}");
        let plain = recipe.starts_with("hqq") || recipe.starts_with("rtn");
        assert_eq!(out.join(RECORD).exists(), !plain, "{recipe}");
        let folded =
            outcome.quality.tensors.iter().filter(|tensor| tensor.scheme.ends_with("folded")).count();
        assert_eq!(folded > 0, !plain, "{recipe}");
        fs::remove_dir_all(&out).unwrap();
        fs::remove_dir_all(&other).unwrap();
    }
}

#[test]
fn an_interrupted_transform_resumes_to_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 5);
    let text = "transform = \"spin\"\nweights = \"int4-channel\"\nactivations = \"int4-token\"\n[spin]\niterations = 5";
    let spun = file(temp.path(), text);
    for recipe in ["awq-int4-g32-asym", "rotate-gptq-int4-channel+int4-token", spun.as_str()] {
        let (expected, out) = (temp.path().join("expected"), temp.path().join("out"));
        quantize(&source, recipe, &expected, options(1, None), usize::MAX).unwrap();
        let (mut interruptions, mut taken_over) = (0, 0);
        for steps in (7..).step_by(9) {
            match quantize(&source, recipe, &out, options(1, None), steps) {
                Ok(outcome) => {
                    taken_over = outcome.resumed;
                    break;
                }
                Err(error) => assert!(error.is_interruption(), "{error}"),
            }
            interruptions += 1;
        }
        let least = if recipe == spun { 2 } else { 3 };
        assert!(interruptions > least && taken_over > 10, "{recipe}: {interruptions} {taken_over}");
        assert_eq!(files(&out), files(&expected), "{recipe}");
        fs::remove_dir_all(&out).unwrap();
        fs::remove_dir_all(&expected).unwrap();
    }
}

#[test]
fn a_changed_record_is_detected() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 6);
    let out = temp.path().join("out");
    quantize(&source, "awq-int4-g32-asym", &out, options(1, None), usize::MAX).unwrap();
    // Without the manifest's hashes.
    fs::remove_file(out.join("mantissa-manifest.json")).unwrap();
    let text = fs::read_to_string(out.join(RECORD)).unwrap();
    let at = text.find("input_layernorm\": \"").unwrap() + "input_layernorm\": \"".len();
    let (other, digits) = (text[..at].to_owned() + "40a00000", &text[at + 8..]);
    fs::write(out.join(RECORD), other + digits).unwrap();
    let found = verify(&out, Some(&source), 1).unwrap();
    assert!(found.faults.iter().any(|fault| fault.contains("input_layernorm")), "{:?}", found.faults);
    fs::write(out.join(RECORD), text.replacen("layers.0.input", "layers.9.input", 1)).unwrap();
    let error = verify(&out, Some(&source), 1).unwrap_err().to_string();
    assert!(error.contains("modules that the model does not have"), "{error}");
}

#[test]
fn unsupported_transforms_and_searches_are_refused_before_any_work() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 7);
    let out = temp.path().join("out");
    let offline =
        file(temp.path(), "transform = \"rotate\"\nweights = \"int4-g32\"\n[rotate]\nonline = false");
    // A name leaves these rotations out; a file can still ask for them.
    let asked = temp.path().join("asked.toml");
    fs::write(
        &asked,
        "transform = \"rotate\"\nmethod = \"autoround\"\nweights = \"int4-g32\"\n[rotate]\nonline = true",
    )
    .unwrap();
    let asked = asked.to_str().unwrap().to_owned();
    for (recipe, container, part) in [
        ("awq-q4_0", None, "transforms are not supported in this format"),
        ("rotate-int4-g32", Some(gptq::CONTAINER), "online = false"),
        (&asked, None, "AutoRound cannot rotate inputs"),
        ("hqq-nf4", None, "integers with an offset"),
        ("hqq-int4-t4x4", None, "in groups of a row or of a column"),
        // Groups with a short last one, which only the native format holds.
        ("hqq-int4-g64", Some(mlx::CONTAINER), "cannot be stored in mlx"),
        ("rtn-mse-nf4", None, "a scale per group"),
        ("rtn-mse-int4-g32", Some(exl2::CONTAINER), "exl2"),
    ] {
        let error =
            quantize(&source, recipe, &out, options(1, container), usize::MAX).unwrap_err().to_string();
        assert!(error.contains(part), "{recipe}: {error}");
        assert!(!out.exists());
    }
    let none = Options { threads: 1, ..Options::default() };
    let error = quantize(&source, "awq-int4-g32", &out, none, usize::MAX).unwrap_err();
    assert!(matches!(error, QuantError::NoCalibration { .. }), "{error}");
    quantize(&source, &offline, &out, options(1, Some(gptq::CONTAINER)), usize::MAX).unwrap();
    assert!(verify(&out, Some(&source), 1).unwrap().ok);
}

#[test]
fn observers_stay_within_the_amax() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 8);
    let scales = |observer: &str, transform: &str| -> Vec<f32> {
        let text = format!(
            "{transform}weights = \"int8-channel\"\nactivations = \"int8-tensor@static\"\nobserver = \"{observer}\""
        );
        let (recipe, out) = (file(temp.path(), &text), temp.path().join("out"));
        quantize(&source, &recipe, &out, options(2, None), usize::MAX).unwrap();
        let found = verify(&out, Some(&source), 1).unwrap();
        assert!(found.ok, "{observer}: {:?}", found.faults);
        let files = ModelFiles::open(&out).unwrap();
        let stored = ["q_proj", "o_proj"].map(|name| {
            let module = format!("model.layers.1.self_attn.{name}");
            files.linear(&module, 64, 64, false).unwrap().input.unwrap().outer.unwrap()
        });
        fs::remove_dir_all(&out).unwrap();
        stored.to_vec()
    };
    let greatest = scales("max", "");
    for observer in ["percentile", "mse", "kl", "moving-average"] {
        let found = scales(observer, "");
        assert!(found.iter().zip(&greatest).all(|(a, b)| *a > 0.0 && a <= b), "{observer}: {found:?}");
    }
    // The scale is that of the scaled input.
    assert_ne!(scales("max", "transform = \"smooth\"\n")[0], greatest[0]);
    let dynamic =
        file(temp.path(), "weights = \"int8-channel\"\nactivations = \"int8-token\"\nobserver = \"mse\"");
    let error =
        quantize(&source, &dynamic, &temp.path().join("out"), options(1, None), usize::MAX).unwrap_err();
    assert!(error.to_string().contains("observer"), "{error}");
}
