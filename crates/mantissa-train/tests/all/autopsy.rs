//! Planted numeric faults are named by the autopsy, and sound runs are not accused.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_model::ModelConfig;
use mantissa_train::autopsy::{Autopsy, SOUND, Verdict};
use mantissa_train::data::{Batches, Cursor, TokenFile, TokenWriter};
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    AdamW, AdamWOptions, OperandPolicy, Options, Parameters, Policy, TrainModel, Trainer, TrainerOptions,
};
use tempfile::TempDir;

use crate::common::sampled;

const LEN: usize = 24;
const LAYERS: usize = 4;

fn config() -> ModelConfig {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true
    });
    ModelConfig::from_json(&config, "config").unwrap()
}

fn tokens(dir: &Path) -> PathBuf {
    let path = dir.join("tokens.safetensors");
    let mut writer = TokenWriter::new(80);
    let mut token = 1u32;
    for i in 0..8_000u32 {
        token = if i % 7 == 0 { (i * i + 3) % 80 } else { (token * 5 + 1) % 80 };
        writer.push(&[token]).unwrap();
    }
    writer.finish(&mantissa_store::Output::owned(&path), BTreeMap::new()).unwrap();
    path
}

/// Overwrites values of a tensor by `change`, which gets row, column and value.
fn plant(params: &mut Parameters, tensor: &str, change: impl Fn(usize, usize, f32) -> f32) {
    let param = params.table().by_name(tensor).unwrap().clone();
    let cols = *param.tensor.shape.last().unwrap();
    let values = params.values()[param.range.clone()].to_vec();
    let changed: Vec<f32> = values.iter().enumerate().map(|(i, v)| change(i / cols, i % cols, *v)).collect();
    params.set(param.range.start, &changed);
}

fn trainer(dir: &Path, policy: &Policy, change: impl Fn(&mut Parameters)) -> Trainer {
    trainer_of(&config(), dir, policy, change)
}

fn trainer_of(
    config: &ModelConfig,
    dir: &Path,
    policy: &Policy,
    change: impl Fn(&mut Parameters),
) -> Trainer {
    let mut params = Parameters::random(config, 0.08, 3).unwrap();
    change(&mut params);
    let options = AdamWOptions { max_norm: Some(1.0), ..AdamWOptions::default() };
    let optimizer = AdamW::new(&params, policy, options).unwrap();
    let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads: 2, policy: policy.clone() };
    let model = TrainModel::new(config.clone(), params, options).unwrap();
    let batches = Batches::new(TokenFile::open(&tokens(dir)).unwrap(), LEN, 11, Cursor::default()).unwrap();
    let schedule = Schedule { peak: 3e-3, warmup_steps: 3, total_steps: 40, decay: Decay::Constant };
    Trainer::new(model, optimizer, batches, TrainerOptions { batch: 4, accumulate: 2, schedule }).unwrap()
}

fn bits(trainer: &Trainer) -> Vec<u32> {
    trainer.model().parameters().values().iter().map(|v| v.to_bits()).collect()
}

fn show(autopsy: &Autopsy) {
    println!(
        "{autopsy}\n{:?} {:?} error {:?}, {} replays",
        autopsy.loss, autopsy.grad_norm, autopsy.error, autopsy.replays
    );
    for switched in &autopsy.switched {
        println!(
            "  {:<50} {:>3} {:?} {:?}",
            switched.operands, switched.count, switched.error, switched.share
        );
    }
    println!("{:#?} {:?}", autopsy.culprits, autopsy.tensors);
}

fn examine(trainer: &mut Trainer) -> Autopsy {
    let mut last = 0;
    let autopsy = trainer.autopsy(&mut |n| last = n).unwrap();
    show(&autopsy);
    // Tens of replays, not one for each of the 150 operands.
    assert!(last == autopsy.replays && last <= 45, "{last} for {}", autopsy.replays);
    autopsy
}

