//! mlx-lm: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::sources::MLX_OPS;
use super::super::subject::FormatClass;
use crate::hardware::Maker;

use FormatClass::{IntWeights, Mxfp4, Mxfp8, Nvfp4};
use Inputs::None;
use Scales::Group;
use Severity::Refused;

pub(super) static ENGINE: Engine = Engine {
    name: "mlx",
    title: "mlx-lm",
    typed: &["mlx-lm"],
    makers: &[Maker::Apple],
    command: Some("mlx_lm.generate --model {model} --prompt {prompt}"),
    split: Option::None,
    keeps: &["mlx"],
    widens: &[],
    shared: &["whole-groups", "head", "tied-head", "bos-rule", "generation-ends", "token-rows"],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const MLX_LM: &str = "mlx-lm 0.32.2 mlx_lm/utils.py (load_model, _transform_awq_weights)";

const RULES: &[Rule] = &[
    Rule {
        id: "mlx-convention",
        conventions: &[],
        severity: Refused,
        requires: "mlx tensors, or awq or mxfp4, which mlx-lm converts at load (compressed-tensors only in DeepSeek-V3's architecture, gptq not: it ends at g_idx)",
        check: Check::Convention(&["dense", "mlx", "awq", "mxfp4"]),
        source: MLX_LM,
        fix: "use mlx",
    },
    Rule {
        id: "mlx-schemes",
        conventions: &["mlx"],
        severity: Refused,
        requires: "integers in groups, MXFP4, MXFP8 or NVFP4 with unquantized inputs",
        check: Check::Schemes(&[
            Accepted::new(IntWeights, &[Group], &[None]),
            Accepted::new(Mxfp4, &[], &[None]),
            Accepted::new(Mxfp8, &[], &[None]),
            Accepted::new(Nvfp4, &[], &[None]),
        ]),
        source: MLX_OPS,
        fix: "use integers in groups of 64",
    },
    Rule {
        id: "mlx-bits",
        conventions: &["awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: MLX_LM,
        fix: "use int4",
    },
    Rule {
        id: "mlx-affine-bits",
        conventions: &["mlx"],
        severity: Refused,
        requires: "2, 3, 4, 5, 6 or 8-bit integers",
        check: Check::Bits { symmetric: &[2, 3, 4, 5, 6, 8], asymmetric: &[2, 3, 4, 5, 6, 8] },
        source: MLX_OPS,
        fix: "use another bit width",
    },
    Rule {
        id: "mlx-groups",
        conventions: &["mlx", "awq"],
        severity: Refused,
        requires: "groups of 32, 64 or 128",
        check: Check::Groups { sizes: &[32, 64, 128], channel: false, other_in_f16: false },
        source: MLX_OPS,
        fix: "use groups of 32, 64 or 128",
    },
    Rule {
        id: "mlx-mxfp4",
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: MLX_LM,
        fix: "use MXFP4",
    },
];

/// Configurations that it accepts and refuses, read from its source: mlx-lm 0.32.2 on mlx 0.32.4.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const LOAD: &str = "mlx_lm/utils.py: load_model";
    const AWQ: &str = "mlx_lm/utils.py: _transform_awq_weights";
    const OPS: &str = "mlx/ops.cpp: affine_quantize, fp_quantize";
    const LLAMA: &str = "mlx_lm/models/llama.py: sanitize leaves weight_packed, which no parameter has; only deepseek_v3.py renames it";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", LOAD),
        Case::takes("mlx", "int4-g64-asym:minmax", "", OPS),
        Case::takes("mlx", "int2-g64-asym:minmax", "", OPS),
        Case::takes("mlx", "int3-g64-asym:minmax", "", OPS),
        Case::takes("mlx", "int6-g32-asym:minmax", "", OPS),
        Case::takes("mlx", "int8-g128-asym:minmax", "", OPS),
        Case::takes("mlx", "mxfp4", "", OPS),
        Case::takes("mlx", "mxfp8-e4m3", "", OPS),
        Case::takes("mlx", "nvfp4:torchao-1level", "", OPS),
        Case::takes("awq", "int4-g128-asym", "", AWQ),
        Case::takes("awq", "int4-g64", "", AWQ),
        Case::takes("mxfp4", "mxfp4", "", LOAD),
        Case::refuses("compressed-tensors", "nvfp4:ct", "", "mlx-convention", LLAMA),
        Case::refuses("compressed-tensors", "int4-g32", "", "mlx-convention", LLAMA),
        Case::refuses("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", "mlx-convention", LLAMA),
        Case::refuses("gptq", "int4-g128", "", "mlx-convention", AWQ),
        Case::refuses("gptq", "int4-g128", "", "mlx-convention", AWQ).with("act-order"),
        Case::refuses("gguf", "q4_0", "", "mlx-convention", LOAD),
        Case::refuses("modelopt", "nvfp4:torchao", "", "mlx-convention", LOAD),
        Case::refuses("bitsandbytes", "nf4", "", "mlx-convention", LOAD),
        Case::refuses("awq", "int4-channel", "", "mlx-groups", AWQ),
        Case::refuses("awq", "int4-g256-asym", "", "mlx-groups", OPS),
        Case::refuses("mlx", "int4-g16-asym:minmax", "", "mlx-groups", OPS),
        Case::refuses("mlx", "int4-channel-asym:minmax", "", "mlx-schemes", OPS),
        Case::refuses("mlx", "int5-g64-asym:minmax", "", "whole-groups", OPS).with("cols=352"),
    ];
}
