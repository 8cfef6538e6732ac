//! Runs from beginning to end: they learn, stop and go on with the same bits, and say where they diverge.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_model::ModelConfig;
use mantissa_train::blockwise::BlockwiseRule;
use mantissa_train::data::{Batches, Cursor, TokenFile, TokenWriter};
use mantissa_train::scaling::{SCALING_OPTIONS, ScalingOptions};
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    AdamW, AdamWOptions, DecayGroups, HeldOut, MomentFormat, Optimizer, Options, Parameters, Policy,
    SampleOptions, Sgd, SgdOptions, StateMap, Stop, TrainError, TrainModel, Trainer, TrainerOptions,
};
use tempfile::TempDir;

const LEN: usize = 24;

fn config() -> ModelConfig {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true
    });
    ModelConfig::from_json(&config, "config").unwrap()
}

/// Tokens in which each follows from the one before, mostly.
fn tokens(dir: &Path) -> PathBuf {
    let path = dir.join("tokens.safetensors");
    let mut writer = TokenWriter::new(80);
    let mut token = 1u32;
    for i in 0..20_000u32 {
        token = if i % 7 == 0 { (i * i + 3) % 80 } else { (token * 5 + 1) % 80 };
        writer.push(&[token]).unwrap();
    }
    writer.finish(&mantissa_store::Output::owned(&path), BTreeMap::new()).unwrap();
    path
}

fn trainer(tokens: &Path, policy: &Policy, moments: MomentFormat, peak: f64, threads: usize) -> Trainer {
    let params = Parameters::random(&config(), 0.05, 3).unwrap();
    let options = AdamWOptions { moments, max_norm: Some(1.0), ..AdamWOptions::default() };
    let optimizer = AdamW::new(&params, policy, options).unwrap();
    let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads, policy: policy.clone() };
    let model = TrainModel::new(config(), params, options).unwrap();
    let batches = Batches::new(TokenFile::open(tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
    let schedule =
        Schedule { peak, warmup_steps: 3, total_steps: 40, decay: Decay::Cosine { min_ratio: 0.1 } };
    Trainer::new(model, optimizer, batches, TrainerOptions { batch: 4, accumulate: 2, schedule }).unwrap()
}

fn bits(trainer: &Trainer) -> Vec<u32> {
    trainer.model().parameters().values().iter().map(|v| v.to_bits()).collect()
}

/// Every kind of moments.
fn kinds() -> Vec<MomentFormat> {
    let map = |text: &str| MomentFormat::Map(StateMap::new(&text.parse().unwrap()).unwrap());
    vec![
        MomentFormat::F32,
        MomentFormat::Bf16,
        MomentFormat::Blockwise8(BlockwiseRule::Cuda),
        MomentFormat::Blockwise8(BlockwiseRule::Cpu),
        map("dyn8-tensor"),
        map("lin8-g128"),
    ]
}

/// Every policy, fp16 with both rules of loss scaling; scales are so large that the first steps are skipped.
fn policies() -> Vec<Policy> {
    let named = Policy::names().map(|name| Policy::by_name(name, 21).unwrap());
    let large =
        |scaling: ScalingOptions| Some(ScalingOptions { initial: 2f32.powi(25), interval: 2, ..scaling });
    let scaled = SCALING_OPTIONS.map(|(_, scaling)| Policy { scaling: large(scaling), ..Policy::fp16() });
    named.filter(|policy| policy.scaling.is_none()).chain(scaled).collect()
}

/// Validation and samples between steps change no bit of a run, whatever its operands remember.
#[test]
fn validation_and_samples_leave_a_run_as_it_is() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    for name in ["fp32", "fp16", "fp8-delayed", "nvfp4"] {
        let policy = Policy::by_name(name, 21).unwrap();
        let [mut plain, mut watched] =
            [1, 2].map(|threads| trainer(&tokens, &policy, MomentFormat::F32, 1e-2, threads));
        let held_out = HeldOut::new(TokenFile::open(&tokens).unwrap(), LEN, 4, 3).unwrap();
        let options = SampleOptions { tokens: 5, temperature: 0.5, seed: 2, end: None };
        let mut losses = Vec::new();
        for _ in 0..6 {
            let loss = watched.validate(&held_out).unwrap();
            assert_eq!(watched.validate(&held_out).unwrap(), loss, "{name}");
            let text = watched.sample(&[1, 6, 31], options).unwrap();
            assert_eq!((text.len(), watched.sample(&[1, 6, 31], options).unwrap()), (5, text), "{name}");
            losses.push(loss);
            assert_eq!(plain.step().unwrap(), watched.step().unwrap(), "{name}");
        }
        assert!(bits(&plain) == bits(&watched), "{name}");
        assert!(losses[5] < losses[0] && losses[0] < 5.0, "{name}: {losses:?}");
    }
    let short = HeldOut::new(TokenFile::open(&tokens).unwrap(), 30_000, 4, 3).unwrap_err().to_string();
    assert!(short.contains("more than 30000 (data.length); fix: raise validation.share"), "{short}");
}

