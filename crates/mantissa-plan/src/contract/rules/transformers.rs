//! Rules of Hugging Face transformers.

use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Inputs::{Fp8Group, None};
use Kind::{Book, Fp8Tiles, Int8, IntWeights, Mxfp4};
use Scales::{Group, Row};
use Server::Transformers;
use Severity::Refused;

const TRANSFORMERS: &str = "transformers 5.23.0 src/transformers/quantizers/auto.py (AUTO_QUANTIZER_MAPPING)";
const LOADED: &str = "tests/interop/loads.py: transformers 5.23.0, compressed-tensors 0.20.0";

pub(super) const RULES: &[Rule] = &[
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
        fix: "use compressed-tensors",
    },
    Rule {
        id: "transformers-ct-zero-points",
        servers: &[Transformers],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "packed integers without zero points: from_pretrained stops at the size of weight_zero_point (CompressedTensorsConfig(dequantize=True) loads them)",
        check: Check::NoZeroPoints(&[IntWeights]),
        source: LOADED,
        fix: "use a symmetric scheme",
    },
    Rule {
        id: "transformers-ct-act-order",
        servers: &[Transformers],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "no act-order: compressed-tensors 0.20 refuses weight_g_idx",
        check: Check::NoActOrder,
        source: "compressed-tensors 0.20.0 src/compressed_tensors/quantization/quant_args.py (actorder)",
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "transformers-gptq-bits",
        servers: &[Transformers],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "2, 3, 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[2, 3, 4, 8], asymmetric: &[2, 3, 4, 8] },
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (GPTQConfig.post_init)",
        fix: "use int4",
    },
    Rule {
        id: "transformers-awq-bits",
        servers: &[Transformers],
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers per row or group with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[Row, Group], &[None])]),
        source: "transformers 5.23.0 src/transformers/integrations/awq.py (replace_with_awq_linear)",
        fix: "use int4",
    },
    Rule {
        id: "transformers-bnb-kinds",
        servers: &[Transformers],
        conventions: &["bitsandbytes"],
        severity: Refused,
        requires: "NF4, FP4 or LLM.int8()",
        check: Check::Kinds(&[Book, Int8]),
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (BitsAndBytesConfig)",
        fix: "use nf4",
    },
    Rule {
        id: "transformers-fp8-schemes",
        servers: &[Transformers],
        conventions: &["deepseek-fp8"],
        severity: Refused,
        requires: "FP8 tiles with inputs in groups",
        check: Check::Schemes(&[Accepted::new(Fp8Tiles, &[], &[Fp8Group])]),
        source: "transformers 5.23.0 src/transformers/utils/quantization_config.py (FineGrainedFP8Config)",
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "transformers-gguf-kinds",
        servers: &[Transformers],
        conventions: &["gguf"],
        severity: Refused,
        requires: "GGUF block types that gguf decodes (NVFP4 it does not)",
        check: Check::Kinds(&[Kind::Blocks, Mxfp4]),
        source: "tests/interop/loads.py: transformers 5.23.0, gguf 0.19.0",
        fix: "use q4_k_m or q8_0",
    },
    Rule {
        id: "transformers-mxfp4-kinds",
        servers: &[Transformers],
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "transformers 5.23.0 src/transformers/quantizers/quantizer_mxfp4.py",
        fix: "use MXFP4",
    },
];
