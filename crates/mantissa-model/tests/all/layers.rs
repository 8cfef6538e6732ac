//! Runs one layer at a time over saved states, and checks the inputs of its linear layers.
use std::collections::BTreeMap;

use crate::common::{expected, load, tiny};
use mantissa_model::config::NormPlaces;
use mantissa_model::graph::NormKind;
use mantissa_model::{
    Batch, Buffers, Carried, Decoder, ForwardError, Layer, Linear, LinearInput, LinearKind, ModelConfig,
    Norm, load_config, load_embedding,
};
use mantissa_store::convention::ModelFiles;

#[test]
fn layers_by_themselves_give_the_bits_of_the_decoder() {
    for dir in tiny() {
        let (files, decoder) = (ModelFiles::open(&dir).unwrap(), load(&dir));
        let config = decoder.config();
        let tokens = expected(&dir).0.concat();
        // One sequence that needs padding, and enough tokens for the MLP to split them.
        let long: Vec<u32> = tokens.iter().copied().cycle().take(600).collect();
        for (tokens, lens) in [(&tokens[..7], vec![7]), (&tokens[..9], vec![2, 0, 7]), (&long, vec![10; 60])]
        {
            let mut buffers = Buffers::plan(config, tokens.len(), 10).unwrap();
            let mut states = vec![f32::NAN; tokens.len() * config.hidden_size];
            load_embedding(&files, config).unwrap().embed(tokens, &lens, 0, &mut states).unwrap();
            let embedding = load_embedding(&files, config).unwrap();
            let mut carried = Carried::new(&embedding, tokens, &states);
            for i in 0..config.num_hidden_layers {
                let layer = Layer::load(&files, config, i).unwrap();
                // Other work of these buffers leaves no trace.
                let (first, input) = buffers.layer_inputs();
                [first, input].into_iter().for_each(|x| x.fill(f32::NAN));
                carried.enter(config, i, &mut buffers);
                layer.run(config, &lens, &mut states, None, &mut buffers).unwrap();
                carried.leave(config, i, tokens.len(), &buffers);
                carried.advance(config, tokens.len(), &buffers);
            }
            let expected = decoder.forward(&Batch { tokens, lens: &lens }, &mut buffers).unwrap();
            assert!(normed(&decoder, &files, &states) == expected.states(), "{}", dir.display());
        }
    }
}

fn normed(decoder: &Decoder, files: &ModelFiles, states: &[f32]) -> Vec<f32> {
    let config = decoder.config();
    let norm = Norm::load(files, config, &config.final_norm_module(), config.hidden_size).unwrap();
    let mut out = vec![0.0; states.len()];
    norm.forward(states, &mut out);
    out
}

/// Every linear layer applied to its observed input gives the observed input of the next step.
#[test]
fn observed_inputs_are_those_of_the_linear_layers() {
    for dir in tiny() {
        let decoder = load(&dir);
        let config = decoder.config();
        let layer = &decoder.layers()[0];
        let (sequences, _) = expected(&dir);
        let long: Vec<u32> = sequences[0].iter().copied().cycle().take(20 * 30).collect();
        for (tokens, lens) in [(&sequences[0][..5], vec![5]), (&long, vec![20; 30])] {
            let mut buffers = Buffers::plan(config, tokens.len(), lens[0]).unwrap();
            let mut states = vec![0.0; tokens.len() * config.hidden_size];
            let embedding = load_embedding(&ModelFiles::open(&dir).unwrap(), config).unwrap();
            embedding.embed(tokens, &lens, 0, &mut states).unwrap();
            Carried::new(&embedding, tokens, &states).enter(config, 0, &mut buffers);
            let (before, mut seen) = (states.clone(), BTreeMap::new());
            let mut observe = |input: LinearInput, x: &[f32]| {
                seen.entry(input).or_insert_with(Vec::new).extend_from_slice(x);
            };
            layer.run(config, &lens, &mut states, Some(&mut observe), &mut buffers).unwrap();
            check_widths(config, &seen, tokens.len());
            let experts = config.experts.as_ref().is_some_and(|experts| experts.layers[0]);
            if config.norm_places != NormPlaces::Before || experts {
                continue;
            }
            let mut qkv_input = vec![0.0; before.len()];
            layer.norm(NormKind::Input).unwrap().forward(&before, &mut qkv_input);
            assert_eq!(seen[&LinearInput::Qkv], qkv_input, "{}", dir.display());

            let mut middle = before;
            let linear = |kind| layer.linear(kind).unwrap();
            // Attention, a recurrent mixer, or both.
            let halves = [(LinearKind::O, LinearInput::O), (LinearKind::MixOut, LinearInput::Mixed)];
            for (linear, input) in
                halves.into_iter().filter_map(|(kind, input)| Some((layer.linear(kind)?, input)))
            {
                add(&mut middle, &apply(linear, &seen[&input]));
            }
            if !config.has_mlp[0] {
                close(&states, &middle);
                continue;
            }
            let mut mlp_input = vec![0.0; middle.len()];
            layer.norm(NormKind::Post).unwrap().forward(&middle, &mut mlp_input);
            close(&seen[&LinearInput::GateUp], &mlp_input);

            add(&mut middle, &apply(linear(LinearKind::Down), &seen[&LinearInput::Down]));
            close(&states, &middle);
        }
    }
}