/// Experiment E14: every policy, loss scaling rule, rounding and moment format, stopped after any step, with one and
/// two threads.
#[test]
fn a_stopped_run_resumes_bit_exactly() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let all =
        policies().into_iter().flat_map(|policy| kinds().into_iter().map(move |kind| (policy.clone(), kind)));
    let mut skipped = 0;
    for (i, (policy, moments)) in all.enumerate() {
        let name = format!("{} {:?} {moments:?}", policy.name, policy.scaling.map(|scaling| scaling.rule));
        let new = |threads| trainer(&tokens, &policy, moments, 3e-3, threads);
        let run = |trainer: &mut Trainer, steps: usize| -> Vec<u64> {
            (0..steps).map(|_| trainer.step().unwrap().loss.to_bits()).collect()
        };
        let mut whole = new(1);
        let losses = run(&mut whole, 6);
        skipped += whole.progress().skipped;
        let path = temp.path().join("checkpoint.safetensors");
        // Every policy and moment format is tried with every stop.
        let (stop, threads) = [(1, 1), (3, 2), (5, 1)][(i + i / kinds().len()) % 3];
        let mut first = new(threads);
        let mut found = run(&mut first, stop);
        first.save(&mantissa_store::Output::owned(&path), "settings").unwrap();
        let mut second = new(3 - threads);
        second.load(&path, "settings").unwrap();
        assert_eq!(second.progress(), first.progress());
        found.extend(run(&mut second, 6 - stop));
        assert_eq!(found, losses, "{name}: stopped after {stop}");
        assert!(bits(&second) == bits(&whole), "{name}: stopped after {stop}");
    }
    assert!(skipped >= 12, "{skipped} skipped steps among those that were gone on from");
}

/// Experiment E14 for optimizers: each with every format of its moments, with master weights of every kind, in memory
/// and in a file, stopped after any step, with one and two threads.
#[test]
fn every_optimizer_resumes_bit_exactly() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let path = temp.path().join("checkpoint.safetensors");
    let formats = ["f32", "bf16", "fp8", "8bit", "8bit:cpu", "8bit:torchao", "4bit", "dyn8-tensor"];
    let policies = ["fp32", "bf16", "bf16-remainder", "bf16-pure-sr", "fp16"];
    for (i, (kind, _)) in mantissa_train::optimizers().enumerate() {
        for (j, moments) in formats.into_iter().enumerate() {
            let own = match kind {
                "adafactor" => "beta1 = 0.9",
                "soap" => "frequency = 2\nblock = 40",
                "sgd" => "nesterov = true",
                _ => "",
            };
            let settings: mantissa_train::config::Optimizer = mantissa_options::from_toml(&format!(
                "kind = \"{kind}\"\nlr = 1e-3\nmoments = \"{moments}\"\nlr_scale = {{ embeddings = 0.5 }}\n{own}"
            ))
            .unwrap();
            let policy = Policy::by_name(policies[(i + j) % policies.len()], 9).unwrap();
            let new = |threads, paged| {
                let params = Parameters::random(&config(), 0.05, 3).unwrap();
                let mut settings = settings.clone();
                settings.common.paged = paged;
                let optimizer = Optimizer::new(&params, &policy, &settings.recipe())
                    .unwrap()
                    .with_decay(&settings.decay_groups(), params.table())
                    .unwrap()
                    .with_rates(&settings.rate_scales(), params.table())
                    .unwrap();
                let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads, policy: policy.clone() };
                let model = TrainModel::new(config(), params, options).unwrap();
                let batches =
                    Batches::new(TokenFile::open(&tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
                let schedule =
                    Schedule { peak: 1e-3, warmup_steps: 0, total_steps: 9, decay: Decay::Constant };
                let options = TrainerOptions { batch: 4, accumulate: 1, schedule };
                let trainer = Trainer::new(model, optimizer, batches, options).unwrap();
                trainer.open_pages(temp.path()).unwrap();
                trainer
            };
            let run = |trainer: &mut Trainer, steps: usize| -> Vec<u64> {
                (0..steps).map(|_| trainer.step().unwrap().loss.to_bits()).collect()
            };
            let name = format!("{kind} {moments} {}", policy.name);
            let mut whole = new(1, false);
            let losses = run(&mut whole, 6);
            assert!(losses[5] != losses[0], "{name}: nothing moved");
            let stop = [1, 3, 4][(i + j) % 3];
            // Maps cannot be paged.
            let paged = moments != "dyn8-tensor";
            let mut first = new(2, paged);
            let mut found = run(&mut first, stop);
            first.save(&mantissa_store::Output::owned(&path), "s").unwrap();
            let mut second = new(1, paged && j % 2 == 0);
            second.load(&path, "s").unwrap();
            found.extend(run(&mut second, 6 - stop));
            assert_eq!(found, losses, "{name}: stopped after {stop}");
            assert!(bits(&second) == bits(&whole), "{name}: stopped after {stop}");
        }
    }
}

