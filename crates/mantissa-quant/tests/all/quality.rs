//! `quality.json` is correct and reproducible, and any change in it is detected.
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::common::{files, model, names_in};
use mantissa_eval::{Sequence, compare};
use mantissa_model::Decoder;
use mantissa_num::round::random_u32;
use mantissa_quant::verify::{Against, Verification, verify, verify_against};
use mantissa_quant::{
    Evaluation, Exceeded, Options, Outcome, Plan, QUALITY_NAME, Quality, QuantError, Recipe, Start, TokenSet,
    quality_path, run,
};
use mantissa_store::convention::{ModelFiles, gguf};
use mantissa_store::{Dtype, FileDigest, MANIFEST_NAME, Manifest, manifest_path};
use serde_json::{Value, json};
use tempfile::TempDir;

const RECIPE: &str = "rtn-int4-g32";

fn windows() -> Vec<Sequence> {
    let token = |window: u64, i| random_u32(window, i) % 96;
    (0..4).map(|w| Sequence { tokens: (0..30).map(|i| token(w, i)).collect(), from: 1 }).collect()
}

struct WeightJob<'a> {
    source: &'a Path,
    recipe: &'a str,
    out: &'a Path,
    options: Options,
    max_kl: Option<f64>,
}

impl WeightJob<'_> {
    /// Runs the plan; `stop` is called with the tokens evaluated. Returns the outcome and the number of these calls.
    fn run(&self, stop: impl Fn(u64) -> bool + Sync) -> (Result<Outcome, QuantError>, usize) {
        let mut evaluated = 0;
        let result = (|| {
            let source = ModelFiles::open(self.source)?;
            let plan = Plan::new(&source, Recipe::load(self.recipe)?, self.options.clone())?;
            let evaluation = Evaluation::new(&source, "w.json:k", windows(), self.max_kl)?;
            let plan = plan.with_evaluation(Some(evaluation));
            run(
                &plan,
                &source,
                &mantissa_store::Output::of_job(self.out, mantissa_store::JobKey::of("test"), true),
                Start::Resume,
                &mut |at| {
                    evaluated += usize::from(at.tokens.is_some());
                    if at.tokens.is_some_and(&stop) {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                },
            )
        })();
        (result, evaluated)
    }
}

fn options(threads: usize) -> Options {
    Options { threads, max_shard_bytes: 30_000, ..Options::default() }
}

fn quantize(source: &Path, recipe: &str, out: &Path, options: Options) -> Outcome {
    WeightJob { source, recipe, out, options, max_kl: None }.run(|_| false).0.unwrap()
}

#[test]
fn it_describes_the_output() {
    let temp = TempDir::new().unwrap();
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let (source, out) = (model(temp.path(), dtype, 1), temp.path().join(format!("q-{dtype}")));
        let outcome = quantize(&source, RECIPE, &out, options(2));
        let q = Quality::read(&out).unwrap().unwrap();
        assert_eq!(q, outcome.quality);
        let digest = |path: PathBuf| FileDigest::of(&fs::read(path).unwrap());
        let source_files: Vec<_> = q.hashes.source.iter().collect();
        assert_eq!(source_files.len(), 2);
        assert!(source_files.iter().all(|(name, d)| **d == digest(source.join(name))));
        let shards = ModelFiles::open(&out).unwrap().checkpoint().files().count();
        assert!(shards > 1 && q.hashes.weights.len() == shards + 1, "the index too");
        assert!(q.hashes.weights.iter().all(|(name, d)| *d == digest(out.join(name))));
        assert_eq!(q.hashes.recipe, FileDigest::of(RECIPE.as_bytes()).hex());
        assert_eq!((q.layers.len(), q.tensors.len()), (14, 7));
        assert!(q.layers.iter().all(|l| l.method == "rtn" && l.fallback.is_none() && l.error.mse > 0.0));
        assert!(q.tensors.iter().all(|t| t.error.is_none() && t.scheme == dtype.name().to_lowercase()));
        let stored = ModelFiles::open(&out).unwrap().checkpoint().total_bytes();
        assert_eq!((q.bytes, q.bits_per_weight), (stored, 8.0 * stored as f64 / q.parameters as f64));
        let figures = q.evaluation.unwrap();
        assert_eq!(figures.text, TokenSet::new("w.json:k", &windows()));
        assert_eq!(figures.noise_floor_kl == 0.0, dtype == Dtype::BF16, "{figures:?}");
        assert!(figures.kl > 1e-5 && figures.kl > 10.0 * figures.noise_floor_kl, "{figures:?}");
        let load = |path: &Path| Decoder::load(&ModelFiles::open(path).unwrap()).unwrap();
        let go_on = |_| ControlFlow::Continue(());
        let (own, c) = compare(&load(&out), &load(&source), &windows(), 1, &go_on).unwrap();
        assert_eq!((figures.nll, figures.kl, figures.kl_se), (own.nll, c.kl, c.kl_se));
        assert_eq!((figures.top1, figures.delta_nll_se), (c.top1, c.delta_nll_se));
    }
}

