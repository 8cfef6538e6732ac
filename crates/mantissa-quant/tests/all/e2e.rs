//! Training of scales and norms after a method, through the pipeline: codes stay, the held-out loss falls, outputs
//! verify and do not depend on threads or interruptions, and impossible requests are refused before any work.
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{calibration, files, model};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::verify::verify;
use mantissa_quant::{Options, Outcome, Plan, QuantError, Recipe, Start, run};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, ModelFiles, Weight, gptq, native};
use tempfile::TempDir;

const MODULE: &str = "model.layers.1.mlp.up_proj";

fn quantize(
    source: &Path,
    recipe: &str,
    out: &Path,
    (threads, container): (usize, Option<Container>),
    steps: usize,
) -> Result<Outcome, QuantError> {
    let source = ModelFiles::open(source)?;
    let options = Options {
        threads,
        container,
        calibration: Some(calibration()),
        max_shard_bytes: 60_000,
        ..Options::default()
    };
    let plan = Plan::new(&source, Recipe::load(recipe)?, options)?;
    assert!(plan.peak_bytes(true) > 0);
    let mut left = steps;
    let output = mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true);
    run(&plan, &source, &output, Start::Resume, &mut |_| {
        left = left.saturating_sub(1);
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

/// Codes and scales of a layer `[rows, cols]`.
fn layer(dir: &Path) -> (mantissa_num::Codes, mantissa_num::ScaleLevel) {
    let files = ModelFiles::open(dir).unwrap();
    match files.linear(MODULE, 96, 64, false).unwrap().weight {
        Weight::Quantized(q) => (q.codes, q.scales),
        other => panic!("{other:?}"),
    }
}

#[test]
fn scales_and_norms_change_and_codes_do_not() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 1);
    let recipe = temp.path().join("r.toml");
    for (i, (text, format)) in [
        ("method = \"rtn\"\nweights = \"int2-g32-asym\"", None),
        ("method = \"gptq\"\nweights = \"int3-g32\"", Some(gptq::CONTAINER)),
        ("method = \"rtn\"\nweights = \"nvfp4\"", None),
        ("method = \"hqq\"\nweights = \"int2-g32\"", Some(native::CONTAINER)),
    ]
    .into_iter()
    .enumerate()
    {
        let written = |name: &str, tuning: &str, threads| {
            fs::write(&recipe, format!("{tuning}{text}{}", if tuning.is_empty() { "" } else { TABLE }))
                .unwrap();
            let out = temp.path().join(format!("{name}-{i}"));
            let outcome =
                quantize(&source, recipe.to_str().unwrap(), &out, (threads, format), usize::MAX).unwrap();
            (out, outcome)
        };
        let (plain, _) = written("plain", "", 1);
        let (tuned, outcome) = written("tuned", "tune = \"e2e\"\n", 1);
        let (again, _) = written("again", "tune = \"e2e\"\n", 3);
        let ((codes, scales), (kept, trained)) = (layer(&plain), layer(&tuned));
        assert!(codes == kept && scales != trained, "{text}");
        let norm = "model.layers.1.input_layernorm.weight";
        let [before, after] =
            [&source, &tuned].map(|dir| ModelFiles::open(dir).unwrap().tensor_f32(norm, &[64]));
        assert_ne!(before.unwrap(), after.unwrap(), "{text}");
        assert!(files(&tuned) == files(&again), "{text}: depends on threads");
        let note = outcome.quality.notes.iter().find(|note| note.starts_with("e2e: KL ")).cloned().unwrap();
        let figures: Vec<f64> = note.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(figures[1] < 0.95 * figures[0], "{text}: {note}");
        assert!(outcome.quality.layers.iter().all(|layer| layer.method.ends_with("+e2e")), "{text}");
        let verified = verify(&tuned, Some(&source), 1).unwrap();
        assert!(verified.ok, "{text}: {:?}", verified.faults);
        assert!(verified.notes.iter().any(|note| note.contains("were trained")), "{text}");
    }
}

const TABLE: &str = "\n[e2e]\nepochs = 12\nbatch_tokens = 64\n";

