//! Jobs of quantization run by a host of their own: progress, stops and resumes, records, refusals.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use mantissa_jobs::calibration::{Calibration, WeightedText};
use mantissa_jobs::names::Format;
use mantissa_jobs::{
    Allowed, Class, Convert, ConvertArguments, Gauge, Host, Job, JobError, ModelPath, Polling, Progress,
    Quantize, RebuildArguments, RecipeText, Silent, Unit, WeightOptions, default_text, job,
};
use mantissa_store::Paths;
use mantissa_store::convention::Container;
use tempfile::TempDir;

/// Model with a tokenizer, that of the binary's demo.
fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("demo/model")
}

/// What a host was shown.
#[derive(Default)]
struct Shown {
    lines: Mutex<Vec<String>>,
    polls: AtomicUsize,
    orderly: AtomicBool,
}

/// Progress that records everything and asks for a stop after a number of questions.
struct Recorder {
    shown: Arc<Shown>,
    stop_after: usize,
}

/// Display that records the current activity.
struct Lines(Arc<Shown>);

impl Progress for Recorder {
    fn start(&self, total: u64, _: Unit, _: bool) -> Box<dyn Gauge> {
        self.shown.lines.lock().unwrap().push(format!("start {total}"));
        Box::new(Lines(Arc::clone(&self.shown)))
    }

    fn note(&self, text: &str) {
        self.shown.lines.lock().unwrap().push(format!("note: {text}"));
    }

    fn warn(&self, text: &str) {
        self.shown.lines.lock().unwrap().push(format!("warning: {text}"));
    }

    fn stops(&self) -> bool {
        assert!(self.shown.orderly.load(Ordering::SeqCst), "a question outside orderly work");
        self.shown.polls.fetch_add(1, Ordering::SeqCst) >= self.stop_after
    }

    fn polling(&self, polling: Polling) {
        self.shown.orderly.store(polling != Polling::Never, Ordering::SeqCst);
    }
}

impl Gauge for Lines {
    fn message(&self, text: &str) {
        self.0.lines.lock().unwrap().push(text.to_owned());
    }

    fn status(&self, _: &str) {}

    fn begin_at(&self, _: u64) {}

    fn set(&self, _: u64) {}

    fn add(&self, _: u64) {}

    fn note(&self, _: &str) {}

    fn finish(&self) {}
}

fn allowed() -> Allowed {
    Allowed { threads: 2, ..Allowed::default() }
}

/// Makes a host that records and asks for a stop after `stop_after` questions.
fn host(job: &impl Job, stop_after: usize) -> (Host, Arc<Shown>) {
    let shown = Arc::new(Shown::default());
    let recorder = Recorder { shown: Arc::clone(&shown), stop_after };
    (job::host(job, allowed(), false, Box::new(recorder)).unwrap(), shown)
}

/// Quantization of the demo on a few windows of the built-in text.
fn quantize(out: &Path) -> Quantize {
    let calibration = Calibration {
        texts: vec![WeightedText::new(default_text::NAME)],
        samples: Some(4),
        length: Some(64),
        ..Calibration::default()
    };
    let weights = WeightOptions {
        recipe: RecipeText::read("gptq-int4-g128").unwrap(),
        calibration,
        ..WeightOptions::default()
    };
    Quantize { source: ModelPath::new(model()), out: out.to_owned(), weights, ..Quantize::default() }
}

/// Files of a folder with their bytes.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

