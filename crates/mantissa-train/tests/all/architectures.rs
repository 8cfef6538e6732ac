//! Gradients that PyTorch gave for tiny models of many architectures (`tests/data/make_arch_gradients.py`), and training of
//! mixtures of experts.
use crate::common::{bits, data, sequences, train_model};
use mantissa_model::Batch;
use mantissa_train::{AdamW, AdamWOptions, ParamInfo, Policy, next_token_targets};
use serde_json::Value;

/// Share of the largest gradient of a model, or of its own size, by which a tensor's numbers may be off.
const TOLERANCE: f64 = 2e-4;
/// As in the script.
const BALANCE: f32 = 0.1;

/// Norm of a gradient, and its product with `cos(0.7 i)` in the order of the checkpoint.
fn numbers(gradient: &[f32], param: &ParamInfo) -> [f64; 2] {
    let stored = param.stored_shape();
    let at = |i: usize| match (param.transposed, stored.as_slice()) {
        (true, &[rows, cols]) => gradient[i % cols * rows + i / cols],
        _ => gradient[i],
    };
    let (mut squares, mut along) = (0.0, 0.0);
    for i in 0..gradient.len() {
        squares += f64::from(at(i)).powi(2);
        along += f64::from(at(i)) * (0.7 * i as f64).cos();
    }
    [squares.sqrt(), along]
}

#[test]
fn gradients_of_every_architecture_match_pytorch() {
    let text = std::fs::read_to_string(data().join("train/architectures.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    let recorded = recorded.as_object().unwrap();
    assert!(recorded.len() >= 20);
    for (variant, expected) in recorded {
        let dir = data().join("tiny").join(variant);
        let mut model = train_model(&dir, 2).unwrap_or_else(|error| panic!("{variant}: {error}"));
        model.set_balance_factor(BALANCE);
        let sequences = sequences(&dir);
        let (tokens, lens) = (sequences.concat(), vec![sequences[0].len(); sequences.len()]);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let scale = 1.0 / (tokens.len() - lens.len()) as f32;
        model.zero_gradients();
        let loss = model.forward_backward(&batch, &next_token_targets(&batch), scale).unwrap().mean();
        let recorded = expected["loss"].as_f64().unwrap();
        assert!((loss / recorded - 1.0).abs() < TOLERANCE, "{variant}: loss {loss} for {recorded}");
        let balance = expected["balance"].as_f64();
        assert_eq!(balance.is_some(), model.balance_loss().is_some(), "{variant}");
        if let (Some(recorded), Some(found)) = (balance, model.balance_loss()) {
            assert!((found / recorded - 1.0).abs() < TOLERANCE, "{variant}: balance {found} for {recorded}");
        }
        let expected = expected["gradients"].as_object().unwrap();
        let gradients = model.gradients().to_f32();
        let greatest = expected.values().map(|pair| pair[0].as_f64().unwrap()).fold(0.0, f64::max);
        assert_eq!(model.parameters().table().iter().count(), expected.len(), "{variant}");
        for param in model.parameters().table().iter() {
            let name = &param.tensor.name;
            let pair = expected.get(name).unwrap_or_else(|| panic!("{variant}: no {name}"));
            let found = numbers(&gradients[param.range.clone()], param);
            let norm = pair[0].as_f64().unwrap();
            for (found, recorded) in found.into_iter().zip([norm, pair[1].as_f64().unwrap()]) {
                let bound = TOLERANCE * norm.max(1e-3 * greatest);
                assert!((found - recorded).abs() <= bound, "{variant} {name}: {found} for {recorded}");
            }
        }
    }
}

/// Tiny models of several architectures learn their batch at several precisions; tokens are counted by expert.
#[test]
fn other_architectures_train_at_every_precision() {
    let recipe = |name| Policy::by_name(name, 1).unwrap();
    for (variant, policy, factor) in [
        ("mixtral", Policy::fp32(), 0.0),
        ("qwen3-moe", Policy::fp32(), 0.05),
        ("qwen2-moe", Policy::bf16_remainder(), 0.01),
        ("mixtral", recipe("fp8-delayed"), 0.01),
        ("gemma2", recipe("fp8-delayed"), 0.0),
        ("phi3", recipe("fp8-blockwise"), 0.0),
        ("gpt-neox", Policy::bf16_remainder(), 0.0),
        ("bitnet-silu", Policy::bf16_remainder(), 0.0),
        ("olmo2", recipe("fp8-blockwise"), 0.0),
    ] {
        let dir = data().join("tiny").join(variant);
        let sequences = sequences(&dir);
        let (tokens, lens) = (sequences.concat(), vec![sequences[0].len(); sequences.len()]);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        let scale = 1.0 / (tokens.len() - lens.len()) as f32;
        let run = |threads: usize| {
            let options =
                mantissa_train::Options { policy: policy.clone(), ..crate::common::options(threads) };
            let files = mantissa_store::convention::ModelFiles::open(&dir).unwrap();
            let mut model = mantissa_train::TrainModel::load(&files, options).unwrap();
            model.set_balance_factor(factor);
            let mut optimizer = AdamW::new(model.parameters(), &policy, AdamWOptions::default()).unwrap();
            let (mut losses, mut balance) = (Vec::new(), Vec::new());
            for _ in 0..12 {
                model.zero_gradients();
                losses.push(model.forward_backward(&batch, &targets, scale).unwrap().mean());
                balance.extend(model.balance_loss());
                optimizer.step(&mut model, 1e-2, 1.0).unwrap();
            }
            let counts = model.expert_tokens().to_vec();
            (losses, balance, counts, bits(&model.parameters().values()))
        };
        let (losses, balance, counts, values) = run(1);
        assert!(losses[11] < 0.8 * losses[0], "{variant}: {losses:?}");
        let per_token = if variant == "qwen3-moe" { 3 } else { 2 };
        for counts in counts.iter().filter(|counts| !counts.is_empty()) {
            assert_eq!(counts.iter().sum::<u64>(), (per_token * tokens.len()) as u64, "{variant}");
        }
        assert_eq!(balance.len(), if factor == 0.0 { 0 } else { 12 });
        assert!(balance.iter().all(|loss| *loss > 0.9 * per_token as f64), "{variant}: {balance:?}");
        assert!(run(3).3 == values, "{variant}: threads change no bit");
    }
}
