//! State of a runtime's sequences and cache, for status pages and metrics.

use super::sequence::{Sequence, SequenceId};

/// Phase of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Waits for room.
    Waiting,
    /// Its prompt is being computed.
    Prefill,
    /// It generates.
    Decode,
}

/// State of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceState {
    /// The sequence.
    pub id: SequenceId,
    /// Its phase.
    pub phase: Phase,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Generated tokens.
    pub new_tokens: usize,
    /// Largest number of new tokens.
    pub max_new_tokens: usize,
    /// Tokens in the cache.
    pub held_tokens: usize,
    /// Tokens of the prompt that were not computed because another sequence had them.
    pub cached_tokens: usize,
    /// Priority.
    pub priority: i32,
}

/// Use of the cache, in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Blocks in all.
    pub blocks: usize,
    /// Blocks that no sequence holds.
    pub free: usize,
    /// Finished sequences whose cache is kept for prompts that begin alike.
    pub kept: usize,
}

pub(super) fn state(sequence: &Sequence, held: Option<usize>) -> SequenceState {
    let decodes = |held: usize| sequence.tokens.len() - held.min(sequence.tokens.len()) <= 1;
    SequenceState {
        id: sequence.id,
        phase: match held {
            None => Phase::Waiting,
            Some(held) if sequence.made > 0 && decodes(held) => Phase::Decode,
            Some(_) => Phase::Prefill,
        },
        prompt_tokens: sequence.prompt_len(),
        new_tokens: sequence.made,
        max_new_tokens: sequence.request.max_new_tokens,
        held_tokens: held.unwrap_or(0),
        cached_tokens: sequence.cached.unwrap_or(0),
        priority: sequence.request.priority,
    }
}
