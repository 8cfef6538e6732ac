//! Memory of training, predicted by purpose.

mod buffers;
mod options;
mod sizes;

use mantissa_model::{LinearInfo, ModelConfig, Role};

use crate::adapter::AdapterSizes;
use crate::arena::Parameters;
use crate::form::Histories;
use crate::forms::FormSizes;
use crate::frozen::{Base, Formats};
use crate::gradients::Gradients;
use crate::lora::Tuning;
use crate::param_table::{ParamInfo, ParamTable};
use crate::policy::Master;
use crate::rows::PART;
pub(crate) use buffers::{Mixture, Saved, Scratch, allocate};
pub(crate) use options::HEAD_ROWS;
pub use options::Options;
use sizes::{SharedOperand, Sizes, choice_bytes, has_experts};

/// Memory of a model in training by purpose. Not included: optimizer state
/// ([`AdamW::bytes`](crate::AdamW::bytes)), and the matmul packing buffers of about one L2 cache per thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Names and bytes.
    pub entries: Vec<(&'static str, u64)>,
}

impl MemoryPlan {
    /// Predicts the memory of a model with `options`.
    pub fn new(config: &ModelConfig, options: &Options) -> Self {
        Self::with_table(config, options, &ParamTable::with_scales(config, &options.policy))
    }

    /// Predicts the memory of a model fine-tuned with adapters, whose frozen weights are packed in `formats`.
    pub fn tuned(config: &ModelConfig, options: &Options, tuning: &Tuning, formats: &Formats) -> Self {
        let mut plan = Self::with_table(config, options, &tuning.table(config));
        let weights = options.policy.weights;
        let packed = |info: &LinearInfo| formats.contains_key(&info.module);
        let sizes = AdapterSizes::new(config, tuning, weights, options.max_tokens, packed);
        plan.entries.insert(0, ("frozen weights", Base::bytes_of(tuning, config, weights, formats)));
        plan.entries.push(("adapters", sizes.bytes()));
        plan
    }

    fn with_table(config: &ModelConfig, options: &Options, table: &ParamTable) -> Self {
        let sizes = Sizes::new(config, options);
        let bytes = |lengths: &[usize]| {
            lengths.iter().fold(0u64, |sum, &n| sum.saturating_add(n as u64)).saturating_mul(4)
        };
        let policy = &options.policy;
        let saved_bytes = |layer| {
            let mixed = has_experts(config, layer);
            let inputs = sizes.inputs(mixed).iter().map(SharedOperand::bytes).sum();
            let choices = choice_bytes(if mixed { sizes.choices() } else { 0 });
            bytes(&sizes.saved(mixed)).saturating_add(inputs).saturating_add(choices)
        };
        let saved = (0..config.num_hidden_layers).map(saved_bytes).fold(0, u64::saturating_add);
        let logits = bytes(&[sizes.logits]);
        let mut entries = vec![
            ("parameters", Parameters::bytes(table, policy)),
            ("gradients", Gradients::bytes(table, policy.gradients)),
            ("saved activations", saved),
            ("logits", logits),
            ("scratch", bytes(&sizes.scratch()).saturating_sub(logits) + 2 * choice_bytes(sizes.choices())),
        ];
        let shared = sizes.rounded().iter().map(SharedOperand::bytes).sum::<u64>();
        let all = [&policy.linear, &policy.head].iter().all(|linear| linear.shares_all(policy.weights));
        let own = match (all, policy.master) {
            (true, Master::Int8 { .. }) => decoded_weights(table, options.threads),
            (true, _) => 0,
            (false, _) => own_operands(config, options),
        };
        if shared + own > 0 {
            entries.push(("rounded operands", shared.saturating_add(own)));
        }
        let quantized = sizes.forms.as_ref().map_or(0, FormSizes::bytes);
        let histories = Histories::bytes(&crate::form::histories(config, policy));
        if quantized > 0 {
            entries.push(("quantized operands", quantized.saturating_add(histories)));
        }
        MemoryPlan { entries }
    }

    /// Total bytes.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().fold(0, |sum, entry| sum.saturating_add(entry.1))
    }
}

/// Bytes of operands that matmuls round by themselves: on the calling thread whole matrices of a weight
/// gradient, on every other thread a part of the tokens and a weight.
fn own_operands(config: &ModelConfig, options: &Options) -> u64 {
    let widest = config.decoder_linears().map(|info| info.rows.max(info.cols)).max().unwrap_or(0);
    let weight = config.decoder_linears().map(|info| info.rows * info.cols).max().unwrap_or(0);
    let head = config.vocab_size.saturating_mul(config.hidden_size);
    let logits = options.max_tokens.min(HEAD_ROWS).saturating_mul(config.vocab_size);
    let tokens = options.max_tokens.saturating_mul(widest).max(logits);
    let caller = tokens.saturating_add(tokens.max(weight).max(head));
    let part = PART.min(options.max_tokens).saturating_mul(widest).max(logits);
    let other = part.saturating_add(weight.max(head));
    let others = other.saturating_mul(options.threads.saturating_sub(1));
    2 * (caller.saturating_add(others) as u64)
}

/// Bytes of an INT8 weight that each thread decodes for a product in f32.
fn decoded_weights(table: &ParamTable, threads: usize) -> u64 {
    let linear = |param: &&ParamInfo| matches!(param.tensor.role, Role::Linear { .. });
    let longest = table.iter().filter(linear).map(|param| param.range.len() as u64).max().unwrap_or(0);
    longest.saturating_mul(4).saturating_mul(threads.max(1) as u64)
}

