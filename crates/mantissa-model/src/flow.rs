//! Computation of a decoder layer, written once for evaluation, calibration, generation and training: `x +=
//! attention(norm(x))`, `x += mlp(norm(x))`, on `residual` `[rows, hidden]`. Architectures differ in the places of
//! norms, in the storage of projections and in the structure of the MLP. The config states these; no layer depends on
//! its model's name.
//!
//! A [`LayerFlow`] holds the blocks of a layer and the [`Program`] that they lower to; this module runs it on the
//! processor. [`Operators`] provides everything that depends on how weights are stored (norms and linear layers),
//! [`Activations`] the buffers, so a model has the same bits in every kind of pass.

mod cached;
mod elementwise;
mod execute;
mod layer;
pub(crate) mod weights;

pub use mantissa_kernels::parts;

pub use self::cached::CachedAttention;
pub use self::layer::LayerFlow;
pub use crate::absorbed::AbsorbedHeads;
pub use crate::attention::Attention;
pub use crate::experts::{route_backward, sigmoid};
pub use crate::indexer::IndexerFlow;
pub use crate::operators::{
    Activations, ExpertChoice, ExtraScratch, Group, IndexRows, LatentTokens, MIN_ROWS, MatmulJob, MlpRows,
    Operators, Sequences,
};
pub use crate::program::{Buffer, Op, Program, View};
