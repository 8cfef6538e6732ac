//! Lengths of the buffers of training, from a config and the sizes that a run is planned for.

use mantissa_kernels::CausalAttention;
use mantissa_model::ModelConfig;
use mantissa_model::config::{MlpForm, NormPlaces, QkvForm};
use mantissa_model::flow::{ExpertChoice, LayerFlow, MIN_ROWS};

use super::options::{HEAD_ROWS, Options};
use crate::form::LinearRules;
use crate::forms::FormSizes;
use crate::norm::NormOp;
use crate::operand::Operand;
use crate::rows::PART;
use crate::store::Precision;

/// True if layer `layer` has experts in place of the MLP.
pub(super) fn has_experts(config: &ModelConfig, layer: usize) -> bool {
    config.experts.as_ref().is_some_and(|experts| experts.layers[layer])
}

pub(super) fn choice_bytes(choices: usize) -> u64 {
    (size_of::<ExpertChoice>() as u64).saturating_mul(choices as u64)
}

/// Buffer lengths in f32 values.
#[derive(Clone, Debug)]
pub(super) struct Sizes {
    tokens: usize,
    rows: usize,
    hidden: usize,
    query: usize,
    key: usize,
    heads: usize,
    intermediate: usize,
    /// Inner width of the widest MLP or expert.
    inner: usize,
    /// Inner width of the widest expert; 0 without experts.
    expert: usize,
    /// Experts of a layer, and experts of a token.
    experts: (usize, usize),
    pub(super) logits: usize,
    scores: usize,
    tables: usize,
    /// True if local layers have tables of their own.
    local: bool,
    /// Partial gradients of the widest norm.
    partial: usize,
    /// True if queries and keys change before RoPE: they are normed or clipped.
    raw: bool,
    /// True if results are normed before they are added.
    results: bool,
    /// True if attention and MLP read the same states.
    parallel: bool,
    /// Width of the joined projection of q, k and v, and of gate and up; 0 if they are separate.
    joined: (usize, usize),
    /// True if the inputs of the output and down projections are normed.
    sub_norms: bool,
    /// True if logits are capped.
    capped: bool,
    /// Dtypes of shared operands: inputs and output gradients, of the layers and of the head.
    layers: (Precision, Precision),
    head: (Precision, Precision),
    /// Quantized operands, if the policy has any.
    pub(super) forms: Option<FormSizes>,
}

/// Shared operand: dtype and number of values.
#[derive(Clone, Copy, Debug)]
pub(super) struct SharedOperand(Precision, usize);

impl SharedOperand {
    pub(super) fn bytes(&self) -> u64 {
        Operand::bytes(self.0, self.1)
    }

    pub(super) fn allocate(self) -> Option<Operand> {
        Operand::new(self.0, self.1)
    }
}

impl Sizes {
    pub(super) fn new(config: &ModelConfig, options: &Options) -> Self {
        let experts = config.experts.as_ref();
        let expert = experts.map_or(0, |all| all.width.max(all.shared.map_or(0, |shared| shared.width)));
        let dense = (0..config.num_hidden_layers).any(|layer| !has_experts(config, layer));
        let quantized = options.policy.quantized_layers();
        let norms = config.norms(0).map(|(_, width)| width);
        let joined_qkv = config.query_width() + 2 * config.key_value_width();
        let of = |joined: bool, width: usize| if joined { width } else { 0 };
        Sizes {
            tokens: options.max_tokens,
            rows: options.max_tokens.max(MIN_ROWS),
            hidden: config.hidden_size,
            query: config.query_width(),
            key: config.key_value_width(),
            heads: config.num_attention_heads,
            intermediate: config.intermediate_size,
            inner: expert.max(of(dense, config.intermediate_size)),
            expert,
            experts: experts.map_or((0, 0), |all| (all.count.into(), all.per_token)),
            logits: options.max_tokens.min(HEAD_ROWS).saturating_mul(config.vocab_size),
            scores: scores(config, options.max_len).saturating_mul(options.threads.max(1)),
            tables: options.max_len.saturating_mul(config.rotary_dim / 2),
            local: config.local_rope.is_some(),
            partial: NormOp::partial_len(config.norm, norms.fold(config.hidden_size, usize::max)),
            raw: config.has_head_norms() || config.clip_qkv.is_some(),
            results: matches!(config.norm_places, NormPlaces::After | NormPlaces::Both),
            parallel: matches!(config.norm_places, NormPlaces::Parallel | NormPlaces::ParallelShared),
            joined: (
                of(config.qkv != QkvForm::Separate, joined_qkv),
                of(config.mlp == MlpForm::GatedJoined, 2 * config.intermediate_size),
            ),
            sub_norms: config.has_sub_norms(),
            capped: config.logit_softcap.is_some(),
            layers: (options.policy.linear.shared_input(), options.policy.linear.shared_gradient()),
            head: (options.policy.head.shared_input(), options.policy.head.shared_gradient()),
            forms: (!quantized.is_empty()).then(|| {
                let rules: Vec<_> = quantized.into_iter().map(LinearRules::new).collect();
                FormSizes::new(config, &rules, options.max_tokens)
            }),
        }
    }

