//! Fine-tunes a model with QLoRA on the tokens of a run, without the command line's folder: the counterpart of
//! `bench/training/peft_qlora.py`, for equal losses, processor time and memory.
//!
//! ```text
//! cargo run --release -p mantissa-train --example qlora -- MODEL DATA.jsonl HELD_OUT.txt POLICY SEED STEPS
//! ```
//!
//! Rank 16, alpha 32, NF4 with double quantization, batches of 4 windows of 256 tokens, AdamW with learning rate 2e-3
//! after 4 steps of warmup, gradients clipped to 1. Prints a JSON object.
#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use mantissa_model::{Batch, Bos, Tokenizer, load_config};
use mantissa_store::convention::ModelFiles;
use mantissa_train::data::{Shuffle, TextFormat, documents};
use mantissa_train::{
    AdamW, AdamWOptions, Lora, Options, Parameters, Policy, TrainModel, Tuning, next_token_targets,
};

const LENGTH: usize = 256;
const BATCH: usize = 4;
const LEARNING_RATE: f64 = 2e-3;
const WARMUP: usize = 4;
const HELD_OUT: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, data, held_out, policy, seed, steps] = arguments.as_slice() else {
        return Err("expected MODEL DATA.jsonl HELD_OUT.txt POLICY SEED STEPS".into());
    };
    let (seed, steps): (u64, usize) = (seed.parse()?, steps.parse()?);
    let policy = Policy::by_name(policy, seed).ok_or("unknown policy")?;
    let (files, tokenizer) = (ModelFiles::open(Path::new(dir))?, Tokenizer::load(Path::new(dir))?);
    let config = load_config(&files)?;
    let mut tokens = Vec::new();
    documents(Path::new(data), &TextFormat::JsonLines { field: "text".to_owned() }, |document| {
        tokens.extend(tokenizer.encode(document, Bos::Auto)?);
        tokens.extend(config.eos_token_ids.first());
        Ok(())
    })?;
    let held = tokenizer.encode(&std::fs::read_to_string(held_out)?, Bos::Never)?;
    let held: Vec<&[u32]> = held.chunks_exact(LENGTH).take(HELD_OUT).collect();
    let begin = Instant::now();
    let base = Some("nf4-dq".parse().map_err(|_| "scheme")?);
    let tuning = Tuning { lora: Lora::default(), base, train: Vec::new(), seed };
    let params = Parameters::tuned(&files, &config, &tuning, &policy, 1)?;
    let options = AdamWOptions { weight_decay: 0.0, max_norm: Some(1.0), ..AdamWOptions::default() };
    let mut optimizer = AdamW::new(&params, &policy, options)?;
    let base = params.hash_base();
    let planned = Options { max_tokens: BATCH * LENGTH, max_len: LENGTH, threads: 1, policy };
    let mut model = TrainModel::new(config, params, planned)?;
    let before = loss(&mut model, &held)?;
    let loaded = begin.elapsed().as_secs_f64();
    let (windows, mut losses, start) =
        (((tokens.len() - 1) / LENGTH) as u64, Vec::new(), processor_seconds());
    for step in 0..steps {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for place in (step * BATCH) as u64..((step + 1) * BATCH) as u64 {
            let at = Shuffle::new(windows, seed, place / windows).at(place % windows) as usize * LENGTH;
            inputs.extend(&tokens[at..at + LENGTH]);
            targets.extend(&tokens[at + 1..at + LENGTH + 1]);
        }
        model.zero_gradients();
        let batch = Batch { tokens: &inputs, lens: &[LENGTH; BATCH] };
        let scale = 1.0 / targets.len() as f32;
        losses.push(model.forward_backward(&batch, &targets, scale)?.mean());
        let warm = ((step + 1) as f64 / WARMUP as f64).min(1.0);
        optimizer.step(&mut model, LEARNING_RATE * warm, 1.0)?;
    }
    let seconds = (processor_seconds() - start) / steps as f64;
    let result = serde_json::json!({
        "seed": seed, "losses": losses, "held_out_before": before, "held_out_after": loss(&mut model, &held)?,
        "load_seconds": loaded, "step_seconds": seconds, "peak_rss": peak_bytes(),
        "frozen_bytes": model.parameters().frozen_bytes(),
        "base_is_unchanged": model.parameters().hash_base() == base,
    });
    println!("{result}");
    Ok(())
}

/// Mean loss of windows.
fn loss(model: &mut TrainModel, windows: &[&[u32]]) -> Result<f64, Box<dyn Error>> {
    let (mut nll, mut targets) = (0.0, 0);
    for tokens in windows {
        let batch = Batch { tokens, lens: &[tokens.len()] };
        let found = model.loss(&batch, &next_token_targets(&batch))?;
        (nll, targets) = (nll + found.nll, targets + found.targets);
    }
    Ok(nll / targets as f64)
}

/// Processor seconds of this process.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |i: usize| fields.get(i).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

/// Peak resident bytes of this process.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
