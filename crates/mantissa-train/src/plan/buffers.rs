//! Buffers of training: the saved activations of each layer, and scratch that all layers share.

use mantissa_model::flow::ExpertChoice;
use mantissa_model::{LoadError, ModelConfig, zeros};

use super::MemoryPlan;
use super::options::Options;
use super::sizes::{SharedOperand, Sizes, has_experts};
use crate::forms::{FormSizes, Forms};
use crate::operand::Operand;

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
    pub(crate) choices: Vec<ExpertChoice>,
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
    /// Gradient of a result of attention or MLP, `[rows, hidden]`, if it differs from the gradient of the residual stream.
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
    pub(crate) by_token: [Vec<ExpertChoice>; 2],
}

/// Allocates the activations and scratch that [`MemoryPlan`] predicts.
///
/// # Errors
/// [`LoadError::Memory`], [`LoadError::Context`].
pub(crate) fn allocate(config: &ModelConfig, options: &Options) -> Result<(Vec<Saved>, Scratch), LoadError> {
    let (needed, allowed) = (options.max_len, config.max_position_embeddings);
    if needed > allowed {
        return Err(LoadError::Context { needed, allowed });
    }
    let sizes = Sizes::new(config, options);
    let memory = || LoadError::Memory { what: "training", bytes: MemoryPlan::new(config, options).bytes() };
    let layer = |layer| {
        let mixed = has_experts(config, layer);
        let [
            residual,
            q,
            k,
            v,
            attended,
            lse,
            middle,
            gate,
            up,
            raw_q,
            raw_k,
            attention_out,
            mlp_out,
            router,
        ] = arrays(sizes.saved(mixed))?;
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
            results: [attention_out, mlp_out],
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
fn choices(n: usize) -> Option<Vec<ExpertChoice>> {
    let mut choices = Vec::new();
    choices.try_reserve_exact(n).ok().map(|()| choices)
}

fn arrays<const N: usize>(lengths: [usize; N]) -> Option<[Vec<f32>; N]> {
    let all = lengths.into_iter().map(zeros).collect::<Option<Vec<_>>>()?;
    all.try_into().ok()
}

fn operands<const N: usize>(shares: [SharedOperand; N]) -> Option<[Operand; N]> {
    let all = shares.into_iter().map(SharedOperand::allocate).collect::<Option<Vec<_>>>()?;
    all.try_into().ok()
}
