//! Rules of LMDeploy's TurboMind engine.

use super::super::schemes::{Accepted, Inputs, Scales};
use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Inputs::{Fp8Group, None};
use Kind::{Fp8Tiles, IntWeights, Mxfp4};
use Scales::Group;
use Server::Lmdeploy;
use Severity::{Refused, Wrong};

const LMDEPLOY: &str = "InternLM/lmdeploy lmdeploy/turbomind/converter.py (get_tm_config) @1263d5cd8";
const GROUPS: &str = "InternLM/lmdeploy lmdeploy/turbomind/converter.py (_SUPPORTED_GROUP_SIZES) @1263d5cd8";
const FORMATS: &str =
    "InternLM/lmdeploy lmdeploy/turbomind/weight_format.py (FP8Format, CompressedTensorFormat) @1263d5cd8";

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "lmdeploy-convention",
        servers: &[Lmdeploy],
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
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors", "awq", "gptq"],
        severity: Refused,
        requires: "pack-quantized integers in groups with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[Group], &[None])]),
        source: LMDEPLOY,
        fix: "use int4 with groups of 128",
    },
    Rule {
        id: "lmdeploy-bits",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: LMDEPLOY,
        fix: "use int4 with groups of 128",
    },
    Rule {
        id: "lmdeploy-gptq",
        servers: &[Lmdeploy],
        conventions: &["gptq"],
        severity: Refused,
        requires: "symmetric 4-bit integers",
        check: Check::Bits { symmetric: &[4], asymmetric: &[] },
        source: LMDEPLOY,
        fix: "use symmetric int4, or awq",
    },
    Rule {
        id: "lmdeploy-act-order",
        servers: &[Lmdeploy],
        conventions: &["gptq"],
        severity: Refused,
        requires: "no act-order (desc_act false)",
        check: Check::NoActOrder,
        source: LMDEPLOY,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "lmdeploy-ct-act-order",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors"],
        severity: Wrong,
        requires: "no act-order: weight_g_idx is not read",
        check: Check::NoActOrder,
        source: FORMATS,
        fix: "quantize with act-order and static groups, which needs no g_idx",
    },
    Rule {
        id: "lmdeploy-groups",
        servers: &[Lmdeploy],
        conventions: &["gptq", "awq"],
        severity: Refused,
        requires: "groups of 128",
        check: Check::Groups { sizes: &[128], channel: false, other_in_f16: false },
        source: GROUPS,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-ct-groups",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "groups of 32 or 128",
        check: Check::Groups { sizes: &[32, 128], channel: false, other_in_f16: false },
        source: GROUPS,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-fp8",
        servers: &[Lmdeploy],
        conventions: &["deepseek-fp8", "fp8"],
        severity: Wrong,
        requires: "FP8 tiles of 128 × 128 (weight_scale_inv): other scales are not read",
        check: Check::Schemes(&[Accepted::new(Fp8Tiles, &[], &[Fp8Group])]),
        source: FORMATS,
        fix: "use FP8 tiles of 128 × 128",
    },
    Rule {
        id: "lmdeploy-mxfp4",
        servers: &[Lmdeploy],
        conventions: &["mxfp4"],
        severity: Refused,
        requires: "MXFP4",
        check: Check::Kinds(&[Mxfp4]),
        source: LMDEPLOY,
        fix: "use MXFP4",
    },
];
