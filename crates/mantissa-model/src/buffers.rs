//! The memory of a forward pass, planned once and used for every call.

use crate::config::ModelConfig;
use crate::error::{ForwardError, LoadError};
use crate::flow::{Activations, MIN_ROWS, MlpRows, attention_shape};
use crate::linear::Linear;

/// Tokens that go through the MLP at a time: its inner activations are by far the widest.
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
        let attention = attention_shape(config, None);
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

    /// What a layer's flow writes, and beside it the quantized copy of an input and the panel of a weight.
    pub(crate) fn activations(&mut self) -> (Activations<'_>, &mut [f32], &mut [f32]) {
        let activations = Activations {
            residual: &mut self.residual,
            normed: &mut self.normed,
            q: &mut self.q,
            k: &mut self.k,
            v: &mut self.v,
            attended: &mut self.attended,
            lse: None,
            gate: &mut self.gate,
            up: &mut self.up,
            inner: &mut self.inner,
            mlp: MlpRows { most: MLP_TOKENS, keep: false },
            scores: &mut self.scores,
            cos: &self.cos,
            sin: &self.sin,
        };
        (activations, &mut self.quantized, &mut self.panel)
    }
}

/// # Errors
/// [`LoadError::Context`] where `needed` tokens exceed the model's context.
pub(crate) fn check_context(config: &ModelConfig, needed: usize) -> Result<(), LoadError> {
    let allowed = config.max_position_embeddings;
    if needed > allowed { Err(LoadError::Context { needed, allowed }) } else { Ok(()) }
}

/// `n` zeros, or `None` where there is no memory for them.
pub fn zeros(n: usize) -> Option<Vec<f32>> {
    let mut values = Vec::new();
    values.try_reserve_exact(n).ok()?;
    values.resize(n, 0.0);
    Some(values)
}
