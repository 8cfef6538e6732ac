//! Trained models against the figures that transformers gave for them. The data stands beside the repository; without it
//! these tests say that they were skipped.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::ops::ControlFlow;
use std::path::Path;

use common::{load, logits, shared};
use mantissa_kernels::kernels;
use mantissa_model::{Bos, GenerateOptions, Tokenizer, generate};
use serde_json::Value;

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn windows(value: &Value, count: usize) -> Vec<Vec<u32>> {
    let ids =
        |window: &Value| window.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    value.as_array().unwrap().iter().take(count).map(ids).collect()
}

/// Sum over a window of the negative log-likelihood of each token after the first.
fn nll_sums(model: &str, windows: &[Vec<u32>]) -> Option<Vec<f64>> {
    let decoder = load(&shared(&format!("models/{model}"))?);
    let vocab = decoder.config().vocab_size;
    let logits = logits(&decoder, windows);
    let mut rows = logits.chunks_exact(vocab);
    let mut sum_of = |window: &Vec<u32>| {
        let nll = |(i, row): (usize, &[f32])| {
            let next = window.get(i + 1)?;
            Some(kernels().log_softmax_stats(row).nll(row[*next as usize]))
        };
        rows.by_ref().take(window.len()).enumerate().filter_map(nll).sum()
    };
    Some(windows.iter().map(&mut sum_of).collect())
}

#[test]
fn babyllama_has_the_recorded_likelihood_of_every_window() {
    let Some(path) = shared("reference/peers/babyllama-105-tokens.json") else { return };
    let windows = windows(&json(&path)["eval_in"], 16);
    let recorded = json(&shared("reference/peers/babyllama-105-nll-in.json").unwrap());
    let sums = nll_sums("babyllama-105", &windows).unwrap();
    for (i, sum) in sums.iter().enumerate() {
        let recorded = recorded["nll_sum_per_window"][i].as_f64().unwrap();
        assert!((sum - recorded).abs() < 1e-3, "window {i}: {sum} for {recorded}");
    }
}

#[test]
fn models_continue_as_recorded() {
    let cases = [
        (
            "stories260K",
            "she saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said",
        ),
        (
            "babyllama-105",
            "She loved to play outside in the sunshine. One day, she went to the park with her mommy",
        ),
        (
            "bitllama-1M",
            "She loved to play with her toys and eat candy. One day, she went to the park with her mommy",
        ),
        (
            "bitllama-3M",
            "She loved to play outside and explore the world around her. One day, she saw a big, red ball.",
        ),
        (
            "ref-8m",
            "She loved to play outside and play with her toys. One day, she found a big bag of water.",
        ),
    ];
    for (model, part) in cases {
        let Some(dir) = shared(&format!("models/{model}")) else { return };
        let decoder = load(&dir);
        let tokenizer = Tokenizer::load(&dir).unwrap();
        let prompt = "Once upon a time";
        let ids = tokenizer.encode(prompt, Bos::Auto).unwrap();
        let mut stream = tokenizer.stream();
        stream.skip(&ids).unwrap();
        let mut text = prompt.to_string();
        let options = GenerateOptions { max_new_tokens: 180, ..GenerateOptions::default() };
        let generated = generate(&decoder, &ids, &options, |id| {
            text += &stream.push(id).unwrap();
            ControlFlow::Continue(())
        });
        text += &stream.finish().unwrap();
        let start = "Once upon a time, there was a little girl named Lily. ";
        assert!(text.starts_with(start) && text.contains(part), "{model}: {text}");
        let ids = [ids, generated.unwrap().tokens].concat();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text, "{model}: streamed and whole");
    }
}
