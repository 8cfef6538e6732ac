//! Rules of each engine.
//!
//! Sources name project, file and commit, or a documentation page. Engines change: a rule holds for the
//! version its source names.

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod cases;
mod exllamav2;
mod llama_cpp;
mod lmdeploy;
mod mlx;
mod sglang;
mod shared;
mod sources;
mod tables;
mod tensorrt_llm;
mod transformers;
mod vllm;

use super::Rule;

/// Returns every rule: those shared by several engines first, then engine by engine, then those on
/// embedding and head.
pub fn rules() -> impl Iterator<Item = &'static Rule> {
    let all = [
        shared::RULES,
        vllm::RULES,
        sglang::RULES,
        tensorrt_llm::RULES,
        lmdeploy::RULES,
        transformers::RULES,
        llama_cpp::RULES,
        mlx::RULES,
        exllamav2::RULES,
        // Last, because the first rule of one engine is cited as the source of what it loads.
        tables::RULES,
    ];
    all.into_iter().flatten()
}
