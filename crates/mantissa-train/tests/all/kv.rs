//! Quantized keys and values in training: the values are those of evaluation with a quantized KV cache, gradients pass the
//! rounding.
use std::path::PathBuf;

use crate::common::{batch, bits, data, options, trainable};
use mantissa_model::{Batch, Buffers, Decoder, KvPolicy, load_config};
use mantissa_store::convention::ModelFiles;
use mantissa_train::{Options, PolicyTable, TrainModel, next_token_targets};

fn model(dir: &std::path::Path, kv: &str, threads: usize) -> TrainModel {
    let table: PolicyTable = mantissa_options::from_toml(&format!("kv = \"{kv}\"")).unwrap();
    let options = Options { policy: table.policy(1).unwrap(), ..options(threads) };
    TrainModel::load(&ModelFiles::open(dir).unwrap(), options).unwrap()
}

#[test]
fn logits_are_those_of_evaluation_with_a_quantized_cache() {
    let clips = |dir: &PathBuf| load_config(&ModelFiles::open(dir).unwrap()).unwrap().clip_qkv.is_some();
    for dir in trainable().into_iter().filter(|dir| !clips(dir)) {
        let (tokens, lens) = batch(&dir, 90);
        let batch = Batch { tokens: &tokens, lens: &lens };
        for kv in ["int8-head", "int4-head-asym", "fp8-e4m3-head", "keys=int4-head,sinks=2,pre-rope"] {
            let mut decoder = Decoder::load(&ModelFiles::open(&dir).unwrap()).unwrap();
            decoder.set_kv(&kv.parse::<KvPolicy>().unwrap()).unwrap();
            let longest = 32.min(decoder.config().max_position_embeddings);
            let mut buffers = Buffers::plan(decoder.config(), 90, longest).unwrap();
            let mut expected = vec![0.0; 90 * decoder.config().vocab_size];
            decoder.forward(&batch, &mut buffers).unwrap().logits(0..90, &mut expected).unwrap();
            let mut found = vec![0.0; expected.len()];
            model(&dir, kv, 2).logits(&batch, &mut found).unwrap();
            assert!(bits(&found) == bits(&expected), "{} {kv}", dir.display());
        }
    }
}

/// With a cache in f16 the loss is nearly smooth: its slopes are the straight-through gradients.
#[test]
fn gradients_pass_the_rounding() {
    let dir = &data().join("tiny/llama2-gqa-tied");
    let mut model = model(dir, "f16", 1);
    let (tokens, lens) = batch(dir, 120);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    model.zero_gradients();
    model.forward_backward(&batch, &targets, 1.0).unwrap();
    let gradients = model.gradients().to_f32().to_vec();
    let table: Vec<_> = model.parameters().table().iter().cloned().collect();
    let mut seen = 0;
    for param in table
        .iter()
        .filter(|param| param.tensor.name.contains("k_proj.w") || param.tensor.name.contains("v_proj.w"))
    {
        let g = &gradients[param.range.clone()];
        let norm = g.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let before = model.parameters().values()[param.range.clone()].to_vec();
        let mut loss = |h: f64| {
            let moved: Vec<f32> = before
                .iter()
                .zip(g)
                .map(|(w, g)| (f64::from(*w) + h * f64::from(*g) / norm) as f32)
                .collect();
            model.parameters_mut().set(param.range.start, &moved);
            model.loss(&batch, &targets).unwrap().nll
        };
        let h = 2e-2;
        let slope = (loss(h) - loss(-h)) / (2.0 * h);
        loss(0.0);
        assert!((slope / norm - 1.0).abs() < 3e-2, "{}: slope {slope} for {norm}", param.tensor.name);
        seen += 1;
    }
    assert!(seen >= 2, "{seen}");
}
