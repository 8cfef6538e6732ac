//! Rules of TensorRT-LLM's PyTorch backend.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Kind::{Fp8, Fp8Tiles, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Server::TensorrtLlm;
use Severity::Refused;

const TRTLLM: &str =
    "TensorRT-LLM documentation, features/quantization; tensorrt_llm/_torch/model_config.py @008e0af8";
const MODELOPT: &str = "NVIDIA Model Optimizer documentation, guides/0_support_matrix";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "trtllm-convention",
        servers: &[TensorrtLlm],
        conventions: &[],
        severity: Refused,
        requires: "a format that TensorRT-LLM reads: modelopt, compressed-tensors, fp8, awq, gptq, mxfp4",
        check: Check::Convention(&[
            "dense",
            "modelopt",
            "compressed-tensors",
            "deepseek-fp8",
            "fp8",
            "awq",
            "gptq",
            "mxfp4",
        ]),
        source: TRTLLM,
        fix: "run mantissa convert --format modelopt",
    },
    Rule {
        id: "trtllm-fp8-gpu",
        servers: &[TensorrtLlm],
        conventions: &[],
        severity: Refused,
        requires: "SM 8.9 for FP8",
        check: Check::Capability { kinds: &[Fp8, Fp8Tiles], least: 89, end: None },
        source: MODELOPT,
        fix: "use an Ada, Hopper or Blackwell GPU, or int4",
    },
    Rule {
        id: "trtllm-fp4-gpu",
        servers: &[TensorrtLlm],
        conventions: &[],
        severity: Refused,
        requires: "SM 10.0 for FP4",
        check: Check::Capability { kinds: &[Nvfp4, Mxfp4, Mxfp8], least: 100, end: None },
        source: MODELOPT,
        fix: "use a Blackwell GPU, or FP8 or int4",
    },
    Rule {
        id: "trtllm-int4-gpu",
        servers: &[TensorrtLlm],
        conventions: &[],
        severity: Refused,
        requires: "SM 8.0 for int4 weights",
        check: Check::Capability { kinds: &[IntWeights], least: 80, end: None },
        source: MODELOPT,
        fix: "use an Ampere or later GPU",
    },
    Rule {
        id: "trtllm-kinds",
        servers: &[TensorrtLlm],
        conventions: &["modelopt", "compressed-tensors"],
        severity: Refused,
        requires: "FP8, NVFP4, MXFP4, MXFP8 or int4 weights",
        check: Check::Kinds(&[Fp8, Fp8Tiles, Nvfp4, Mxfp4, Mxfp8, IntWeights]),
        source: TRTLLM,
        fix: "use FP8 or NVFP4",
    },
    Rule {
        id: "trtllm-ct-activations",
        servers: &[TensorrtLlm],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "quantized activations beside integer and NVFP4 weights in compressed-tensors",
        check: Check::Activations { kinds: &[IntWeights, Nvfp4], quantized: true },
        source: "TensorRT-LLM tensorrt_llm/_torch/model_config.py (quant_config_utils) @008e0af8",
        fix: "run mantissa convert --format modelopt",
    },
];
