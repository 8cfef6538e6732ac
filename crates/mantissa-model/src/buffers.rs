//! Memory of a forward pass, planned once and reused by every call.

use mantissa_kernels::CausalAttention;

use crate::config::{DenseMlp, ModelConfig};
use crate::error::{ForwardError, LoadError};
use crate::flow::LayerFlow;
use crate::graph::LinearKind;
use crate::linear::Linear;
use crate::memory::{check_context, zeros};
use crate::operators::{Activations, ExpertChoice, ExtraScratch, IndexRows, MIN_ROWS, MlpRows};
use crate::program::Buffer;

/// Tokens per pass through the MLP, whose inner activations are by far the widest.
const MLP_TOKENS: usize = 512;

/// Activations of one forward pass and its scratch. One per thread.
#[derive(Debug)]
pub struct Buffers {
    pub(crate) sizes: Sizes,
    /// The residual stream, `[rows, hidden]`.
    pub(crate) residual: Vec<f32>,
    /// Its normalized copy, `[rows, hidden]`; after the last layer, the result.
    pub(crate) normed: Vec<f32>,
    /// `[rows, query width]`.
    pub(crate) q: Vec<f32>,
    /// `[rows, key width]`.
    pub(crate) k: Vec<f32>,
    /// `[rows, key width]`.
    pub(crate) v: Vec<f32>,
    /// `[rows, widest joined heads or mixer's result]`.
    pub(crate) attended: Vec<f32>,
    /// `[mlp rows, intermediate]`.
    pub(crate) gate: Vec<f32>,
    /// `[mlp rows, intermediate]`.
    pub(crate) up: Vec<f32>,
    /// `[mlp rows, intermediate]`.
    pub(crate) inner: Vec<f32>,
    /// A quantized copy of a linear layer's input.
    pub(crate) quantized: Vec<f32>,
    /// Dequantized rows of a weight.
    pub(crate) panel: Vec<f32>,
    /// Scores of a block of queries.
    pub(crate) scores: Vec<f32>,
    /// `[positions, head_dim / 2]`.
    pub(crate) cos: Vec<f32>,
    /// `[positions, head_dim / 2]`.
    pub(crate) sin: Vec<f32>,
    /// Cosines for layers with their own rotary parameters.
    pub(crate) local_cos: Vec<f32>,
    pub(crate) local_sin: Vec<f32>,
    /// Keys and values of layers with their own rotary parameters, if later layers share them, `[rows, key width]`.
    local_k: Vec<f32>,
    local_v: Vec<f32>,
    /// Scaled embeddings of the pass, `[rows, hidden]`, if layers have inputs of their own.
    pub(crate) first: Vec<f32>,
    /// The layer's own input, `[rows, width]`.
    pub(crate) layer_input: Vec<f32>,
    /// Parallel streams of states, `[streams, rows, hidden]`.
    pub(crate) streams: Vec<f32>,
    /// See [`ExtraScratch`], as for all that follows.
    pub(crate) wide: Vec<f32>,
    pub(crate) logits: Vec<f32>,
    pub(crate) gathered: Vec<f32>,
    pub(crate) result: Vec<f32>,
    pub(crate) sum: Vec<f32>,
    index_queries: Vec<f32>,
    index_keys: Vec<f32>,
    index_weights: Vec<f32>,
    pub(crate) choices: Vec<ExpertChoice>,
    pub(crate) chosen: Vec<u32>,
}

/// Sizes that buffers were planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    tokens: usize,
    rows: usize,
    positions: usize,
    hidden: usize,
    query: usize,
    key: usize,
    intermediate: usize,
    panel: usize,
    scores: usize,
    half: usize,
    /// Half the rotated width in layers with their own tables, if there are any.
    local: Option<usize>,
    /// True if layers share keys and values.
    shares: bool,
    /// Width of a layer's own input.
    layer_input: usize,
    /// Values of a row of parallel streams of states; 0 in models with one.
    streams: usize,
    wide: usize,
    /// Width of the widest joined heads or mixer's result.
    joined: usize,
    /// Widest input of a linear layer outside the MLP.
    input: usize,
    experts: usize,
    per_token: usize,
    /// Widths of an indexer's queries, keys, weights and choices.
    index: [usize; 4],
    threads: usize,
}