#[test]
fn sound_runs_are_not_accused() {
    let temp = TempDir::new().unwrap();
    for name in sampled(Policy::names(), 3) {
        println!("== {name}");
        let policy = Policy::by_name(name, 5).unwrap();
        let mut trainer = trainer(temp.path(), &policy, |_| {});
        (0..4).for_each(|_| assert!(trainer.step().is_ok()));
        let before = bits(&trainer);
        let autopsy = examine(&mut trainer);
        assert!(autopsy.culprits.is_empty(), "{name}: {autopsy}");
        let error = autopsy.error.unwrap();
        let expected = if error > SOUND { Verdict::Spread } else { Verdict::Sound };
        assert_eq!(autopsy.verdict, expected, "{name}: {autopsy}");
        // The run itself goes on as if nothing had happened.
        assert!(bits(&trainer) == before, "{name}");
        let report = trainer.step().unwrap();
        assert_eq!(autopsy.loss.run, Some(report.loss), "{name}");
        assert!((autopsy.grad_norm.run.unwrap() / report.norm.unwrap() - 1.0).abs() < 1e-9, "{name}");
    }
}

/// Output gradients of one layer in E4M3 without scales: most become 0.
#[test]
fn gradients_that_underflow_in_one_layer_are_named() {
    let temp = TempDir::new().unwrap();
    let mut policy = Policy::by_name("fp8-current", 5).unwrap();
    let mut linear = policy.linear.clone();
    linear.dgrad.left = OperandPolicy::new("fp8-e4m3".parse().unwrap());
    policy.exceptions.insert(2, linear);
    let mut trainer = trainer(temp.path(), &policy, |_| {});
    (0..2).for_each(|_| assert!(trainer.step().is_ok()));
    let autopsy = examine(&mut trainer);
    let culprit = &autopsy.culprits[0];
    assert_eq!(autopsy.verdict, Verdict::Group, "{autopsy}");
    assert_eq!(autopsy.largest.as_ref().unwrap().operands, "dgrad.dy of layer 2");
    assert_eq!((culprit.layer, culprit.gemm, culprit.operand), (Some(2), "dgrad", "dy"));
    assert!(culprit.health.as_ref().unwrap().underflowed > 0.5, "{culprit:?}");
    assert_eq!(culprit.remedy.set, ["precision.dgrad.dy=\"fp8-e4m3-token\""]);
}

/// One large channel in a weight under INT8 with a scale per tensor: all other weights become 0.
#[test]
fn an_outlier_channel_under_a_scale_per_tensor_is_named() {
    let temp = TempDir::new().unwrap();
    let mut policy = Policy::by_name("int8-rowwise", 5).unwrap();
    for gemm in [&mut policy.linear.fprop, &mut policy.linear.dgrad] {
        gemm.right = OperandPolicy::new("int8-tensor:restricted".parse().unwrap());
    }
    let mut trainer = trainer(temp.path(), &policy, |params| {
        plant(params, "model.layers.1.mlp.up_proj.weight", |_, col, v| if col == 5 { 100.0 * v } else { v });
    });
    let autopsy = examine(&mut trainer);
    let culprit = &autopsy.culprits[0];
    assert_eq!(
        (autopsy.verdict, culprit.layer, culprit.operand),
        (Verdict::Operand, Some(1), "w"),
        "{autopsy}"
    );
    assert_eq!(culprit.tensor, "model.layers.1.mlp.up_proj.weight");
    assert!(culprit.error_without.unwrap() < autopsy.error.unwrap(), "{culprit:?}");
    // The outlier is in every line, so that a scale per line would not help: it was tried.
    let tried: Vec<&str> = autopsy.switched.iter().map(|switched| &switched.operands[..]).collect();
    assert!(
        tried.contains(&"model.layers.1.mlp.up_proj.weight alone, in int8-channel:restricted"),
        "{tried:?}"
    );
    assert!(culprit.remedy.error.unwrap() <= 0.5 * culprit.error.unwrap(), "{:?}", culprit.remedy);
    let keys = ["precision.fprop.w=", "precision.dgrad.w="];
    assert!(
        culprit.remedy.set.iter().zip(keys).all(|(set, key)| set.starts_with(key)),
        "{:?}",
        culprit.remedy
    );
}

