//! Measurements and servers as job values: they are read back as they were written, state their memory, and run.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_jobs::calibration::Calibration;
use mantissa_jobs::job::{self, from_json, to_json};
use mantissa_jobs::measured_text::{BosChoice, MeasuredText};
use mantissa_jobs::names::{AsText, Engine};
use mantissa_jobs::{
    Bench, Diagnose, Diff, DiffPrompts, Doctor, Evaluate, EvaluateReport, Gauge, Host, Job, JobError, Lint,
    ModelPath, Progress, RenderChat, Serve, ServedModel, Shadow, Silent, Unit, Verify,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::host;
use crate::tiny;

/// Writes a text of a few windows to `dir`.
fn text(dir: &TempDir) -> MeasuredText {
    let file = dir.path().join("text.txt");
    let line = |i: usize| format!("Line {} says that {} is before {}.\n", i, i % 10, (i + 1) % 10);
    fs::write(&file, (0..20).map(line).collect::<String>()).unwrap();
    MeasuredText { text: Some(file), context: Some(16), limit: Some(64), ..MeasuredText::default() }
}

fn model() -> ModelPath {
    ModelPath::new(tiny())
}

/// Checks that `job` is read back as it was written, and states its memory; returns its host.
fn granted<J: Job + PartialEq + std::fmt::Debug>(job: &J) -> Host {
    assert_eq!(from_json::<J>("j", to_json(job).unwrap()).unwrap(), *job);
    let (granted, _) = host(job, None);
    assert!(job.memory(&granted).unwrap() > 0);
    granted
}

#[test]
fn a_model_is_evaluated_on_a_text_and_on_a_task() {
    let dir = tempfile::tempdir().unwrap();
    let job = Evaluate {
        model: model(),
        adapter: None,
        reference: Some(model()),
        text: text(&dir),
        tasks: Vec::new(),
        chat: false,
        engine: Engine::Reference,
        kv: Some(AsText("int8-head".parse().unwrap())),
        calibration: Calibration::default(),
        prefill: None,
        attention_operands: Some(AsText("int8".parse().unwrap())),
        accumulator: None,
        per_window: Some(dir.path().join("windows.json")),
        logits: None,
        per_item: None,
        max_kl: Some(0.0),
        max_ppl_increase: None,
        max_accuracy_drop: None,
        seed: 0,
    };
    let report = job.run(&granted(&job)).unwrap();
    assert!(dir.path().join("windows.json").is_file());
    let refused = job.require(&report).unwrap_err().to_string();
    assert!(refused.starts_with("KL: expected at most 0 nats/token, got "), "{refused}");
    let EvaluateReport::Text(found) = report else { panic!("{report:?}") };
    assert!(found.tokens > 0 && found.comparison.unwrap().kl < 1.0);

    let tasks = vec![PathBuf::from("cloze")];
    let job = Evaluate { text: MeasuredText::default(), tasks, kv: None, per_window: None, ..job };
    let job = Evaluate { attention_operands: None, ..job };
    assert_eq!(from_json::<Evaluate>("j", to_json(&job).unwrap()).unwrap(), job);
    assert!(job.inputs().iter().all(|path| path.exists()), "{:?}", job.inputs());
}

#[test]
fn models_are_compared_checked_and_measured() {
    let dir = tempfile::tempdir().unwrap();
    let compare = Diff {
        a: model(),
        b: model(),
        prompts: DiffPrompts::Text("Line".to_owned()),
        tokens: 3,
        top: 2,
        chat: false,
        system: None,
        bos: BosChoice::Auto,
    };
    let found = compare.run(&granted(&compare)).unwrap();
    assert!(found.prompts[0].difference.is_none() && found.prompts[0].equal_tokens > 0, "{found:?}");

    let doctor = Doctor { model: model(), reference: Some(model()), text: MeasuredText::default() };
    doctor.run(&granted(&doctor)).unwrap().require_sound().unwrap();

    let lint = Lint { model: model(), targets: Vec::new(), reference: None };
    let found = lint.run(&granted(&lint)).unwrap();
    assert!(found.ok && !found.reports.is_empty());
    found.require_ok(&tiny()).unwrap();

    let verify = Verify { model: model(), reference: None, key: None, text: text(&dir) };
    granted(&verify);
    let diagnose = Diagnose {
        model: model(),
        reference: None,
        text: text(&dir),
        calibration: Calibration::default(),
        kv: vec![AsText("int8-head".parse().unwrap())],
        max_kl: None,
        seed: 0,
    };
    granted(&diagnose);

    let bench = Bench {
        model: model(),
        adapter: None,
        prompt: Some(4),
        generated: Some(2),
        reps: 1,
        depth: vec![0],
        batch: vec![1, 2],
        kv: Vec::new(),
        explain: true,
        seed: 0,
    };
    let found = bench.run(&granted(&bench)).unwrap();
    assert_eq!((found.runs.len(), found.first.batch), (2, 1));
    assert!(found.kernels.is_some_and(|kernels| !kernels.is_empty()));
}

/// Host that asks for a stop at once.
struct Stopping;

impl Progress for Stopping {
    fn start(&self, _: u64, _: Unit, _: bool) -> Box<dyn Gauge> {
        Box::new(Silent)
    }

    fn note(&self, _: &str) {}

    fn warn(&self, _: &str) {}

    fn stops(&self) -> bool {
        true
    }
}

/// Renders nothing.
struct NoChat;

impl RenderChat for NoChat {
    fn render_each(&self, _: &Path, _: &str, _: &[Value]) -> Result<Vec<Result<String, String>>, JobError> {
        Ok(Vec::new())
    }
}

#[test]
fn a_server_names_its_keys_without_holding_them_and_ends_with_its_host() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.txt");
    fs::write(&keys, "secret-of-one-client 3\n").unwrap();
    let named = |name: &str| ServedModel { name: name.to_owned(), model: model() };
    let job = Serve {
        models: vec![named("a"), named("b")],
        adapter: None,
        chat_template: None,
        draft: None,
        lookup: true,
        kv: Some(AsText("int8-head".parse().unwrap())),
        host: "127.0.0.1".parse().unwrap(),
        port: 0,
        api_key_file: Some(keys.clone()),
        no_api_key: false,
        cors: vec!["localhost".to_owned()],
        shadow: Some(Shadow { reference: "a".to_owned(), share: 0.5, limit: 0.1 }),
        parallel: 2,
        context: Some(16),
        step_tokens: 128,
        max_tokens: None,
        queue: 4,
        connections: 4,
        time_limit: 10,
        drain: 1,
        grammar_memory: Some(0),
        share_prefixes: false,
        strict_model: true,
        separate_thoughts: true,
        thought_tokens: None,
    };
    let value = to_json(&job).unwrap().to_string();
    assert!(value.contains("keys.txt") && !value.contains("secret"), "{value}");
    granted(&job);
    assert!(job.inputs().contains(&keys));
    let stopping = || job::host(&job, mantissa_jobs::Allowed::default(), false, Box::new(Stopping)).unwrap();
    let error = job.run(&stopping()).unwrap_err().to_string();
    assert!(error.contains("a host that renders chat templates"), "{error}");
    let report = job.run(&stopping().with_chat(Box::new(NoChat))).unwrap();
    assert_eq!(report.models, ["a", "b"]);
    assert!(report.url.starts_with("http://127.0.0.1:") && report.predicted_peak_memory > 0, "{report:?}");
    let public = Serve { host: "0.0.0.0".parse().unwrap(), api_key_file: None, ..job.clone() };
    let error = public.run(&stopping().with_chat(Box::new(NoChat))).unwrap_err().to_string();
    assert!(error.starts_with("--host 0.0.0.0: expected a loopback address"), "{error}");
}