/// Every optimizer learns, with its moments in 32 and in 4 bits.
#[test]
fn every_optimizer_learns() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    for (kind, _) in mantissa_train::optimizers() {
        let lr = match kind {
            "sgd" => 0.5,
            "lion" => 2e-3,
            "adafactor" => 5e-2,
            _ => 1e-2,
        };
        for moments in ["f32", "4bit"] {
            let settings: mantissa_train::config::Optimizer = mantissa_options::from_toml(&format!(
                "kind = \"{kind}\"\nlr = {lr:?}\nmoments = \"{moments}\""
            ))
            .unwrap();
            let params = Parameters::random(&config(), 0.05, 3).unwrap();
            let optimizer = Optimizer::new(&params, &Policy::fp32(), &settings.recipe()).unwrap();
            let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads: 2, policy: Policy::fp32() };
            let model = TrainModel::new(config(), params, options).unwrap();
            let batches =
                Batches::new(TokenFile::open(&tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
            let schedule = Schedule {
                peak: lr,
                warmup_steps: 3,
                total_steps: 40,
                decay: Decay::Cosine { min_ratio: 0.1 },
            };
            let options = TrainerOptions { batch: 4, accumulate: 1, schedule };
            let mut trainer = Trainer::new(model, optimizer, batches, options).unwrap();
            let losses: Vec<_> = (0..40).map(|_| trainer.step().unwrap().loss).collect();
            println!("{kind} {moments}: {:.4} to {:.4}", losses[0], losses[39]);
            assert!(losses[39] < 0.8 * losses[0], "{kind} {moments}: {} to {}", losses[0], losses[39]);
        }
    }
}

/// Experiment E9, small: second moments that a linear map rounds to 0 cause unbounded updates; the dynamic map, with
/// and without blocks, stays close to f32.
#[test]
fn linear_moments_explode_and_dynamic_ones_do_not() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let end = |moments| {
        let mut trainer = trainer(&tokens, &Policy::fp32(), moments, 1e-2, 2);
        let losses = (0..40).map(|_| trainer.step().map_or(f64::INFINITY, |report| report.loss));
        losses.collect::<Vec<_>>()[36..].iter().sum::<f64>() / 4.0
    };
    let map = |text: &str| end(MomentFormat::Map(StateMap::new(&text.parse().unwrap()).unwrap()));
    let exact = end(MomentFormat::F32);
    for text in ["dyn8", "dyn8-tensor"] {
        let found = map(text);
        assert!((found - exact).abs() < 0.05, "{text}: {found} for {exact}");
    }
    for text in ["lin8", "lin8-tensor"] {
        let found = map(text);
        assert!(found > exact + 2.0, "{text}: {found} for {exact}");
    }
}

