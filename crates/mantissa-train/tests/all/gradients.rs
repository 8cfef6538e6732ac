//! Gradients against differences of the loss, and their bits at every thread count.
use crate::common::{batch, bits, data, name, one, options, plain, sampled, train_model, trainable};
use mantissa_model::load_config;
use mantissa_model::{Batch, Buffers, ForwardError, InputQuantizer, Layer, Linear, LinearInput, LinearKind};
use mantissa_num::parse_activation;
use mantissa_store::convention::{ActivationQuant, LinearWeight, ModelFiles};
use mantissa_train::{
    AdamW, AdamWOptions, IGNORE_TARGET, LayerTrainer, Parameters, Policy, SampledHead, TrainError,
    TrainModel, next_token_targets,
};

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
    let before = model.parameters().values()[place].to_vec();
    let move_by = |(v, d): (&f32, &f32)| (f64::from(*v) + h * f64::from(*d)) as f32;
    let moved: Vec<f32> = before.iter().zip(direction).map(move_by).collect();
    model.parameters_mut().set(start, &moved);
    let loss = model.forward_backward(batch, targets, 0.0).unwrap();
    model.parameters_mut().set(start, &before);
    loss.nll
}

/// Compares gradients with central differences for every parameter tensor of every kind of model: along a direction
/// with a large share of the gradient, and along the gradient itself.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    for dir in sampled(trainable(), 3) {
        let mut model = train_model(&dir, 1).unwrap();
        // The choice of experts makes the loss jump, and clipping gives it kinks.
        if model.config().experts.is_some() || model.config().clip_qkv.is_some() {
            continue;
        }
        let (tokens, lens) = batch(&dir, 90);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        model.zero_gradients();
        model.forward_backward(&batch, &targets, 1.0).unwrap();
        let gradients = model.gradients().to_f32().to_vec();
        let whole = gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let params: Vec<_> = model.parameters().table().iter().cloned().collect();
        for param in params {
            let gradient = &gradients[param.range.clone()];
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            // Key biases do not change the softmax: their gradient is rounding error. Numbers of xIELU stay fixed.
            if norm < 1e-5 * whole {
                let without = ["k_proj.bias", "act_fn.beta", "act_fn.eps"];
                let known = without.iter().any(|end| param.tensor.name.ends_with(end));
                assert!(known, "{} {}: {norm}", name(&dir), param.tensor.name);
                continue;
            }
            let along: Vec<f32> = gradient.iter().map(|g| (f64::from(*g) / norm) as f32).collect();
            // Every other element, so that a wrong factor on some elements cannot hide in the norm.
            let half: Vec<f32> =
                along.iter().enumerate().map(|(i, v)| if i % 3 == 0 { -*v } else { 0.5 * *v }).collect();
            for direction in [along, half] {
                let expected: f64 =
                    gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
                let mut slope = |h: f64| {
                    let mut at = |h| moved(&mut model, param.range.start, &direction, h, &batch, &targets);
                    (at(h) - at(-h)) / (2.0 * h)
                };
                // Richardson extrapolation: the error of order h² cancels between two steps.
                // The loss of apertus (xIELU is quadratic) is curved within that step; in a shorter one the rounding
                // of the loss, up to 2e-5, counts.
                let steep = dir.ends_with("apertus");
                let h = if steep { 0.02 / whole } else { 1e-2 };
                let rounding = if steep { 2e-5 / h } else { 0.0 };
                let got = (4.0 * slope(h) - slope(2.0 * h)) / 3.0;
                let bound = 2e-3 * norm + 2e-5 * whole + rounding;
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

/// Sinks take part in the softmax of windows and capped scores: all gradients of such a model are slopes.
#[test]
fn attention_sinks_have_slopes() {
    let dir = data().join("tiny/mistral-window");
    let mut config = load_config(&ModelFiles::open(&dir).unwrap()).unwrap();
    (config.attention.sinks, config.attention_softcap) = (true, Some(2.0));
    let params = Parameters::random(&config, 0.2, 5).unwrap();
    let mut model = TrainModel::new(config, params, options(1)).unwrap();
    let (tokens, lens) = batch(&dir, 90);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    model.zero_gradients();
    model.forward_backward(&batch, &targets, 1.0).unwrap();
    let gradients = model.gradients().to_f32().to_vec();
    let params: Vec<_> = model.parameters().table().iter().cloned().collect();
    let mut sinks = 0;
    for param in params {
        let gradient = &gradients[param.range.clone()];
        let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let along: Vec<f32> = gradient.iter().map(|g| (f64::from(*g) / norm) as f32).collect();
        let mut slope = |h: f64| {
            let mut at = |h| moved(&mut model, param.range.start, &along, h, &batch, &targets);
            (at(h) - at(-h)) / (2.0 * h)
        };
        let slope = (4.0 * slope(2e-3) - slope(4e-3)) / 3.0;
        assert!((slope / norm - 1.0).abs() < 1e-2, "{}: slope {slope} for {norm}", param.tensor.name);
        sinks += usize::from(param.tensor.name.ends_with("sinks"));
    }
    assert_eq!(sinks, model.config().num_hidden_layers);
}

#[test]
fn thread_counts_change_no_bit() {
    let plain = plain();
    // Models of both kinds.
    let (first, others): (Vec<_>, Vec<_>) = trainable().into_iter().partition(|dir| plain.contains(dir));
    for dir in sampled(first, 3).chain(sampled(others, 3)) {
        let (tokens, lens) = batch(&dir, 1200);
        let batch = Batch { tokens: &tokens, lens: &lens };
        let targets = next_token_targets(&batch);
        let run = |threads| {
            let mut model = train_model(&dir, threads).unwrap();
            let options = AdamWOptions { max_norm: Some(0.5), ..AdamWOptions::default() };
            let mut optimizer = AdamW::new(model.parameters(), &Policy::fp32(), options).unwrap();
            let mut seen = Vec::new();
            for _ in 0..2 {
                model.zero_gradients();
                let loss = model.forward_backward(&batch, &targets, 1e-3).unwrap();
                let norm = optimizer.step(&mut model, 1e-3, 1.0).unwrap();
                seen.push((loss.nll.to_bits(), norm.to_bits(), bits(&model.gradients().to_f32())));
            }
            (seen, bits(&model.parameters().values()))
        };
        let one = run(1);
        for threads in [3, 2, 7].into_iter().take(if plain.contains(&dir) { 3 } else { 1 }) {
            assert!(run(threads) == one, "{}, {threads} threads", name(&dir));
        }
    }
}

/// The gradients of two batches add up to that of both together; tokens without a target contribute nothing.
#[test]
fn gradients_accumulate() {
    let dir = &one();
    let mut model = train_model(dir, 1).unwrap();
    let (tokens, lens) = batch(dir, 200);
    let whole = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&whole);
    model.zero_gradients();
    let loss = model.forward_backward(&whole, &targets, 0.01).unwrap();
    let expected = model.gradients().to_f32().to_vec();
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
    assert!(model.gradients().to_f32().iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5 * scale));

    model.zero_gradients();
    let none = model.forward_backward(&whole, &vec![IGNORE_TARGET; 200], 0.01).unwrap();
    assert_eq!((none.nll, none.targets), (0.0, 0));
    assert!(model.gradients().to_f32().iter().all(|g| *g == 0.0));
}

