//! Rules of SGLang.

use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Inputs::{Fp8Dynamic, Fp8Group, Fp8Static, Fp8Token, Int8Static, Int8Token, Mx, None};
use Kind::{Book, Fp8, Fp8Tiles, Int8, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Scales::{Group, Row, Tensor};
use Server::Sglang;
use Severity::Refused;

const SGLANG: &str = "sglang 0.5.23 srt/layers/quantization/__init__.py (BASE_QUANTIZATION_METHODS)";
const SGLANG_CT: &str =
    "sglang 0.5.23 srt/layers/quantization/compressed_tensors/compressed_tensors.py (_get_scheme_from_parts)";
const SGLANG_MARLIN: &str = "sglang 0.5.23 srt/layers/quantization/marlin_utils.py (_check_marlin_supported)";
const SGLANG_GPTQ: &str = "sglang 0.5.23 srt/layers/quantization/gptq/gptq.py (GPTQMarlinConfig; gptq without Marlin is gone on CUDA)";
const SGLANG_MODELOPT: &str = "sglang 0.5.23 srt/configs/model_config.py (_parse_modelopt_quant_config), srt/layers/quantization/modelopt_quant.py";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "sglang-convention",
        servers: &[Sglang],
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
        servers: &[Sglang],
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
        servers: &[Sglang],
        conventions: &["compressed-tensors", "awq", "auto-round"],
        severity: Refused,
        requires: "4 or 8-bit integers; zero points only with 4 bits",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[4] },
        source: SGLANG_MARLIN,
        fix: "use int4 or int8",
    },
    Rule {
        id: "sglang-int8-zero",
        servers: &[Sglang],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "int8 weights without zero points where inputs are int8",
        check: Check::NoZeroPoints(&[Int8]),
        source: SGLANG_CT,
        fix: "use symmetric int8",
    },
    Rule {
        id: "sglang-gptq-bits",
        servers: &[Sglang],
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: SGLANG_GPTQ,
        fix: "use symmetric int4 or int8, or awq for asymmetric int4",
    },
    Rule {
        id: "sglang-groups",
        servers: &[Sglang],
        conventions: &["compressed-tensors", "gptq", "awq"],
        severity: Refused,
        requires: "one scale per output row, or groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: false },
        source: SGLANG_MARLIN,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "sglang-modelopt-schemes",
        servers: &[Sglang],
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
        servers: &[Sglang],
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
        servers: &[Sglang],
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "sglang 0.5.23 srt/layers/quantization/mxfp4.py (Mxfp4Config)",
        fix: "use MXFP4",
    },
    Rule {
        id: "sglang-bnb-kinds",
        servers: &[Sglang],
        conventions: &["bitsandbytes"],
        severity: Refused,
        requires: "NF4, FP4 or LLM.int8()",
        check: Check::Kinds(&[Book, Int8]),
        source: "sglang 0.5.23 srt/layers/quantization/bitsandbytes.py (BitsAndBytesConfig)",
        fix: "use nf4",
    },
];