/// The noise floor is 0 for an f32 model whose weights are all bf16 values; else it is the loss of a bf16 copy.
#[test]
fn the_noise_floor_is_the_loss_of_bf16() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 2);
    let floor = |source: &Path, out: &str| {
        let figures =
            quantize(source, RECIPE, &temp.path().join(out), options(1)).quality.evaluation.unwrap();
        (figures.noise_floor_kl, figures.noise_floor_kl_se)
    };
    let rounded = temp.path().join("rounded");
    fs::create_dir(&rounded).unwrap();
    fs::copy(source.join("config.json"), rounded.join("config.json")).unwrap();
    let opened = ModelFiles::open(&source).unwrap();
    let mut bytes = fs::read(source.join("model.safetensors")).unwrap();
    for meta in opened.checkpoint().tensors() {
        for value in bytes[meta.offset as usize..][..meta.len as usize].chunks_exact_mut(4) {
            let bf16 = half_to_even(f32::from_le_bytes(value.try_into().unwrap()));
            value.copy_from_slice(&bf16.to_le_bytes());
        }
    }
    fs::write(rounded.join("model.safetensors"), bytes).unwrap();
    let load = |path: &Path| Decoder::load(&ModelFiles::open(path).unwrap()).unwrap();
    let go_on = |_| ControlFlow::Continue(());
    let (_, expected) = compare(&load(&rounded), &load(&source), &windows(), 1, &go_on).unwrap();
    let (kl, se) = floor(&source, "q");
    // bf16 weights are widened panel by panel, f32 weights are not; the sums have the same terms.
    assert!((kl - expected.kl).abs() < 1e-3 * kl && (se - expected.kl_se).abs() < 1e-2 * se && kl > 1e-7);
    assert!(floor(&rounded, "r").0 < 1e-3 * kl);
}

/// Rounds to the nearest bf16, ties to even, on the bits.
fn half_to_even(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

#[test]
fn it_is_reproducible_and_contains_no_path() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 3);
    let recipe = temp.path().join("mixed.toml");
    fs::write(&recipe, "weights = \"int4-g32\"\nkeep = [\"*.nothing\"]\n").unwrap();
    // Adds a note that contains the source's path.
    fs::rename(source.join("model.safetensors"), source.join("other.safetensors")).unwrap();
    let out = |name: &str| temp.path().join(name);
    for threads in [1, 2, 5] {
        let outcome =
            quantize(&source, recipe.to_str().unwrap(), &out(&threads.to_string()), options(threads));
        assert_eq!(outcome.quality.recipe, "mixed.toml");
        assert_eq!(outcome.quality.notes.len(), 2, "{:?}", outcome.quality.notes);
    }
    assert!(files(&out("1")) == files(&out("2")) && files(&out("1")) == files(&out("5")));
    for name in [QUALITY_NAME, MANIFEST_NAME] {
        let text = fs::read_to_string(out("1").join(name)).unwrap();
        assert!(!text.contains(temp.path().to_str().unwrap()), "{text}");
    }
}

#[test]
fn a_failed_gate_keeps_the_work_but_writes_no_output() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 4), temp.path().join("out"));
    let expected = temp.path().join("expected");
    let kl = quantize(&source, RECIPE, &expected, options(1)).quality.evaluation.unwrap().kl;
    let with = |max_kl| WeightJob { source: &source, recipe: RECIPE, out: &out, options: options(1), max_kl };
    let (refused, evaluated) = with(Some(kl / 2.0)).run(|_| false);
    let error = refused.unwrap_err();
    let QuantError::Gate(failure) = &error else { panic!("{error}") };
    let Exceeded::Kl { allowed, .. } = failure.exceeded else { panic!("{}", failure.exceeded) };
    assert_eq!((failure.quality.evaluation.as_ref().unwrap().kl, allowed), (kl, kl / 2.0));
    assert!(failure.kept.as_ref().unwrap().is_dir() && !out.exists() && evaluated > 0);
    assert!(
        error.to_string().contains("nats/token, got 0.") && error.to_string().contains("kept in"),
        "{error}"
    );
    // A higher limit reuses the layers and the evaluation.
    let (done, evaluated) = with(Some(kl)).run(|_| false);
    assert_eq!((done.unwrap().resumed, evaluated), (21, 0));
    assert_eq!(files(&out), files(&expected));
    // A failed gate leaves the old output in place.
    let again = WeightJob { recipe: "rtn-int2-g32", ..with(Some(kl)) };
    assert!(matches!(again.run(|_| false).0, Err(QuantError::Gate(_))));
    assert_eq!(files(&out), files(&expected));
}