impl Sizes {
    /// Computes sizes for scratch of `wide` values a row, which depends on the model alone. Allocates nothing: sizes are checked
    /// before every pass.
    fn new(config: &ModelConfig, max_tokens: usize, max_len: usize, threads: usize, wide: usize) -> Self {
        let sides = config.indexer_sides().into_iter().flatten();
        let shapes = config.linear_shapes().chain(sides.map(|side| (side.rows, side.cols)));
        let panels = shapes.map(|(rows, cols)| Linear::scratch_len(rows, cols));
        let tables = config
            .vocab_size
            .max(config.hidden_size)
            .max(config.experts.as_ref().map_or(0, |experts| experts.count.into()));
        let head = Linear::scratch_len(tables, config.hidden_size);
        let scores = |layer| {
            let shape = CausalAttention { window: None, chunk: None, ..config.attention_shape(layer) };
            shape.scratch_len(max_tokens.min(max_len), max_len)
        };
        let scores = (0..config.num_hidden_layers).map(scores).max().unwrap_or(0);
        let index = index_widths(config, max_len);
        // Keys and values of one head that a query attends to.
        let scores = scores.saturating_add(index[3].saturating_mul(2 * config.head_dim));
        Sizes {
            tokens: max_tokens,
            rows: max_tokens.max(MIN_ROWS),
            positions: max_len,
            hidden: config.hidden_size,
            query: config.query_width(),
            key: config.key_value_width(),
            intermediate: widest_mlp(config),
            panel: panels.fold(head, usize::max),
            scores: scores.saturating_mul(threads),
            half: config.global_rotary_dim() / 2,
            local: config.local_rope.as_ref().map(|_| config.rotary_dim / 2),
            shares: config.by_layer.shared_from < config.num_hidden_layers,
            layer_input: config.own_input_width(),
            streams: config.streams_width(),
            wide,
            joined: joined(config),
            input: config
                .latent
                .map_or(0, |latent| latent.kv_rank.max(latent.q_rank.unwrap_or(0)))
                .max(config.mixer_linear(LinearKind::QB).map_or(0, |linear| linear.cols)),
            experts: config.experts.as_ref().map_or(0, |experts| experts.count.into()),
            per_token: config.experts.as_ref().map_or(0, |experts| experts.per_token),
            index,
            threads,
        }
    }

    fn mlp_rows(&self) -> usize {
        self.rows.min(MLP_TOKENS)
    }

    /// Choices of the tokens of a part, and the groups of experts that the last of them chooses from.
    fn choices(&self) -> usize {
        self.mlp_rows().saturating_mul(self.per_token).saturating_add(self.experts)
    }

    /// Bytes of all fields; `u64::MAX` on overflow.
    fn bytes(&self) -> u64 {
        // A choice is as large as three f32.
        let choices = self.choices().saturating_mul(3);
        let chosen = self.rows.saturating_mul(self.index[3]);
        let lengths = self.lengths().map(|all| all.into_iter().chain([choices, chosen]));
        let total = lengths.and_then(|mut all| all.try_fold(0u64, |sum, n| sum.checked_add(n as u64)));
        total.and_then(|n| n.checked_mul(4)).unwrap_or(u64::MAX)
    }