#[test]
fn every_policy_learns() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let mut last = BTreeMap::new();
    for name in Policy::names() {
        let policy = Policy::by_name(name, 4).unwrap();
        let mut trainer = trainer(&tokens, &policy, MomentFormat::F32, 1e-2, 2);
        let reports: Vec<_> = (0..40).map(|_| trainer.step().unwrap()).collect();
        let mean = |reports: &[mantissa_train::StepReport]| {
            reports.iter().map(|r| r.loss).sum::<f64>() / reports.len() as f64
        };
        let (first, end) = (mean(&reports[..4]), mean(&reports[36..]));
        println!("{name}: {first:.4} to {end:.4} nats, {} steps skipped", trainer.progress().skipped);
        assert!(end < 0.6 * first, "{name}: {first} to {end}");
        assert_eq!(trainer.progress().tokens, 40 * 8 * LEN as u64);
        last.insert(name, end);
    }
    let [f32_loss, bf16] = [last["fp32"], last["bf16"]];
    assert!((bf16 - f32_loss).abs() < 0.1, "{last:?}");
}

/// A scale too large for f16 is lowered step by step, and the updates in between are left out.
#[test]
fn a_loss_scale_finds_its_place() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let mut policy = Policy::fp16();
    let scaling = policy.scaling.as_mut().unwrap();
    scaling.initial = 2f32.powi(40);
    let mut trainer = trainer(&tokens, &policy, MomentFormat::F32, 1e-3, 1);
    let before = bits(&trainer);
    let reports: Vec<_> = (0..30).map(|_| trainer.step().unwrap()).collect();
    let skipped = reports.iter().filter(|r| r.norm.is_none()).count();
    assert!(reports[0].norm.is_none() && reports[29].norm.is_some() && skipped > 5, "{skipped}");
    assert_eq!(trainer.progress().skipped, skipped as u64);
    let halved =
        reports.windows(2).filter(|w| w[0].norm.is_none()).all(|w| w[1].loss_scale * 2.0 == w[0].loss_scale);
    assert!(halved && bits(&trainer) != before);
}

#[test]
fn divergence_names_its_tensor_and_keeps_the_last_weights() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let mut trainer = trainer(&tokens, &Policy::fp32(), MomentFormat::F32, 1e30, 1);
    let mut before = bits(&trainer);
    let error = loop {
        match trainer.step() {
            Ok(_) => before = bits(&trainer),
            Err(error) => break error,
        }
    };
    let TrainError::Diverged { step, tensor, .. } = &error else { panic!("{error}") };
    assert!(*step > 1 && tensor.starts_with("model."), "{error}");
    assert!(bits(&trainer) == before);
}

/// A weight that makes one product overflow is named with its layer and product, at any number of threads.
#[test]
fn the_first_operator_that_is_not_finite_is_named() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    for (policy, weight, value, expected) in [
        ("fp32", "model.layers.1.mlp.up_proj.weight", f32::MAX, "model.layers.1.mlp.up_proj: fprop y"),
        (
            "bf16",
            "model.layers.0.self_attn.v_proj.weight",
            f32::INFINITY,
            "model.layers.0.self_attn.v_proj: fprop w",
        ),
        ("fp32", "model.layers.0.input_layernorm.weight", f32::NAN, "model.layers.0.input_layernorm: output"),
    ] {
        for threads in [1, 2] {
            let policy = Policy::by_name(policy, 1).unwrap();
            let params = Parameters::random(&config(), 0.05, 3).unwrap();
            let range = params.table().by_name(weight).unwrap().range.clone();
            let optimizer = AdamW::new(&params, &policy, AdamWOptions::default()).unwrap();
            let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads, policy };
            let mut model = TrainModel::new(config(), params, options).unwrap();
            model.parameters_mut().set(range.start, &vec![value; range.len()]);
            let batches =
                Batches::new(TokenFile::open(&tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
            let schedule = Schedule { peak: 1e-3, warmup_steps: 0, total_steps: 2, decay: Decay::Constant };
            let options = TrainerOptions { batch: 4, accumulate: 2, schedule };
            let mut trainer = Trainer::new(model, optimizer, batches, options).unwrap();
            let error = trainer.step().unwrap_err();
            let TrainError::Diverged { step: 1, tensor, .. } = &error else { panic!("{error}") };
            assert_eq!(tensor, expected, "{threads} threads");
            assert_eq!(trainer.progress().steps, 0);
        }
    }
}