#[test]
fn an_interrupted_evaluation_is_repeated() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 5), temp.path().join("out"));
    let expected = temp.path().join("expected");
    quantize(&source, RECIPE, &expected, options(1));
    let job = WeightJob { source: &source, recipe: RECIPE, out: &out, options: options(1), max_kl: None };
    let error = job.run(|tokens| tokens >= 60).0.unwrap_err();
    assert!(error.is_interruption() && !out.exists(), "{error}");
    let (done, evaluated) = job.run(|_| false);
    // Four windows against the source, and four against its bf16 copy.
    assert_eq!((done.unwrap().resumed, evaluated), (21, 8));
    assert_eq!(files(&out), files(&expected));
    assert_eq!(names_in(temp.path()).iter().filter(|name| name.contains("partial")).count(), 0);
}

#[test]
fn unusable_windows_are_refused_first() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::F32, 6)).unwrap();
    let refused = |tokens: Vec<u32>| {
        let error = Evaluation::new(&source, "w", vec![Sequence { tokens, from: 1 }], None).unwrap_err();
        error.to_string()
    };
    assert!(refused(vec![1, 96]).contains("expected ids from 0 to 95, got 96"));
    assert!(refused(vec![1; 65]).contains("at most 64 tokens"));
}

/// Changes `quality.json` and updates the manifest to match.
fn tamper(out: &Path, change: impl FnOnce(&mut Value)) {
    let path = out.join(QUALITY_NAME);
    let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    fs::write(&path, format!("{value:#}\n")).unwrap();
    agree(out, QUALITY_NAME);
}

/// Updates the manifest's entry of a file.
fn agree(out: &Path, file: &str) {
    let mut manifest = Manifest::read(out).unwrap();
    manifest.files.insert(file.to_owned(), FileDigest::of(&fs::read(out.join(file)).unwrap()));
    fs::write(out.join(MANIFEST_NAME), manifest.to_json()).unwrap();
}

fn check(out: &Path, source: &Path) -> Result<Verification, QuantError> {
    let text = windows();
    let against = Against { reference: Some(source), recorded: true, text: Some(&text) };
    verify_against(out, &against, 2, &|_| ControlFlow::Continue(()))
}

#[test]
fn any_change_is_detected() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 7);
    let pristine = temp.path().join("pristine");
    quantize(&source, RECIPE, &pristine, Options { threads: 1, ..Options::default() });
    let found = check(&pristine, &source).unwrap();
    assert!(found.ok && found.notes.is_empty() && found.source_files == 2, "{found:?}");
    assert_eq!(found.figures, Quality::read(&pristine).unwrap().unwrap().evaluation);
    type Change = (&'static str, fn(&mut Value), &'static str);
    let changes: [Change; 9] = [
        (
            "kl",
            |q| q["evaluation"]["kl"] = json!(q["evaluation"]["kl"].as_f64().unwrap() * 0.99),
            "evaluation.kl",
        ),
        ("ppl", |q| q["evaluation"]["ppl"] = json!(90.0), "evaluation.ppl"),
        ("top1", |q| q["evaluation"]["top1"] = json!(1.0), "evaluation.top1"),
        ("se", |q| q["evaluation"]["kl_se"] = json!(0.0), "evaluation.kl_se"),
        ("floor", |q| q["evaluation"]["noise_floor_kl"] = json!(0.01), "evaluation.noise_floor_kl"),
        ("layer", |q| q["layers"][3]["mse"] = json!(1e-9), "expected mse"),
        (
            "weights",
            |q| q["hashes"]["weights"]["model.safetensors"]["sha256"] = json!("0".repeat(64)),
            "hashes.weights",
        ),
        ("source", |q| q["hashes"]["source"]["config.json"]["bytes"] = json!(1), "hashes.source"),
        (
            "one file more",
            |q| q["hashes"]["weights"]["x.safetensors"] = json!({"bytes": 1, "sha256": "0".repeat(64)}),
            "x.safetensors",
        ),
    ];
    for (name, change, says) in changes {
        let out = temp.path().join("out");
        copy(&pristine, &out);
        tamper(&out, change);
        let found = check(&out, &source).unwrap();
        assert!(!found.ok && found.faults.iter().any(|f| f.contains(says)), "{name}: {:?}", found.faults);
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn a_weight_changed_with_its_manifest_is_detected() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 8), temp.path().join("out"));
    quantize(&source, RECIPE, &out, Options { threads: 1, ..Options::default() });
    let weights = out.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 1;
    fs::write(&weights, bytes).unwrap();
    agree(&out, "model.safetensors");
    let found = verify(&out, None, 1).unwrap();
    assert!(found.faults.iter().any(|f| f.contains("hashes.weights")), "{:?}", found.faults);
    // Without a manifest the files are hashed.
    fs::remove_file(out.join(MANIFEST_NAME)).unwrap();
    let found = verify(&out, None, 1).unwrap();
    assert!(found.faults.iter().any(|f| f.contains("hashes.weights")), "{:?}", found.faults);
    // An output without quality.json counts as another tool's.
    fs::remove_file(out.join(QUALITY_NAME)).unwrap();
    let found = verify(&out, None, 1).unwrap();
    assert!(found.ok && found.notes.iter().any(|n| n.contains("no quality.json")), "{found:?}");
}