    /// Lengths of the fields of [`Buffers`], in their order; `None` if one overflows.
    fn lengths(&self) -> Option<[usize; 29]> {
        let by_rows = |width: usize| self.rows.checked_mul(width);
        let inner = self.mlp_rows().checked_mul(self.intermediate)?;
        let tables = self.positions.checked_mul(self.half)?;
        let quantized = by_rows(self.hidden.max(self.joined).max(self.input))?.max(inner);
        let local = self.positions.checked_mul(self.local.unwrap_or(0))?;
        let shared = if self.shares { by_rows(self.key)? } else { 0 };
        let first = if self.layer_input > 0 { by_rows(self.hidden)? } else { 0 };
        let of_part = |width: usize| self.mlp_rows().checked_mul(if self.experts > 0 { width } else { 0 });
        Some([
            by_rows(self.hidden)?,
            by_rows(self.hidden)?,
            by_rows(self.query)?,
            by_rows(self.key)?,
            by_rows(self.key)?,
            by_rows(self.joined)?,
            inner,
            inner,
            inner,
            quantized,
            self.panel,
            self.scores,
            tables,
            tables,
            local,
            local,
            shared,
            shared,
            first,
            by_rows(self.layer_input)?,
            by_rows(self.streams)?,
            by_rows(self.wide)?,
            of_part(self.experts)?,
            of_part(self.hidden)?,
            of_part(self.hidden)?,
            of_part(self.hidden)?,
            by_rows(self.index[0])?,
            by_rows(self.index[1])?,
            by_rows(self.index[2])?,
        ])
    }
}

impl Buffers {
    /// Allocates for passes of up to `max_tokens` tokens in sequences (including cached tokens) of up to `max_len`.
    ///
    /// # Errors
    /// [`LoadError::Context`] if `max_len` exceeds the model's context, [`LoadError::Memory`] if there is not enough
    /// memory.
    pub fn plan(config: &ModelConfig, max_tokens: usize, max_len: usize) -> Result<Self, LoadError> {
        Self::plan_for(config, max_tokens, max_len, 1)
    }

