//! The caches of a runtime's sequences, by slot.

use mantissa_kernels::ScoreRules;
use mantissa_model::flow::{Activations, Attention, CachedAttention, LatentTokens, Operators, Sequences};
use mantissa_model::mixer::States;
use mantissa_model::{ForwardError, LoadError};

use crate::cache::{AttendInputs, KvPool, LatentInputs, RowSpan, SequenceCache, StatePool};
use crate::model::{Caches, FastModel};

/// Caches of all slots, over one pool of blocks.
#[derive(Debug)]
pub(crate) struct Kv {
    pool: KvPool,
    caches: Vec<SequenceCache>,
    states: StatePool,
    /// Rows of the sequences of a pass.
    spans: Vec<RowSpan>,
    /// Slots of the sequences of a pass.
    slots: Vec<usize>,
}

impl Kv {
    /// Plans for `slots` sequences of up to `context` tokens that together hold `tokens` tokens.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if there is not enough memory.
    pub(crate) fn new(
        model: &FastModel,
        slots: usize,
        tokens: usize,
        context: usize,
    ) -> Result<Self, LoadError> {
        let pool = KvPool::plan(model.kv().clone(), tokens)?;
        let caches = (0..slots).map(|_| SequenceCache::new(&pool)).collect();
        let states = StatePool::plan(&model.kv().states(context), slots)?;
        Ok(Kv { pool, caches, states, spans: Vec::new(), slots: Vec::new() })
    }

    /// Tokens of a block, the unit in which memory is given and shared.
    pub(crate) fn block(&self) -> usize {
        self.pool.storage().block_tokens()
    }

    /// Numbers of blocks in all, and of free ones.
    pub(crate) fn blocks(&self) -> [usize; 2] {
        [self.pool.blocks(), self.pool.free_blocks()]
    }

    /// Tokens of slot `slot`.
    pub(crate) fn len(&self, slot: usize) -> usize {
        self.caches[slot].len()
    }

    /// Makes room for `tokens` tokens in all in slot `slot`. Returns false, and changes nothing, if there is none.
    pub(crate) fn reserve(&mut self, slot: usize, tokens: usize) -> bool {
        self.caches[slot].reserve(&mut self.pool, tokens)
    }

    /// True if there are states of recurrent mixers.
    pub(crate) fn is_recurrent(&self) -> bool {
        !self.states.is_empty()
    }

    /// Removes all tokens of a slot from `len` on; with states, which cannot be cut back, all tokens.
    pub(crate) fn truncate(&mut self, slot: usize, len: usize) {
        let len = if self.is_recurrent() && len < self.len(slot) { 0 } else { len };
        self.caches[slot].truncate(&mut self.pool, len);
    }

    /// Gives the memory of a slot back.
    pub(crate) fn release(&mut self, slot: usize) {
        self.caches[slot].release(&mut self.pool);
    }

    /// Lets slot `to`, which is empty, begin with the first `len` tokens of slot `from`; with states, only if these are
    /// all of its tokens.
    pub(crate) fn share(&mut self, from: usize, to: usize, len: usize) {
        if self.is_recurrent() {
            if len != self.len(from) {
                return;
            }
            self.states.copy(from, to);
        }
        self.caches[to] = self.caches[from].fork_prefix(&mut self.pool, len);
    }

    /// Returns the caches of a pass over `slots`, whose sequences have `lens` new tokens each.
    pub(crate) fn pass(&mut self, slots: &[usize], lens: &[usize]) -> Pass<'_> {
        self.spans.clear();
        self.slots.clear();
        self.slots.extend_from_slice(slots);
        let mut row = 0;
        for (&sequence, len) in slots.iter().zip(lens) {
            self.spans.push(RowSpan { sequence, rows: row..row + len, start: self.caches[sequence].len() });
            row += len;
        }
        Pass { kv: self, layer: 0, state: 0 }
    }

    /// Counts the tokens that a pass has appended.
    pub(crate) fn commit(&mut self, slots: &[usize], lens: &[usize]) {
        slots.iter().zip(lens).for_each(|(&slot, &len)| self.caches[slot].commit(len));
    }
}

/// Caches of the sequences of a pass.
pub(crate) struct Pass<'a> {
    kv: &'a mut Kv,
    /// Place of the layer among those with attention.
    layer: usize,
    /// Place of the layer among those with a recurrent mixer.
    state: usize,
}

impl Caches for Pass<'_> {
    fn layer(&mut self, layer: usize) -> &mut dyn CachedAttention {
        [self.layer, self.state] = self.kv.pool.storage().places(layer);
        self
    }
}

impl CachedAttention for Pass<'_> {
    fn holds_latents(&self) -> bool {
        true
    }

    fn states(&mut self) -> Result<States<'_>, ForwardError> {
        let Kv { states, slots, .. } = &mut *self.kv;
        states.layer(self.state, slots).ok_or(ForwardError::OtherModel { what: "KV cache" })
    }

    fn attend_latents(
        &mut self,
        attention: &Attention,
        _: &Sequences<'_>,
        rows: &mut LatentTokens<'_>,
        operators: &mut dyn Operators,
    ) -> Result<(), ForwardError> {
        let Some(heads) = operators.absorbed() else {
            return Err(ForwardError::OtherModel { what: "KV cache" });
        };
        let inputs = LatentInputs { layer: self.layer, attention, heads, rows };
        let Kv { pool, caches, spans, .. } = &mut *self.kv;
        pool.attend_latents(inputs, spans, caches)
    }

    fn attend(
        &mut self,
        attention: &Attention,
        seqs: &Sequences<'_>,
        rules: ScoreRules<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let (shape, tokens) = (attention.shape(), seqs.tokens());
        let (q_width, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let (out, padding) = a.attended[..seqs.rows * q_width].split_at_mut(tokens * q_width);
        padding.fill(0.0);
        let inputs = AttendInputs {
            layer: self.layer,
            append: attention.has_own_kv(),
            shape,
            rules,
            half: attention.half(),
            cos: a.cos,
            sin: a.sin,
            q: &mut a.q[..tokens * q_width],
            k: &mut a.k[..tokens * width],
            v: &a.v[..tokens * width],
            out,
            threads: attention.threads(),
        };
        let Kv { pool, caches, spans, .. } = &mut *self.kv;
        pool.attend(inputs, spans, caches)
    }
}
