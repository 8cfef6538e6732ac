//! Rules of Hugging Face transformers.

use super::super::{Check, Rule, Server, Severity};

use Server::Transformers;
use Severity::Refused;

const TRANSFORMERS: &str =
    "huggingface/transformers src/transformers/quantizers/auto.py (AUTO_QUANTIZER_MAPPING), v5";

pub(super) const RULES: &[Rule] = &[Rule {
    id: "transformers-convention",
    servers: &[Transformers],
    conventions: &[],
    severity: Refused,
    requires: "a quant_method that has a quantizer in transformers (GGUF through gguf_file)",
    check: Check::Convention(&[
        "dense",
        "compressed-tensors",
        "gptq",
        "awq",
        "auto-round",
        "bitsandbytes",
        "deepseek-fp8",
        "fp8",
        "mxfp4",
        "gguf",
        "hqq",
        "quanto",
    ]),
    source: TRANSFORMERS,
    fix: "run mantissa convert --format compressed-tensors",
}];
