//! Tests on a tiny model: gradients match finite differences, steps preserve the function, and learning lowers the
//! loss.

use std::path::Path;

use mantissa_num::round::random_u32;

use super::*;
use crate::plan::{Options, Use};
use crate::recipe::Recipe;

fn source() -> ModelFiles {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied");
    ModelFiles::open(&data).unwrap()
}

fn plan(source: &ModelFiles, recipe: &str) -> Plan {
    let vocab = mantissa_model::load_config(source).unwrap().vocab_size as u32;
    let window = |w: u64| (0..24).map(|i| random_u32(w, i) % vocab).collect();
    let calibration = CalibrationSet::new("drawn", (0..20).map(window).collect());
    let options = Options { threads: 1, calibration: Some(calibration), ..Options::default() };
    Plan::new(source, Recipe::load(recipe).unwrap(), options).unwrap()
}

fn options() -> SpinOptions {
    SpinOptions { iterations: 30, batch_tokens: 192, ..SpinOptions::default() }
}

fn learner<'a>(plan: &'a Plan, source: &'a ModelFiles) -> Learner<'a> {
    let rotations = dense(&plan.config, Rotations::random(&plan.config, options().rotate));
    Learner::new(plan, source, options(), rotations, &mut || ControlFlow::Continue(())).unwrap()
}

fn states(plan: &Plan, source: &ModelFiles) -> States {
    teacher(plan, source, plan.text_for(Use::Transform).unwrap(), &mut || ControlFlow::Continue(())).unwrap()
}

/// The norms get unequal weights, so that the function depends on the rotations. Nothing is rounded, so that it is
/// smooth.
#[test]
fn gradients_match_finite_differences() {
    let source = source();
    let mut plan = plan(&source, "spin-int8-channel+int8-token");
    let teacher = states(&plan, &source);
    plan.activations = Some("f32".parse().unwrap());
    let set = plan.text_for(Use::Transform).unwrap().clone();
    let mut learner = learner(&plan, &source);
    let windows = [0, 3, 5];
    let loss = |learner: &mut Learner<'_>| {
        learner.refold().unwrap();
        for (i, name) in ["0.post_attention_layernorm", "1.input_layernorm"].into_iter().enumerate() {
            let name = format!("model.layers.{name}.weight");
            let range = learner.model.parameters().table().by_name(&name).unwrap().range.clone();
            let weights: Vec<f32> = (0..range.len()).map(|at| 1.0 + ((at + i) as f32 * 0.9).sin()).collect();
            learner.model.parameters_mut().set(range.start, &weights);
        }
        learner.loss(&set, &teacher, &[windows.to_vec()]).unwrap()
    };
    let start = learner.rotations.clone();
    let here = loss(&mut learner);
    let (tokens, lens, states) = learner.batch(&set, &teacher, &windows).unwrap();
    learner.model.zero_gradients();
    let scale = 1.0 / tokens.len() as f32;
    let sum = learner.model.distill(&Batch { tokens: &tokens, lens: &lens }, &states, scale, true).unwrap();
    assert!(here > 0.0 && (sum / tokens.len() as f64 - here).abs() < 1e-6 * here, "{sum} {here}");
    let (values, gradients) = (learner.model.parameters().values(), learner.model.gradients().to_f32());
    let slopes: Vec<_> = learned_matrices(&start)
        .map(|matrix| learner.rotation_gradient(matrix, &values, &gradients))
        .collect();
    assert_eq!(slopes.len(), 1 + plan.config.num_hidden_layers);
    let length = slopes[0].iter().map(|s| s * s).sum::<f64>().sqrt();
    drop((values, gradients));
    let mut turned = |by: f64| {
        let Coordinates::Turned(matrix) = &start.residual[0] else { return f64::NAN };
        let a: Vec<f64> = slopes[0].iter().map(|s| s / length * by).collect();
        learner.rotations.residual = vec![Coordinates::Turned(Arc::new(matrix.turned(&a)))];
        loss(&mut learner)
    };
    let difference = (turned(0.01) - turned(-0.01)) / 0.02;
    assert!((difference - length).abs() < 0.02 * length, "{difference} for {length}");
}

#[test]
fn learning_lowers_the_loss_and_preserves_the_function() {
    let source = source();
    for recipe in ["spin-int4-channel+int4-token", "spin-int3-channel"] {
        let plan = plan(&source, recipe);
        let set = plan.text_for(Use::Transform).unwrap();
        let mut steps = 0;
        let mut tick = |_: &str| {
            steps += 1;
            ControlFlow::Continue(())
        };
        let learned = learn(&plan, &source, options(), set, &mut tick).unwrap();
        let [before, after] = learned.kl;
        assert!(steps > options().iterations && after < before && after > 0.0, "{recipe}: {before} {after}");
        assert!(learned_matrices(&learned.rotations).all(|matrix| matrix.error() <= 1e-6));
        let start = dense(&plan.config, Rotations::random(&plan.config, options().rotate));
        assert_ne!(start, learned.rotations);
        // The unquantized model computes the same function as before.
        let teacher = states(&plan, &source);
        let mut learner = learner(&plan, &source);
        learner.rotations = learned.rotations;
        learner.refold().unwrap();
        let table = learner.model.parameters().table().clone();
        let folded = Folded::new(&source, &learner.folds);
        let options = training_options(set, options(), 1);
        let mut model = TrainModel::load(&folded, options).unwrap();
        assert_eq!(model.parameters().table(), &table);
        let (tokens, lens, states) = learner.batch(set, &teacher, &[0, 1]).unwrap();
        let kl = model.divergence(&Batch { tokens: &tokens, lens: &lens }, &states).unwrap();
        assert!(kl.abs() < 1e-8 * tokens.len() as f64, "{recipe}: {kl}");
    }
}
