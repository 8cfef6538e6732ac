//! vLLM.

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
        requires: "a convention that vLLM reads: compressed-tensors, gptq, awq, auto-round, bitsandbytes, modelopt, fp8, mxfp4, gguf",
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
        cure: "mantissa convert --format compressed-tensors",
    },
    Rule {
        id: "vllm-bits",
        servers: &[Vllm],
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "integers of 4 or 8 bits, with zero points of 4 (others only with the optional humming kernels)",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[4] },
        source: MARLIN,
        cure: "int4 or int8",
    },
    Rule {
        id: "vllm-gptq-bits",
        servers: &[Vllm],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "symmetric integers of 4 or 8 bits",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: AUTO_GPTQ,
        cure: "symmetric int4 or int8; asymmetric int4: mantissa convert --format awq",
    },
    Rule {
        id: "vllm-groups",
        servers: &[Vllm],
        conventions: &["compressed-tensors", "gptq", "auto-round", "awq"],
        severity: Refused,
        requires: "a scale per output row, or groups of 32, 64 or 128 (ExLlama's kernel takes others, in float16)",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: true },
        source: MARLIN,
        cure: "groups of 32, 64 or 128",
    },
    Rule {
        id: "gptq-zero-points-marlin",
        servers: &[Vllm],
        conventions: &["gptq", "auto-round"],
        severity: Warning,
        requires: "zero points as checkpoint_format says; Marlin does not read those of symmetric weights",
        check: Check::Seen(Observed::ZeroPointVersion),
        source: AUTO_GPTQ,
        cure: "set checkpoint_format to what the data are, in config.json and quantize_config.json",
    },
];
