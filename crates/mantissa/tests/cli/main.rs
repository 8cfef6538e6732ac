//! The binary from the outside: the behavior that scripts rely on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod calibrated;
mod cast;
mod cast_golden;
mod catalogue;
mod chat;
mod containers;
mod convert;
mod demo;
mod diff;
mod doctor;
mod fit;
mod frame;
mod gguf_architectures;
mod gguf_forms;
mod gguf_types;
mod hostile;
mod inputs;
mod inspect;
mod interruptions;
mod kv;
mod lint;
mod main_job;
mod memory;
mod outputs;
mod quality;
mod spqr;
mod strict;
mod support;
mod synth;
mod token_files;
mod train;
mod train_faults;
mod trellis;
mod unopenable;
