//! Memory of training, predicted and allocated.

use mantissa_kernels::CausalAttention;
use mantissa_model::flow::{LayerFlow, MIN_ROWS};
use mantissa_model::{HeadNorms, LinearInfo, LoadError, ModelConfig, zeros};

use crate::adapter::{AdapterSizes, Base, Formats, Tuning};
use crate::arena::ParamTable;
use crate::form::{FormSizes, Forms, Histories, LinearRules};
use crate::gradients::Gradients;
use crate::operand::Operand;
use crate::policy::Policy;
use crate::rows::PART;
use crate::store::Precision;

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
        Self::with_table(config, options, &ParamTable::new(config))
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
        let saved = bytes(&sizes.saved()).saturating_add(sizes.inputs().iter().map(Share::bytes).sum());
        let saved = saved.saturating_mul(config.num_hidden_layers as u64);
        let logits = bytes(&[sizes.logits]);
        let mut entries = vec![
            ("parameters", policy.weights.bytes().saturating_mul(table.len() as u64)),
            ("gradients", Gradients::bytes(table, policy.gradients)),
            ("saved activations", saved),
            ("logits", logits),
            ("scratch", bytes(&sizes.scratch()).saturating_sub(logits)),
        ];
        let shared = sizes.rounded().iter().map(Share::bytes).sum::<u64>();
        let all = [&policy.linear, &policy.head].iter().all(|linear| linear.shares_all(policy.weights));
        let own = if all { 0 } else { own_operands(config, options) };
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
    let widest = config.intermediate_size.max(config.hidden_size).max(config.query_width());
    let weight = config.linears().iter().map(|info| info.rows * info.cols).max().unwrap_or(0);
    let head = config.vocab_size.saturating_mul(config.hidden_size);
    let logits = options.max_tokens.min(HEAD_ROWS).saturating_mul(config.vocab_size);
    let tokens = options.max_tokens.saturating_mul(widest).max(logits);
    let caller = tokens.saturating_add(tokens.max(weight).max(head));
    let part = PART.min(options.max_tokens).saturating_mul(widest).max(logits);
    let other = part.saturating_add(weight.max(head));
    let others = other.saturating_mul(options.threads.saturating_sub(1));
    2 * (caller.saturating_add(others) as u64)
}

/// Buffer lengths in f32 values.
#[derive(Clone, Debug)]
struct Sizes {
    tokens: usize,
    rows: usize,
    hidden: usize,
    query: usize,
    key: usize,
    heads: usize,
    intermediate: usize,
    logits: usize,
    scores: usize,
    tables: usize,
    /// Head width of models with query and key norms.
    normed_head: Option<usize>,
    /// Dtypes of shared operands: inputs and output gradients, of the layers and of the head.
    layers: (Precision, Precision),
    head: (Precision, Precision),
    /// Quantized operands, if the policy has any.
    forms: Option<FormSizes>,
}

/// Shared operand: dtype and number of values.
#[derive(Clone, Copy, Debug)]
struct Share(Precision, usize);

impl Share {
    fn bytes(&self) -> u64 {
        Operand::bytes(self.0, self.1)
    }

    fn allocate(self) -> Option<Operand> {
        Operand::new(self.0, self.1)
    }
}

impl Sizes {
    fn new(config: &ModelConfig, options: &Options) -> Self {
        Sizes {
            tokens: options.max_tokens,
            rows: options.max_tokens.max(MIN_ROWS),
            hidden: config.hidden_size,
            query: config.query_width(),
            key: config.key_value_width(),
            heads: config.num_attention_heads,
            intermediate: config.intermediate_size,
            logits: options.max_tokens.min(HEAD_ROWS).saturating_mul(config.vocab_size),
            scores: scores(config, options.max_len).saturating_mul(options.threads.max(1)),
            tables: options.max_len.saturating_mul(config.head_dim / 2),
            normed_head: (config.head_norms == HeadNorms::Each).then_some(config.head_dim),
            layers: (options.policy.linear.shared_input(), options.policy.linear.shared_gradient()),
            head: (options.policy.head.shared_input(), options.policy.head.shared_gradient()),
            forms: (!options.policy.linear.is_plain()).then(|| {
                FormSizes::new(config, &LinearRules::new(&options.policy.linear), options.max_tokens)
            }),
        }
    }

    /// Lengths of the f32 fields of [`Saved`], in order.
    fn saved(&self) -> [usize; 11] {
        let of = |width: usize| self.rows.saturating_mul(width);
        let [raw_q, raw_k] = [self.query, self.key].map(|width| self.normed_head.map_or(0, |_| of(width)));
        [
            of(self.hidden),
            of(self.query),
            of(self.key),
            of(self.key),
            of(self.query),
            self.tokens.saturating_mul(self.heads),
            of(self.hidden),
            of(self.intermediate),
            of(self.intermediate),
            raw_q,
            raw_k,
        ]
    }