/// A step with telemetry has the same bits as one without, and reports the updates that pure bf16 loses.
#[test]
fn measured_steps_change_nothing_and_show_stalled_weights() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let changed = |name: &str| {
        let policy = Policy::by_name(name, 5).unwrap();
        let new = |threads| trainer(&tokens, &policy, MomentFormat::F32, 2e-5, threads);
        let (mut plain, mut measured) = (new(1), new(2));
        let mut last = None;
        for _ in 0..4 {
            let report = plain.step().unwrap();
            let (same, health) = measured.measured_step().unwrap();
            assert_eq!(report, same, "{name}");
            assert_eq!(health.step, report.step);
            last = Some(health);
        }
        assert!(bits(&plain) == bits(&measured), "{name}");
        let health = last.unwrap();
        // 2 layers of 7 linears and the head, with x, w and dy each.
        assert_eq!(health.operands.len(), 15 * 3, "{name}");
        assert!(health.operands.iter().all(|operand| operand.amax.is_some_and(|amax| amax > 0.0)));
        let matrices = health.weights.iter().filter(|weight| weight.tensor.contains("proj"));
        let shares: Vec<_> = matrices.map(|weight| weight.changed).collect();
        assert!(shares.len() == 14 && shares.iter().all(|share| (0.0..=1.0).contains(share)));
        shares.iter().sum::<f64>() / shares.len() as f64
    };
    let (fp32, nearest, stochastic) = (changed("fp32"), changed("bf16-pure"), changed("bf16-pure-sr"));
    println!("weights changed by an update: f32 {fp32:.3}, bf16 {nearest:.3}, stochastic {stochastic:.3}");
    assert!(fp32 > 0.9 && nearest < 0.3 && stochastic > nearest && stochastic < 0.5 * fp32);
}

/// Telemetry has the norms of the step, and the quality of every matmul's result; both whatever the number of threads.
#[test]
fn norms_and_matmuls_are_measured() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    for (name, most) in [("bf16", 80.0), ("fp16", 100.0), ("fp8-blockwise", 80.0), ("nvfp4", 80.0)] {
        let policy = Policy::by_name(name, 5).unwrap();
        let step = |threads| {
            let mut trainer = trainer(&tokens, &policy, MomentFormat::F32, 1e-3, threads);
            trainer.step().unwrap();
            trainer.measured_step().unwrap()
        };
        let (report, health) = step(1);
        let norm = health.weights.iter().map(|weight| weight.grad_norm.unwrap().powi(2)).sum::<f64>().sqrt();
        assert!((norm / report.norm.unwrap() - 1.0).abs() < 1e-9, "{name}: {norm}");
        for weight in &health.weights {
            let ratio = weight.update_ratio.unwrap();
            assert!((1e-5..0.1).contains(&ratio), "{name}: {weight:?}");
        }
        // 2 layers of 7 linears and the head.
        assert_eq!(health.gemms.len(), 15 * 3, "{name}");
        for gemm in &health.gemms {
            let sqnr = gemm.sqnr_db.unwrap();
            assert!((5.0..most).contains(&sqnr) && gemm.rows >= 32, "{name}: {gemm:?}");
        }
        let lowest = |found: &str| {
            let all = health.gemms.iter().filter(|gemm| gemm.gemm == found && gemm.linear != "lm_head");
            all.filter_map(|gemm| gemm.sqnr_db).fold(f64::INFINITY, f64::min)
        };
        let all = ["fprop y", "dgrad dx", "wgrad dw"].map(lowest);
        println!("{name}: lowest SQNR {all:?}");
        assert!(all.iter().all(|sqnr| *sqnr > if name == "nvfp4" { 5.0 } else { 25.0 }), "{name}: {all:?}");
        let (_, two) = step(2);
        assert_eq!((&health.gemms, &health.weights), (&two.gemms, &two.weights), "{name}");
    }
    let f32 = trainer(&tokens, &Policy::fp32(), MomentFormat::F32, 1e-3, 1).measured_step().unwrap().1;
    assert!(f32.gemms.is_empty(), "f32 rounds nothing");
}

/// Scaled gradients beyond f16 are counted before the products round them.
#[test]
fn saturated_and_underflowed_operands_are_counted() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let share = |scale: f32| {
        let mut policy = Policy::fp16();
        policy.scaling.as_mut().unwrap().initial = scale;
        let (report, health) = trainer(&tokens, &policy, MomentFormat::F32, 1e-3, 1).measured_step().unwrap();
        let gradients = health.operands.iter().filter(|operand| operand.operand == "dgrad dy");
        let sums = gradients.fold((0.0, 0.0), |sum, g| (sum.0 + g.underflowed, sum.1 + g.saturated));
        (sums.0 / 15.0, sums.1 / 15.0, report.norm.is_some(), health.weights.is_empty())
    };
    let (small, large) = (share(2f32.powi(-12)), share(2f32.powi(40)));
    assert!(small.0 > 0.2 && small.1 == 0.0 && small.2 && !small.3, "{small:?}");
    // After the head everything is infinite already.
    assert!(large.1 > 0.05 && !large.2 && large.3, "{large:?}");
}

