//! Training, inspection, casts, measurements and servers as job values: they run, stop and resume to the same bytes, and
//! are read back as they were written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod measures;
mod support;

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_jobs::cast::{Cast, CastArguments};
use mantissa_jobs::finetune::{
    Distill, DistillArguments, Finetune, FinetuneArguments, TrainedWeights, TuningArguments,
};
use mantissa_jobs::inspect::Inspect;
use mantissa_jobs::job::{from_json, to_json};
use mantissa_jobs::train::{Ranks, StartMode, Train, TrainArguments, TrainAutopsy};
use mantissa_jobs::{Job, JobError, ModelPath, Polling, embedded};
use serde_json::Value;

use support::host;

/// Returns the folder of a tiny model with a tokenizer.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied")
}

/// Writes the settings and the text of a run of 6 steps to `dir`.
fn settings(dir: &Path) -> TrainArguments {
    let line = |i: usize| format!("Line {} says that {} is before {}.\n==\n", i, i % 10, (i + 1) % 10);
    fs::write(dir.join("text.txt"), (0..120).map(line).collect::<String>()).unwrap();
    let config = dir.join("run.toml");
    let toml = r#"
        seed = 3
        out = "run"
        [model.architecture]
        architectures = ["LlamaForCausalLM"]
        model_type = "llama"
        hidden_act = "silu"
        hidden_size = 32
        intermediate_size = 48
        num_hidden_layers = 2
        num_attention_heads = 2
        num_key_value_heads = 1
        vocab_size = 300
        max_position_embeddings = 32
        rms_norm_eps = 1e-5
        rope_theta = 10000.0
        tie_word_embeddings = true
        [data]
        files = ["text.txt"]
        split = "=="
        length = 16
        batch = 2
        [validation]
        share = 0.2
        every = 2
        [samples]
        prompts = ["Line"]
        every = 3
        tokens = 4
        [precision]
        policy = "bf16"
        [optimizer]
        lr = 5e-3
        [schedule]
        steps = 6
        [checkpoint]
        every = 2
    "#;
    fs::write(&config, toml).unwrap();
    TrainArguments {
        config,
        set: Vec::new(),
        tensorboard: None,
        start: StartMode::New,
        ranks: Ranks::default(),
    }
}

/// Returns the exported weights of the run in `dir`, and the losses of its log.
fn result(dir: &Path) -> (Vec<u8>, Vec<f64>) {
    let weights = fs::read(dir.join("run/model/model.safetensors")).unwrap();
    let log = fs::read_to_string(dir.join("run/log.jsonl")).unwrap();
    let losses =
        log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap());
    (weights, losses.collect())
}

#[test]
fn a_run_stops_where_the_host_asks_and_resumes_to_the_same_bytes() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let job = Train::resolve(&settings(whole.path())).unwrap();
    let (granted, record) = host(&job, None);
    assert!(job.memory(&granted).unwrap() > 100_000);
    let report = job.run(&granted).unwrap();
    assert_eq!((report.steps, report.results.model), (6, Some(whole.path().join("run/model"))));
    assert_eq!(
        *record.pollings.lock().unwrap(),
        [Polling::Saving, Polling::Never, Polling::Soon, Polling::Never]
    );
    assert!(record.notes.lock().unwrap().iter().any(|note| note.starts_with("step 3: Line")));
    // The message of a stop is kept from the start to the end.
    let messages = record.messages.lock().unwrap();
    assert!(messages.first().unwrap().as_deref().unwrap().starts_with("run: Interrupted."));
    assert_eq!(messages.last(), Some(&None));

    let job = Train::resolve(&settings(parts.path())).unwrap();
    for stop in [1, 3, 4] {
        let (granted, record) = host(&job, Some(stop));
        let error = job.run(&granted).err().unwrap();
        assert!(error.is_stop(), "{error}");
        let JobError::Stopped(stopped) = error else { panic!("{error}") };
        assert_eq!((stopped.steps, stopped.restarts), (stop, false));
        // Work that stopped stays orderly until its error has ended the process.
        assert_eq!(*record.pollings.lock().unwrap(), [Polling::Saving]);
    }
    job.run(&host(&job, None).0).unwrap();
    assert!(result(whole.path()) == result(parts.path()));
    let again = job.run(&host(&job, None).0).unwrap();
    let (_, losses) = result(parts.path());
    assert_eq!((again.already_complete, again.steps, again.loss), (true, 6, losses.last().copied()));
}