    /// Runs [`plan`](Self::plan) for passes of whole sequences whose attention runs on `threads` threads.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_for(
        config: &ModelConfig,
        max_tokens: usize,
        max_len: usize,
        threads: usize,
    ) -> Result<Self, LoadError> {
        check_context(config, max_len)?;
        let sizes = Sizes::new(config, max_tokens, max_len, threads.max(1), widest_scratch(config));
        let memory = || LoadError::Memory { what: "buffers", bytes: sizes.bytes() };
        let lengths = sizes.lengths().ok_or_else(memory)?;
        let mut buffers = Self::allocate(sizes, lengths).ok_or_else(memory)?;
        config.rope.fill_tables(config.global_rotary_dim(), max_len, &mut buffers.cos, &mut buffers.sin);
        if let Some(rope) = &config.local_rope {
            let Buffers { local_cos, local_sin, .. } = &mut buffers;
            rope.fill_tables(config.rotary_dim, max_len, local_cos, local_sin);
        }
        buffers.choices.try_reserve_exact(sizes.choices()).map_err(|_| memory())?;
        Ok(buffers)
    }

    /// Allocates fields of these lengths, in the order of [`Sizes::lengths`]; `None` if there is not enough memory.
    fn allocate(sizes: Sizes, lengths: [usize; 29]) -> Option<Self> {
        let mut lengths = lengths.into_iter();
        let mut next = || zeros(lengths.next()?);
        Some(Buffers {
            sizes,
            residual: next()?,
            normed: next()?,
            q: next()?,
            k: next()?,
            v: next()?,
            attended: next()?,
            gate: next()?,
            up: next()?,
            inner: next()?,
            quantized: next()?,
            panel: next()?,
            scores: next()?,
            cos: next()?,
            sin: next()?,
            local_cos: next()?,
            local_sin: next()?,
            local_k: next()?,
            local_v: next()?,
            first: next()?,
            layer_input: next()?,
            streams: next()?,
            wide: next()?,
            logits: next()?,
            gathered: next()?,
            result: next()?,
            sum: next()?,
            index_queries: next()?,
            index_keys: next()?,
            index_weights: next()?,
            choices: Vec::new(),
            chosen: zeros(sizes.rows.checked_mul(sizes.index[3])?)?,
        })
    }

    /// Bytes that [`plan`](Self::plan) allocates; `u64::MAX` on overflow.
    pub fn bytes_needed(config: &ModelConfig, max_tokens: usize, max_len: usize) -> u64 {
        Self::bytes_needed_for(config, max_tokens, max_len, 1)
    }

    /// Bytes that [`plan_for`](Self::plan_for) allocates; `u64::MAX` on overflow.
    pub fn bytes_needed_for(config: &ModelConfig, max_tokens: usize, max_len: usize, threads: usize) -> u64 {
        Sizes::new(config, max_tokens, max_len, threads.max(1), widest_scratch(config)).bytes()
    }

    /// Keys (rotated) and values that `layer` has left in the last pass over whole sequences, `[tokens, key width]`
    /// each, as the cache would return them. Those of a layer that later ones share stay until another layer of its
    /// kind projects its own.
    ///
    /// # Panics
    /// If `tokens` exceeds the planned number.
    pub fn keys_and_values(&self, config: &ModelConfig, layer: usize, tokens: usize) -> (&[f32], &[f32]) {
        let heads = config.heads(layer);
        let len = tokens * heads.key_value * heads.dim;
        match self.sizes.shares && config.windows[layer].is_some() {
            true => (&self.local_k[..len], &self.local_v[..len]),
            false => (&self.k[..len], &self.v[..len]),
        }
    }

    /// Keys and values of layers with or without a window, if layers share them.
    pub(crate) fn shared(&mut self, windowed: bool) -> (&mut [f32], &mut [f32]) {
        match self.sizes.shares && windowed {
            true => (&mut self.local_k, &mut self.local_v),
            false => (&mut self.k, &mut self.v),
        }
    }

    /// Keeps the first `len` values of the residual stream, embeddings of a pass, for [`layer_inputs`](Self::layer_inputs).
    ///
    /// # Panics
    /// If the model's layers have no inputs of their own, or more was not planned for.
    pub fn keep_first(&mut self, len: usize) {
        self.first[..len].copy_from_slice(&self.residual[..len]);
    }

    /// Scaled embeddings of a pass, `[rows, hidden]`, and the input of a layer of its own, `[rows, width]`; both empty
    /// in models whose layers have none.
    pub fn layer_inputs(&mut self) -> (&mut [f32], &mut [f32]) {
        (&mut self.first, &mut self.layer_input)
    }

    /// Checks that `tokens` tokens in sequences of up to `longest` positions of this model fit.
    ///
    /// # Errors
    /// [`ForwardError::Plan`], [`ForwardError::OtherModel`].
    pub fn check(&self, config: &ModelConfig, tokens: usize, longest: usize) -> Result<(), ForwardError> {
        let planned = self.sizes;
        if tokens > planned.tokens {
            return Err(ForwardError::Plan {
                what: "tokens of a batch",
                needed: tokens,
                planned: planned.tokens,
            });
        }
        if longest > planned.positions {
            let planned = planned.positions;
            return Err(ForwardError::Plan { what: "tokens of a sequence", needed: longest, planned });
        }
        match Sizes::new(config, planned.tokens, planned.positions, planned.threads, planned.wide) == planned
        {
            true => Ok(()),
            false => Err(ForwardError::OtherModel { what: "buffers" }),
        }
    }

    /// Splits the buffers into the outputs of a layer, the quantized copy of an input, and the panel of a weight.
    /// `local` selects the tables of layers with their own rotary parameters.
    pub fn activations(&mut self, local: bool) -> (Activations<'_>, &mut [f32], &mut [f32]) {
        let (k, v) = match local && self.sizes.shares {
            true => (&mut self.local_k, &mut self.local_v),
            false => (&mut self.k, &mut self.v),
        };
        let activations = Activations {
            residual: &mut self.residual,
            normed: &mut self.normed,
            q: &mut self.q,
            k,
            v,
            attended: &mut self.attended,
            lse: None,
            gate: &mut self.gate,
            up: &mut self.up,
            inner: &mut self.inner,
            mlp: MlpRows { most: MLP_TOKENS, keep: false },
            scores: &mut self.scores,
            cos: if local { &self.local_cos } else { &self.cos },
            sin: if local { &self.local_sin } else { &self.sin },
            layer_input: &self.layer_input,
            streams: &mut self.streams,
            extra: ExtraScratch {
                wide: &mut self.wide,
                logits: &mut self.logits,
                gathered: &mut self.gathered,
                result: &mut self.result,
                sum: &mut self.sum,
                choices: &mut self.choices,
                index: IndexRows {
                    queries: &mut self.index_queries,
                    keys: &mut self.index_keys,
                    weights: &mut self.index_weights,
                    chosen: &mut self.chosen,
                },
            },
        };
        (activations, &mut self.quantized, &mut self.panel)
    }
}

