//! Rules of SGLang.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Kind::Nvfp4;
use Server::Sglang;
use Severity::Refused;

const SGLANG: &str = "sgl-project/sglang python/sglang/srt/layers/quantization/__init__.py @0116a682";
const SGLANG_GPTQ: &str = "sgl-project/sglang python/sglang/srt/layers/quantization/gptq.py @006d0961";

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
        fix: "run mantissa convert --format compressed-tensors",
    },
    Rule {
        id: "sglang-bits",
        servers: &[Sglang],
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "4 or 8-bit integers; zero points only with 4 bits",
        check: Check::Bits { symmetric: &[4, 8], asymmetric: &[4] },
        source: "sgl-project/sglang python/sglang/srt/layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py @b4ea46ff",
        fix: "use int4 or int8",
    },
    Rule {
        id: "sglang-gptq-bits",
        servers: &[Sglang],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "2, 3, 4 or 8-bit integers",
        check: Check::Bits { symmetric: &[2, 3, 4, 8], asymmetric: &[2, 3, 4, 8] },
        source: SGLANG_GPTQ,
        fix: "use another bit width",
    },
    Rule {
        id: "sglang-ct-nvfp4",
        servers: &[Sglang],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "NVFP4 weights with NVFP4 activations",
        check: Check::Activations { kinds: &[Nvfp4], quantized: true },
        source: SGLANG,
        fix: "use nvfp4+nvfp4",
    },
];
