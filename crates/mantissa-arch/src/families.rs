//! The list of families, a file each.

mod apertus;
mod arcee;
mod bamba;
mod bitnet;
mod cohere;
mod deepseek;
mod deepseek_v4;
mod ernie;
mod exaone;
mod falcon_h1;
mod gemma;
mod gemma3n;
mod gemma4;
mod glm;
mod gpt2;
mod gpt_neox;
mod gpt_oss;
mod granite;
mod hunyuan;
mod jamba;
mod kimi;
mod lfm2;
mod llama;
mod mamba2;
mod minimax;
mod mistral;
mod nemotron_h;
mod olmo;
mod phi;
mod qwen;
mod qwen_hybrid;
mod seed_oss;
mod smollm;
mod starcoder;

use crate::family::Family;

/// Every family.
pub(crate) static FAMILIES: &[&Family] = &[
    &llama::FAMILY,
    &mistral::FAMILY,
    &granite::FAMILY,
    &ernie::FAMILY,
    &glm::FAMILY,
    &cohere::FAMILY,
    &qwen::FAMILY,
    &smollm::FAMILY,
    &seed_oss::FAMILY,
    &arcee::FAMILY,
    &hunyuan::FAMILY,
    &exaone::FAMILY,
    &starcoder::FAMILY,
    &apertus::FAMILY,
    &bitnet::FAMILY,
    &gemma::FAMILY,
    &gemma3n::FAMILY,
    &gemma4::FAMILY,
    &phi::FAMILY,
    &olmo::FAMILY,
    &gpt2::FAMILY,
    &gpt_neox::FAMILY,
    &minimax::FAMILY,
    &qwen_hybrid::FAMILY,
    &falcon_h1::FAMILY,
    &jamba::FAMILY,
    &bamba::FAMILY,
    &nemotron_h::FAMILY,
    &mamba2::FAMILY,
    &lfm2::FAMILY,
    &deepseek::FAMILY,
    &deepseek_v4::FAMILY,
    &kimi::FAMILY,
    &gpt_oss::FAMILY,
];
