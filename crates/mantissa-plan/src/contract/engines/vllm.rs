//! vLLM on NVIDIA GPUs: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::{FormatClass, Observed};
use crate::hardware::Maker;

use FormatClass::{Fp8, Fp8Tiles, Int8, IntFp8, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Inputs::{Fp8Dynamic, Fp8Group, Fp8Static, Fp8Token, Int8Static, Int8Token, Mx, None};
use Scales::{Group, Row, Tensor};
use Severity::{Refused, Warning};

pub(super) static ENGINE: Engine = Engine {
    name: "vllm",
    title: "vLLM",
    typed: &[],
    makers: &[Maker::Nvidia],
    command: Some("vllm serve {model}"),
    split: Some("--tensor-parallel-size"),
    keeps: &["compressed-tensors"],
    widens: &[],
    shared: &[
        "tp-heads",
        "tp-width",
        "tp-group",
        "fp8-tiles",
        "fused-alike",
        "nvfp4-global",
        "fused-input-scale",
        "fp8-fused-scale",
        "marlin-gpu",
        "int8-gpu",
        "fp8-gpu",
        "fp4-gpu",
        "router-dense",
        "ignored-names",
        "unlisted-layers",
        "head",
        "tied-head",
        "cache-scale-missing",
        "bos-rule",
        "tokenizer-ends",
        "token-rows",
        "cache-scale",
        "gguf-cuda-kinds",
        "gguf-cuda-types",
        "vllm-head-target",
        "head-tiles",
        "auto-round-head",
        "vllm-fp8-head",
        "vllm-awq-head",
        "vllm-ct-embedding",
        "vllm-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const METHODS: &str =
    "vllm 0.33.0 vllm/model_executor/layers/quantization/__init__.py (get_quantization_config)";
const CT: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (_get_scheme_from_parts)";
const W4A8: &str = "vllm-project/vllm vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (_is_fp8_w4a8_sm90)";
const WNA16: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py; humming-kernels 0.1.19 for what Marlin has not";
const AUTO_GPTQ: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/auto_gptq.py (TYPE_MAP)";
const MARLIN: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/utils/marlin_utils.py (MARLIN_SUPPORTED_GROUP_SIZES)";
const AWQ: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/auto_awq.py (TYPE_MAP)";
const DESC_ACT: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/utils/gptq_utils.py (normalize_and_validate_gptq_desc_act)";

const RULES: &[Rule] = &[
    Rule {
        id: "vllm-convention",
        conventions: &[],
        severity: Refused,
        requires: "a format that vLLM reads: compressed-tensors, gptq, awq, auto-round, modelopt, fp8, mxfp4, and gguf by a plugin",
        check: Check::Convention(&[
            "dense",
            "compressed-tensors",
            "gptq",
            "awq",
            "auto-round",
            "modelopt",
            "deepseek-fp8",
            "fp8",
            "mxfp4",
            "gguf",
        ]),
        source: METHODS,
        fix: "use compressed-tensors",
    },
    Rule {
        id: "vllm-gguf-plugin",
        conventions: &["gguf"],
        severity: Warning,
        requires: "the plugin that reads GGUF since vLLM 0.33",
        check: Check::Package("vllm-gguf-plugin"),
        source: "vllm 0.33.0 metadata (extra-quant: vllm-gguf-plugin); vllm-gguf-plugin 0.0.5 quantization/utils.py",
        fix: "pip install 'vllm[extra-quant]'",
    },
    Rule {
        id: "vllm-ct-schemes",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "integers per row or group with unquantized or int8 inputs, int4 in groups with FP8 inputs per token, int8 or FP8 per tensor or row with inputs alike, FP8 tiles, NVFP4, MXFP4 or MXFP8",
        check: Check::Schemes(&[
            Accepted::new(IntWeights, &[Row, Group], &[None, Int8Token]),
            Accepted::new(IntFp8, &[Group], &[Fp8Token]),
            Accepted::new(Int8, &[Tensor, Row], &[Int8Token, Int8Static]),
            Accepted::new(Fp8, &[Tensor, Row], &[None, Fp8Token, Fp8Dynamic, Fp8Static]),
            Accepted::new(Fp8Tiles, &[], &[None, Fp8Token, Fp8Group, Fp8Dynamic]),
            Accepted::new(Nvfp4, &[], &[None, Inputs::Nvfp4]),
            Accepted::new(Mxfp4, &[], &[]),
            Accepted::new(Mxfp8, &[], &[]),
        ]),
        source: CT,
        fix: "use int4, int8, FP8, NVFP4 or MXFP4",
    },
    Rule {
        id: "vllm-w4a8-gpu",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "SM 9.0 (Hopper) for integer weights with FP8 inputs",
        check: Check::Capability { kinds: &[IntFp8], least: 90, end: Some(91) },
        source: W4A8,
        fix: "use a Hopper GPU, or int4 with unquantized inputs",
    },
    Rule {
        id: "vllm-w4a8-zero",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "4-bit weights without zero points where inputs are FP8",
        check: Check::NoZeroPoints(&[IntFp8]),
        source: W4A8,
        fix: "use symmetric int4",
    },
    Rule {
        id: "vllm-int8-zero",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "int8 weights without zero points where inputs are int8",
        check: Check::NoZeroPoints(&[Int8]),
        source: CT,
        fix: "use symmetric int8",
    },
    Rule {
        id: "vllm-bits",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "integers of 2 to 8 bits",
        check: Check::Bits { symmetric: &[2, 3, 4, 5, 6, 7, 8], asymmetric: &[2, 3, 4, 5, 6, 7, 8] },
        source: WNA16,
        fix: "use int4 or int8",
    },
    Rule {
        id: "vllm-ct-groups",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "one scale per output row, or groups of 16, 32, 64, 128 or 256",
        check: Check::Groups { sizes: &[16, 32, 64, 128, 256], channel: true, other_in_f16: true },
        source: WNA16,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "vllm-act-order",
        conventions: &["compressed-tensors", "gptq", "auto-round"],
        severity: Refused,
        requires: "no act-order (g_idx): it is no longer supported",
        check: Check::NoActOrder,
        source: DESC_ACT,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "vllm-gptq-bits",
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: AUTO_GPTQ,
        fix: "use symmetric int4 or int8; for asymmetric int4 use awq",
    },
    Rule {
        id: "vllm-awq-bits",
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: AWQ,
        fix: "use int4",
    },
    Rule {
        id: "vllm-groups",
        conventions: &["gptq"],
        severity: Refused,
        requires: "one scale per output row, or groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: false },
        source: MARLIN,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "vllm-modelopt-schemes",
        conventions: &["modelopt"],
        severity: Refused,
        requires: "FP8 per tensor or row with quantized inputs, FP8 tiles, NVFP4 or MXFP8 (no int4)",
        check: Check::Schemes(&[
            Accepted::new(Fp8, &[Tensor], &[Fp8Static]),
            Accepted::new(Fp8, &[Row], &[Fp8Token]),
            Accepted::new(Fp8Tiles, &[], &[]),
            Accepted::new(Nvfp4, &[], &[None, Inputs::Nvfp4]),
            Accepted::new(Mxfp8, &[], &[Mx]),
        ]),
        source: "vllm 0.33.0 vllm/model_executor/layers/quantization/modelopt.py (LINEAR_ALGOS)",
        fix: "use compressed-tensors",
    },
    Rule {
        id: "vllm-fp8-schemes",
        conventions: &["deepseek-fp8", "fp8"],
        severity: Refused,
        requires: "FP8 tiles with inputs in groups, or FP8 with one scale",
        check: Check::Schemes(&[
            Accepted::new(Fp8Tiles, &[], &[Fp8Group]),
            Accepted::new(Fp8, &[Tensor], &[Fp8Static, Fp8Dynamic, Fp8Token]),
        ]),
        source: "vllm 0.33.0 vllm/model_executor/layers/quantization/fp8.py (Fp8Config)",
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "vllm-mxfp4-kinds",
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "vllm 0.33.0 vllm/model_executor/layers/quantization/mxfp4.py (GptOssMxfp4Config)",
        fix: "use MXFP4",
    },
    Rule {
        id: "gptq-zero-points-marlin",
        conventions: &["gptq", "auto-round"],
        severity: Warning,
        requires: "zero points that match checkpoint_format; Marlin ignores those of symmetric weights",
        check: Check::Seen(Observed::ZeroPointVersion),
        source: AUTO_GPTQ,
        fix: "set checkpoint_format to match the data, in MODEL/config.json and MODEL/quantize_config.json",
    },
];

/// Configurations that it accepts and refuses, read from its source: vLLM 0.33.0, `vllm/model_executor/layers/quantization`.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const CT: &str = "compressed_tensors/compressed_tensors.py: _get_scheme_from_parts";
    const WNA16: &str = "compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP; kernels/linear/mixed_precision/humming.py";
    const GPTQ: &str = "auto_gptq.py: AutoGPTQConfig.TYPE_MAP";
    const AWQ: &str = "auto_awq.py: AutoAWQConfig.TYPE_MAP";
    const MODELOPT: &str = "modelopt.py: LINEAR_ALGOS";
    const METHODS: &str = "__init__.py: get_quantization_config";
    const DESC_ACT: &str = "utils/gptq_utils.py: normalize_and_validate_gptq_desc_act";
    const GGUF: &str = "vllm-gguf-plugin 0.0.5 quantization/utils.py: DEQUANT_TYPES";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", METHODS),
        Case::takes("compressed-tensors", "int4-g128", "", WNA16),
        Case::takes("compressed-tensors", "int4-g128-asym", "", WNA16),
        Case::takes("compressed-tensors", "int3-g128", "", WNA16),
        Case::takes("compressed-tensors", "int8-channel", "", WNA16),
        Case::takes("compressed-tensors", "int4-channel", "int8-token", CT),
        Case::takes("compressed-tensors", "int8-channel", "int8-token", CT),
        Case::takes("compressed-tensors", "int8-tensor", "int8-tensor@static", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", CT),
        Case::takes("compressed-tensors", "int4-g128", "fp8-e4m3-token", CT).with("gpu=h100"),
        Case::takes("compressed-tensors", "nvfp4:ct", "", CT),
        Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
        Case::takes("compressed-tensors", "mxfp4", "", CT),
        Case::takes("compressed-tensors", "mxfp8-e4m3", "", CT),
        Case::takes("gptq", "int4-g128", "", GPTQ),
        Case::takes("gptq", "int8-channel", "", GPTQ),
        Case::takes("awq", "int4-g128-asym", "", AWQ),
        Case::takes("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", MODELOPT),
        Case::takes("modelopt", "nvfp4:torchao", "", MODELOPT),
        Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", "fp8.py: Fp8Config"),
        Case::takes("gguf", "q4_k", "", GGUF),
        Case::refuses("compressed-tensors", "int4-tensor", "", "vllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int8-g128", "int8-token", "vllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "fp8-e4m3-g128", "", "vllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "nvfp4:ct", "fp8-e4m3-token", "vllm-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int8-channel-asym", "int8-token", "vllm-int8-zero", CT),
        Case::refuses("compressed-tensors", "int4-g128-asym", "fp8-e4m3-token", "vllm-w4a8-zero", CT),
        Case::refuses("compressed-tensors", "int4-g128", "fp8-e4m3-token", "vllm-w4a8-gpu", CT)
            .with("gpu=b200"),
        Case::refuses(
            "compressed-tensors",
            "int4-g8",
            "",
            "vllm-ct-groups",
            "humming-kernels 0.1.19 humming/kernel/humming.py: weight_scale_group_size >= 256 / bits",
        ),
        Case::refuses("compressed-tensors", "int4-g128", "", "vllm-act-order", WNA16).with("act-order"),
        Case::refuses("gptq", "int4-g128", "", "vllm-act-order", DESC_ACT).with("act-order"),
        Case::refuses("gptq", "int4-g128-asym", "", "vllm-gptq-bits", GPTQ),
        Case::refuses("gptq", "int3-g128", "", "vllm-gptq-bits", GPTQ),
        Case::refuses(
            "gptq",
            "int4-g256",
            "",
            "vllm-groups",
            "utils/marlin_utils.py: MARLIN_SUPPORTED_GROUP_SIZES",
        ),
        Case::refuses("modelopt", "int4-g128", "", "vllm-modelopt-schemes", MODELOPT),
        Case::refuses("bitsandbytes", "nf4", "", "vllm-convention", METHODS),
        Case::refuses("exl2", "int4-g128", "", "vllm-convention", METHODS),
        Case::refuses("mlx", "int4-g64-asym:minmax", "", "vllm-convention", METHODS),
        Case::refuses("gguf", "tq1_0", "", "gguf-cuda-types", GGUF),
        Case::refuses("gguf", "mxfp4", "", "gguf-cuda-kinds", GGUF),
        Case::refuses(
            "compressed-tensors",
            "int4-g128",
            "",
            "tp-group",
            "kernels/linear/mixed_precision/marlin.py: can_implement",
        )
        .with("tp=4"),
        Case::refuses(
            "compressed-tensors",
            "int4-g128",
            "",
            "fused-alike",
            "compressed_tensors/utils.py: get_matched_target of fused layers",
        )
        .with("mixed=int4-g32"),
        Case::refuses(
            "compressed-tensors",
            "nvfp4:ct",
            "",
            "nvfp4-global",
            "compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py",
        )
        .with("unfused-scales"),
        Case::refuses(
            "compressed-tensors",
            "int8-channel",
            "int8-token",
            "int8-gpu",
            "vLLM documentation, features/quantization/int8.md",
        )
        .with("gpu=b200"),
    ];
}
