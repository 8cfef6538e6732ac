//! mantissa itself, which reads every format that it writes.

use super::super::engine::Engine;
use crate::hardware::Maker;

pub(super) static ENGINE: Engine = Engine {
    name: "mantissa",
    title: "mantissa",
    typed: &[],
    makers: &[Maker::Cpu],
    command: Some("mantissa run {model}{chat} -p {prompt}"),
    split: None,
    keeps: &["gguf", "native", "compressed-tensors"],
    widens: &[],
    shared: &[],
    rules: &[],
    #[cfg(test)]
    cases: &[],
};
