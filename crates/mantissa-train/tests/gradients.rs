//! Gradients against differences of the loss, and their bits at every thread count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{batch, bits, name, train_model, trainable};
use mantissa_model::{Batch, ForwardError};
use mantissa_train::{AdamW, AdamWOptions, IGNORE_TARGET, TrainError, TrainModel, next_token_targets};

/// The loss with one parameter tensor moved by `h` along `direction`.
fn moved(
    model: &mut TrainModel,
    start: usize,
    direction: &[f32],
    h: f64,
    batch: &Batch<'_>,
    targets: &[u32],
) -> f64 {
    let place = start..start + direction.len();
    let before = model.parameters().values()[place.clone()].to_vec();
    let values = &mut model.parameters_mut().values_mut()[place.clone()];
    values.iter_mut().zip(direction).for_each(|(v, d)| *v = (f64::from(*v) + h * f64::from(*d)) as f32);
    let loss = model.forward_backward(batch, targets, 0.0).unwrap();
    model.parameters_mut().values_mut()[place].copy_from_slice(&before);
    loss.nll
}

/// For every parameter tensor of every kind of model: the derivative of the loss along a direction with a large share of
/// the gradient, and along the gradient itself, is what central differences give.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    for dir in trainable() {
        let mut model = train_model(&dir, 1).unwrap();
        let (tokens, lens) = batch(&dir, 90);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        model.zero_gradients();
        model.forward_backward(&batch, &targets, 1.0).unwrap();
        let gradients = model.gradients().to_vec();
        let whole = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let params: Vec<_> = model.parameters().table().iter().cloned().collect();
        for param in params {
            let gradient = &gradients[param.range.clone()];
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            // Keys' biases move no softmax: their gradient is rounding.
            if norm < 1e-5 * whole {
                assert!(param.tensor.name.ends_with("k_proj.bias"), "{} {}", name(&dir), param.tensor.name);
                continue;
            }
            let along: Vec<f32> = gradient.iter().map(|g| (f64::from(*g) / norm) as f32).collect();
            // Every other element of it: a wrong factor on some elements cannot hide in the norm.
            let half: Vec<f32> =
                along.iter().enumerate().map(|(i, v)| if i % 3 == 0 { -*v } else { 0.5 * *v }).collect();
            for direction in [along, half] {
                let expected: f64 =
                    gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                let mut slope = |h: f64| {
                    let mut at = |h| moved(&mut model, param.range.start, &direction, h, &batch, &targets);
                    (at(h) - at(-h)) / (2.0 * h)
                };
                // Richardson: the error of order h² cancels between two steps.
                let h = 1e-2;
                let got = (4.0 * slope(h) - slope(2.0 * h)) / 3.0;
                let bound = 2e-3 * norm + 2e-5 * whole;
                assert!(
                    (got - expected).abs() < bound,
                    "{} {}: slope {got}, gradient {expected}, norm {norm} of {whole}",
                    name(&dir),
                    param.tensor.name
                );
            }
        }
    }
}

#[test]
fn thread_counts_change_no_bit() {
    for dir in trainable() {
        let (tokens, lens) = batch(&dir, 1200);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        let run = |threads| {
            let mut model = train_model(&dir, threads).unwrap();
            let options = AdamWOptions { max_norm: Some(0.5), ..AdamWOptions::default() };
            let mut optimizer = AdamW::new(model.parameters().table(), options).unwrap();
            let mut seen = Vec::new();
            for _ in 0..2 {
                model.zero_gradients();
                let loss = model.forward_backward(&batch, &targets, 1e-3).unwrap();
                let norm = optimizer.step(&mut model, 1e-3).unwrap();
                seen.push((loss.nll.to_bits(), norm.to_bits(), bits(model.gradients())));
            }
            (seen, bits(model.parameters().values()))
        };
        let one = run(1);
        for threads in [2, 3, 7] {
            assert!(run(threads) == one, "{}, {threads} threads", name(&dir));
        }
    }
}

/// Two batches add up to the gradient of both together, and tokens without a target to nothing.
#[test]
fn gradients_accumulate() {
    let dir = &trainable()[0];
    let mut model = train_model(dir, 1).unwrap();
    let (tokens, lens) = batch(dir, 200);
    let whole = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&whole);
    model.zero_gradients();
    let loss = model.forward_backward(&whole, &targets, 0.01).unwrap();
    let expected = model.gradients().to_vec();
    let cut = lens.len() / 2;
    let at: usize = lens[..cut].iter().sum();
    model.zero_gradients();
    let mut sum = 0.0;
    for (tokens, lens, targets) in
        [(&tokens[..at], &lens[..cut], &targets[..at]), (&tokens[at..], &lens[cut..], &targets[at..])]
    {
        sum += model.forward_backward(&Batch { tokens, lens }, targets, 0.01).unwrap().nll;
    }
    assert!((sum - loss.nll).abs() < 1e-6 * loss.nll);
    let scale = expected.iter().fold(0.0_f32, |m, g| m.max(g.abs()));
    assert!(model.gradients().iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5 * scale));

    model.zero_gradients();
    let none = model.forward_backward(&whole, &vec![IGNORE_TARGET; 200], 0.01).unwrap();
    assert_eq!((none.nll, none.targets), (0.0, 0));
    assert!(model.gradients().iter().all(|g| *g == 0.0));
}

#[test]
fn wrong_batches_are_refused() {
    let mut model = train_model(&trainable()[0], 1).unwrap();
    let vocab = u32::try_from(model.config().vocab_size).unwrap();
    let mut run = |tokens: &[u32], lens: &[usize], targets: &[u32]| {
        let before = bits(model.gradients());
        let error = model.forward_backward(&Batch { tokens, lens }, targets, 1.0).unwrap_err();
        assert!(bits(model.gradients()) == before);
        error
    };
    let lengths = ForwardError::Lengths { sum: 3, tokens: 2 };
    assert!(matches!(run(&[1, 2], &[3], &[1, 2]), TrainError::Forward(error) if error == lengths));
    assert!(matches!(run(&[1, 2], &[2], &[1]), TrainError::Targets { found: 1, allowed: 2 }));
    assert!(matches!(
        run(&[1, vocab], &[2], &[1, 1]),
        TrainError::Forward(ForwardError::Vocabulary { index: 1, .. })
    ));
    assert!(matches!(run(&[1, 2], &[2], &[1, vocab]), TrainError::Target { index: 1, .. }));
    assert!(matches!(
        run(&[1; 33], &[33], &[1; 33]),
        TrainError::Forward(ForwardError::Plan { needed: 33, .. })
    ));
    assert!(matches!(
        run(&[1; 1201], &[1; 1201], &[1; 1201]),
        TrainError::Forward(ForwardError::Plan { .. })
    ));
}

#[test]
fn a_gradient_that_is_not_finite_changes_nothing() {
    let dir = &trainable()[0];
    let mut model = train_model(dir, 1).unwrap();
    let mut optimizer = AdamW::new(model.parameters().table(), AdamWOptions::default()).unwrap();
    let (tokens, lens) = batch(dir, 70);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    let before = bits(model.parameters().values());
    model.forward_backward(&batch, &targets, f32::INFINITY).unwrap();
    let error = optimizer.step(&mut model, 1e-3).unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { step: 1, .. }), "{error}");
    assert!(bits(model.parameters().values()) == before && optimizer.steps() == 0);
}
