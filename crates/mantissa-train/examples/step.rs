//! Cost of a training step: `cargo run --release -p mantissa-train --example step [steps] [threads] [policy] [moments]
//! [optimizer] [paged]`.
//!
//! The model of the project's training gate: a Llama of 8.3M parameters (6 layers, hidden 288, 6 heads, MLP 768,
//! vocabulary 4096), random weights and tokens, batch 16 × 256, f32, AdamW unless told otherwise. Prints process CPU time and wall time of
//! each step, the profile of the cheapest, the planned bytes and the peak of resident memory.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use mantissa_model::{Batch, ModelConfig};
use mantissa_num::round::random_u32;
use mantissa_train::{
    MemoryPlan, Optimizer, Options, Parameters, Policy, Profile, StepPart, TrainModel, next_token_targets,
};
use rustix::time::{ClockId, clock_gettime};

const SEQUENCES: usize = 16;
const LEN: usize = 256;

fn main() {
    let argument = |n| std::env::args().nth(n).map(|text| text.parse().expect("a number"));
    let (steps, threads): (usize, usize) = (argument(1).unwrap_or(5), argument(2).unwrap_or(1));
    let policy = std::env::args().nth(3).unwrap_or_else(|| "fp32".to_owned());
    let policy = Policy::by_name(&policy, 1).expect("a policy");
    let text = |n, default: &str| std::env::args().nth(n).unwrap_or_else(|| default.to_owned());
    let (moments, kind, paged) = (text(4, "f32"), text(5, "adamw"), text(6, "") == "paged");
    let toml = format!("kind = \"{kind}\"\nlr = 1e-3\nmoments = \"{moments}\"\npaged = {paged}");
    let settings: mantissa_train::config::Optimizer =
        mantissa_options::from_toml(&toml).expect("an optimizer and its moments");
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 4096, "max_position_embeddings": LEN,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false
    });
    let config = ModelConfig::from_json(&config, "step").expect("a config");
    let options = Options { max_tokens: SEQUENCES * LEN, max_len: LEN, threads, policy: policy.clone() };
    let plan = MemoryPlan::new(&config, &options);
    let parameters = config.parameters();
    let params = Parameters::random(&config, 0.02, 1).expect("memory");
    let recipe = settings.recipe();
    let state = recipe.bytes(params.table(), &policy);
    let mut optimizer = Optimizer::new(&params, &policy, &recipe).expect("memory");
    optimizer.open_pages(&std::env::temp_dir(), 0).expect("a file of moments");
    let mut model = TrainModel::new(config, params, options).expect("a model that can be trained");
    model.set_profile(Profile::new(cpu));

    let tokens: Vec<u32> = (0..SEQUENCES * LEN).map(|i| random_u32(2, i as u64) % 4096).collect();
    let lens = [LEN; SEQUENCES];
    let batch = Batch { tokens: &tokens, lens: &lens };
    let targets = next_token_targets(&batch);
    let mut best = (Duration::MAX, [Duration::ZERO; StepPart::ALL.len()]);
    println!("{parameters} parameters, {} tokens, {threads} threads", tokens.len());
    for step in 1..=steps {
        model.profile().reset();
        let (wall, start) = (Instant::now(), cpu());
        model.zero_gradients();
        let scale = 1.0 / (tokens.len() - SEQUENCES) as f32;
        let loss = model.forward_backward(&batch, &targets, scale).expect("a batch that fits");
        let norm = optimizer.step(&mut model, 1e-3, 1.0).expect("finite gradients");
        let (took, wall) = (cpu() - start, wall.elapsed());
        let (loss, cpu, wall) = (loss.mean(), took.as_secs_f64(), wall.as_secs_f64());
        println!("step {step}: loss {loss:.5}, gradient norm {norm:.5}, {cpu:.3} CPU-s, {wall:.3} s");
        if took < best.0 {
            best = (took, StepPart::ALL.map(|part| model.profile().get(part)));
        }
    }
    println!("\nprofile of the cheapest step, ms of CPU");
    for (part, time) in StepPart::ALL.iter().zip(best.1) {
        println!("{:<18} {:8.1}", format!("{part:?}"), time.as_secs_f64() * 1e3);
    }
    let rest = best.0.saturating_sub(best.1.iter().sum());
    println!(
        "{:<18} {:8.1}\n{:<18} {:8.1}",
        "rest",
        rest.as_secs_f64() * 1e3,
        "sum",
        best.0.as_secs_f64() * 1e3
    );
    println!("\nmemory, MB");
    for (name, bytes) in plan.entries.iter().chain(&[("optimizer state", state)]) {
        println!("{name:<18} {:8.1}", *bytes as f64 / 1e6);
    }
    println!("{:<18} {:8.1}", "state in a file", optimizer.paged_bytes() as f64 / 1e6);
    println!("{:<18} {:8.1}", "planned", (plan.bytes() + state) as f64 / 1e6);
    println!("{:<18} {:8.1}", "peak resident", peak_resident() as f64 / 1e6);
}

/// CPU time of this process.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The greatest resident size of this process, bytes; 0 where the system does not say.
fn peak_resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}
