//! The caches of a runtime's sequences, by slot.

use mantissa_kernels::{ScoreRules, kernels};
use mantissa_model::flow::{Activations, CachedAttention, LayerFlow, Sequences};
use mantissa_model::{ForwardError, LoadError};

use crate::model::{Caches, FastModel};

/// Queries up to which attention runs query by query, so that a token has the same bits alone and as a proposal.
const FEW: usize = 16;

/// Caches of all slots, in f32.
#[derive(Debug)]
pub(crate) struct Kv {
    tables: Vec<Table>,
    blocks: usize,
    width: usize,
}

/// Cache of one slot.
#[derive(Clone, Debug, Default)]
struct Table {
    /// Keys and values of each layer, `[len, width]`.
    layers: Vec<[Vec<f32>; 2]>,
    len: usize,
    blocks: usize,
}

impl Kv {
    /// Tokens of a block, the unit in which memory is given and shared.
    pub(crate) const BLOCK: usize = 64;

    /// Plans for `slots` sequences that together hold `tokens` tokens.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if there is not enough memory.
    pub(crate) fn new(model: &FastModel, slots: usize, tokens: usize) -> Result<Self, LoadError> {
        let config = model.config();
        let layers = vec![[Vec::new(), Vec::new()]; config.num_hidden_layers];
        let table = Table { layers, ..Table::default() };
        let width = config.key_value_width();
        Ok(Kv { tables: vec![table; slots], blocks: tokens.div_ceil(Self::BLOCK), width })
    }

    /// Bytes of a token of `model`.
    pub(crate) fn bytes_per_token(model: &FastModel) -> f64 {
        let config = model.config();
        8.0 * (config.key_value_width() * config.num_hidden_layers) as f64
    }

    /// Tokens of slot `slot`.
    pub(crate) fn len(&self, slot: usize) -> usize {
        self.tables[slot].len
    }

    /// Number of blocks that no slot holds.
    pub(crate) fn free(&self) -> usize {
        self.blocks.saturating_sub(self.tables.iter().map(|table| table.blocks).sum())
    }

    /// Makes room for `tokens` tokens in all in slot `slot`. Returns false, and changes nothing, if there is none.
    pub(crate) fn reserve(&mut self, slot: usize, tokens: usize) -> bool {
        let more = tokens.div_ceil(Self::BLOCK).saturating_sub(self.tables[slot].blocks);
        if more > self.free() {
            return false;
        }
        let width = self.width;
        let table = &mut self.tables[slot];
        table.blocks += more;
        let len = table.blocks * Self::BLOCK * width;
        table.layers.iter_mut().flatten().for_each(|side| side.resize(side.len().max(len), 0.0));
        true
    }

    /// Removes all tokens of a slot from `len` on.
    pub(crate) fn truncate(&mut self, slot: usize, len: usize) {
        self.tables[slot].len = self.tables[slot].len.min(len);
    }

    /// Gives the memory of a slot back.
    pub(crate) fn release(&mut self, slot: usize) {
        self.truncate(slot, 0);
        self.tables[slot].blocks = 0;
    }

    /// Lets slot `to`, which is empty, begin with the first `len` tokens of slot `from`. Returns false if there is no
    /// memory for it.
    pub(crate) fn share(&mut self, from: usize, to: usize, len: usize) -> bool {
        if !self.reserve(to, len) {
            return false;
        }
        let Table { layers, len: held, .. } = self.tables[from].clone();
        let (table, len) = (&mut self.tables[to], len.min(held));
        for (to, from) in table.layers.iter_mut().flatten().zip(layers.iter().flatten()) {
            to[..len * self.width].copy_from_slice(&from[..len * self.width]);
        }
        table.len = len;
        true
    }

    /// Returns the caches of a pass over `slots`, one sequence each.
    pub(crate) fn pass<'a>(&'a mut self, slots: &'a [usize]) -> Pass<'a> {
        Pass { kv: self, slots, layer: 0 }
    }

    /// Counts the tokens that a pass has appended.
    pub(crate) fn commit(&mut self, slots: &[usize], lens: &[usize]) {
        slots.iter().zip(lens).for_each(|(&slot, len)| self.tables[slot].len += len);
    }
}

/// Caches of the sequences of a pass.
pub(crate) struct Pass<'a> {
    kv: &'a mut Kv,
    slots: &'a [usize],
    layer: usize,
}

impl Caches for Pass<'_> {
    fn layer(&mut self, layer: usize) -> &mut dyn CachedAttention {
        self.layer = layer;
        self
    }
}

impl CachedAttention for Pass<'_> {
    fn attend(
        &mut self,
        flow: &LayerFlow,
        seqs: &Sequences<'_>,
        rules: ScoreRules<'_>,
        a: &mut Activations<'_>,
    ) -> Result<(), ForwardError> {
        let shape = flow.attention_shape();
        let (q_width, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let mut row = 0;
        for (i, (&slot, &len)) in self.slots.iter().zip(seqs.lens).enumerate() {
            let (start, rows) = (seqs.start(i), row..row + len);
            let q = &mut a.q[rows.start * q_width..rows.end * q_width];
            let k = &mut a.k[rows.start * width..rows.end * width];
            let (v, out) =
                (&a.v[rows.start * width..rows.end * width], &mut a.attended[rows.start * q_width..]);
            flow.rotate(start, q, shape.heads, a.cos, a.sin);
            flow.rotate(start, k, shape.kv_heads, a.cos, a.sin);
            let [keys, values] = &mut self.kv.tables[slot].layers[self.layer];
            keys[start * width..][..k.len()].copy_from_slice(k);
            values[start * width..][..v.len()].copy_from_slice(v);
            let each = if len <= FEW { 1 } else { len };
            let parts = q.chunks(each * q_width).zip(out.chunks_mut(each * q_width));
            for (part, (q, out)) in parts.enumerate() {
                let end = (start + len.min((part + 1) * each)) * width;
                let (k, v) = (&keys[..end], &values[..end]);
                kernels().attention_causal_with(shape, rules, q, k, v, out, a.scores);
            }
            row += len;
        }
        a.attended[row * q_width..seqs.rows * q_width].fill(0.0);
        Ok(())
    }
}
