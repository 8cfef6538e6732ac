//! Rules of vLLM.

use super::super::subject::Observed;
use super::super::{Check, Rule, Server, Severity};

use Server::Vllm;
use Severity::{Refused, Warning};

const MARLIN: &str =
    "vllm-project/vllm vllm/model_executor/layers/quantization/utils/marlin_utils.py @007d5005";
const AUTO_GPTQ: &str = "vllm-project/vllm vllm/model_executor/layers/quantization/auto_gptq.py @055e47c2";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "vllm-convention",
        servers: &[Vllm],
        conventions: &[],
        severity: Refused,
        requires: "a format that vLLM reads: compressed-tensors, gptq, awq, auto-round, bitsandbytes, modelopt, fp8, mxfp4, gguf",
        check: Check::Convention(&[
            "dense",
            "compressed-tensors",
            "gptq",
            "awq",
            "auto-round",
            "bitsandbytes",
            "modelopt",
            "deepseek-fp8",
            "fp8",
            "mxfp4",
            "gguf",
        ]),
        source: "vllm-project/vllm vllm/model_executor/layers/quantization/__init__.py @05d90956",
        fix: "run mantissa convert --format compressed-tensors",
    },
    Rule {
        id: "vllm-bits",
        servers: &[Vllm],
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "4 or 8-bit integers, zero points only with 4 bits (others need the optional humming kernels)",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[4] },
        source: MARLIN,
        fix: "use int4 or int8",
    },
    Rule {
        id: "vllm-gptq-bits",
        servers: &[Vllm],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "symmetric 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: AUTO_GPTQ,
        fix: "use symmetric int4 or int8; for asymmetric int4 run mantissa convert --format awq",
    },
    Rule {
        id: "vllm-groups",
        servers: &[Vllm],
        conventions: &["compressed-tensors", "gptq", "auto-round", "awq"],
        severity: Refused,
        requires: "one scale per output row, or groups of 32, 64 or 128 (ExLlama's kernel takes other sizes, in float16)",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: true },
        source: MARLIN,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "gptq-zero-points-marlin",
        servers: &[Vllm],
        conventions: &["gptq", "auto-round"],
        severity: Warning,
        requires: "zero points that match checkpoint_format; Marlin ignores those of symmetric weights",
        check: Check::Seen(Observed::ZeroPointVersion),
        source: AUTO_GPTQ,
        fix: "set checkpoint_format to match the data, in config.json and quantize_config.json",
    },
];
