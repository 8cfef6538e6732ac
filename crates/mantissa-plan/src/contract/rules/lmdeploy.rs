//! Rules of LMDeploy's TurboMind engine.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};

use Kind::IntWeights;
use Server::Lmdeploy;
use Severity::Refused;

const LMDEPLOY: &str = "InternLM/lmdeploy lmdeploy/turbomind/converter.py @1263d5cd8";

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
        fix: "run mantissa convert --format awq",
    },
    Rule {
        id: "lmdeploy-bits",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors", "awq"],
        severity: Refused,
        requires: "4-bit integers with unquantized activations",
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
        fix: "run mantissa convert --format awq",
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
        id: "lmdeploy-groups",
        servers: &[Lmdeploy],
        conventions: &["gptq", "awq"],
        severity: Refused,
        requires: "groups of 128",
        check: Check::Groups { sizes: &[128], channel: false, other_in_f16: false },
        source: LMDEPLOY,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-ct-groups",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "groups of 32 or 128",
        check: Check::Groups { sizes: &[32, 128], channel: false, other_in_f16: false },
        source: LMDEPLOY,
        fix: "use groups of 128",
    },
    Rule {
        id: "lmdeploy-ct-kinds",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors"],
        severity: Refused,
        requires: "pack-quantized integers: other compressed-tensors formats are refused",
        check: Check::Kinds(&[IntWeights]),
        source: LMDEPLOY,
        fix: "use int4 with groups of 128, or FP8 tiles as deepseek-fp8",
    },
    Rule {
        id: "lmdeploy-activations",
        servers: &[Lmdeploy],
        conventions: &["compressed-tensors", "awq", "gptq"],
        severity: Refused,
        requires: "4-bit integers with unquantized activations",
        check: Check::Activations { kinds: &[IntWeights], quantized: false },
        source: LMDEPLOY,
        fix: "leave the activations unquantized: no +SCHEME in the recipe",
    },
];
