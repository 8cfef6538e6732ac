//! Tests of the crate, as one program: they are linked once and run side by side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
mod conversion;
mod e2e;
mod golden_methods;
mod gptq;
mod gptq_calibrate;
mod mixed_methods;
mod never_worse;
mod pipeline;
mod quality;
mod resume;
mod transform;
mod verify_gguf;
