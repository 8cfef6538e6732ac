//! Precision policies on a tiny model: what their gradients keep, what their updates keep, what they take in memory.
use crate::common::{batch, bits, one, options, sampled};
use mantissa_model::{Batch, ModelConfig};
use mantissa_store::convention::ModelFiles;
use mantissa_train::blockwise::BlockwiseRule;
use mantissa_train::{
    AdamW, AdamWOptions, Array, ArrayMut, Gradients, MomentFormat, Options, ParamTable, Parameters, Policy,
    TrainModel, next_token_targets,
};

fn model(policy: &Policy, threads: usize) -> (TrainModel, Parameters) {
    let files = ModelFiles::open(&one()).unwrap();
    let config = mantissa_model::load_config(&files).unwrap();
    let params = Parameters::load(&files, &config).unwrap();
    let options = Options { policy: policy.clone(), ..options(threads) };
    (TrainModel::new(config, params.clone(), options).unwrap(), params)
}

/// Tokens, lengths of their sequences, and what follows each.
struct Text {
    tokens: Vec<u32>,
    lens: Vec<usize>,
    targets: Vec<u32>,
}

fn text(count: usize) -> Text {
    let (tokens, lens) = batch(&one(), count);
    let targets = next_token_targets(&Batch { tokens: &tokens, lens: &lens });
    Text { tokens, lens, targets }
}

/// A model after `steps` steps of `policy` at learning rate `lr`.
fn trained(policy: &Policy, options: AdamWOptions, lr: f64, steps: usize) -> TrainModel {
    let Text { tokens, lens, targets } = text(300);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let (mut model, params) = model(policy, 1);
    let mut optimizer = AdamW::new(&params, policy, options).unwrap();
    for _ in 0..steps {
        model.zero_gradients();
        model.forward_backward(&batch, &targets, 1.0 / 300.0).unwrap();
        optimizer.step(&mut model, lr, 1.0).unwrap();
    }
    model
}

/// Gradients of the mean loss of 600 tokens times `scale`.
fn gradients(policy: &Policy, scale: f32) -> Vec<f32> {
    let (mut model, _) = model(policy, 1);
    let Text { tokens, lens, targets } = text(600);
    model.zero_gradients();
    model.forward_backward(&Batch { tokens: &tokens, lens: &lens }, &targets, scale / 600.0).unwrap();
    model.gradients().to_f32().to_vec()
}

fn relative_error(found: &[f32], expected: &[f32], scale: f32) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = found.iter().zip(expected).map(|(a, b)| square(a / scale - b)).sum();
    (error / expected.iter().map(|b| square(*b)).sum::<f64>()).sqrt()
}

/// The direction of experiment E2: f16 loses gradients as the loss is scaled down, and all of them in the end.
#[test]
fn small_gradients_vanish_in_f16_unless_the_loss_is_scaled() {
    let expected = gradients(&Policy::fp32(), 1.0);
    let errors: Vec<f64> = [14, 0, -8, -30]
        .map(|k| {
            let scale = 2f32.powi(k);
            relative_error(&gradients(&Policy::fp16(), scale), &expected, scale)
        })
        .to_vec();
    println!("f16, loss × 2^14, 2^0, 2^-8, 2^-30: {errors:?}");
    assert!(errors[0] < 5e-3 && errors[1] < 2e-2, "{errors:?}");
    assert!(errors[2] > 4.0 * errors[0] && errors[3] > 0.9, "{errors:?}");
    // bf16 has the range of f32, so the scale makes no difference.
    let near = relative_error(&gradients(&Policy::bf16(), 1.0), &expected, 1.0);
    let small = relative_error(&gradients(&Policy::bf16(), 2f32.powi(-30)), &expected, 2f32.powi(-30));
    assert!(near < 3e-2 && small < 1.01 * near, "{near} {small}");
}

#[test]
fn a_loss_scale_is_taken_out_again() {
    let Text { tokens, lens, targets } = text(300);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let run = |scale: f32| {
        let (mut model, params) = model(&Policy::fp32(), 1);
        let options = AdamWOptions { max_norm: Some(0.1), ..AdamWOptions::default() };
        let mut optimizer = AdamW::new(&params, &Policy::fp32(), options).unwrap();
        model.zero_gradients();
        model.forward_backward(&batch, &targets, scale / 300.0).unwrap();
        let norm = optimizer.step(&mut model, 1e-2, f64::from(scale)).unwrap();
        (norm, model.parameters().values().to_vec())
    };
    let (plain, scaled) = (run(1.0), run(1024.0));
    assert!((plain.0 / scaled.0 - 1.0).abs() < 1e-6, "{} {}", plain.0, scaled.0);
    assert!(plain.1.iter().zip(&scaled.1).all(|(a, b)| (a - b).abs() < 1e-7));
}

