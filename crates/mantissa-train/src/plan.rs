//! Memory of training, predicted and allocated.

mod sizes;

use mantissa_model::flow::Choice;
use mantissa_model::{LinearInfo, LoadError, ModelConfig, Role, zeros};

use crate::adapter::{AdapterSizes, Base, Formats, Tuning};
use crate::arena::{ParamInfo, ParamTable, Parameters};
use crate::form::{FormSizes, Forms, Histories};
use crate::gradients::Gradients;
use crate::operand::Operand;
use crate::policy::{Master, Policy};
use crate::rows::PART;
use sizes::{Share, Sizes, choice_bytes, has_experts};

/// Tokens whose logits are held at a time.
pub(crate) const HEAD_ROWS: usize = 512;

/// Sizes and precision that a model in training is planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Maximum tokens per batch.
    pub max_tokens: usize,
    /// Maximum tokens per sequence.
    pub max_len: usize,
    /// Number of threads; results do not depend on it.
    pub threads: usize,
    /// Precision policy.
    pub policy: Policy,
}

/// Memory of a model in training by purpose. Not included: optimizer state
/// ([`AdamW::bytes`](crate::AdamW::bytes)), and the matmul packing buffers of about one L2 cache per thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Names and bytes.
    pub entries: Vec<(&'static str, u64)>,
}

