//! Paged KV cache: blocks, block tables, storage schemes, and attention that reads the packed cache.
//!
//! A [`KvPlan`] states how each layer stores keys and values. A [`KvPool`] holds the blocks of all sequences; a
//! [`SequenceCache`] is one sequence's block table. Sequences share the blocks of a common prefix, and copy a shared
//! block before they write to it. [`KvPool::attend`] rotates, appends and attends for all sequences of a pass.
//!
//! Heads that are stored as elements with one scale ([`TileFormat`](mantissa_kernels::paged::TileFormat)) are read
//! by fused kernels. All other schemes of [`KvPolicy`](mantissa_model::KvPolicy) are stored by their codec and decoded
//! 64 tokens at a time while they are read. Sinks and the window of a policy stay in f32, outside the blocks.
//!
//! Results do not depend on the number of threads, nor on the other sequences of a pass. Up to [`FEW`] new tokens, a
//! token's result does not depend on the others of its pass either, unless the policy has a window or groups along
//! tokens.
//!
//! Latent attention (DeepSeek-V2) caches one vector per token for all heads, the latent and the rotated part of its
//! keys; [`KvPool::attend_latents`] reads it without expanding it to heads.
//!
//! Layers with a recurrent mixer have no blocks: a [`StatePool`] holds their states, one per sequence.

mod attend;
mod latents;
mod pass;
mod plan;
mod pool;
mod prefill;
mod scratch;
mod sequence;
mod side;
mod states;
#[cfg(test)]
mod tests;

pub use self::attend::AttendInputs;
pub use self::latents::LatentInputs;
pub use self::pass::{FEW, RowSpan};
pub use self::plan::KvPlan;
pub use self::pool::KvPool;
pub use self::sequence::SequenceCache;
pub use self::states::StatePool;
