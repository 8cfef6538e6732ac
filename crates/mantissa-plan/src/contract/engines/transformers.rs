//! Hugging Face transformers: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::{FormatClass, Observed};
use crate::hardware::Maker;

use FormatClass::{Book, Fp8Tiles, Int8, IntFp8, IntWeights, Mxfp4};
use Inputs::{Fp8Group, None};
use Scales::{Group, Row};
use Severity::Refused;

pub(super) static ENGINE: Engine = Engine {
    name: "transformers",
    title: "transformers",
    typed: &["hf", "huggingface"],
    makers: &[Maker::Nvidia, Maker::Amd, Maker::Intel],
    command: Option::None,
    split: Option::None,
    keeps: &["compressed-tensors"],
    // transformers docs, "GGUF": "load_dequant": the checkpoint is dequantized to fp32 or the given dtype.
    widens: &["gguf"],
    shared: &[
        "whole-groups",
        "gptq-zero-points",
        "ignored-names",
        "unlisted-layers",
        "head",
        "bos-rule",
        "generation-ends",
        "token-rows",
        "auto-round-head",
        "transformers-gptq-head",
        "transformers-awq-head",
        "transformers-fp8-head",
        "transformers-embedding",
        "transformers-bnb-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const TRANSFORMERS: &str = "transformers 5.23.0 src/transformers/quantizers/auto.py (AUTO_QUANTIZER_MAPPING)";
const LOADED: &str = "tests/interop/loads.py: transformers 5.23.0, compressed-tensors 0.20.0";

const RULES: &[Rule] = &[
    Rule {
        id: "transformers-convention",
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
        fix: "use compressed-tensors",
    },
    Rule {
        id: "transformers-tied-head",
        conventions: &[],
        severity: Severity::Warning,
        requires: "tie_word_embeddings false beside a separate lm_head: transformers 5 warns and uses the lm_head, transformers 4 ignores it",
        check: Check::Seen(Observed::TiedHead),
        source: "transformers 5.23.0 src/transformers/modeling_utils.py (tie_weights)",
        fix: "set every tie_word_embeddings in MODEL/config.json to false",
    },
    Rule {
        id: "transformers-ct-zero-points",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "packed integers without zero points: from_pretrained stops at the size of weight_zero_point (CompressedTensorsConfig(dequantize=True) loads them)",
        check: Check::NoZeroPoints(&[IntWeights, IntFp8]),
        source: LOADED,
        fix: "use a symmetric scheme",
    },
    Rule {
        id: "transformers-ct-act-order",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "no act-order: compressed-tensors 0.20 refuses weight_g_idx",
        check: Check::NoActOrder,
        source: "compressed-tensors 0.20.0 src/compressed_tensors/quantization/quant_args.py (actorder)",
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "transformers-gptq-bits",
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "2, 3, 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[2, 3, 4, 8], asymmetric: &[2, 3, 4, 8] },
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (GPTQConfig.post_init)",
        fix: "use int4",
    },
    Rule {
        id: "transformers-awq-bits",
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers per row or group with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[Row, Group], &[None])]),
        source: "transformers 5.23.0 src/transformers/integrations/awq.py (replace_with_awq_linear)",
        fix: "use int4",
    },
    Rule {
        id: "transformers-bnb-kinds",
        conventions: &["bitsandbytes"],
        severity: Refused,
        requires: "NF4, FP4 or LLM.int8()",
        check: Check::Kinds(&[Book, Int8]),
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (BitsAndBytesConfig)",
        fix: "use nf4",
    },
    Rule {
        id: "transformers-fp8-schemes",
        conventions: &["deepseek-fp8"],
        severity: Refused,
        requires: "FP8 tiles with inputs in groups",
        check: Check::Schemes(&[Accepted::new(Fp8Tiles, &[], &[Fp8Group])]),
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (FineGrainedFP8Config)",
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "transformers-gguf-kinds",
        conventions: &["gguf"],
        severity: Refused,
        requires: "GGUF block types that gguf decodes (NVFP4 it does not)",
        check: Check::Kinds(&[FormatClass::Blocks, Mxfp4]),
        source: "tests/interop/loads.py: transformers 5.23.0, gguf 0.19.0",
        fix: "use q4_k_m or q8_0",
    },
    Rule {
        id: "transformers-mxfp4-kinds",
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "transformers 5.23.0 src/transformers/quantizers/quantizer_mxfp4.py",
        fix: "use MXFP4",
    },
];