    fn by_row(&self, width: usize) -> usize {
        self.rows.saturating_mul(width)
    }

    fn by_row_if(&self, used: bool, width: usize) -> usize {
        if used { self.by_row(width) } else { 0 }
    }

    /// Choices of the experts of all tokens, and groups to choose from.
    pub(super) fn choices(&self) -> usize {
        let (count, per_token) = self.experts;
        self.by_row(per_token).saturating_add(count)
    }

    /// Lengths of the f32 fields of [`Saved`](super::Saved), in order; of a layer with experts if `mixed`.
    pub(super) fn saved(&self, mixed: bool) -> [usize; 14] {
        let of = |width: usize| self.by_row(width);
        [
            of(self.hidden),
            of(self.query),
            of(self.key),
            of(self.key),
            of(self.query),
            self.tokens.saturating_mul(self.heads),
            self.by_row_if(!self.parallel, self.hidden),
            self.by_row_if(!mixed, self.intermediate),
            self.by_row_if(!mixed, self.intermediate),
            self.by_row_if(self.raw, self.query),
            self.by_row_if(self.raw, self.key),
            self.by_row_if(self.results, self.hidden),
            self.by_row_if(self.results, self.hidden),
            self.by_row_if(mixed, self.experts.0),
        ]
    }

    /// Operands of [`Saved::inputs`](super::Saved::inputs), in order.
    pub(super) fn inputs(&self, mixed: bool) -> [SharedOperand; 4] {
        let widths = [self.hidden, self.query, self.hidden, if mixed { 0 } else { self.intermediate }];
        widths.map(|width| SharedOperand(self.layers.0, self.by_row(width)))
    }

    /// Operands of [`Scratch::rounded`](super::Scratch::rounded), `head_input` and `head_gradient`.
    pub(super) fn rounded(&self) -> [SharedOperand; 5] {
        let of = |width: usize| self.by_row(width);
        let (qkv, gate_up) = self.joined;
        let inner = SharedOperand(self.layers.1, of(self.intermediate.max(self.key)));
        let first = SharedOperand(self.layers.1, of(self.hidden.max(self.query).max(qkv)));
        let second = SharedOperand(self.layers.1, of(self.intermediate.max(self.key).max(gate_up)));
        [
            first,
            second,
            inner,
            SharedOperand(self.head.0, of(self.hidden)),
            SharedOperand(self.head.1, self.logits),
        ]
    }

    /// Width of [`Scratch::wide`](super::Scratch::wide): joined projections, results to be normed, and both sides of a norm in the MLP.
    fn wide(&self) -> usize {
        let results = if self.results { self.hidden } else { 0 };
        let subs = if self.sub_norms { self.query.max(2 * self.intermediate) } else { 0 };
        self.joined.0.max(self.joined.1).max(results).max(subs)
    }

    /// Lengths of the f32 fields of [`Scratch`](super::Scratch), in order.
    pub(super) fn scratch(&self) -> [usize; 25] {
        let of = |width: usize| self.by_row(width);
        let mixed = self.experts.0 > 0;
        let local = if self.local { self.tables } else { 0 };
        [
            of(self.hidden),
            of(self.hidden),
            of(self.inner),
            self.scores,
            of(self.hidden),
            of(self.hidden),
            of(self.query),
            of(self.query),
            of(self.key),
            of(self.key),
            self.tokens.div_ceil(PART).saturating_mul(self.partial),
            self.logits,
            self.tables,
            self.tables,
            local,
            local,
            self.by_row_if(self.results || self.parallel, self.hidden),
            of(self.wide()),
            if self.capped { self.logits } else { 0 },
            of(self.expert),
            of(self.expert),
            of(self.experts.0),
            self.by_row_if(mixed, self.hidden),
            self.by_row_if(mixed, self.hidden),
            self.by_row_if(mixed, self.hidden),
        ]
    }
}

/// Scratch of one thread's attention, forward or backward. Ignores the sliding window, which only reduces it.
fn scores(config: &ModelConfig, max_len: usize) -> usize {
    let shape =
        CausalAttention { window: None, chunk: None, ..*LayerFlow::new(config, 0, 1).attention_shape() };
    shape.scratch_len(max_len, max_len).max(shape.backward_scratch_len(max_len))
}