/// Some steps with each policy and kind of moments, on any number of threads and interrupted, have the same bits.
#[test]
fn steps_have_the_same_bits_on_any_number_of_threads_and_from_a_state() {
    let Text { tokens, lens, targets } = text(700);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let kinds = [
        MomentFormat::F32,
        MomentFormat::Bf16,
        MomentFormat::Blockwise8(BlockwiseRule::Cuda),
        MomentFormat::Blockwise8(BlockwiseRule::Cpu),
    ];
    // All kinds of moments are among every third.
    for (i, name) in sampled(Policy::names().enumerate(), 3) {
        let (policy, moments) = (Policy::by_name(name, 9).unwrap(), kinds[i % kinds.len()]);
        let run = |threads: usize, stop: usize| {
            let (mut trained, params) = model(&policy, threads);
            let options = AdamWOptions { moments, ..AdamWOptions::default() };
            let mut optimizer = AdamW::new(&params, &policy, options).unwrap();
            let mut losses = Vec::new();
            for step in 0..4 {
                if step == stop {
                    // Restores everything that a checkpoint holds into a new run.
                    let (mut other, first) = model(&policy, threads);
                    other.parameters_mut().set(0, &trained.parameters().values());
                    let mut again = AdamW::new(&first, &policy, options).unwrap();
                    let table = trained.parameters().table();
                    copy(optimizer.arrays(table), again.restore(table, optimizer.steps()));
                    (trained, optimizer) = (other, again);
                }
                trained.zero_gradients();
                let loss = trained.forward_backward(&batch, &targets, 64.0 / 700.0).unwrap();
                optimizer.step(&mut trained, 3e-3, 64.0).unwrap();
                losses.push(loss.nll.to_bits());
            }
            (losses, bits(&trained.parameters().values()))
        };
        let one = run(1, 9);
        let first = f64::from_bits(one.0[0]);
        assert!(f64::from_bits(one.0[3]) < first, "{name}: the loss falls from {first}");
        assert!(run(2, 9) == one, "{name}: two threads");
        assert!(run(3, 2) == one, "{name}: resumed");
    }
}

fn copy(from: Vec<(String, Array<'_>)>, to: Vec<(String, ArrayMut<'_>)>) {
    assert_eq!(from.len(), to.len());
    for ((name, from), (place, to)) in from.into_iter().zip(to) {
        assert_eq!(name, place);
        match (from, to) {
            (Array::F32(a), ArrayMut::F32(b)) => b.copy_from_slice(a),
            (Array::Bf16(a), ArrayMut::Bf16(b)) | (Array::U16(a), ArrayMut::U16(b)) => b.copy_from_slice(a),
            (Array::U8(a), ArrayMut::U8(b)) => b.copy_from_slice(a),
            (from, _) => panic!("{name}: {from:?}"),
        }
    }
}

/// A master copy in 16 more bits equals one in f32, except for ties.
#[test]
fn the_remainder_is_a_whole_master_copy() {
    let run =
        |policy: Policy| bits(&trained(&policy, AdamWOptions::default(), 1e-3, 5).parameters().values());
    let (whole, halves) = (run(Policy::bf16()), run(Policy::bf16_remainder()));
    let different = whole.iter().zip(&halves).filter(|(a, b)| a != b).count();
    assert!(different * 500 < whole.len(), "{different} of {} differ", whole.len());
}

/// Mechanism of experiment E1: updates far below half a unit in the last place of bf16. With rounding to nearest
/// hardly any takes effect; with stochastic rounding they do on average; a master copy keeps them all.
#[test]
fn small_updates_need_a_master_copy_or_stochastic_rounding() {
    let Text { tokens, lens, targets } = text(300);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let run = |policy: Policy| {
        let before = model(&policy, 1).0.parameters().values().to_vec();
        let options = AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() };
        let mut model = trained(&policy, options, 2e-6, 40);
        let loss = model.forward_backward(&batch, &targets, 0.0).unwrap().mean();
        let after = model.parameters().values().to_vec();
        let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count() as f64 / before.len() as f64;
        (loss, changed)
    };
    let start = {
        let (mut model, _) = model(&Policy::bf16(), 1);
        model.forward_backward(&batch, &targets, 0.0).unwrap().mean()
    };
    let [nearest, stochastic, master] =
        [Policy::bf16_pure(), Policy::bf16_pure_stochastic(3), Policy::bf16()].map(run);
    let gain = |(loss, _): (f64, f64)| start - loss;
    println!(
        "gain and share changed: nearest {:?}, stochastic {:?}, master {:?}",
        (gain(nearest), nearest.1),
        (gain(stochastic), stochastic.1),
        (gain(master), master.1)
    );
    assert!(nearest.1 < 0.2 && gain(nearest) < 0.6 * gain(master));
    assert!(stochastic.1 > 2.0 * nearest.1);
    assert!((gain(stochastic) - gain(master)).abs() < 0.5 * gain(master));
}

/// Bytes of each parameter, as the literature counts them.
#[test]
fn memory_of_weights_gradients_and_states_matches_the_table() {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 1024, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
    });
    let config = ModelConfig::from_json(&config, "config").unwrap();
    let table = ParamTable::new(&config);
    let n = config.parameters() as f64;
    assert_eq!(table.len() as u64, config.parameters(), "no gaps in this model");
    let eight = MomentFormat::Blockwise8(BlockwiseRule::Cuda);
    let rows = [
        (Policy::fp32(), MomentFormat::F32, 16.0),
        (Policy::bf16(), MomentFormat::F32, 18.0),
        (Policy::bf16_remainder(), MomentFormat::F32, 16.0),
        (Policy::bf16_pure(), MomentFormat::F32, 12.0),
        (Policy::bf16_pure(), MomentFormat::Bf16, 8.0),
        (Policy::bf16_pure_stochastic(1), MomentFormat::Bf16, 8.0),
        (Policy::bf16_pure(), eight, 6.031_25),
    ];
    for (policy, moments, expected) in rows {
        let weights = policy.weights.bytes() * table.len() as u64;
        let state = AdamW::bytes(&table, &policy, moments);
        // Except for the staging buffer, which is not per parameter.
        let staged = 4 * 1024 * 256;
        let gradients = Gradients::bytes(&table, policy.gradients);
        let gradients = if policy.gradients.bytes() == 2 { gradients - staged } else { gradients };
        let found = (weights + gradients + state) as f64 / n;
        // Norms are too small for 8-bit moments.
        assert!((found - expected).abs() < 0.03, "{} {moments:?}: {found} for {expected}", policy.name);
    }
}