#[test]
fn a_job_of_another_process_resumes_the_run() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let job = Train::resolve(&settings(whole.path())).unwrap();
    job.run(&host(&job, None).0).unwrap();
    let job = Train::resolve(&settings(parts.path())).unwrap();
    assert!(job.run(&host(&job, Some(2)).0).is_err());
    let text = to_json(&job).unwrap().to_string();
    drop(job);
    let job: Train = from_json("job.json", serde_json::from_str(&text).unwrap()).unwrap();
    job.run(&host(&job, None).0).unwrap();
    assert!(result(whole.path()) == result(parts.path()));
}

#[test]
fn serialized_runs_are_read_back_and_checked() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = settings(dir.path());
    let job = Train::resolve(&arguments).unwrap();
    let value = to_json(&job).unwrap();
    assert_eq!(from_json::<Train>("j", value.clone()).unwrap(), job);
    let mut other = value.clone();
    other["version"] = 99.into();
    assert!(
        from_json::<Train>("j", other).unwrap_err().to_string().starts_with("j: version: expected 1, got 99")
    );
    assert!(from_json::<Finetune>("j", value.clone()).is_err());
    let mut wrong = value;
    let text = wrong["settings"].as_str().unwrap().replace("batch = 2", "batch = 0");
    wrong["settings"] = text.into();
    assert!(from_json::<Train>("j", wrong).unwrap_err().to_string().contains("data.batch"));
    let set = vec!["schedule.steps=9".to_owned()];
    let changed = Train::resolve(&TrainArguments { set, ..arguments }).unwrap();
    assert_eq!(changed.settings().schedule.steps, 9);
    assert_eq!(changed.outputs()[0].path, dir.path().join("run"));
    let inputs = changed.inputs();
    assert!(inputs.contains(&dir.path().join("run.toml")) && inputs.contains(&dir.path().join("text.txt")));
}

#[test]
fn an_autopsy_replays_a_step() {
    let dir = tempfile::tempdir().unwrap();
    let job = Train::resolve(&settings(dir.path())).unwrap();
    job.run(&host(&job, None).0).unwrap();
    let autopsy = TrainAutopsy { run: dir.path().join("run"), step: Some(4) };
    let report = autopsy.run(&host(&autopsy, None).0).unwrap();
    assert_eq!((report.autopsy.step, report.chosen.as_str()), (4, "--step"));
    assert!(!report.summary.is_empty());
    let beyond = TrainAutopsy { step: Some(9), ..autopsy };
    let error = beyond.run(&host(&beyond, None).0).err().unwrap().to_string();
    assert!(error.starts_with("--step: expected 1 to 7"), "{error}");
}

fn tuning(dir: &Path) -> TuningArguments {
    let line = |i: usize| format!("Line {} says that {} is before {}.\n", i, i % 10, (i + 1) % 10);
    let data = dir.join("data.txt");
    fs::write(&data, (0..60).map(line).collect::<String>()).unwrap();
    TuningArguments {
        data: vec![data],
        out: dir.join("tuned"),
        base_scheme: None,
        rank: 2,
        alpha: 4.0,
        dropout: 0.0,
        target: Vec::new(),
        train: Vec::new(),
        rslora: false,
        loftq: 0,
        lr: 1e-3,
        epochs: 1.0,
        steps: Some(2),
        batch: Some(2),
        length: Some(16),
        validation: Some("0".to_owned()),
        patience: 0,
        optimizer: "adamw".to_owned(),
        moments: "f32".to_owned(),
        policy: "bf16".to_owned(),
        set: Vec::new(),
        merge: true,
        requantize: None,
        tensorboard: None,
        start: StartMode::New,
    }
}

