//! Trained models against figures measured with transformers. The data is not in the repository; without it these
//! tests are skipped with a message.
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{load, logits, sampled, shared};
use mantissa_kernels::kernels;
use mantissa_model::{Bos, Decoder, GenerateOptions, Tokenizer, generate};
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
fn nll_sums(decoder: &Decoder, windows: &[Vec<u32>]) -> Vec<f64> {
    let vocab = decoder.config().vocab_size;
    let logits = logits(decoder, windows);
    let mut rows = logits.chunks_exact(vocab);
    let mut sum_of = |window: &Vec<u32>| {
        let nll = |(i, row): (usize, &[f32])| {
            let next = window.get(i + 1)?;
            Some(kernels().log_softmax_stats(row).nll(row[*next as usize]))
        };
        rows.by_ref().take(window.len()).enumerate().filter_map(nll).sum()
    };
    windows.iter().map(&mut sum_of).collect()
}

#[test]
fn babyllama_has_the_recorded_likelihood_of_every_window() {
    let Some(path) = shared("reference/peers/babyllama-105-tokens.json") else { return };
    let windows = windows(&json(&path)["eval_in"], 16);
    let recorded = json(&shared("reference/peers/babyllama-105-nll-in.json").unwrap());
    let sums = nll_sums(&load(&shared("models/babyllama-105").unwrap()), &windows);
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

/// Perplexity over all windows of a set, taken 16 windows at a time.
fn perplexity(dir: &Path, windows: &[Vec<u32>]) -> f64 {
    let decoder = load(dir);
    let sums: f64 = windows.chunks(16).flat_map(|part| nll_sums(&decoder, part)).sum();
    let predicted: usize = windows.iter().map(|window| window.len() - 1).sum();
    (sums / predicted as f64).exp()
}

#[test]
fn quantized_checkpoints_have_the_recorded_perplexity() {
    let Some(path) = shared("artifacts/EXPECT.json") else { return };
    let expect = json(&path);
    let windows =
        windows(&json(&shared("reference/peers/babyllama-105-tokens.json").unwrap())["eval_in"], 160);
    let artifacts = [
        ("llmc_rtn_w4_g32_sym", 1e-3),
        ("llmc_rtn_w4_g32_asym", 1e-3),
        ("ar_w4_g32_sym", 1e-3),
        ("autoawq_w4_g32_noclip", 1e-3),
        ("gptqm_w3_g32_sym_gar", 1e-3),
        ("gptqm_w4_g32_sym_descact", 1e-3),
        ("gptqm_w4_g32_sym_gar", 1e-3),
        ("llmc_w8a8_int8_dyn", 1e-2),
        ("llmc_fp8_dynamic", 1e-2),
        ("llmc_nvfp4", 1e-2),
        ("llmc_mxfp4", 1e-2),
        ("llmc_mxfp8", 1e-2),
        ("llmc_kv_fp8_static", 1e-2),
        ("llmc_gptq_w3_g32_asym_static", 1e-3),
        ("llmc_gptq_w4_g32_sym_static", 1e-3),
        ("mo_FP8_DEFAULT_CFG", 1e-2),
        ("bnb_fn_nf4", 1e-3),
        ("bnb_fn_nf4_dq", 1e-3),
        ("bnb_int8", 1e-2),
    ];
    // `mantissa/tests/peers.rs` has the others too, through the binary.
    for (name, bound) in sampled(artifacts, 4) {
        let entry = expect.as_array().unwrap().iter().find(|entry| entry["artifact"] == name).unwrap();
        let recorded = entry["eval_in"]["ppl"].as_f64().unwrap();
        let found = perplexity(&path.with_file_name(name), &windows);
        println!("{name:24} {found:.6} for {recorded:.6} ({:+.1e})", found / recorded - 1.0);
        assert!((found / recorded - 1.0).abs() < bound, "{name}: {found} for {recorded}");
    }
    // The recorded figure for this model, 2.305107, is not reproduced: ours is 1.2e-3 below it, beyond 1e-3. The same
    // file decoded by numpy and run by transformers gives the figure below, so the reader is not at fault. Possible
    // cause, not verified: it was measured before saving, when ModelOpt averages the input scales of fused layers and
    // rounds their weights again.
    let found = perplexity(&path.with_file_name("mo_INT4_AWQ_g32"), &windows);
    assert!((found / 2.302_292_85 - 1.0).abs() < 1e-6, "mo_INT4_AWQ_g32: {found}");
}
