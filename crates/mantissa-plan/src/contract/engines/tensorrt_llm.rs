//! TensorRT-LLM's PyTorch backend: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::FormatClass;
use crate::hardware::Maker;

use FormatClass::{Fp8, Fp8Tiles, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Inputs::{Fp8Group, Fp8Static, Fp8Token, Mx, None};
use Scales::{Group, Row, Tensor};
use Severity::Refused;

pub(super) static ENGINE: Engine = Engine {
    name: "tensorrt-llm",
    title: "TensorRT-LLM",
    typed: &["trtllm", "trt-llm"],
    makers: &[Maker::Nvidia],
    command: Some("trtllm-serve {model}"),
    split: Some("--tp_size"),
    keeps: &["modelopt", "compressed-tensors"],
    widens: &[],
    shared: &[
        "tp-heads",
        "tp-width",
        "tp-group",
        "fp8-tiles",
        "fused-alike",
        "nvfp4-global",
        "fused-input-scale",
        "router-dense",
        "ignored-names",
        "unlisted-layers",
        "head",
        "tied-head",
        "bos-rule",
        "tokenizer-ends",
        "token-rows",
        "trtllm-head",
        "trtllm-int-head",
        "trtllm-awq-head",
        "trtllm-fp8-head",
        "trtllm-embedding",
        "trtllm-fp8-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const TRTLLM: &str =
    "NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/llm_utils.py (_update_from_hf_quant_config) @0066b2a5";
const TRTLLM_CT: &str = "NVIDIA/TensorRT-LLM tensorrt_llm/models/quant_config_utils.py (_quant_config_from_config_group) @21156a7a";
const TRTLLM_LINEAR: &str =
    "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/linear.py (get_quant_method) @3105370b";
const TRTLLM_AWQ: &str =
    "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/linear.py (W4A16_AWQ_LinearMethod) @3105370b";
const TRTLLM_FP8: &str =
    "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/model_config.py (load_hf_quant_config) @008e0af8";
const MODELOPT: &str = "NVIDIA Model Optimizer documentation, guides/0_support_matrix";

const RULES: &[Rule] = &[
    Rule {
        id: "trtllm-convention",
        conventions: &[],
        severity: Refused,
        requires: "a format that TensorRT-LLM reads: modelopt, compressed-tensors, fp8, mxfp4 (other values of quant_method end with NotImplementedError)",
        check: Check::Convention(&[
            "dense",
            "modelopt",
            "compressed-tensors",
            "deepseek-fp8",
            "fp8",
            "mxfp4",
        ]),
        source: TRTLLM,
        fix: "use modelopt",
    },
    Rule {
        id: "trtllm-fp8-gpu",
        conventions: &[],
        severity: Refused,
        requires: "SM 8.9 for FP8",
        check: Check::Capability { kinds: &[Fp8, Fp8Tiles], least: 89, end: Option::None },
        source: MODELOPT,
        fix: "use an Ada, Hopper or Blackwell GPU, or int4",
    },
    Rule {
        id: "trtllm-fp4-gpu",
        conventions: &[],
        severity: Refused,
        requires: "SM 10.0 for FP4",
        check: Check::Capability { kinds: &[Nvfp4, Mxfp4, Mxfp8], least: 100, end: Option::None },
        source: MODELOPT,
        fix: "use a Blackwell GPU, or FP8 or int4",
    },
    Rule {
        id: "trtllm-int4-gpu",
        conventions: &[],
        severity: Refused,
        requires: "SM 8.0 for int4 weights",
        check: Check::Capability { kinds: &[IntWeights], least: 80, end: Option::None },
        source: MODELOPT,
        fix: "use an Ampere or later GPU",
    },
    Rule {
        id: "trtllm-ct-schemes",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "FP8 per row with FP8 inputs per token, FP8 tiles with inputs in groups of 128, NVFP4 with NVFP4 inputs, or MXFP4",
        check: Check::Schemes(&[
            Accepted::new(Fp8, &[Row], &[Fp8Token]),
            Accepted::new(Fp8Tiles, &[], &[Fp8Group]),
            Accepted::new(Nvfp4, &[], &[Inputs::Nvfp4]),
            Accepted::new(Mxfp4, &[], &[]),
        ]),
        source: TRTLLM_CT,
        fix: "use FP8 with FP8 inputs",
    },
    Rule {
        id: "trtllm-modelopt-schemes",
        conventions: &["modelopt"],
        severity: Refused,
        requires: "FP8 per tensor or row with quantized inputs, int4 in groups, NVFP4 with NVFP4 inputs or MXFP8",
        check: Check::Schemes(&[
            Accepted::new(Fp8, &[Tensor], &[Fp8Static]),
            Accepted::new(Fp8, &[Row], &[Fp8Token]),
            Accepted::new(Fp8Tiles, &[], &[Fp8Group]),
            Accepted::new(IntWeights, &[Group], &[None]),
            Accepted::new(Nvfp4, &[], &[Inputs::Nvfp4]),
            Accepted::new(Mxfp8, &[], &[Mx]),
        ]),
        source: TRTLLM_LINEAR,
        fix: "use FP8 with FP8 inputs",
    },
    Rule {
        id: "trtllm-modelopt-bits",
        conventions: &["modelopt"],
        severity: Refused,
        requires: "4-bit integers without zero points",
        check: Check::Bits { symmetric: &[4], asymmetric: &[] },
        source: TRTLLM_LINEAR,
        fix: "use symmetric int4",
    },
    Rule {
        id: "trtllm-fp8-schemes",
        conventions: &["deepseek-fp8", "fp8"],
        severity: Refused,
        requires: "FP8 tiles of 128 × 128 (weight_block_size), or FP8 with stored input scales",
        check: Check::Schemes(&[
            Accepted::new(Fp8Tiles, &[], &[Fp8Group]),
            Accepted::new(Fp8, &[Tensor], &[Fp8Static]),
        ]),
        source: TRTLLM_FP8,
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "trtllm-dense-mxfp4",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "MXFP4 in experts only: dense layers have no method for W4A16_MXFP4",
        check: Check::ExpertsOnly(&[Mxfp4]),
        source: TRTLLM_LINEAR,
        fix: "use NVFP4 with NVFP4 inputs",
    },
    Rule {
        id: "trtllm-awq-multiplier",
        conventions: &["modelopt"],
        severity: Refused,
        requires: "int4 weights of o_proj and down_proj with pre_quant_scale, as ModelOpt's AWQ writes them",
        check: Check::Multiplied(&[IntWeights]),
        source: TRTLLM_AWQ,
        fix: "use FP8 with FP8 inputs",
    },
];

/// Configurations that it accepts and refuses, read from its source: TensorRT-LLM at the commits that the rules name, `tensorrt_llm`.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const CT: &str = "models/quant_config_utils.py: _quant_config_from_config_group";
    const LINEAR: &str = "_torch/modules/linear.py: get_quant_method";
    const AWQ: &str = "_torch/modules/linear.py: W4A16_AWQ_LinearMethod.load_weights_vanilla";
    const METHODS: &str = "llmapi/llm_utils.py: _update_from_hf_quant_config, NotImplementedError";
    const FP8: &str = "_torch/model_config.py: load_hf_quant_config, FP8_BLOCK_SCALES";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", METHODS),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-t128x128", "fp8-e4m3-g128", CT),
        Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
        Case::takes("compressed-tensors", "mxfp4", "", CT).with("experts"),
        Case::takes("modelopt", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", LINEAR),
        Case::takes("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", LINEAR),
        Case::takes("modelopt", "nvfp4:torchao", "nvfp4", LINEAR),
        Case::takes("modelopt", "mxfp8-e4m3", "mxfp8-e4m3", LINEAR),
        Case::takes("modelopt", "int4-g128", "", AWQ).with("multiplied"),
        Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", FP8),
        Case::takes("mxfp4", "mxfp4", "", "_torch/model_config.py: get_mxfp4_quant_algo").with("experts"),
        Case::refuses("compressed-tensors", "int4-g128", "", "trtllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int8-channel", "", "trtllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int8-channel", "int8-token", "trtllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "nvfp4:ct", "", "trtllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "fp8-e4m3-channel", "", "trtllm-ct-schemes", CT),
        Case::refuses(
            "compressed-tensors",
            "fp8-e4m3-tensor",
            "fp8-e4m3-tensor@static",
            "trtllm-ct-schemes",
            CT,
        ),
        Case::refuses("compressed-tensors", "mxfp8-e4m3", "", "trtllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "mxfp4", "", "trtllm-dense-mxfp4", LINEAR),
        Case::refuses("modelopt", "int4-g128", "", "trtllm-awq-multiplier", AWQ),
        Case::refuses("modelopt", "nvfp4:torchao", "", "trtllm-modelopt-schemes", LINEAR),
        Case::refuses("awq", "int4-g128-asym", "", "trtllm-convention", METHODS),
        Case::refuses("gptq", "int4-g128", "", "trtllm-convention", METHODS),
        Case::refuses("bitsandbytes", "nf4", "", "trtllm-convention", METHODS),
        Case::refuses("gguf", "q4_k", "", "trtllm-convention", METHODS),
        Case::refuses(
            "compressed-tensors",
            "fp8-e4m3-channel",
            "fp8-e4m3-token",
            "trtllm-fp8-gpu",
            "NVIDIA Model Optimizer documentation, guides/0_support_matrix.html",
        )
        .with("gpu=a100"),
        Case::refuses(
            "modelopt",
            "nvfp4:torchao",
            "nvfp4",
            "trtllm-fp4-gpu",
            "NVIDIA Model Optimizer documentation, guides/0_support_matrix.html",
        )
        .with("gpu=h100"),
    ];
}
