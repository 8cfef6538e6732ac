//! One sequence's block table, and its tokens that stay in f32.

use super::plan::LayerPlan;
use super::pool::KvPool;
use super::side::Held;

/// The cache of one sequence. Blocks belong to a [`KvPool`]: [`release`](Self::release) gives them back.
#[derive(Debug, Default)]
pub struct SequenceCache {
    pub(super) blocks: Vec<u32>,
    len: usize,
    /// Keys and values of each layer.
    pub(super) layers: Vec<[Held; 2]>,
}

impl SequenceCache {
    /// Creates an empty cache for sequences of `pool`.
    pub fn new(pool: &KvPool) -> Self {
        let layers = pool.plan.layers.iter().map(|_| Default::default()).collect();
        SequenceCache { blocks: Vec::new(), len: 0, layers }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Blocks held, shared ones included.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Makes room for `tokens` tokens in all, and for writing after those held: blocks that are shared and will be
    /// written to are copied. Returns false, and changes nothing, if there are not enough free blocks.
    pub fn reserve(&mut self, pool: &mut KvPool, tokens: usize) -> bool {
        let needed = tokens.div_ceil(pool.plan.block_tokens);
        let more = needed.saturating_sub(self.blocks.len());
        let stored = self.layers.iter().flatten().map(|held| held.stored).min().unwrap_or(0);
        let written = (stored / pool.plan.block_tokens).min(self.blocks.len());
        let written = if tokens > self.len { written } else { self.blocks.len() };
        let shared = self.blocks[written..].iter().filter(|&&block| pool.references(block) > 1).count();
        if more + shared > pool.free_blocks() {
            return false;
        }
        for block in &mut self.blocks[written..] {
            if pool.references(*block) > 1 {
                let Some(own) = pool.copy(*block) else { return false };
                pool.drop_block(std::mem::replace(block, own));
            }
        }
        self.blocks.extend((0..more).map_while(|_| pool.take()));
        true
    }

    /// Counts the `tokens` tokens that every layer has appended since the last call.
    pub fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }

    /// Removes all tokens from `len` on, and gives back blocks beyond them. Tokens that have left a window do not
    /// return to it.
    pub fn truncate(&mut self, pool: &mut KvPool, len: usize) {
        self.len = self.len.min(len);
        let len = self.len;
        for (i, held) in self.layers.iter_mut().enumerate() {
            cut(
                &pool.plan.layers[i],
                pool.layers[i].bytes(),
                &self.blocks,
                held,
                len,
                pool.plan.block_tokens,
            );
        }
        let keep = self.len.div_ceil(pool.plan.block_tokens).min(self.blocks.len());
        self.blocks.drain(keep..).for_each(|block| pool.drop_block(block));
    }

    /// Removes all tokens and gives all blocks back.
    pub fn release(&mut self, pool: &mut KvPool) {
        self.truncate(pool, 0);
    }

    /// Creates a sequence with the same tokens, which shares all blocks.
    pub fn fork(&self, pool: &mut KvPool) -> Self {
        self.fork_prefix(pool, self.len)
    }

    /// Creates a sequence with the first `len` tokens, which shares their blocks.
    pub fn fork_prefix(&self, pool: &mut KvPool, len: usize) -> Self {
        self.blocks.iter().for_each(|&block| pool.hold(block));
        let mut fork =
            SequenceCache { blocks: self.blocks.clone(), len: self.len, layers: self.layers.clone() };
        fork.truncate(pool, len);
        fork
    }
}

/// Removes the tokens of one layer from `len` on.
pub(super) fn cut(
    plan: &LayerPlan,
    data: &[u8],
    blocks: &[u32],
    held: &mut [Held; 2],
    len: usize,
    block_tokens: usize,
) {
    for (side, held) in [&plan.keys, &plan.values].into_iter().zip(held) {
        held.truncate(plan, side, data, blocks, len, block_tokens);
    }
}