#[test]
fn wrong_batches_are_refused() {
    let mut model = train_model(&one(), 1).unwrap();
    let vocab = u32::try_from(model.config().vocab_size).unwrap();
    let mut run = |tokens: &[u32], lens: &[usize], targets: &[u32]| {
        let before = bits(&model.gradients().to_f32());
        let error = model.forward_backward(&Batch { tokens, lens }, targets, 1.0).unwrap_err();
        assert!(bits(&model.gradients().to_f32()) == before);
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
fn a_non_finite_gradient_changes_nothing() {
    let dir = &one();
    let mut model = train_model(dir, 1).unwrap();
    let mut optimizer = AdamW::new(model.parameters(), &Policy::fp32(), AdamWOptions::default()).unwrap();
    let (tokens, lens) = batch(dir, 70);
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    let before = bits(&model.parameters().values());
    model.forward_backward(&batch, &targets, f32::INFINITY).unwrap();
    let error = optimizer.step(&mut model, 1e-3, 1.0).unwrap_err();
    assert!(matches!(error, TrainError::NonFinite { step: 1, .. }), "{error}");
    assert!(bits(&model.parameters().values()) == before && optimizer.steps() == 0);
}

fn wave(n: usize, phase: f32) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.617 + phase).sin()).collect()
}

/// `Σ c ∘ output` of a layer that reads `states`.
fn weighted_output(layer: &mut LayerTrainer, mut states: Vec<f32>, lens: &[usize], c: &[f32]) -> f64 {
    layer.forward(&mut states, lens).unwrap();
    states.iter().zip(c).map(|(y, c)| f64::from(*y) * f64::from(*c)).sum()
}

