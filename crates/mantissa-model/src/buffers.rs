//! The memory of a forward pass, planned once and used for every call.

use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::linear::Linear;
use mantissa_kernels::CausalAttention;

/// Tokens that go through the MLP at a time: its inner activations are by far the widest.
const MLP_TOKENS: usize = 512;

/// Least number of rows of an evaluation pass: shorter ones are padded. Products of up to 64 rows may be
/// summed in another order, and a sequence is to have the same bits alone and in a batch.
pub(crate) const MIN_ROWS: usize = 65;

/// Packed sequences: `lens[i]` tokens each, one after another, all beginning at position `start`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequences<'a> {
    /// Number of tokens of each.
    pub(crate) lens: &'a [usize],
    /// Position of the first token of each.
    pub(crate) start: usize,
    /// Rows of the activations, at least the sum of `lens`; what is beyond is padding.
    pub(crate) rows: usize,
}

impl Sequences<'_> {
    /// Rows that are no padding.
    pub(crate) fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }
}

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
    /// `[rows, query width]`.
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
}

/// What buffers were planned for.
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
}

impl Sizes {
    fn new(config: &ModelConfig, max_tokens: usize, max_len: usize) -> Self {
        let linears = crate::graph::LinearKind::ALL.map(|kind| config.linear(0, kind));
        let panels = linears.iter().map(|l| Linear::scratch_len(l.rows, l.cols));
        let head = Linear::scratch_len(config.vocab_size, config.hidden_size);
        let attention = CausalAttention {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            scale: 1.0,
            window: None,
        };
        Sizes {
            tokens: max_tokens,
            rows: max_tokens.max(MIN_ROWS),
            positions: max_len,
            hidden: config.hidden_size,
            query: config.query_width(),
            key: config.key_value_width(),
            intermediate: config.intermediate_size,
            panel: panels.fold(head, usize::max),
            scores: attention.scratch_len(max_tokens.min(max_len), max_len),
            half: config.head_dim / 2,
        }
    }

    fn mlp_rows(&self) -> usize {
        self.rows.min(MLP_TOKENS)
    }

    /// Lengths of the fields of [`Buffers`], in their order; `None` where one overflows.
    fn lengths(&self) -> Option<[usize; 14]> {
        let by_rows = |width: usize| self.rows.checked_mul(width);
        let inner = self.mlp_rows().checked_mul(self.intermediate)?;
        let tables = self.positions.checked_mul(self.half)?;
        let quantized = by_rows(self.hidden.max(self.query))?.max(inner);
        Some([
            by_rows(self.hidden)?,
            by_rows(self.hidden)?,
            by_rows(self.query)?,
            by_rows(self.key)?,
            by_rows(self.key)?,
            by_rows(self.query)?,
            inner,
            inner,
            inner,
            quantized,
            self.panel,
            self.scores,
            tables,
            tables,
        ])
    }
}

impl Buffers {
    /// Allocates for passes of up to `max_tokens` tokens in sequences (cached ones included) of up to
    /// `max_len`.
    ///
    /// # Errors
    /// [`LoadError::Context`] where `max_len` exceeds the model's context, [`LoadError::Memory`] where there
    /// is not enough memory.
    pub fn plan(config: &ModelConfig, max_tokens: usize, max_len: usize) -> Result<Self, LoadError> {
        check_context(config, max_len)?;
        let memory =
            || LoadError::Memory { what: "buffers", bytes: Self::bytes_needed(config, max_tokens, max_len) };
        let sizes = Sizes::new(config, max_tokens, max_len);
        let lengths = sizes.lengths().ok_or_else(memory)?;
        let mut fields = Vec::with_capacity(lengths.len());
        for len in lengths {
            fields.push(zeros(len).ok_or_else(memory)?);
        }
        let Ok(fields) = <[Vec<f32>; 14]>::try_from(fields) else { return Err(memory()) };
        let [
            residual,
            normed,
            q,
            k,
            v,
            attended,
            gate,
            up,
            inner,
            quantized,
            panel,
            scores,
            mut cos,
            mut sin,
        ] = fields;
        config.rope.fill_tables(config.head_dim, max_len, &mut cos, &mut sin);
        Ok(Buffers {
            sizes,
            residual,
            normed,
            q,
            k,
            v,
            attended,
            gate,
            up,
            inner,
            quantized,
            panel,
            scores,
            cos,
            sin,
        })
    }

    /// Bytes that [`plan`](Self::plan) allocates; `u64::MAX` where the number overflows.
    pub fn bytes_needed(config: &ModelConfig, max_tokens: usize, max_len: usize) -> u64 {
        let lengths = Sizes::new(config, max_tokens, max_len).lengths();
        let total =
            lengths.and_then(|all| all.into_iter().try_fold(0u64, |sum, n| sum.checked_add(n as u64)));
        total.and_then(|n| n.checked_mul(4)).unwrap_or(u64::MAX)
    }

    /// Whether `tokens` tokens in sequences of up to `longest` positions of this model fit.
    pub(crate) fn check(
        &self,
        config: &ModelConfig,
        tokens: usize,
        longest: usize,
    ) -> Result<(), ForwardError> {
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
        match Sizes::new(config, planned.tokens, planned.positions) == planned {
            true => Ok(()),
            false => Err(ForwardError::OtherModel { what: "buffers" }),
        }
    }

    /// Cuts `rows` tokens into nearly equal parts that the MLP's buffers hold. The parts of a large pass are
    /// all large, so that none is multiplied by the path for single rows.
    pub(crate) fn mlp_parts(rows: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let parts = rows.div_ceil(MLP_TOKENS);
        (0..parts).map(move |i| i * rows / parts..(i + 1) * rows / parts)
    }
}

/// # Errors
/// [`LoadError::Context`] where `needed` tokens exceed the model's context.
pub(crate) fn check_context(config: &ModelConfig, needed: usize) -> Result<(), LoadError> {
    let allowed = config.max_position_embeddings;
    if needed > allowed { Err(LoadError::Context { needed, allowed }) } else { Ok(()) }
}

/// `n` zeros, or `None` where there is no memory for them.
pub(crate) fn zeros(n: usize) -> Option<Vec<f32>> {
    let mut values = Vec::new();
    values.try_reserve_exact(n).ok()?;
    values.resize(n, 0.0);
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_rows_and_are_never_tiny() {
        for rows in [1, 2, 3, 511, 512, 513, 1024, 1025, 1537, 100_000] {
            let parts: Vec<_> = Buffers::mlp_parts(rows).collect();
            assert_eq!(parts.iter().map(ExactSizeIterator::len).sum::<usize>(), rows);
            assert!(parts.windows(2).all(|w| w[0].end == w[1].start));
            assert!(parts.iter().all(|p| p.len() <= MLP_TOKENS && p.len() >= rows.min(MLP_TOKENS / 2)));
        }
    }
}
