//! Learned scales of weights (LSQ): their gradients through a whole model, and runs that stop and resume.
use crate::common::{batch, bits, one, options};
use mantissa_model::{Batch, ModelConfig, load_config};
use mantissa_num::Scheme;
use mantissa_store::Output;
use mantissa_store::convention::ModelFiles;
use mantissa_train::data::{Batches, Cursor, TokenFile, TokenWriter};
use mantissa_train::schedule::{Decay, Schedule};
use mantissa_train::{
    AdamW, AdamWOptions, Optimizer, Options, Parameters, Policy, PolicyTable, RateScales, TrainModel,
    Trainer, TrainerOptions, next_token_targets,
};
use tempfile::TempDir;

fn policy(base: &str, scheme: &str, x: &str) -> Policy {
    let text = format!(
        "policy = \"{base}\"\nfprop.x = \"{x}\"\nfprop.w = {{ scheme = \"{scheme}\", scales = \"learned\" }}\n\
         dgrad.w = {{ scheme = \"f32\", source = \"forward\" }}"
    );
    mantissa_options::from_toml::<PolicyTable>(&text).unwrap().policy(1).unwrap()
}

/// Elements at the bounds of a scheme, by the number of its bits.
fn bounds(scheme: &str) -> (f64, f64) {
    let bits: i32 = scheme[3..4].parse().unwrap();
    (-2f64.powi(bits - 1), 2f64.powi(bits - 1) - 1.0)
}

/// The gradients of weights and scales are those that LSQ states for the gradient of the rounded weight, which is that of
/// a model in f32 with these weights.
#[test]
fn gradients_follow_from_those_of_the_rounded_weights() {
    let dir = &one();
    let files = ModelFiles::open(dir).unwrap();
    let config = load_config(&files).unwrap();
    let (tokens, lens) = batch(dir, 200);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    for scheme in ["int3-g16", "int2-channel", "int4-g32"] {
        let options = Options { policy: policy("fp32", scheme, "f32"), ..options(2) };
        let mut model = TrainModel::load(&files, options).unwrap();
        let mut rounded = Parameters::load(&files, &config).unwrap();
        let first = rounded.clone();
        for info in config.decoder_linears() {
            let name = format!("{}.weight", info.module);
            let place = first.table().by_name(&name).unwrap().range.start;
            rounded.set(place, &model.forward_weight(info.layer, info.kind).unwrap());
        }
        let table = rounded.table().clone();
        let mut reference = TrainModel::new(config.clone(), rounded, crate::common::options(1)).unwrap();
        for model in [&mut model, &mut reference] {
            model.zero_gradients();
            model.forward_backward(&batch, &targets, 1e-2).unwrap();
        }
        let (found, of_rounded) =
            (model.gradients().to_f32().to_vec(), reference.gradients().to_f32().to_vec());
        let (low, high) = bounds(scheme);
        let width = scheme.parse::<Scheme>().unwrap().format.blocks();
        for info in config.decoder_linears() {
            let name = format!("{}.weight", info.module);
            let of = |name: &str| model.parameters().table().by_name(name).unwrap().range.clone();
            let (weights, scales) = (of(&name), of(&format!("{}.weight_scale", info.module)));
            let values = model.parameters().values();
            let width = width.len(1, info.cols);
            let w = values[weights.clone()].chunks(info.cols).flat_map(|row| row.chunks(width));
            let g = &of_rounded[table.by_name(&name).unwrap().range.clone()];
            let g = g.chunks(info.cols).flat_map(|row| row.chunks(width));
            let own = found[weights].chunks(info.cols).flat_map(|row| row.chunks(width));
            let blocks = w.zip(g).zip(own).zip(values[scales.clone()].iter().zip(&found[scales]));
            for (((w, g), own), (s, of_scale)) in blocks {
                let mut expected = 0.0;
                for ((w, g), own) in w.iter().zip(g).zip(own) {
                    let (v, g) = (f64::from(w / s), f64::from(*g));
                    let inside = v > low && v < high;
                    expected += g * (v.clamp(low, high).round_ties_even() - if inside { v } else { 0.0 });
                    assert!((f64::from(*own) - if inside { g } else { 0.0 }).abs() < 1e-5, "{scheme} {name}");
                }
                expected /= (w.len() as f64 * high).sqrt();
                let close = (f64::from(*of_scale) - expected).abs() < 1e-5 + 1e-4 * expected.abs();
                assert!(close, "{scheme} {name}: {of_scale} for {expected}");
            }
        }
    }
}

