//! ExLlamaV2: how it is run, and what it requires.

use super::super::engine::Engine;
use super::super::rule::{Check, Rule, Severity};
use super::super::schemes::{Accepted, Inputs};
use super::super::sources::EXLLAMA;
use super::super::subject::FormatClass;
use crate::hardware::Maker;

use FormatClass::IntWeights;
use Severity::{Refused, Wrong};

pub(super) static ENGINE: Engine = Engine {
    name: "exllamav2",
    title: "ExLlamaV2",
    typed: &["exllama"],
    makers: &[Maker::Nvidia],
    command: Some("python test_inference.py -m {model} -p {prompt}"),
    split: None,
    keeps: &["exl2"],
    widens: &[],
    shared: &[
        "whole-groups",
        "gptq-zero-points",
        "head",
        "bos-rule",
        "token-rows",
        "exllamav2-head",
        "exllamav2-embedding",
    ],
    rules: RULES,
    #[cfg(test)]
    cases: cases::CASES,
};

const RULES: &[Rule] = &[
    Rule {
        id: "exllamav2-convention",
        conventions: &[],
        severity: Refused,
        requires: "exl2 or gptq tensors",
        check: Check::Convention(&["dense", "exl2", "gptq", "auto-round"]),
        source: EXLLAMA,
        fix: "use gptq or exl2",
    },
    Rule {
        id: "exllamav2-bits",
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "4-bit integers: a GPTQ matrix packs 8 rows into one word",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: EXLLAMA,
        fix: "use int4, or exl2 for other widths",
    },
    Rule {
        id: "exllamav2-groups",
        conventions: &["gptq", "auto-round"],
        severity: Wrong,
        requires: "one scale per output row, or groups of 32, 64, 128, 256, 512 or 1024: other sizes are rounded up to a power of two",
        check: Check::Groups { sizes: &[32, 64, 128, 256, 512, 1024], channel: true, other_in_f16: false },
        source: "turboderp-org/exllamav2 exllamav2_ext/cuda/q_matrix.cu (gptq_groupsize) @da07facd",
        fix: "use groups of 128",
    },
    Rule {
        id: "exllamav2-kinds",
        conventions: &["gptq", "auto-round", "exl2"],
        severity: Refused,
        requires: "integer weights with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[], &[Inputs::None])]),
        source: EXLLAMA,
        fix: "use int4",
    },
];

/// Configurations that it accepts and refuses, read from its source: ExLlamaV2 at da07facd (0.3.2).
#[cfg(test)]
mod cases {
    use super::super::super::case::Case;

    const MODULE: &str = "exllamav2/module.py: load_weight";
    const MATRIX: &str = "exllamav2_ext/ext_qmatrix.cpp: make_q_matrix, height = q_weight.size(0) * 8";
    const GROUPS: &str = "exllamav2_ext/cuda/q_matrix.cu: gptq_groupsize";
    const ZEROS: &str = "exllamav2/config.py: checkpoint_offset_qzeros";

    pub(super) const CASES: &[Case] = &[
        Case::takes("dense", "", "", MODULE),
        Case::takes("exl2", "int4-g128", "", MODULE),
        Case::takes("exl2", "int3-g32", "", MODULE),
        Case::takes("exl2", "int6-g64", "", MODULE),
        Case::takes("gptq", "int4-g128", "", MATRIX),
        Case::takes("gptq", "int4-g32", "", MATRIX),
        Case::takes("gptq", "int4-g128-asym", "", MATRIX),
        Case::takes("gptq", "int4-channel", "", GROUPS),
        Case::takes("gptq", "int4-g256", "", GROUPS),
        Case::takes("gptq", "int4-g128", "", "exllamav2/ext.py: make_q_matrix, g_idx").with("act-order"),
        Case::takes("auto-round", "int4-g128", "", MATRIX),
        Case::refuses("gptq", "int3-g128", "", "exllamav2-bits", MATRIX),
        Case::refuses("gptq", "int8-g128", "", "exllamav2-bits", MATRIX),
        Case::refuses("gptq", "int2-g64-asym", "", "exllamav2-bits", MATRIX),
        Case::refuses("gptq", "int4-g96", "", "exllamav2-groups", GROUPS),
        Case::refuses("gptq", "int4-g128", "", "gptq-zero-points", ZEROS).with("seen=zero-points"),
        Case::refuses("gptq", "int4-g128", "", "whole-groups", GROUPS).with("cols=352"),
        Case::refuses("awq", "int4-g128-asym", "", "exllamav2-convention", MATRIX),
        Case::refuses("compressed-tensors", "int4-g128", "", "exllamav2-convention", MODULE),
        Case::refuses("bitsandbytes", "nf4", "", "exllamav2-convention", MODULE),
        Case::refuses("modelopt", "int4-g128", "", "exllamav2-convention", MODULE),
        Case::refuses("gguf", "q4_k", "", "exllamav2-convention", MODULE),
        Case::refuses("mlx", "int4-g64-asym:minmax", "", "exllamav2-convention", MODULE),
        Case::refuses("exl3", "trellis4", "", "exllamav2-convention", MODULE),
    ];
}