/// Configurations that it accepts and refuses, read from its source: transformers 5.23.0 with compressed-tensors 0.20.0, gptqmodel 7.7.0, bitsandbytes 0.50.2 and gguf 0.19.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const LOADED: &str = "tests/interop/loads.py";
    const AUTO: &str = "quantizers/auto.py: AUTO_QUANTIZER_MAPPING";
    const GPTQ: &str = "utils/quantization_config.py: GPTQConfig.post_init, bits in 2, 3, 4, 8";
    const ACT_ORDER: &str = "compressed-tensors quantization/quant_args.py: actorder";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", AUTO),
        Case::takes("compressed-tensors", "int4-g128", "", LOADED),
        Case::takes("compressed-tensors", "int4-channel", "", LOADED),
        Case::takes("compressed-tensors", "int8-channel", "", LOADED),
        Case::takes("compressed-tensors", "int8-channel", "int8-token", LOADED),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "", LOADED),
        Case::takes("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", LOADED),
        Case::takes("compressed-tensors", "nvfp4:ct", "", LOADED),
        Case::takes("compressed-tensors", "mxfp4", "", LOADED),
        Case::takes("compressed-tensors", "mxfp8-e4m3", "", LOADED),
        Case::takes("bitsandbytes", "nf4", "", LOADED),
        Case::takes("bitsandbytes", "int8-channel:restricted", "int8-token:restricted", LOADED),
        Case::takes("gptq", "int4-g128-asym", "", GPTQ),
        Case::takes("gptq", "int3-g128", "", GPTQ),
        Case::takes("awq", "int4-g128-asym", "", "integrations/awq.py: replace_with_awq_linear"),
        Case::takes("gguf", "q4_k", "", LOADED),
        Case::takes("gguf", "tq1_0", "", LOADED),
        Case::takes(
            "deepseek-fp8",
            "fp8-e4m3-t128x128",
            "fp8-e4m3-g128",
            "quantizers/quantizer_finegrained_fp8.py",
        ),
        Case::refuses("compressed-tensors", "int4-g128-asym", "", "transformers-ct-zero-points", LOADED),
        Case::refuses("compressed-tensors", "int8-g32-asym", "", "transformers-ct-zero-points", LOADED),
        Case::refuses("compressed-tensors", "int4-g128", "", "transformers-ct-act-order", ACT_ORDER)
            .with("act-order"),
        Case::refuses(
            "compressed-tensors",
            "int4-g128",
            "",
            "whole-groups",
            "compressed_tensors/compressors/pack_quantized.py: sizes",
        )
        .with("cols=352"),
        Case::refuses("gptq", "int5-g128", "", "transformers-gptq-bits", GPTQ),
        Case::refuses("gptq", "int6-g128", "", "transformers-gptq-bits", GPTQ),
        Case::refuses(
            "gptq",
            "int4-g128",
            "",
            "gptq-zero-points",
            "gptqmodel utils/model.py: convert_gptq_v1_to_v2_format",
        )
        .with("seen=zero-points"),
        Case::refuses("gguf", "nvfp4:ct", "", "transformers-gguf-kinds", LOADED),
        Case::refuses("modelopt", "nvfp4:torchao", "", "transformers-convention", AUTO),
        Case::refuses("mlx", "int4-g64-asym:minmax", "", "transformers-convention", AUTO),
        Case::refuses("exl2", "int4-g128", "", "transformers-convention", AUTO),
        Case::refuses("exl3", "trellis4", "", "transformers-convention", AUTO),
        Case::refuses("native", "nf4", "", "transformers-convention", AUTO),
        Case::refuses("onnx", "int4-g128", "", "transformers-convention", AUTO),
        // A warning: transformers 5 uses the head.
        Case::takes("dense", "", "", "modeling_utils.py: tie_weights").with("seen=tied-head"),
    ];
}