/// Number of f32 score values per thread.
pub(crate) fn scores_per_thread(scores: &[f32], threads: usize) -> usize {
    scores.len() / threads.max(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use mantissa_model::LoadError;
    use mantissa_model::flow::ExpertChoice;
    use serde_json::json;

    use super::*;
    use crate::arena::Parameters;
    use crate::model::TrainModel;
    use crate::operand::Operand;
    use crate::policy::Policy;

    fn config(changes: &[(&str, u64)]) -> ModelConfig {
        let mut config = json!({
            "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5
        });
        changes.iter().for_each(|(field, value)| config[field] = json!(value));
        ModelConfig::from_json(&config, "config.json").unwrap()
    }

    /// Small model of another architecture.
    fn other(model_type: &str) -> ModelConfig {
        let config = json!({
            "model_type": model_type, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 50, "sliding_window": 8,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]
        });
        ModelConfig::from_json(&config, "config.json").unwrap()
    }

    /// The predicted bytes equal the allocated ones.
    #[test]
    fn the_plan_is_the_sum_of_the_buffers() {
        // Head norms, and heads wider together than the hidden size.
        let normed = json!({
            "model_type": "qwen3", "hidden_size": 12, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-5
        });
        let normed = ModelConfig::from_json(&normed, "config.json").unwrap();
        for (config, max_tokens, max_len, threads, policy) in [
            (config(&[]), 1, 1, 1, Policy::fp32()),
            (config(&[]), 700, 64, 1, Policy::bf16_remainder()),
            (config(&[]), 2000, 40, 3, Policy::fp32()),
            (config(&[]), 2000, 40, 3, Policy::fp16()),
            (normed.clone(), 600, 40, 2, Policy::fp32()),
            (other("gemma2"), 600, 40, 2, Policy::fp32()),
            (other("gemma3_text"), 600, 40, 2, Policy::fp32()),
            (other("phi3"), 600, 40, 2, Policy::fp32()),
            (other("gpt_neox"), 600, 40, 2, Policy::fp32()),
            (other("qwen2_moe"), 600, 40, 2, Policy::fp32()),
        ] {
            let weights = policy.weights.bytes();
            let options = Options { max_tokens, max_len, threads, policy };
            let plan = MemoryPlan::new(&config, &options);
            let params = Parameters::random(&config, 0.1, 1).unwrap();
            let model = TrainModel::new(config.clone(), params, options).unwrap();
            let saved = model.saved.iter().flat_map(|s| {
                let [raw_q, raw_k] = &s.raw;
                let [attention_out, mlp_out] = &s.results;
                let all = [&s.residual, &s.q, &s.k, &s.v, &s.attended, &s.lse, &s.middle, &s.gate, &s.up];
                all.into_iter().chain([raw_q, raw_k, attention_out, mlp_out, &s.router]).map(Vec::capacity)
            });
            let s = &model.scratch;
            let m = &s.mixture;
            let choices = model.saved.iter().map(|s| &s.choices).chain(&m.by_token).map(Vec::capacity);
            let choices = size_of::<ExpertChoice>() as u64 * choices.sum::<usize>() as u64;
            let scratch = [
                &s.residual,
                &s.normed,
                &s.inner,
                &s.scores,
                &s.d_residual,
                &s.d_normed,
                &s.d_attended,
                &s.dq,
                &s.dk,
                &s.dv,
                &s.partials,
                &s.logits,
                &s.d_branch,
                &s.wide,
                &s.capped,
                &m.gate,
                &m.up,
                &m.logits,
                &m.gathered,
                &m.result,
                &m.sum,
            ];
            let scratch = scratch.into_iter().chain(&s.angles).chain(&s.local_angles).map(Vec::capacity);
            let inputs = model.saved.iter().flat_map(|s| &s.inputs);
            let operands = inputs.chain(&s.rounded).chain([&s.head_input, &s.head_gradient]);
            let operands = operands.map(Operand::capacity).sum::<u64>();
            let all = saved.sum::<usize>() + scratch.sum::<usize>() + model.grads.len();
            let weights = weights * model.params.table().len() as u64;
            assert_eq!(plan.bytes(), 4 * all as u64 + operands + weights + choices, "{max_tokens} tokens");
        }
        // Quantized operands, and matrices that plain layers round by themselves.
        for name in ["fp8-delayed", "fp8-blockwise", "nvfp4", "tetrajet2", "int8-switchback"] {
            let policy = Policy::by_name(name, 1).unwrap();
            let options = Options { max_tokens: 600, max_len: 40, threads: 2, policy };
            let entries = MemoryPlan::new(&normed, &options).entries;
            let planned = entries.iter().find(|(entry, _)| *entry == "quantized operands").unwrap().1;
            let params = Parameters::random(&normed, 0.1, 1).unwrap();
            let model = TrainModel::new(normed.clone(), params, options).unwrap();
            let histories: usize = model.histories.arrays().map(|(_, values)| values.len()).sum();
            let found = model.scratch.forms.capacity() + 4 * histories as u64;
            // The histories' own records come on top.
            assert!((found..=found + 40 * 6 * 7 * 2).contains(&planned), "{name}: {planned} for {found}");
        }
    }

    #[test]
    fn excess_memory_is_refused_before_work() {
        let options =
            |max_tokens, max_len| Options { max_tokens, max_len, threads: 1, policy: Policy::fp32() };
        let error = allocate(&config(&[]), &options(8, 65)).unwrap_err();
        assert!(matches!(error, LoadError::Context { needed: 65, allowed: 64 }), "{error}");
        let error = allocate(&config(&[]), &options(usize::MAX / 64, 8)).unwrap_err();
        assert!(matches!(error, LoadError::Memory { .. }), "{error}");
    }
}