/// A stop is heeded within a step, which is then done again.
#[test]
fn a_stopped_step_leaves_the_run_unchanged() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let new = || trainer(&tokens, &Policy::bf16(), MomentFormat::F32, 3e-3, 1);
    let (mut whole, mut stopped) = (new(), new());
    let expected: Vec<_> = (0..4).map(|_| whole.step().unwrap()).collect();
    let mut found = vec![stopped.step().unwrap(), stopped.step().unwrap()];
    stopped.set_stop(Stop::new(|| true));
    assert!(matches!(stopped.step(), Err(TrainError::Stopped)));
    stopped.set_stop(Stop::new(|| false));
    found.extend((0..2).map(|_| stopped.step().unwrap()));
    assert_eq!(found, expected);
    assert!(bits(&stopped) == bits(&whole));
}

/// SGD learns, stops and resumes with every kind of master copy; tensors without weight decay do not decay.
#[test]
fn sgd_is_an_optimizer_like_the_other() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    for (name, momentum) in [("fp32", 0.9), ("bf16", 0.9), ("bf16-remainder", 0.0), ("bf16-pure-sr", 0.9)] {
        let policy = Policy::by_name(name, 9).unwrap();
        let new = |threads| {
            let params = Parameters::random(&config(), 0.05, 3).unwrap();
            let options =
                SgdOptions { momentum, nesterov: momentum > 0.0, weight_decay: 1e-4, max_norm: Some(1.0) };
            let optimizer: Optimizer = Sgd::new(&params, &policy, options).unwrap();
            let groups = DecayGroups { no_decay: vec!["embeddings".to_owned()], ..DecayGroups::default() };
            let optimizer = optimizer.with_decay(&groups, params.table()).unwrap();
            let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads, policy: policy.clone() };
            let model = TrainModel::new(config(), params, options).unwrap();
            let batches =
                Batches::new(TokenFile::open(&tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
            let schedule = Schedule { peak: 0.1, warmup_steps: 3, total_steps: 40, decay: Decay::Constant };
            Trainer::new(model, optimizer, batches, TrainerOptions { batch: 4, accumulate: 2, schedule })
                .unwrap()
        };
        let mut whole = new(1);
        let losses: Vec<_> = (0..40).map(|_| whole.step().unwrap().loss).collect();
        assert!(losses[39] < 0.99 * losses[0], "{name}: {} to {}", losses[0], losses[39]);
        let path = temp.path().join("sgd.safetensors");
        let mut first = new(2);
        (0..7).for_each(|_| assert!(first.step().is_ok()));
        first.save(&mantissa_store::Output::owned(&path), "s").unwrap();
        let mut second = new(1);
        second.load(&path, "s").unwrap();
        (0..33).for_each(|_| assert!(second.step().is_ok()));
        assert!(bits(&second) == bits(&whole), "{name}");
    }
}

#[test]
fn another_runs_checkpoint_is_refused() {
    let temp = TempDir::new().unwrap();
    let tokens = tokens(temp.path());
    let path = temp.path().join("c.safetensors");
    let new = |name: &str, moments| trainer(&tokens, &Policy::by_name(name, 1).unwrap(), moments, 1e-3, 1);
    let mut first = new("bf16", MomentFormat::F32);
    first.step().unwrap();
    first.save(&mantissa_store::Output::owned(&path), "a").unwrap();
    let message = |mut other: Trainer, about: &str| other.load(&path, about).unwrap_err().to_string();
    assert!(message(new("bf16", MomentFormat::F32), "b").contains("settings: expected those of the run"));
    assert!(message(new("fp32", MomentFormat::F32), "a").contains("got BF16"));
    assert!(message(new("bf16", MomentFormat::Bf16), "a").contains("optimizer"));
    assert!(message(new("bf16-remainder", MomentFormat::F32), "a").contains("optimizer.master"));
    // Damaged, or of another kind.
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 5]).unwrap();
    assert!(new("bf16", MomentFormat::F32).load(&path, "a").is_err());
    assert!(
        new("bf16", MomentFormat::F32).load(&tokens, "a").unwrap_err().to_string().contains("mantissa-train")
    );
}
