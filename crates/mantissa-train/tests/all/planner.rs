//! `mantissa plan --train` counts what the trainer allocates.
use mantissa_model::{ModelConfig, Role};
use mantissa_plan::training::policy_storage;
use mantissa_train::{AdamW, Master, MemoryPlan, MomentFormat, Options, ParamTable, Policy, Precision};
use serde_json::json;

fn config(model_type: &str, hidden: u64, kv_heads: u64) -> ModelConfig {
    let config = json!({
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": kv_heads, "head_dim": 16, "vocab_size": 300,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 28
    });
    ModelConfig::from_json(&config, "config.json").unwrap()
}

/// Every policy with every state of AdamW: weights, master copy, gradients and moments. All but the buffers of an update, which
/// do not grow with the number of layers: a tensor of gradients below 16 bits, and one of INT8 weights.
#[test]
fn every_policy_and_state() {
    let shapes = [config("llama", 64, 2), config("llama", 24, 4), config("qwen2_moe", 32, 4)];
    for config in shapes {
        let table = ParamTable::new(&config);
        let linears = || table.iter().filter(|param| matches!(param.tensor.role, Role::Linear { .. }));
        let of = |lens: &mut dyn Iterator<Item = usize>| lens.map(|n| n as u64).max().unwrap();
        let linear: u64 = linears().map(|param| param.range.len() as u64).sum();
        let columns = |shape: &[usize]| shape.last().copied().unwrap();
        let rows: u64 =
            linears().map(|param| (param.range.len() / columns(&param.tensor.shape)) as u64).sum();
        let others = table.len() as u64 - linear;
        let longest = of(&mut linears().map(|param| param.range.len()));
        let largest = of(&mut table.iter().map(|param| param.range.len()));
        for name in Policy::names() {
            let policy = Policy::by_name(name, 1).unwrap();
            let storage = policy_storage(name);
            let options = Options { max_tokens: 8, max_len: 8, threads: 1, policy: policy.clone() };
            let plan = MemoryPlan::new(&config, &options);
            let entry = |what: &str| plan.entries.iter().find(|(name, _)| *name == what).unwrap().1;
            let decoded = if matches!(policy.master, Master::Int8 { .. }) { 4 * longest } else { 0 };
            let staged = if policy.gradients == Precision::F32 { 0 } else { 4 * largest };
            let held = entry("parameters") - decoded + entry("gradients") - staged;
            for state in ["f32", "bf16", "fp8", "8bit", "8bit:cpu", "8bit:torchao", "4bit"] {
                let format = MomentFormat::parse(state).unwrap();
                // f32 weights have no master copy.
                let moments = AdamW::bytes(&table, &Policy::fp32(), format) as f64;
                let allocated = (held + AdamW::bytes(&table, &policy, format)) as f64;
                let planned = storage.bytes(linear, rows, others, 0.0) + moments;
                assert_eq!(allocated, planned, "{name}, {state}");
            }
        }
    }
}