/// Channel scales of a trellis are trained, and a trellis without them has one scale per block of outputs.
#[test]
fn scales_of_a_trellis_are_trained() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 4);
    for scheme in ["trellis2", "trellis2-channel"] {
        let out = temp.path().join(scheme);
        let recipe = format!("qtip-{scheme}+e2e");
        let outcome = quantize(&source, &recipe, &out, (1, None), usize::MAX).unwrap();
        let verified = verify(&out, Some(&source), 1).unwrap();
        assert!(verified.ok, "{scheme}: {:?}", verified.faults);
        assert!(outcome.quality.notes.iter().any(|note| note.contains("→")), "{:?}", outcome.quality.notes);
    }
}

/// A run that ends at any step resumes to the same bytes; layers that were quantized are not quantized again.
#[test]
fn an_interrupted_run_ends_in_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 2);
    let recipe = "rtn-int3-g32+e2e";
    let (expected, out) = (temp.path().join("expected"), temp.path().join("out"));
    quantize(&source, recipe, &expected, (1, None), usize::MAX).unwrap();
    for steps in [10, 26] {
        let error = quantize(&source, recipe, &out, (1, None), steps).unwrap_err();
        assert!(error.is_interruption(), "{steps}: {error}");
    }
    let outcome = quantize(&source, recipe, &out, (1, None), usize::MAX).unwrap();
    assert_eq!(outcome.resumed, 21, "all copied tensors and layers");
    assert!(files(&out) == files(&expected));
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 3);
    let out = temp.path().join("out");
    for (recipe, format, part) in [
        ("rtn-q4_0+e2e", None, "expected a folder"),
        ("gptq-int4-g32+e2e", Some("exl2"), "shared by rows"),
        ("rtn-int4-g32+kv-fp8-e4m3-tensor@static+e2e", None, "keys and values"),
        ("rotate-int4-channel+int4-token+e2e", None, "rotated at run time"),
    ] {
        let format = format.map(|name| Container::named(name).unwrap());
        let error = quantize(&source, recipe, &out, (1, format), usize::MAX).unwrap_err().to_string();
        assert!(error.contains(part) && error.contains("fix: "), "{recipe}: {error}");
        assert!(!out.exists());
    }
    let unread = Recipe::from_toml("r.toml", "weights = \"int4-g32\"\n[e2e]\nepochs = 3").unwrap_err();
    assert!(unread.to_string().contains("tune = \"e2e\""), "{unread}");
}

/// Every architecture is either trained, or refused by name before any work.
#[test]
fn architectures_are_trained_or_refused_before_any_work() {
    let temp = TempDir::new().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    let windows = vec![(1..9).collect(), (3..11).collect()];
    let (mut trained, mut refused) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(tiny).unwrap() {
        let dir = entry.unwrap().path();
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let source = ModelFiles::open(&dir).unwrap();
        let planned = |recipe: &str| {
            let options = Options {
                threads: 1,
                container: Some(native::CONTAINER),
                calibration: Some(CalibrationSet::new("windows", windows.clone())),
                ..Options::default()
            };
            Plan::new(&source, Recipe::load(recipe)?, options)
        };
        if planned("rtn-int4-g8").is_err() {
            continue;
        }
        match planned("rtn-int4-g8+e2e") {
            Ok(plan) => {
                let out = temp.path().join(&name);
                let output = mantissa_store::Output::of_job(&out, mantissa_store::JobKey::of("test"), true);
                let done = run(&plan, &source, &output, Start::Resume, &mut |_| ControlFlow::Continue(()));
                let layers = done.unwrap_or_else(|error| panic!("{name}: {error}")).quality.layers;
                assert!(layers.iter().any(|layer| layer.method.ends_with("+e2e")), "{name}");
                trained.push(name);
            }
            Err(error @ QuantError::EndToEnd { .. }) => {
                let text = error.to_string();
                assert!(text.ends_with("; fix: leave out +e2e"), "{name}: {text}");
                assert_eq!(text.matches("fix: ").count(), 1, "{name}: {text}");
                refused.push(name);
            }
            Err(error) => panic!("{name}: {error}"),
        }
    }
    for (names, name) in [(&trained, "llama2-gqa-tied"), (&trained, "qwen2-bias"), (&refused, "gpt2")] {
        assert!(names.iter().any(|other| other == name), "{name}: {trained:?} {refused:?}");
    }
    assert!(refused.iter().any(|name| name == "gemma3") && refused.iter().any(|name| name == "mixtral"));
}
