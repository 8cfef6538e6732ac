//! Losses, gradients and updates that PyTorch gave for tiny models (`tests/data/make_train_gradients.py`).
use std::collections::BTreeMap;

use crate::common::{data, name, sequences, train_model};
use mantissa_model::Batch;
use mantissa_store::SafeTensors;
use mantissa_train::{AdamW, AdamWOptions, MomentFormat, Policy, TrainModel, next_token_targets};

const TOLERANCE: f32 = 1e-4;

/// As in the script.
const ADAMW: AdamWOptions = AdamWOptions {
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-3,
    weight_decay: 0.1,
    decay_vectors: true,
    max_norm: None,
    moments: MomentFormat::F32,
};
const LEARNING_RATE: f64 = 1e-2;

struct Expected {
    loss: Vec<f64>,
    tensors: BTreeMap<String, Vec<f32>>,
}

fn expected(name: &str) -> Expected {
    let file = SafeTensors::open(&data().join("train").join(format!("{name}.safetensors"))).unwrap();
    let mut all = Expected { loss: Vec::new(), tensors: BTreeMap::new() };
    for tensor in file.tensors() {
        if tensor.name == "loss" {
            let bytes = file.read(tensor).unwrap();
            all.loss = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
        } else {
            all.tensors.insert(tensor.name.clone(), file.read_f32(tensor).unwrap());
        }
    }
    all
}

fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max, v| v.abs().max(max))
}

/// Compares every tensor of `arena` with the one recorded under `prefix`: within the tolerance relative to the
/// tensor's largest value, or to a thousandth of the largest of all for tensors that are 0 up to rounding.
fn compare(model: &TrainModel, arena: &[f32], prefix: &str, expected: &Expected, variant: &str) {
    let recorded = expected.tensors.iter().filter(|(name, _)| name.starts_with(prefix));
    let greatest = recorded.clone().fold(0.0_f32, |max, (_, values)| max.max(amax(values)));
    assert_eq!(recorded.count(), model.parameters().table().iter().count());
    for param in model.parameters().table().iter() {
        let name = format!("{prefix}{}", param.tensor.name);
        let (got, values) = (&arena[param.range.clone()], &expected.tensors[&name]);
        assert_eq!(got.len(), values.len(), "{variant} {name}");
        let error = got.iter().zip(values).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
        let bound = TOLERANCE * amax(values).max(1e-3 * greatest);
        assert!(error <= bound, "{variant} {name}: error {error:e}, allowed {bound:e}");
    }
}

#[test]
fn steps_match_pytorch() {
    for variant in ["llama1-mha", "llama2-gqa-tied", "qwen2-bias"] {
        let dir = data().join("tiny").join(variant);
        assert_eq!(name(&dir), variant);
        let (expected, sequences) = (expected(variant), sequences(&dir));
        let mut model = train_model(&dir, 1).unwrap();
        let mut optimizer = AdamW::new(model.parameters(), &Policy::fp32(), ADAMW).unwrap();
        let (tokens, lens) = (sequences.concat(), vec![sequences[0].len(); sequences.len()]);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        let scale = 1.0 / (tokens.len() - lens.len()) as f32;
        for step in 0..4 {
            model.zero_gradients();
            let loss = model.forward_backward(&batch, &targets, scale).unwrap().mean();
            let recorded = expected.loss[step];
            assert!(
                (loss / recorded - 1.0).abs() < f64::from(TOLERANCE),
                "{variant}: loss {loss} for {recorded}"
            );
            if step == 0 {
                compare(&model, &model.gradients().to_f32(), "grad.", &expected, variant);
            }
            if step < 3 {
                optimizer.step(&mut model, LEARNING_RATE, 1.0).unwrap();
            }
        }
        compare(&model, &model.parameters().values(), "after.", &expected, variant);
        assert!(expected.loss[3] < 0.99 * expected.loss[0], "the steps did something");
    }
}
