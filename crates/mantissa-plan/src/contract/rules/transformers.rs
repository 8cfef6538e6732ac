//! Rules of Hugging Face transformers.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Server::Transformers;
use Severity::Refused;

const TRANSFORMERS: &str =
    "huggingface/transformers src/transformers/quantizers/auto.py (AUTO_QUANTIZER_MAPPING), v5";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "transformers-ct-zero-points",
        servers: &[Transformers],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "packed integers without zero points: from_pretrained stops at the size of weight_zero_point",
        check: Check::NoZeroPoints(&[Kind::IntWeights]),
        source: "tests/interop/README.md: transformers 5.23 with compressed-tensors 0.20",
        fix: "use a symmetric scheme, or load with CompressedTensorsConfig(dequantize=True)",
    },
    Rule {
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
    },
];