#[test]
fn adapters_train_and_distillation_has_a_teacher() {
    let dir = tempfile::tempdir().unwrap();
    let (model, tuning) = (ModelPath::new(tiny()), tuning(dir.path()));
    let weights = TrainedWeights::Lora;
    let arguments = FinetuneArguments { model: model.clone(), weights, tuning: tuning.clone(), seed: 5 };
    let probe = Train::resolve(&settings(dir.path())).unwrap();
    let (granted, _) = host(&probe, None);
    let job = Finetune::resolve(&arguments, &granted).unwrap();
    assert_eq!(from_json::<Finetune>("j", to_json(&job).unwrap()).unwrap(), job);
    let report = job.run(&host(&job, None).0).unwrap();
    assert!(report.results.adapter.is_some() && report.results.model.is_some(), "{:?}", report.results);
    assert!(report.results.merged_kl.unwrap() < 1e-2);

    let mut whole = DistillArguments {
        teacher: model.clone(),
        student: model,
        weight: 0.5,
        temperature: 2.0,
        scheme: Some("int4-g32".parse().unwrap()),
        weights: TrainedWeights::All,
        tuning: TuningArguments { merge: false, out: dir.path().join("distilled"), ..tuning },
        seed: 0,
    };
    let job = Distill::resolve(&whole, &granted).unwrap();
    assert_eq!(job.train().settings().distill.as_ref().unwrap().weight, Some(0.5));
    assert_eq!(job.run(&host(&job, None).0).unwrap().steps, 2);
    whole.weights = TrainedWeights::Lora;
    let error = Distill::resolve(&whole, &granted).unwrap_err().to_string();
    assert!(error.starts_with("--scheme: expected --adapter none"), "{error}");
}

#[test]
fn a_job_on_the_embedded_model_names_it_without_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let model = ModelPath::find(embedded::NAME).unwrap();
    assert!(model.is_embedded() && model.inputs().is_empty());
    let tuning = TuningArguments { merge: false, ..tuning(dir.path()) };
    let arguments =
        FinetuneArguments { model: model.clone(), weights: TrainedWeights::Lora, tuning, seed: 5 };
    let probe = Train::resolve(&settings(dir.path())).unwrap();
    let job = Finetune::resolve(&arguments, &host(&probe, None).0).unwrap();
    let value = to_json(&job).unwrap();
    let place = model.location().parent().unwrap().display().to_string();
    assert!(!value.to_string().contains(&place), "{value}");
    let read = from_json::<Finetune>("j", value).unwrap();
    assert_eq!(read, job);
    assert!(read.inputs().iter().all(|path| path.is_absolute() && path.exists()), "{:?}", read.inputs());
    assert_eq!(read.run(&host(&read, None).0).unwrap().steps, 2);
    let inspect = Inspect { model, stats: false };
    assert!(from_json::<Inspect>("j", to_json(&inspect).unwrap()).unwrap().model.is_embedded());
    embedded::remove();
}

#[test]
fn a_checkpoint_is_inspected_and_its_tensors_are_cast() {
    let dir = tempfile::tempdir().unwrap();
    let inspect = Inspect { model: ModelPath::new(tiny()), stats: true };
    let (granted, _) = host(&inspect, None);
    let report = inspect.run(&granted).unwrap();
    let sum: u64 = report.by_scheme.iter().map(|total| total.parameters).sum();
    assert_eq!(report.parameters, sum);
    assert!(report.tensors.iter().all(|tensor| tensor.stats.as_ref().is_some_and(|stats| stats.nan == 0)));

    let cast = |stochastic| {
        let arguments = CastArguments {
            input: tiny().join("model.safetensors"),
            scheme: "int4-g32".parse().unwrap(),
            out: dir.path().join("cast.safetensors"),
            packed: true,
            packed_only: false,
            stochastic,
        };
        Cast::resolve(arguments).unwrap()
    };
    for stochastic in [None, Some(7)] {
        let job = cast(stochastic);
        assert_eq!(from_json::<Cast>("j", to_json(&job).unwrap()).unwrap(), job);
        let report = job.run(&host(&job, None).0).unwrap();
        assert_eq!((report.seed, report.skipped.len()), (stochastic, 0));
        assert!(report.tensors.iter().all(|tensor| tensor.sqnr_db.is_none_or(|db| db > 5.0)));
        fs::remove_file(dir.path().join("cast.safetensors")).unwrap();
    }
}