/// Checks that every linear layer's input was observed once per token; those of experts once per routed token.
fn check_widths(config: &ModelConfig, seen: &BTreeMap<LinearInput, Vec<f32>>, tokens: usize) {
    let mut routed = 0;
    for info in config.layer_linears(0) {
        let input = info.kind.input();
        assert_eq!(config.layer_input_width(0, input), info.cols, "{}", info.module);
        let rows = |input| seen.get(input).map_or(0, |x| x.len() / info.cols);
        match input {
            LinearInput::Expert(e) => {
                assert_eq!(rows(&input) * info.cols, seen.get(&input).map_or(0, Vec::len));
                routed += usize::from(info.kind == LinearKind::ExpertUp(e)) * rows(&input);
            }
            LinearInput::ExpertDown(e) => {
                let tokens = seen.get(&LinearInput::Expert(e)).map_or(0, |x| x.len() / config.expert_input());
                assert_eq!(rows(&input), tokens, "{}", info.module);
            }
            _ => assert_eq!(seen[&input].len(), tokens * info.cols, "{}", info.module),
        }
    }
    if let Some(experts) = config.experts.as_ref().filter(|experts| experts.layers[0]) {
        assert_eq!(routed, tokens * experts.per_token);
    }
}

/// With all experts running, each sees every token once, and the states have the same bits.
#[test]
fn running_all_experts_changes_no_state() {
    let mut models = 0;
    for dir in tiny() {
        let source = ModelFiles::open(&dir).unwrap();
        let config = load_config(&source).unwrap();
        let last = config.num_hidden_layers - 1;
        let Some(experts) = config.experts.as_ref().filter(|experts| experts.layers[last]) else { continue };
        let mut layer = Layer::load(&source, &config, last).unwrap();
        let lens = [7, 1, 12];
        let tokens: usize = lens.iter().sum();
        let mut buffers = Buffers::plan(&config, tokens, 12).unwrap();
        let begin: Vec<f32> =
            (0..tokens * config.hidden_size).map(|i| (i as f32 * 0.61).sin() * 2.0).collect();
        let mut run = |layer: &Layer| {
            let (mut states, mut seen) = (begin.clone(), BTreeMap::new());
            let mut observe = |input: LinearInput, x: &[f32]| *seen.entry(input).or_insert(0) += x.len();
            layer.run(&config, &lens, &mut states, Some(&mut observe), &mut buffers).unwrap();
            (states, seen)
        };
        let (routed, _) = run(&layer);
        layer.run_all_experts();
        let (all, seen) = run(&layer);
        let same = routed.iter().zip(&all).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{}", dir.display());
        for e in 0..experts.count {
            assert_eq!(seen.get(&LinearInput::Expert(e)), Some(&(tokens * config.expert_input())));
            assert_eq!(seen.get(&LinearInput::ExpertDown(e)), Some(&(tokens * experts.width)));
        }
        models += 1;
    }
    assert!(models >= 8, "{models}");
}

fn apply(linear: &Linear, x: &[f32]) -> Vec<f32> {
    let mut scratch = vec![0.0; Linear::scratch_len(linear.rows(), linear.cols())];
    let mut out = vec![0.0; x.len() / linear.cols() * linear.rows()];
    linear.forward(x, &mut out, false, &mut scratch);
    out
}

fn add(to: &mut [f32], x: &[f32]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
}

fn close(a: &[f32], b: &[f32]) {
    let scale = b.iter().fold(1.0_f32, |m, v| m.max(v.abs()));
    assert!(crate::common::max_difference(a, b) <= 1e-5 * scale);
}

#[test]
fn states_of_another_shape_are_refused() {
    let decoder = load(&tiny()[0]);
    let config = decoder.config();
    let mut buffers = Buffers::plan(config, 8, 4).unwrap();
    let mut run = |lens: &[usize], len: usize| {
        decoder.layers()[0].run(config, lens, &mut vec![0.0; len], None, &mut buffers)
    };
    let d = config.hidden_size;
    assert_eq!(run(&[2, 1], 3 * d), Ok(()));
    assert_eq!(run(&[2], 3 * d), Err(ForwardError::Lengths { sum: 2, tokens: 3 }));
    assert_eq!(run(&[3], 3 * d + 1), Err(ForwardError::Lengths { sum: 3, tokens: 3 }));
    assert!(matches!(run(&[5], 5 * d), Err(ForwardError::Plan { needed: 5, planned: 4, .. })));
    assert!(matches!(run(&[3; 3], 9 * d), Err(ForwardError::Plan { needed: 9, planned: 8, .. })));
}
