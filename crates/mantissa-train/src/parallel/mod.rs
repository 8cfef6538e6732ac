//! Training over ranks: data parallel, with sharded optimizer states, gradients and weights (ZeRO) and gradients in few bits.
//!
//! A step has a fixed number of *leaves* (logical workers), each with its own batches. Gradients of a leaf are summed over
//! its batches in their order, and those of the leaves as a binary tree ([`crate::exchange`]). Ranks host whole leaves and exchange
//! bytes, never sums of a library, so the bits of a run do not depend on the number of ranks; random numbers belong to the
//! batch, and the errors of gradients in few bits to the leaf.
//!
//! ```text
//! rank 0                               rank 1 … R - 1
//! reads the batches, sends them        receives those of its leaves
//! gradients of its leaves              gradients of its leaves
//! part r of the sum of all leaves      part r
//! norm                                 norm
//! updates all (ZeRO 0) or part r (1)   the same
//! gathers the weights (ZeRO 1)         gathers
//! ```
//!
//! Bytes that a rank sends in a step, for N parameters of g bytes each in gradients and w in weights: unquantized gradients `(R - 1)/R · N g`, and again for the sums (ZeRO 0) or `(R - 1)/R · N w` (ZeRO 1); with gradients in b bits,
//! `leaves/R · (R - 1)/R · N b/8` instead of the first. With ZeRO 1 rank 0 also gets a piece of 65536 gradients for every end of a
//! shard within one, for the norm. With ZeRO 2 the sums are those of ZeRO 1, layer by layer where a rank has one batch. With ZeRO 3
//! each of a rank's b batches gathers the weights of every decoder layer twice, those of embedding and head once (a tied head the
//! embedding again): `(R - 1)/R · b · (2 N - embedding - head) w` instead of the weights of ZeRO 1.

mod command;
mod follow;
mod grad_norm;
mod group;
mod inventory;
mod options;
mod state;
mod statistics;

pub use follow::follow;
pub use group::Group;
pub use options::{HeldByRank, ParallelOptions};

pub(crate) use command::{Command, StepOrder};
pub(crate) use inventory::SharedArray;