#[test]
fn a_job_shows_its_progress_and_resumes_to_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let (whole, stopped) = (quantize(&temp.path().join("whole")), quantize(&temp.path().join("stopped")));
    let (free, shown) = host(&whole, usize::MAX);
    assert!(whole.memory(&free).unwrap() > 1 << 20);
    let report = whole.run(&free).unwrap();
    assert_eq!((report.outcomes.len(), report.outcomes[0].resumed), (1, 0));
    let lines = shown.lines.lock().unwrap().clone();
    let quantized = |line: &String| line.contains("layers.0.") && line.contains("down_proj");
    assert!(lines.iter().any(quantized) && lines.iter().any(|line| line.starts_with("start ")), "{lines:?}");
    assert!(!shown.orderly.load(Ordering::SeqCst));
    // Half of the questions were asked when half of the work was done.
    let (stopping, shown) = host(&stopped, shown.polls.load(Ordering::SeqCst) / 2);
    let Err(error) = stopped.run(&stopping) else { panic!("not stopped") };
    assert!(error.is_stop() && error.class() == Class::Stopped, "{error}");
    assert!(!stopped.out.exists() && shown.orderly.load(Ordering::SeqCst));
    let report = stopped.run(&host(&stopped, usize::MAX).0).unwrap();
    assert!(report.outcomes[0].resumed > 0);
    let same = |name: &str| {
        let [a, b] = [&whole.out, &stopped.out].map(|folder| files(folder)[name].clone());
        assert!(a == b, "{name}");
    };
    ["model.safetensors", "config.json", "quality.json"].into_iter().for_each(same);
}

#[test]
fn a_job_is_read_back_and_run_as_the_same_job() {
    let temp = TempDir::new().unwrap();
    let made = quantize(&temp.path().join("o"));
    let value = job::to_json(&made).unwrap();
    let back: Quantize = job::from_json("job.json", value.clone()).unwrap();
    assert_eq!(back, made);
    let mut newer = value;
    newer["version"] = 2.into();
    let error = JobError::from(job::from_json::<Quantize>("job.json", newer).unwrap_err());
    assert!(error.to_string().starts_with("job.json: version: expected 1, got 2; fix: "), "{error}");
    assert_eq!(error.class(), Class::Input);
}

#[test]
fn a_job_writes_only_what_it_declared() {
    let temp = TempDir::new().unwrap();
    let made = quantize(&temp.path().join("o"));
    let nothing = Paths::default().check("", false).unwrap();
    let error = made.run(&Host::new(allowed(), nothing, Box::new(Silent))).err().unwrap();
    assert!(matches!(error, JobError::Undeclared(_)), "{error}");
    // An output over an input is refused before any work.
    let over = quantize(&model());
    assert!(job::host(&over, allowed(), false, Box::new(Silent)).is_err());
    // Memory below what the work takes.
    let little = Allowed { memory: Some(5 << 20), ..allowed() };
    let error = made.run(&job::host(&made, little, false, Box::new(Silent)).unwrap()).err().unwrap();
    assert!(
        matches!(error.innermost(), JobError::Memory(_)) && error.class() == Class::Environment,
        "{error}"
    );
    assert!(!made.out.exists());
}

#[test]
fn what_was_made_is_converted_and_rebuilt() {
    let temp = TempDir::new().unwrap();
    let made = quantize(&temp.path().join("o"));
    made.run(&host(&made, usize::MAX).0).unwrap();
    let convert: Convert = ConvertArguments {
        model: ModelPath::new(&*made.out),
        format: Container::named("gptq").unwrap(),
        out: temp.path().join("c"),
        requantize: None,
        drop_inputs: false,
        verify: true,
        max_shard_size: None,
        measure: Default::default(),
    }
    .resolve()
    .unwrap();
    assert_eq!(convert.format, Format(Container::named("gptq").unwrap()));
    convert.run(&host(&convert, usize::MAX).0).unwrap();
    for (artifact, source) in [(&made.out, model()), (&convert.out, made.out.clone())] {
        let rebuild = RebuildArguments {
            quality: artifact.clone(),
            source: ModelPath::new(source),
            out: temp.path().join(format!("again-{}", artifact.file_name().unwrap().display())),
            files: Vec::new(),
        };
        let rebuild = rebuild.resolve().unwrap();
        let (host, shown) = host(&rebuild, usize::MAX);
        let report = rebuild.run(&host).unwrap();
        assert!(report.is_identical() && report.require_identical().is_ok());
        assert_eq!(files(&rebuild.out)["quality.json"], files(artifact)["quality.json"]);
        let told = shown.lines.lock().unwrap().iter().any(|line| line.starts_with("note: mantissa "));
        assert!(told);
    }
}