#[test]
fn an_invalid_file_is_a_fault() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 9), temp.path().join("out"));
    quantize(&source, RECIPE, &out, options(1));
    let good = fs::read_to_string(out.join(QUALITY_NAME)).unwrap();
    for (from, to, says) in [
        ("\"version\": 1", "\"version\": 2", "version: expected 1, got 2"),
        ("\"method\":", "\"meth\":", "method"),
        ("\"tool\":", "\"version\":", "version"),
        ("{", "[", "quality.json"),
    ] {
        let text = good.replacen(from, to, 1);
        assert_ne!(text, good);
        fs::write(out.join(QUALITY_NAME), text).unwrap();
        agree(&out, QUALITY_NAME);
        let found = verify(&out, None, 1).unwrap();
        assert!(found.faults.len() == 1 && found.faults[0].contains(says), "{from}: {:?}", found.faults);
    }
}

#[test]
fn figures_are_measured_again_only_on_their_own_text() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 10), temp.path().join("out"));
    quantize(&source, RECIPE, &out, options(1));
    let other = &windows()[..3];
    let against = |text| Against { reference: None, recorded: true, text: Some(text) };
    let go_on = |_| ControlFlow::Continue(());
    let error = verify_against(&out, &against(other), 1, &go_on).unwrap_err();
    assert!(
        matches!(error, QuantError::OtherText { .. }) && error.to_string().contains("w.json:k"),
        "{error}"
    );
    // The loss is also checked without the source.
    let text = windows();
    let found = verify_against(&out, &against(&text), 1, &go_on).unwrap();
    assert!(found.ok && found.notes.iter().any(|n| n.contains("no source given")), "{found:?}");
    tamper(&out, |q| q["evaluation"]["nll"] = json!(1.0));
    assert!(!verify_against(&out, &against(&text), 1, &go_on).unwrap().ok);
}

#[test]
fn a_gguf_file_has_its_own_quality_json() {
    let temp = TempDir::new().unwrap();
    let (source, out) = (model(temp.path(), Dtype::F32, 11), temp.path().join("m.gguf"));
    // 64 columns are divisible by 32 but not by 256; 96 columns are not divisible by 64.
    let recipe = temp.path().join("r.toml");
    let text = "weights = \"q8_0\"\n[[layers]]\nmodules = [\"*.down_proj\"]\nweights = \"nvfp4\"\n";
    fs::write(&recipe, text).unwrap();
    let gguf = Options { threads: 2, container: Some(gguf::CONTAINER), ..Options::default() };
    let outcome = quantize(&source, recipe.to_str().unwrap(), &out, gguf);
    let q = Quality::read(&out).unwrap().unwrap();
    assert_eq!(q, outcome.quality);
    assert_eq!(quality_path(&out), temp.path().join("m.gguf.quality.json"));
    let digest = FileDigest::of(&fs::read(&out).unwrap());
    assert_eq!(q.hashes.weights, [("m.gguf".to_owned(), digest)].into());
    let embedding = q.tensors.iter().find(|t| t.tensor == "model.embed_tokens.weight").unwrap();
    assert!(embedding.scheme == "f16" && embedding.error.unwrap().mse > 0.0, "{embedding:?}");
    assert_eq!(q.fallbacks, ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]);
    let why = q.layers.iter().filter_map(|l| l.fallback.as_deref()).collect::<Vec<_>>();
    assert!(why.len() == 2 && why[0].starts_with("f16 instead of nvfp4"), "{why:?}");
    assert!(q.fallbacks.iter().all(|module| q.notes.iter().any(|note| note.starts_with(module))));
    assert!(check(&out, &source).unwrap().ok);
    let mut bytes = fs::read(&out).unwrap();
    let at = bytes.len() - 50;
    bytes[at] ^= 1;
    fs::write(&out, bytes).unwrap();
    let faults = check(&out, &source).unwrap().faults;
    assert!(faults.iter().any(|f| f.contains("as in the manifest")), "{faults:?}");
    fs::remove_file(manifest_path(&out)).unwrap();
    let faults = check(&out, &source).unwrap().faults;
    assert!(faults.iter().any(|f| f.contains("hashes.weights")), "{faults:?}");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for name in names_in(from) {
        fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}
