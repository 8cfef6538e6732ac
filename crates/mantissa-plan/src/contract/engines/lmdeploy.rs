//! LMDeploy's TurboMind engine: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::FormatClass;
use crate::hardware::Maker;

use FormatClass::{Fp8Tiles, IntWeights, Mxfp4};
use Inputs::{Fp8Group, None};
use Scales::Group;
use Severity::{Refused, Wrong};

pub(super) static ENGINE: Engine = Engine {
    name: "lmdeploy",
    title: "LMDeploy",
    typed: &["turbomind"],
    makers: &[Maker::Nvidia],
    command: Some("lmdeploy serve api_server {model}"),
    split: Some("--tp"),
    keeps: &["compressed-tensors"],
    widens: &[],
    shared: &[
        "tp-heads",
        "tp-width",
        "tp-group",
        "fp8-tiles",
        "head",
        "tied-head",
        "bos-rule",
        "tokenizer-ends",
        "token-rows",
        "lmdeploy-int-head",
        "lmdeploy-head",
        "lmdeploy-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const LMDEPLOY: &str = "InternLM/lmdeploy lmdeploy/turbomind/converter.py (get_tm_config) @1263d5cd8";
const GROUPS: &str = "InternLM/lmdeploy lmdeploy/turbomind/converter.py (_SUPPORTED_GROUP_SIZES) @1263d5cd8";
const FORMATS: &str =
    "InternLM/lmdeploy lmdeploy/turbomind/weight_format.py (FP8Format, CompressedTensorFormat) @1263d5cd8";

const RULES: &[Rule] = &[
    Rule {
        id: "lmdeploy-convention",
        conventions: &[],
        severity: Refused,
        requires: "a format that TurboMind reads: awq, gptq, compressed-tensors, fp8, mxfp4",
        check: Check::Convention(&[
            "dense",
            "awq",
            "gptq",
            "compressed-tensors",
            "deepseek-fp8",
            "fp8",
            "mxfp4",
        ]),
        source: LMDEPLOY,
        fix: "use awq",
    },
    Rule {
        id: "lmdeploy-schemes",
        conventions: &["compressed-tensors", "awq", "gptq"],
        severity: Refused,
        requires: "pack-quantized integers in groups with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[Group], &[None])]),
        source: LMDEPLOY,
        fix: "use int4 with groups of 128",
    },
    Rule {
        id: "lmdeploy-bits",
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: LMDEPLOY,
        fix: "use int4 with groups of 128",
    },
    Rule {
        id: "lmdeploy-gptq",
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[] },
        source: LMDEPLOY,
        fix: "use symmetric int4, or awq",
    },
    Rule {
        id: "lmdeploy-act-order",
        conventions: &["gptq"],
        severity: Refused,
        requires: "no act-order (desc_act false)",
        check: Check::NoActOrder,
        source: LMDEPLOY,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "lmdeploy-ct-act-order",
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "no act-order: weight_g_idx is not read",
        check: Check::NoActOrder,
        source: FORMATS,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "lmdeploy-groups",
        conventions: &["gptq", "awq"],
        severity: Refused,
        requires: "groups of 128",
        check: Check::Groups { sizes: &[128], channel: false, other_in_f16: false },
        source: GROUPS,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-ct-groups",
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "groups of 32 or 128",
        check: Check::Groups { sizes: &[32, 128], channel: false, other_in_f16: false },
        source: GROUPS,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-fp8",
        conventions: &["deepseek-fp8", "fp8"],
        severity: Wrong,
        requires: "FP8 tiles of 128 × 128 (weight_scale_inv): other scales are not read",
        check: Check::Schemes(&[Accepted::new(Fp8Tiles, &[], &[Fp8Group])]),
        source: FORMATS,
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "lmdeploy-mxfp4",
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: LMDEPLOY,
        fix: "use MXFP4",
    },
];

/// Configurations that it accepts and refuses, read from its source: LMDeploy at 1263d5cd8, TurboMind.
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const CONFIG: &str = "lmdeploy/turbomind/converter.py: get_tm_config";
    const GROUPS: &str = "lmdeploy/turbomind/converter.py: _SUPPORTED_GROUP_SIZES";
    const FORMATS: &str = "lmdeploy/turbomind/weight_format.py: FP8Format, TrivialFormat";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", CONFIG),
        Case::takes("awq", "int4-g128-asym", "", CONFIG),
        Case::takes("awq", "int4-g128", "", CONFIG),
        Case::takes("awq", "int4-g128-asym", "", CONFIG).with("tp=2"),
        Case::takes("gptq", "int4-g128", "", CONFIG),
        Case::takes("gptq", "int4-g128", "", CONFIG).with("f16"),
        Case::takes("compressed-tensors", "int4-g128", "", CONFIG),
        Case::takes("compressed-tensors", "int4-g32", "", GROUPS),
        Case::takes(
            "compressed-tensors",
            "int4-g128-asym",
            "",
            "lmdeploy/turbomind/weight_format.py: CompressedTensorFormat",
        ),
        Case::takes("compressed-tensors", "int4-g32-asym", "", GROUPS),
        Case::takes("deepseek-fp8", "fp8-e4m3-t128x128", "fp8-e4m3-g128", FORMATS),
        Case::takes("mxfp4", "mxfp4", "", CONFIG),
        Case::refuses("compressed-tensors", "int4-g32", "int8-token", "lmdeploy-schemes", CONFIG),
        Case::refuses("compressed-tensors", "int8-channel", "int8-token", "lmdeploy-schemes", CONFIG),
        Case::refuses("compressed-tensors", "fp8-e4m3-channel", "fp8-e4m3-token", "lmdeploy-schemes", CONFIG),
        Case::refuses("compressed-tensors", "nvfp4:ct", "", "lmdeploy-schemes", CONFIG),
        Case::refuses("compressed-tensors", "int4-channel", "", "lmdeploy-schemes", CONFIG),
        Case::refuses("compressed-tensors", "int8-g128", "", "lmdeploy-bits", CONFIG),
        Case::refuses("compressed-tensors", "int4-g64", "", "lmdeploy-ct-groups", GROUPS),
        Case::refuses("compressed-tensors", "int4-g128", "", "lmdeploy-ct-act-order", FORMATS)
            .with("act-order"),
        Case::refuses("awq", "int4-g64-asym", "", "lmdeploy-groups", GROUPS),
        Case::refuses("gptq", "int4-g32", "", "lmdeploy-groups", GROUPS),
        Case::refuses("gptq", "int4-g128-asym", "", "lmdeploy-gptq", CONFIG),
        Case::refuses("gptq", "int8-g128", "", "lmdeploy-gptq", CONFIG),
        Case::refuses("gptq", "int4-g128", "", "lmdeploy-act-order", CONFIG).with("act-order"),
        Case::refuses("fp8", "fp8-e4m3-tensor", "fp8-e4m3-tensor@static", "lmdeploy-fp8", FORMATS),
        Case::refuses("modelopt", "nvfp4:torchao", "", "lmdeploy-convention", CONFIG),
        Case::refuses("bitsandbytes", "nf4", "", "lmdeploy-convention", CONFIG),
        Case::refuses("auto-round", "int4-g128", "", "lmdeploy-convention", CONFIG),
        Case::refuses("gguf", "q4_0", "", "lmdeploy-convention", CONFIG),
    ];
}
