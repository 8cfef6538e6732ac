//! Memory of all sequences, in blocks with reference counts.

use mantissa_model::LoadError;

use super::plan::KvPlan;
use super::scratch::Scratch;

/// Bytes to which the data of a layer is aligned: a cache line.
const LINE: usize = 64;

/// Blocks of all sequences.
#[derive(Debug)]
pub struct KvPool {
    pub(super) plan: KvPlan,
    pub(super) layers: Vec<LayerData>,
    blocks: Blocks,
    pub(super) scratch: Scratch,
}

/// Blocks of one layer, from a cache line on.
#[derive(Debug)]
pub(super) struct LayerData {
    bytes: Vec<u8>,
    start: usize,
}

/// Free list and reference counts.
#[derive(Debug)]
struct Blocks {
    free: Vec<u32>,
    references: Vec<u32>,
    /// True once a block has been given, so that it may hold old bytes.
    used: Vec<bool>,
}

impl LayerData {
    fn new(len: usize) -> Option<Self> {
        let len = len.checked_add(LINE)?;
        // Asks for the memory without an abort; zeroed pages are then taken from the system when they are first used.
        Vec::<u8>::new().try_reserve_exact(len).ok()?;
        let bytes = vec![0u8; len];
        let start = bytes.as_ptr().align_offset(LINE).min(LINE);
        Some(LayerData { bytes, start })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

impl KvPool {
    /// Allocates blocks for `tokens` tokens.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn plan(plan: KvPlan, tokens: usize) -> Result<Self, LoadError> {
        let memory = || LoadError::Memory { what: "KV cache", bytes: plan.bytes_needed(tokens) };
        let count = tokens.div_ceil(plan.block_tokens);
        let len = |bytes: usize| bytes.checked_mul(count);
        let layers = plan.layers.iter().map(|layer| LayerData::new(len(layer.block_bytes)?));
        let layers = layers.collect::<Option<_>>().ok_or_else(memory)?;
        let count32 = u32::try_from(count).map_err(|_| memory())?;
        let blocks = Blocks {
            free: (0..count32).rev().collect(),
            references: vec![0; count],
            used: vec![false; count],
        };
        Ok(KvPool { plan, layers, blocks, scratch: Scratch::default() })
    }

    /// Storage of the layers.
    pub fn storage(&self) -> &KvPlan {
        &self.plan
    }

    /// Number of blocks that no sequence holds.
    pub fn free_blocks(&self) -> usize {
        self.blocks.free.len()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.blocks.references.len()
    }

    /// Number of sequences that hold a block.
    pub(super) fn references(&self, block: u32) -> u32 {
        self.blocks.references[block as usize]
    }

    /// Counts one more holder of a block.
    pub(super) fn hold(&mut self, block: u32) {
        self.blocks.references[block as usize] += 1;
    }

    /// Takes a free block, zeroed.
    pub(super) fn take(&mut self) -> Option<u32> {
        let block = self.blocks.free.pop()?;
        let at = block as usize;
        self.blocks.references[at] = 1;
        if std::mem::replace(&mut self.blocks.used[at], true) {
            for (data, layer) in self.layers.iter_mut().zip(&self.plan.layers) {
                data.bytes_mut()[at * layer.block_bytes..][..layer.block_bytes].fill(0);
            }
        }
        Some(block)
    }

    /// Gives a block back.
    pub(super) fn drop_block(&mut self, block: u32) {
        let references = &mut self.blocks.references[block as usize];
        *references = references.saturating_sub(1);
        if *references == 0 {
            self.blocks.free.push(block);
        }
    }

    /// Takes a free block with the bytes of `from`.
    pub(super) fn copy(&mut self, from: u32) -> Option<u32> {
        let block = self.take()?;
        for (data, layer) in self.layers.iter_mut().zip(&self.plan.layers) {
            let (from, len) = (from as usize * layer.block_bytes, layer.block_bytes);
            data.bytes_mut().copy_within(from..from + len, block as usize * len);
        }
        Some(block)
    }
}