/// A mixture of experts whose second layer rounds output gradients to E4M3 without scales, and a sound one.
#[test]
fn a_layer_of_experts_is_named() {
    let temp = TempDir::new().unwrap();
    let config = serde_json::json!({
        "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "num_local_experts": 4, "num_experts_per_tok": 2
    });
    let config = ModelConfig::from_json(&config, "config").unwrap();
    let mut policy = Policy::by_name("fp8-current", 5).unwrap();
    let mut sound = trainer_of(&config, temp.path(), &policy, |_| {});
    assert!(sound.step().is_ok());
    let mut last = 0;
    let autopsy = sound.autopsy(&mut |n| last = n).unwrap();
    assert!(autopsy.culprits.is_empty() && autopsy.error.unwrap() < SOUND, "{autopsy}");
    let mut linear = policy.linear.clone();
    linear.dgrad.left = OperandPolicy::new("fp8-e4m3".parse().unwrap());
    policy.exceptions.insert(1, linear);
    let mut trainer = trainer_of(&config, temp.path(), &policy, |_| {});
    assert!(trainer.step().is_ok());
    let autopsy = trainer.autopsy(&mut |n| last = n).unwrap();
    show(&autopsy);
    let culprit = &autopsy.culprits[0];
    assert_eq!((culprit.layer, culprit.gemm, culprit.operand), (Some(1), "dgrad", "dy"), "{autopsy}");
    assert!(culprit.linear.starts_with("model.layers.1."), "{culprit:?}");
    // Experts are named as in the checkpoint.
    let (_, health) = trainer.measured_step().unwrap();
    let expert = "model.layers.0.block_sparse_moe.experts.0.w1";
    assert!(health.gemms.iter().any(|gemm| gemm.linear == expert), "{:?}", health.gemms);
}

/// Activations beyond 65504 in one layer, in f16.
#[test]
fn an_overflow_in_f16_is_named() {
    let temp = TempDir::new().unwrap();
    let policy = Policy { scaling: None, ..Policy::fp16() };
    let mut trainer = trainer(temp.path(), &policy, |params| {
        for name in ["gate", "up"] {
            plant(params, &format!("model.layers.2.mlp.{name}_proj.weight"), |_, _, v| 2000.0 * v);
        }
    });
    let told = trainer.step().unwrap_err().to_string();
    let autopsy = examine(&mut trainer);
    let culprit = &autopsy.culprits[0];
    assert_eq!((culprit.gemm, culprit.operand, culprit.error), ("fprop", "x", None), "{autopsy}");
    assert_eq!(culprit.linear, "model.layers.2.mlp.down_proj");
    assert!(told.contains("model.layers.2.mlp.down_proj: fprop x"), "{told}");
    assert!(culprit.health.as_ref().unwrap().saturated > 0.0, "{culprit:?}");
    assert!(culprit.error_without.is_some(), "finite without it: {culprit:?}");
    assert_eq!(culprit.remedy.set, ["precision.fprop.x=\"bf16\"", "precision.wgrad.x=\"bf16\""]);
}

/// A step that is not finite in f32 either is not the precision's fault.
#[test]
fn a_step_that_is_wrong_in_f32_too_is_not_blamed_on_the_precision() {
    let temp = TempDir::new().unwrap();
    let mut trainer = trainer(temp.path(), &Policy::by_name("fp8-current", 5).unwrap(), |params| {
        plant(
            params,
            "model.layers.1.mlp.up_proj.weight",
            |row, _, v| if row == 3 { f32::INFINITY } else { v },
        );
    });
    let autopsy = examine(&mut trainer);
    assert_eq!((autopsy.verdict, autopsy.culprits.len()), (Verdict::NotPrecision, 0));
}