/// Width of the widest joined heads or mixer's result, or of both.
fn joined(config: &ModelConfig) -> usize {
    let widths = (0..config.num_hidden_layers).map(|layer| config.joined_width(layer));
    widths.fold(config.query_width(), usize::max)
}

/// Widths of an indexer's queries, keys, weights and choices in sequences of up to `positions`.
fn index_widths(config: &ModelConfig, positions: usize) -> [usize; 4] {
    let Some(indexer) = &config.indexer else { return [0; 4] };
    match config.chooses(positions) {
        true => [indexer.heads * indexer.dim, indexer.dim, indexer.heads, indexer.chosen],
        // Projected keys pass through the place of the queries.
        false => [indexer.dim, indexer.dim, 0, 0],
    }
}

/// Inner width of the widest MLP.
fn widest_mlp(config: &ModelConfig) -> usize {
    let experts = config.experts.as_ref();
    let shared = experts.and_then(|experts| experts.shared).map_or(0, |shared| shared.width);
    let routed = experts.map_or(0, |experts| experts.width);
    let dense =
        experts.is_none_or(|experts| experts.dense != DenseMlp::None || experts.layers.contains(&false));
    let input = config.by_layer.inputs.map_or(0, |inputs| inputs.width);
    let widest = (0..config.num_hidden_layers).map(|layer| config.ffn(layer)).max().unwrap_or(0);
    shared.max(routed).max(input).max(if dense { widest } else { 0 })
}

/// Width of [`ExtraScratch::wide`], by the operations of the layers.
fn widest_scratch(config: &ModelConfig) -> usize {
    let widths = (0..config.num_hidden_layers)
        .map(|layer| LayerFlow::new(config, layer, 1).program().width(Buffer::Wide));
    widths.max().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_arch::Architecture;

    /// Buffers are as wide as the operations of every layer need.
    #[test]
    fn operations_stay_within_planned_buffers() {
        for row in Architecture::all() {
            let value = crate::config::example(row.name);
            let config = ModelConfig::from_json(&value, "config.json").unwrap();
            let sizes = Sizes::new(&config, 8, 8, 1, widest_scratch(&config));
            for layer in 0..config.num_hidden_layers {
                let flow = LayerFlow::new(&config, layer, 1);
                assert!(flow.program().ops().next().is_some(), "{} {layer}", row.name);
                let planned = [
                    (Buffer::Residual, sizes.hidden),
                    (Buffer::Normed, sizes.hidden),
                    (Buffer::Queries, sizes.query),
                    (Buffer::NormedHeads, sizes.query),
                    (Buffer::Keys, sizes.key),
                    (Buffer::Values, sizes.key),
                    (Buffer::Attended, sizes.joined),
                    (Buffer::Gate, sizes.intermediate),
                    (Buffer::NormedInner, sizes.intermediate),
                    (Buffer::Up, sizes.intermediate),
                    (Buffer::Inner, sizes.intermediate),
                    (Buffer::Wide, sizes.wide),
                    (Buffer::Logits, sizes.experts),
                    (Buffer::Result, sizes.hidden),
                    (Buffer::Sum, sizes.hidden),
                    (Buffer::Streams, sizes.streams),
                ];
                for (buffer, planned) in planned {
                    let needed = flow.program().width(buffer);
                    assert!(needed <= planned, "{} {layer} {buffer:?}: {needed} of {planned}", row.name);
                }
            }
        }
    }
}