const LEN: usize = 16;

fn config() -> ModelConfig {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
    });
    ModelConfig::from_json(&config, "config").unwrap()
}

fn trainer(tokens: &std::path::Path, policy: &Policy, threads: usize) -> Trainer {
    let params = Parameters::random(&config(), 0.05, 3).unwrap().with_scales(&config(), policy).unwrap();
    let options = AdamWOptions { max_norm: Some(1.0), ..AdamWOptions::default() };
    let rates = RateScales([("scales".to_owned(), 0.1)].into());
    let optimizer: Optimizer = AdamW::new(&params, policy, options).unwrap();
    let optimizer = optimizer.with_rates(&rates, params.table()).unwrap();
    let options = Options { max_tokens: 4 * LEN, max_len: LEN, threads, policy: policy.clone() };
    let model = TrainModel::new(config(), params, options).unwrap();
    let batches = Batches::new(TokenFile::open(tokens).unwrap(), LEN, 11, Cursor::default()).unwrap();
    let schedule = Schedule { peak: 3e-3, warmup_steps: 3, total_steps: 40, decay: Decay::Constant };
    Trainer::new(model, optimizer, batches, TrainerOptions { batch: 4, accumulate: 2, schedule }).unwrap()
}

/// Runs learn, are interrupted and resumed to the same bits, on any number of threads, with float and integer products.
#[test]
fn runs_resume_to_the_same_bits() {
    let temp = TempDir::new().unwrap();
    let tokens = temp.path().join("tokens.safetensors");
    let mut writer = TokenWriter::new(64);
    writer.push(&(0..4000u32).map(|i| i % 7 * 9 + i / 1000).collect::<Vec<_>>()).unwrap();
    writer.finish(&Output::owned(&tokens), Default::default()).unwrap();
    for (base, scheme, x) in [
        ("fp32", "int3-g16", "f32"),
        ("bf16", "int4-channel", "bf16"),
        ("fp32", "int8-channel", "int8-token"),
    ] {
        let policy = policy(base, scheme, x);
        let mut whole = trainer(&tokens, &policy, 1);
        let first = whole.model().learned_scales();
        assert_eq!(first.len(), 14);
        let losses: Vec<f64> = (0..30).map(|_| whole.step().unwrap().loss).collect();
        assert!(losses[29] < 0.98 * losses[0], "{scheme}: {} to {}", losses[0], losses[29]);
        let moved = whole.model().learned_scales();
        assert!(first.iter().all(|(name, scales)| moved[name] != *scales), "{scheme}: every scale learns");
        let path = temp.path().join("c.safetensors");
        let mut stopped = trainer(&tokens, &policy, 2);
        (0..7).for_each(|i| assert_eq!(stopped.step().unwrap().loss.to_bits(), losses[i].to_bits()));
        stopped.save(&Output::owned(&path), "s").unwrap();
        let mut resumed = trainer(&tokens, &policy, 1);
        resumed.load(&path, "s").unwrap();
        (7..30).for_each(|i| assert_eq!(resumed.step().unwrap().loss.to_bits(), losses[i].to_bits()));
        let all = |trainer: &Trainer| bits(&trainer.model().parameters().values());
        assert!(all(&resumed) == all(&whole), "{scheme}");
    }
}

/// Parameters take the scales that a policy asks for and lose those that it does not.
#[test]
fn scales_come_and_go_with_the_policy() {
    let learned = policy("fp32", "int4-g32", "f32");
    let plain = Parameters::random(&config(), 0.05, 3).unwrap();
    let with = plain.clone().with_scales(&config(), &learned).unwrap();
    assert_eq!(with.clone().with_scales(&config(), &learned).unwrap(), with);
    assert_eq!(with.with_scales(&config(), &Policy::fp32()).unwrap(), plain);
}
