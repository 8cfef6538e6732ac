//! Tests of the crate, as one program: they are linked once and run side by side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod adapters;
mod architectures;
mod autopsy;
mod common;
mod data;
mod golden_optimizer;
mod gradients;
mod kv;
mod learned_scales;
mod logits;
mod planner;
mod policies;
mod pytorch;
mod ranks;
mod teacher;
mod trainer;
