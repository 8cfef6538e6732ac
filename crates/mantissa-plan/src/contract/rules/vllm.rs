//! Rules of vLLM.

use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::{Kind, Observed};
use super::super::{Check, Rule, Server, Severity};

use Inputs::{Fp8Dynamic, Fp8Group, Fp8Static, Fp8Token, Int8Static, Int8Token, Mx, None};
use Kind::{Fp8, Fp8Tiles, Int8, IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Scales::{Group, Row, Tensor};
use Server::Vllm;
use Severity::{Refused, Warning};

const METHODS: &str =
    "vllm 0.33.0 vllm/model_executor/layers/quantization/__init__.py (get_quantization_config)";
const CT: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py (_get_scheme_from_parts)";
const WNA16: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py; humming-kernels 0.1.19 for what Marlin has not";
const AUTO_GPTQ: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/auto_gptq.py (TYPE_MAP)";
const MARLIN: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/utils/marlin_utils.py (MARLIN_SUPPORTED_GROUP_SIZES)";
const AWQ: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/auto_awq.py (TYPE_MAP)";
const DESC_ACT: &str = "vllm 0.33.0 vllm/model_executor/layers/quantization/utils/gptq_utils.py (normalize_and_validate_gptq_desc_act)";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "vllm-convention",
        servers: &[Vllm],
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
        servers: &[Vllm],
        conventions: &["gguf"],
        severity: Warning,
        requires: "the plugin that reads GGUF since vLLM 0.33",
        check: Check::Package("vllm-gguf-plugin"),
        source: "vllm 0.33.0 metadata (extra-quant: vllm-gguf-plugin); vllm-gguf-plugin 0.0.5 quantization/utils.py",
        fix: "pip install 'vllm[extra-quant]'",
    },
    Rule {
        id: "vllm-ct-schemes",
        servers: &[Vllm],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "integers per row or group with unquantized or int8 inputs, int8 or FP8 per tensor or row with inputs alike, FP8 tiles, NVFP4, MXFP4 or MXFP8",
        check: Check::Schemes(&[
            Accepted::new(IntWeights, &[Row, Group], &[None, Int8Token]),
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
        id: "vllm-int8-zero",
        servers: &[Vllm],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "int8 weights without zero points where inputs are int8",
        check: Check::NoZeroPoints(&[Int8]),
        source: CT,
        fix: "use symmetric int8",
    },
    Rule {
        id: "vllm-bits",
        servers: &[Vllm],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "integers of 2 to 8 bits",
        check: Check::Bits { symmetric: &[2, 3, 4, 5, 6, 7, 8], asymmetric: &[2, 3, 4, 5, 6, 7, 8] },
        source: WNA16,
        fix: "use int4 or int8",
    },
    Rule {
        id: "vllm-ct-groups",
        servers: &[Vllm],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "one scale per output row, or groups of 16, 32, 64, 128 or 256",
        check: Check::Groups { sizes: &[16, 32, 64, 128, 256], channel: true, other_in_f16: true },
        source: WNA16,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "vllm-act-order",
        servers: &[Vllm],
        conventions: &["compressed-tensors", "gptq", "auto-round"],
        severity: Refused,
        requires: "no act-order (g_idx): it is no longer supported",
        check: Check::NoActOrder,
        source: DESC_ACT,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "vllm-gptq-bits",
        servers: &[Vllm],
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[] },
        source: AUTO_GPTQ,
        fix: "use symmetric int4 or int8; for asymmetric int4 use awq",
    },
    Rule {
        id: "vllm-awq-bits",
        servers: &[Vllm],
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: AWQ,
        fix: "use int4",
    },
    Rule {
        id: "vllm-groups",
        servers: &[Vllm],
        conventions: &["gptq"],
        severity: Refused,
        requires: "one scale per output row, or groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: true, other_in_f16: false },
        source: MARLIN,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "vllm-modelopt-schemes",
        servers: &[Vllm],
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
        servers: &[Vllm],
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
        servers: &[Vllm],
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: "vllm 0.33.0 vllm/model_executor/layers/quantization/mxfp4.py (GptOssMxfp4Config)",
        fix: "use MXFP4",
    },
    Rule {
        id: "gptq-zero-points-marlin",
        servers: &[Vllm],
        conventions: &["gptq", "auto-round"],
        severity: Warning,
        requires: "zero points that match checkpoint_format; Marlin ignores those of symmetric weights",
        check: Check::Seen(Observed::ZeroPointVersion),
        source: AUTO_GPTQ,
        fix: "set checkpoint_format to match the data, in MODEL/config.json and MODEL/quantize_config.json",
    },
];
