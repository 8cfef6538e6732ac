//! SGLang on NVIDIA GPUs: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::sources::MARLIN_KERNEL;
use super::super::subject::FormatClass;
use crate::hardware::Maker;

use FormatClass::{Book, Fp8, Fp8Tiles, Int8, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Inputs::{Fp8Dynamic, Fp8Group, Fp8Static, Fp8Token, Int8Static, Int8Token, Mx, None};
use Scales::{Group, Row, Tensor};
use Severity::Refused;

pub(super) static ENGINE: Engine = Engine {
    name: "sglang",
    title: "SGLang",
    typed: &[],
    makers: &[Maker::Nvidia],
    command: Some("python -m sglang.launch_server --model-path {model}"),
    split: Some("--tp"),
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
        "gptq-zero-points",
        "router-dense",
        "ignored-names",
        "unlisted-layers",
        "head",
        "tied-head",
        "cache-scale-missing",
        "bos-rule",
        "file-ends",
        "token-rows",
        "cache-scale",
        "gguf-cuda-kinds",
        "gguf-cuda-types",
        "sglang-head-target",
        "head-tiles",
        "auto-round-head",
        "sglang-fp8-head",
        "sglang-bnb-head",
        "sglang-bnb-int-head",
        "sglang-awq-head",
        "sglang-embedding",
        "sglang-bnb-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const SGLANG: &str = "sglang 0.5.23 srt/layers/quantization/__init__.py (BASE_QUANTIZATION_METHODS)";
const SGLANG_CT: &str =
    "sglang 0.5.23 srt/layers/quantization/compressed_tensors/compressed_tensors.py (_get_scheme_from_parts)";
const SGLANG_MARLIN: &str = "sglang 0.5.23 srt/layers/quantization/marlin_utils.py (_check_marlin_supported)";
const SGLANG_GPTQ: &str = "sglang 0.5.23 srt/layers/quantization/gptq/gptq.py (GPTQMarlinConfig; gptq without Marlin is gone on CUDA)";
const SGLANG_MODELOPT: &str = "sglang 0.5.23 srt/configs/model_config.py (_parse_modelopt_quant_config), srt/layers/quantization/modelopt_quant.py";

const RULES: &[Rule] = &[
    Rule {
        id: "act-order-tp",
        conventions: &["compressed-tensors", "gptq"],
        severity: Refused,
        requires: "with act-order, rows and columns per GPU that are multiples of 64 and 128: Marlin does not pad them",
        check: Check::ActOrderTiles { rows: 64, cols: 128 },
        source: MARLIN_KERNEL,
        fix: "use act-order with static groups (no g_idx), or a smaller tp",
    },
    Rule {
        id: "sglang-convention",
        conventions: &[],
        severity: Refused,
        requires: "a format that SGLang reads: compressed-tensors, gptq, awq, modelopt, fp8, mxfp4, bitsandbytes, gguf",
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
        source: SGLANG,
        fix: "use compressed-tensors",
    },
    Rule {
        id: "sglang-ct-schemes",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "integers per row or group with unquantized inputs, int8 or FP8 per tensor or row with inputs alike, FP8 tiles, or NVFP4 (no MX format)",
        check: Check::Schemes(&[
            Accepted::new(IntWeights, &[Row, Group], &[None]),
            Accepted::new(Int8, &[Tensor, Row], &[Int8Token, Int8Static]),
            Accepted::new(Fp8, &[Tensor, Row], &[None, Fp8Token, Fp8Dynamic, Fp8Static]),
            Accepted::new(Fp8Tiles, &[], &[Fp8Token, Fp8Group, Fp8Dynamic]),
            Accepted::new(Nvfp4, &[], &[None, Inputs::Nvfp4]),
        ]),
        source: SGLANG_CT,
        fix: "use int4, int8, FP8 or NVFP4",
    },
    Rule {
        id: "sglang-bits",
        conventions: &["compressed-tensors", "awq", "auto-round"],
        severity: Refused,
        requires: "4 or 8-bit integers; zero points only with 4 bits",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[4] },
        source: SGLANG_MARLIN,
        fix: "use int4 or int8",
    },
    Rule {
        id: "sglang-int8-zero",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "int8 weights without zero points where inputs are int8",
        check: Check::NoZeroPoints(&[Int8]),
        source: SGLANG_CT,
        fix: "use symmetric int8",
    },
    Rule {
        id: "sglang-gptq-bits",
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: SGLANG_GPTQ,
        fix: "use symmetric int4 or int8, or awq for asymmetric int4",
    },
    Rule {
        id: "sglang-groups",
        conventions: &["compressed-tensors", "gptq", "awq"],
        severity: Refused,
        requires: "one scale per output row, or groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: false },
        source: SGLANG_MARLIN,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "sglang-modelopt-schemes",
        conventions: &["modelopt"],
        severity: Refused,
        requires: "FP8 per tensor with stored input scales, NVFP4 or MXFP8",
        check: Check::Schemes(&[
            Accepted::new(Fp8, &[Tensor], &[Fp8Static]),
            Accepted::new(Nvfp4, &[], &[None, Inputs::Nvfp4]),
            Accepted::new(Mxfp8, &[], &[Mx]),
        ]),
        source: SGLANG_MODELOPT,
        fix: "use compressed-tensors",
    },
    Rule {
        id: "sglang-fp8-schemes",
        conventions: &["deepseek-fp8", "fp8"],
        severity: Refused,
        requires: "FP8 tiles with inputs in groups, or FP8 with one scale",
        check: Check::Schemes(&[
            Accepted::new(Fp8Tiles, &[], &[Fp8Group]),
            Accepted::new(Fp8, &[Tensor], &[Fp8Static, Fp8Dynamic, Fp8Token]),
        ]),
        source: "sglang 0.5.23 srt/layers/quantization/fp8.py (Fp8Config)",
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "sglang-mxfp4-kinds",
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "sglang 0.5.23 srt/layers/quantization/mxfp4.py (Mxfp4Config)",
        fix: "use MXFP4",
    },
    Rule {
        id: "sglang-bnb-kinds",
        conventions: &["bitsandbytes"],
        severity: Refused,
        requires: "NF4, FP4 or LLM.int8()",
        check: Check::Kinds(&[Book, Int8]),
        source: "sglang 0.5.23 srt/layers/quantization/bitsandbytes.py (BitsAndBytesConfig)",
        fix: "use nf4",
    },
];

/// Configurations that it accepts and refuses, read from its source: SGLang 0.5.23, `python/sglang/srt`.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const CT: &str = "layers/quantization/compressed_tensors/compressed_tensors.py: _get_scheme_from_parts";
    const WNA16: &str = "layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py: WNA16_SUPPORTED_TYPES_MAP";
    const MARLIN: &str = "layers/quantization/marlin_utils.py: query_marlin_supported_quant_types, MARLIN_SUPPORTED_GROUP_SIZES";
    const GPTQ: &str = "layers/quantization/gptq/gptq.py: GPTQMarlinConfig.TYPE_MAP; \"gptq\" itself is not registered on CUDA";
    const AWQ: &str = "layers/quantization/awq/awq.py: AWQConfig";
    const MODELOPT: &str = "configs/model_config.py: _parse_modelopt_quant_config";
    const README: &str = "layers/quantization/compressed_tensors/README.md: mxfp4-pack-quantized linears are not supported yet";
    const GGUF: &str = "layers/quantization/gguf.py: DEQUANT_TYPES";

    pub(super) const CASES: &[Case] = &[
        Case::takes("compressed-tensors", "int4-g128", "", CT),
        Case::takes("compressed-tensors", "int4-channel", "", CT),
        Case::takes("compressed-tensors", "int8-channel", "", CT),
        Case::takes("compressed-tensors", "int4-g128-asym", "", MARLIN),
        Case::takes("compressed-tensors", "int8-channel", "int8-token", CT),
        Case::takes("compressed-tensors", "int8-channel", "int8-tensor@static", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", CT),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "", CT),
        Case::takes("compressed-tensors", "nvfp4:ct", "", CT),
        Case::takes("compressed-tensors", "nvfp4:ct", "nvfp4", CT),
        Case::takes("gptq", "int4-g128", "", GPTQ),
        Case::takes("gptq", "int8-g128", "", GPTQ),
        Case::takes("gptq", "int4-g128", "", GPTQ).with("act-order"),
        Case::takes("awq", "int4-g128-asym", "", AWQ),
        Case::takes("modelopt", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", MODELOPT),
        Case::takes("modelopt", "nvfp4:torchao", "", MODELOPT),
        Case::takes("modelopt", "mxfp8-e4m3", "mxfp8-e4m3", MODELOPT),
        Case::takes(
            "deepseek-fp8",
            "fp8-e4m3-t128x128",
            "fp8-e4m3-g128",
            "layers/quantization/fp8.py: Fp8Config",
        ),
        Case::takes("gguf", "q4_k", "", GGUF),
        Case::takes("gguf", "iq4_xs", "", GGUF),
        Case::refuses("compressed-tensors", "mxfp4", "", "sglang-ct-schemes", README),
        Case::refuses("compressed-tensors", "mxfp8-e4m3", "", "sglang-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int4-g128", "int8-token", "sglang-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int4-channel", "int4-token", "sglang-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int8-g128", "int8-token", "sglang-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int4-tensor", "", "sglang-ct-schemes", CT),
        Case::refuses("compressed-tensors", "int3-g128", "", "sglang-bits", WNA16),
        Case::refuses("compressed-tensors", "int8-g128-asym", "", "sglang-bits", MARLIN),
        Case::refuses("compressed-tensors", "int8-channel-asym", "int8-token", "sglang-int8-zero", CT),
        Case::refuses("compressed-tensors", "int4-g16", "", "sglang-groups", MARLIN),
        Case::refuses("gptq", "int4-g128-asym", "", "sglang-gptq-bits", GPTQ),
        Case::refuses("gptq", "int3-g128", "", "sglang-gptq-bits", GPTQ),
        Case::refuses("gptq", "int2-g64", "", "sglang-gptq-bits", GPTQ),
        Case::refuses("gptq", "int4-g256", "", "sglang-groups", MARLIN),
        Case::refuses("modelopt", "fp8-e4m3-channel", "fp8-e4m3-token", "sglang-modelopt-schemes", MODELOPT),
        Case::refuses("modelopt", "int4-g128", "", "sglang-modelopt-schemes", MODELOPT),
        Case::refuses(
            "exl2",
            "int4-g128",
            "",
            "sglang-convention",
            "layers/quantization/__init__.py: BASE_QUANTIZATION_METHODS",
        ),
        Case::refuses(
            "mlx",
            "int4-g64-asym:minmax",
            "",
            "sglang-convention",
            "layers/quantization/__init__.py: mlx only on Apple",
        ),
        Case::refuses("gguf", "mxfp4", "", "gguf-cuda-kinds", GGUF),
        Case::refuses("gguf", "tq1_0", "", "gguf-cuda-types", GGUF),
        Case::refuses(
            "compressed-tensors",
            "int4-g128",
            "",
            "tp-group",
            "layers/parameter.py: assert input_size_per_partition % group_size",
        )
        .with("tp=4"),
        Case::refuses(
            "compressed-tensors",
            "int8-channel",
            "int8-token",
            "int8-gpu",
            "layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_int8.py: no kernel on SM100",
        )
        .with("gpu=b200"),
    ];
}