impl Plan {
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
        let of_layer = |layer| {
            let mixed = has_experts(config, layer);
            let inputs = sizes.inputs(mixed).iter().map(Share::bytes).sum();
            let choices = choice_bytes(if mixed { sizes.choices() } else { 0 });
            bytes(&sizes.saved(mixed)).saturating_add(inputs).saturating_add(choices)
        };
        let saved = (0..config.num_hidden_layers).map(of_layer).fold(0, u64::saturating_add);
        let logits = bytes(&[sizes.logits]);
        let mut entries = vec![
            ("parameters", Parameters::bytes(table, policy)),
            ("gradients", Gradients::bytes(table, policy.gradients)),
            ("saved activations", saved),
            ("logits", logits),
            ("scratch", bytes(&sizes.scratch()).saturating_sub(logits) + 2 * choice_bytes(sizes.choices())),
        ];
        let shared = sizes.rounded().iter().map(Share::bytes).sum::<u64>();
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
        let histories = Histories::bytes(&crate::model::histories(config, policy));
        if quantized > 0 {
            entries.push(("quantized operands", quantized.saturating_add(histories)));
        }
        Plan { entries }
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

/// Activations of a layer saved for the backward.
#[derive(Debug)]
pub(crate) struct Saved {
    /// Input of the layer, `[rows, hidden]`.
    pub(crate) residual: Vec<f32>,
    /// Queries after RoPE, `[rows, query width]`.
    pub(crate) q: Vec<f32>,
    /// Keys after RoPE, `[rows, key width]`.
    pub(crate) k: Vec<f32>,
    /// Values, `[rows, key width]`.
    pub(crate) v: Vec<f32>,
    /// Attention output, `[rows, query width]`.
    pub(crate) attended: Vec<f32>,
    /// Log-sum-exp of the attention scores, `[tokens, heads]`.
    pub(crate) lse: Vec<f32>,
    /// Residual stream between attention and MLP, `[rows, hidden]`; empty if both read the same states.
    pub(crate) middle: Vec<f32>,
    /// Gate before its activation, `[rows, intermediate]`; overwritten by its gradient. Empty in layers with experts,
    /// which are recomputed.
    pub(crate) gate: Vec<f32>,
    /// Up projection, `[rows, intermediate]`; overwritten by its gradient.
    pub(crate) up: Vec<f32>,
    /// Queries `[rows, query width]` and keys `[rows, key width]` before they are normed or clipped, if they are.
    pub(crate) raw: [Vec<f32>; 2],
    /// Results of attention and MLP before their norms, `[rows, hidden]`, if they have norms.
    pub(crate) results: [Vec<f32>; 2],
    /// Logits of the router, `[rows, experts]`.
    pub(crate) router: Vec<f32>,
    /// Routing of the tokens to experts, by expert.
    pub(crate) choices: Vec<Choice>,
    /// Inputs of the linear layers in matmul dtype, in the order of [`mantissa_model::LinearInput::PLAIN`]:
    /// normed states `[rows, hidden]`, attention output `[rows, query width]`, normed states, and the MLP
    /// activation `[rows, intermediate]`.
    pub(crate) inputs: [Operand; 4],
}

/// Buffers reused by every layer.
#[derive(Debug)]
pub(crate) struct Scratch {
    /// Residual stream, `[rows, hidden]`.
    pub(crate) residual: Vec<f32>,
    /// Normed residual stream, `[rows, hidden]`.
    pub(crate) normed: Vec<f32>,
    /// MLP activation or its gradient, `[rows, intermediate]`.
    pub(crate) inner: Vec<f32>,
    /// Attention scores of each thread.
    pub(crate) scores: Vec<f32>,
    /// Gradient of the residual stream, `[rows, hidden]`.
    pub(crate) d_residual: Vec<f32>,
    /// Gradient of the normed states, `[rows, hidden]`.
    pub(crate) d_normed: Vec<f32>,
    /// Gradient of the attention output, `[rows, query width]`.
    pub(crate) d_attended: Vec<f32>,
    /// Gradient of the queries, `[rows, query width]`.
    pub(crate) dq: Vec<f32>,
    /// Gradient of the keys, `[rows, key width]`.
    pub(crate) dk: Vec<f32>,
    /// Gradient of the values, `[rows, key width]`.
    pub(crate) dv: Vec<f32>,
    /// Partial gradients of a norm weight, one row per part of the tokens.
    pub(crate) partials: Vec<f32>,
    /// Logits of some tokens.
    pub(crate) logits: Vec<f32>,
    /// RoPE cosines and sines, `[positions, rotary_dim / 2]` each.
    pub(crate) angles: [Vec<f32>; 2],
    /// Those of layers with their own rotary parameters.
    pub(crate) local_angles: [Vec<f32>; 2],
    /// Gradient of a result of attention or MLP, `[rows, hidden]`, if it differs from that of the residual stream.
    pub(crate) d_branch: Vec<f32>,
    /// Joined projections or their gradients, results to be normed: `[rows, widest of them]`.
    pub(crate) wide: Vec<f32>,
    /// Capped logits of some tokens.
    pub(crate) capped: Vec<f32>,
    /// Buffers of the experts; empty without experts.
    pub(crate) mixture: Mixture,
    /// Output gradients in matmul dtype, used in turn for down, gate and up, for the output projection, and
    /// for q, k and v.
    pub(crate) rounded: [Operand; 3],
    /// Input of the head, `[rows, hidden]`.
    pub(crate) head_input: Operand,
    /// Gradient of some tokens' logits.
    pub(crate) head_gradient: Operand,
    /// Quantized operands; empty if the policy has none.
    pub(crate) forms: Forms,
}

/// Buffers of the experts of a layer.
#[derive(Debug, Default)]
pub(crate) struct Mixture {
    /// Gate and up of some experts, `[rows, widest expert]`.
    pub(crate) gate: Vec<f32>,
    /// See `gate`.
    pub(crate) up: Vec<f32>,
    /// Logits or scores of the router, or their gradients, `[rows, experts]`.
    pub(crate) logits: Vec<f32>,
    /// Inputs of some experts, `[rows, hidden]`.
    pub(crate) gathered: Vec<f32>,
    /// Outputs of some experts, `[rows, hidden]`.
    pub(crate) result: Vec<f32>,
    /// Sum of all experts, or the gradients of an expert's outputs, `[rows, hidden]`.
    pub(crate) sum: Vec<f32>,
    /// Choices by token, and the gradients of their weights.
    pub(crate) by_token: [Vec<Choice>; 2],
}

/// Allocates the activations and scratch that [`Plan`] predicts.
///
/// # Errors
/// [`LoadError::Memory`], [`LoadError::Context`].
pub(crate) fn allocate(config: &ModelConfig, options: &Options) -> Result<(Vec<Saved>, Scratch), LoadError> {
    let (needed, allowed) = (options.max_len, config.max_position_embeddings);
    if needed > allowed {
        return Err(LoadError::Context { needed, allowed });
    }
    let sizes = Sizes::new(config, options);
    let memory = || LoadError::Memory { what: "training", bytes: Plan::new(config, options).bytes() };
    let layer = |layer| {
        let mixed = has_experts(config, layer);
        let [residual, q, k, v, attended, lse, middle, gate, up, raw_q, raw_k, of_attention, of_mlp, router] =
            arrays(sizes.saved(mixed))?;
        Some(Saved {
            residual,
            q,
            k,
            v,
            attended,
            lse,
            middle,
            gate,
            up,
            raw: [raw_q, raw_k],
            results: [of_attention, of_mlp],
            router,
            choices: choices(if mixed { sizes.choices() } else { 0 })?,
            inputs: operands(sizes.inputs(mixed))?,
        })
    };
    let saved = (0..config.num_hidden_layers).map(layer).collect::<Option<Vec<_>>>();
    let saved = saved.ok_or_else(memory)?;
    Ok((saved, scratch(config, options, &sizes).ok_or_else(memory)?))
}

/// Allocates the scratch; `None` if memory is missing.
fn scratch(config: &ModelConfig, options: &Options, sizes: &Sizes) -> Option<Scratch> {
    let [
        residual,
        normed,
        inner,
        scores,
        d_residual,
        d_normed,
        d_attended,
        dq,
        dk,
        dv,
        partials,
        logits,
        mut cos,
        mut sin,
        mut local_cos,
        mut local_sin,
        d_branch,
        wide,
        capped,
        expert_gate,
        expert_up,
        router,
        gathered,
        result,
        sum,
    ] = arrays(sizes.scratch())?;
    config.rope.fill_tables(config.rotary_dim, options.max_len, &mut cos, &mut sin);
    if let Some(rope) = &config.local_rope {
        rope.fill_tables(config.rotary_dim, options.max_len, &mut local_cos, &mut local_sin);
    }
    let forms = sizes.forms.as_ref().map_or_else(|| Some(Forms::default()), FormSizes::allocate)?;
    let [first, second, third, head_input, head_gradient] = operands(sizes.rounded())?;
    Some(Scratch {
        residual,
        normed,
        inner,
        scores,
        d_residual,
        d_normed,
        d_attended,
        dq,
        dk,
        dv,
        partials,
        logits,
        angles: [cos, sin],
        local_angles: [local_cos, local_sin],
        d_branch,
        wide,
        capped,
        mixture: Mixture {
            gate: expert_gate,
            up: expert_up,
            logits: router,
            gathered,
            result,
            sum,
            by_token: [choices(sizes.choices())?, choices(sizes.choices())?],
        },
        rounded: [first, second, third],
        head_input,
        head_gradient,
        forms,
    })
}

/// Allocates an empty list of up to `n` choices; `None` if memory is missing.
fn choices(n: usize) -> Option<Vec<Choice>> {
    let mut choices = Vec::new();
    choices.try_reserve_exact(n).ok().map(|()| choices)
}

fn arrays<const N: usize>(lengths: [usize; N]) -> Option<[Vec<f32>; N]> {
    let all = lengths.into_iter().map(zeros).collect::<Option<Vec<_>>>()?;
    all.try_into().ok()
}

fn operands<const N: usize>(shares: [Share; N]) -> Option<[Operand; N]> {
    let all = shares.into_iter().map(Share::allocate).collect::<Option<Vec<_>>>()?;
    all.try_into().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::arena::Parameters;
    use crate::model::TrainModel;
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
            let plan = Plan::new(&config, &options);
            let params = Parameters::random(&config, 0.1, 1).unwrap();
            let model = TrainModel::new(config.clone(), params, options).unwrap();
            let saved = model.saved.iter().flat_map(|s| {
                let [raw_q, raw_k] = &s.raw;
                let [of_attention, of_mlp] = &s.results;
                let all = [&s.residual, &s.q, &s.k, &s.v, &s.attended, &s.lse, &s.middle, &s.gate, &s.up];
                all.into_iter().chain([raw_q, raw_k, of_attention, of_mlp, &s.router]).map(Vec::capacity)
            });
            let s = &model.scratch;
            let m = &s.mixture;
            let choices = model.saved.iter().map(|s| &s.choices).chain(&m.by_token).map(Vec::capacity);
            let choices = size_of::<Choice>() as u64 * choices.sum::<usize>() as u64;
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
            let entries = Plan::new(&normed, &options).entries;
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