/// Checks for a single layer that the input gradient is the slope of `Σ c ∘ output`, and that of the weights is there without it.
#[test]
fn a_layers_input_gradient_is_the_slope_of_its_output() {
    for dir in plain() {
        let source = ModelFiles::open(&dir).unwrap();
        let config = load_config(&source).unwrap();
        let (d, lens) = (config.hidden_size, [30, 1, 31]);
        let (x, c) = (wave(62 * d, 0.0), wave(62 * d, 1.0));
        let mut layer = LayerTrainer::load(&source, &config, 0, options(2)).unwrap();
        let mut value = |h: f64, direction: &[f32]| {
            let move_by = |(v, d): (&f32, &f32)| (f64::from(*v) + h * f64::from(*d)) as f32;
            weighted_output(&mut layer, x.iter().zip(direction).map(move_by).collect(), &lens, &c)
        };
        let direction = wave(62 * d, 2.0);
        let slope = (value(1e-3, &direction) - value(-1e-3, &direction)) / 2e-3;
        value(0.0, &direction);
        let mut gradient = c.clone();
        layer.input_gradient(&mut gradient, &lens);
        let expected: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let scale = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert!((slope - expected).abs() < 1e-3 * scale, "{}: {slope} for {expected}", name(&dir));
    }
}

/// A layer with quantized inputs gives the same bits as in evaluation, and its weight gradients use the quantized
/// inputs.
#[test]
fn inputs_are_quantized_as_in_evaluation() {
    let quant = ActivationQuant::new(parse_activation("int4-token").unwrap(), None);
    for dir in plain() {
        let source = ModelFiles::open(&dir).unwrap();
        let config = load_config(&source).unwrap();
        let (d, lens) = (config.hidden_size, [30, 1, 31]);
        let (x, c) = (wave(62 * d, 0.0), wave(62 * d, 1.0));
        let mut layer = LayerTrainer::load(&source, &config, 0, options(2)).unwrap();
        for input in LinearInput::PLAIN {
            layer.quantize_input(input, InputQuantizer::new("m", &quant).unwrap()).unwrap();
        }
        let mut evaluated = Layer::load(&source, &config, 0).unwrap();
        for info in config.layer_linears(0) {
            let linear = source.linear(&info.module, info.rows, info.cols, info.bias).unwrap();
            let linear = LinearWeight { input: Some(quant.clone()), ..linear };
            *evaluated.linear_mut(info.kind).unwrap() = Linear::new(&info.module, linear).unwrap();
        }
        let mut expected = x.clone();
        let mut buffers = Buffers::plan(&config, 62, 62).unwrap();
        evaluated.run(&config, &lens, &mut expected, None, &mut buffers).unwrap();
        let mut found = x.clone();
        layer.forward(&mut found, &lens).unwrap();
        assert!(bits(&found) == bits(&expected), "{}", name(&dir));
        // The output is linear in the weight of the down projection.
        layer.backward(&c, &lens);
        let gradient = layer.gradient(LinearKind::Down).to_vec();
        let info = config.linear(0, LinearKind::Down);
        let weight = source.tensor_f32(&format!("{}.weight", info.module), &[info.rows, info.cols]).unwrap();
        let mut value = |h: f32| {
            let moved: Vec<f32> = weight.iter().zip(&gradient).map(|(w, g)| w + h * g).collect();
            layer.set_weight(LinearKind::Down, |weight| weight.copy_from_slice(&moved));
            weighted_output(&mut layer, x.clone(), &lens, &c)
        };
        let squares = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>();
        let slope = (value(0.1) - value(-0.1)) / 0.2;
        assert!((slope - squares).abs() < 1e-3 * squares, "{}: {slope} for {squares}", name(&dir));
    }
}

/// Gradients at drawn targets have the mean zero, being those of a distribution's own logarithm, and do not depend on threads.
#[test]
fn gradients_at_drawn_targets_have_the_mean_zero() {
    let dir = &plain()[0];
    let source = ModelFiles::open(dir).unwrap();
    let config = load_config(&source).unwrap();
    let (d, n) = (config.hidden_size, 1100);
    let state = wave(d, 0.3);
    let run = |threads: usize, seed: u64| {
        let mut head = SampledHead::load(&source, &config, &options(threads)).unwrap();
        let mut states = state.repeat(n);
        head.gradients(&mut states, 5, seed).unwrap();
        states
    };
    let gradients = run(1, 7);
    assert!(bits(&gradients) == bits(&run(3, 7)) && gradients != run(1, 8));
    let mut mean = vec![0.0f64; d];
    gradients
        .chunks_exact(d)
        .for_each(|g| mean.iter_mut().zip(g).for_each(|(m, g)| *m += f64::from(*g) / n as f64));
    let norm = mean.iter().map(|m| m * m).sum::<f64>().sqrt();
    let typical = (gradients.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>() / n as f64).sqrt();
    assert!(typical > 0.0 && norm < 4.0 * typical / (n as f64).sqrt(), "{norm} of {typical}");
    let mut head = SampledHead::load(&source, &config, &options(1)).unwrap();
    assert!(matches!(head.gradients(&mut state.repeat(1201), 0, 0), Err(TrainError::Forward(_))));
}