    /// Operands of [`Saved::inputs`], in order.
    fn inputs(&self) -> [Share; 4] {
        let widths = [self.hidden, self.query, self.hidden, self.intermediate];
        widths.map(|width| Share(self.layers.0, self.rows.saturating_mul(width)))
    }

    /// Operands of [`Scratch::rounded`], `head_input` and `head_gradient`.
    fn rounded(&self) -> [Share; 5] {
        let of = |width: usize| self.rows.saturating_mul(width);
        let inner = Share(self.layers.1, of(self.intermediate.max(self.key)));
        let first = Share(self.layers.1, of(self.hidden.max(self.query)));
        [first, inner, inner, Share(self.head.0, of(self.hidden)), Share(self.head.1, self.logits)]
    }

    /// Lengths of the f32 fields of [`Scratch`], in order.
    fn scratch(&self) -> [usize; 14] {
        let of = |width: usize| self.rows.saturating_mul(width);
        [
            of(self.hidden),
            of(self.hidden),
            of(self.intermediate),
            self.scores,
            of(self.hidden),
            of(self.hidden),
            of(self.query),
            of(self.query),
            of(self.key),
            of(self.key),
            self.tokens.div_ceil(PART).saturating_mul(self.hidden.max(self.normed_head.unwrap_or(0))),
            self.logits,
            self.tables,
            self.tables,
        ]
    }
}

/// Scratch of one thread's attention, forward or backward. Ignores the sliding window, which only reduces it.
fn scores(config: &ModelConfig, max_len: usize) -> usize {
    let shape = CausalAttention { window: None, ..*LayerFlow::new(config, 0, 1).attention_shape() };
    shape.scratch_len(max_len, max_len).max(shape.backward_scratch_len(max_len))
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
    /// Residual stream between attention and MLP, `[rows, hidden]`.
    pub(crate) middle: Vec<f32>,
    /// Gate before its activation, `[rows, intermediate]`; overwritten by its gradient.
    pub(crate) gate: Vec<f32>,
    /// Up projection, `[rows, intermediate]`; overwritten by its gradient.
    pub(crate) up: Vec<f32>,
    /// Queries `[rows, query width]` and keys `[rows, key width]` before their head norms, if the model has
    /// them.
    pub(crate) raw: [Vec<f32>; 2],
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
    /// RoPE cosines, `[positions, head_dim / 2]`.
    pub(crate) cos: Vec<f32>,
    /// RoPE sines, `[positions, head_dim / 2]`.
    pub(crate) sin: Vec<f32>,
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
    let layer = || {
        let [residual, q, k, v, attended, lse, middle, gate, up, raw_q, raw_k] = arrays(sizes.saved())?;
        let inputs = operands(sizes.inputs())?;
        Some(Saved { residual, q, k, v, attended, lse, middle, gate, up, raw: [raw_q, raw_k], inputs })
    };
    let saved = (0..config.num_hidden_layers).map(|_| layer()).collect::<Option<Vec<_>>>();
    let saved = saved.ok_or_else(memory)?;
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
    ] = arrays(sizes.scratch()).ok_or_else(memory)?;
    config.rope.fill_tables(config.head_dim, options.max_len, &mut cos, &mut sin);
    let forms = match &sizes.forms {
        Some(sizes) => sizes.allocate().ok_or_else(memory)?,
        None => Forms::default(),
    };
    let [first, second, third, head_input, head_gradient] = operands(sizes.rounded()).ok_or_else(memory)?;
    let scratch = Scratch {
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
        cos,
        sin,
        rounded: [first, second, third],
        head_input,
        head_gradient,
        forms,
    };
    Ok((saved, scratch))
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
        ] {
            let weights = policy.weights.bytes();
            let options = Options { max_tokens, max_len, threads, policy };
            let plan = Plan::new(&config, &options);
            let params = Parameters::random(&config, 0.1, 1).unwrap();
            let model = TrainModel::new(config.clone(), params, options).unwrap();
            let saved = model.saved.iter().flat_map(|s| {
                let [raw_q, raw_k] = &s.raw;
                [&s.residual, &s.q, &s.k, &s.v, &s.attended, &s.lse, &s.middle, &s.gate, &s.up, raw_q, raw_k]
                    .map(Vec::capacity)
            });
            let s = &model.scratch;
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
                &s.cos,
                &s.sin,
            ];
            let inputs = model.saved.iter().flat_map(|s| &s.inputs);
            let operands = inputs.chain(&s.rounded).chain([&s.head_input, &s.head_gradient]);
            let operands = operands.map(Operand::capacity).sum::<u64>();
            let all =
                saved.sum::<usize>() + scratch.map(Vec::capacity).iter().sum::<usize>() + model.grads.len();
            let weights = weights * model.params.table().len() as u64;
            assert_eq!(plan.bytes(), 4 * all as u64 + operands + weights, "{max_tokens} tokens");
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
