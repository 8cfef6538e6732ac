//! Rules of ExLlamaV2.

use super::super::schemes::{Accepted, Inputs};
use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};
use super::sources::EXLLAMA;

use Kind::IntWeights;
use Server::Exllamav2;
use Severity::{Refused, Wrong};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "exllamav2-convention",
        servers: &[Exllamav2],
        conventions: &[],
        severity: Refused,
        requires: "exl2 or gptq tensors",
        check: Check::Convention(&["dense", "exl2", "gptq", "auto-round"]),
        source: EXLLAMA,
        fix: "use gptq or exl2",
    },
    Rule {
        id: "exllamav2-bits",
        servers: &[Exllamav2],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "4-bit integers: a GPTQ matrix packs 8 rows into one word",
        check: Check::Bits { symmetric: &[4], asymmetric: &[4] },
        source: EXLLAMA,
        fix: "use int4, or exl2 for other widths",
    },
    Rule {
        id: "exllamav2-groups",
        servers: &[Exllamav2],
        conventions: &["gptq", "auto-round"],
        severity: Wrong,
        requires: "one scale per output row, or groups of 32, 64, 128, 256, 512 or 1024: other sizes are rounded up to a power of two",
        check: Check::Groups { sizes: &[32, 64, 128, 256, 512, 1024], channel: true, other_in_f16: false },
        source: "turboderp-org/exllamav2 exllamav2_ext/cuda/q_matrix.cu (gptq_groupsize) @da07facd",
        fix: "use groups of 128",
    },
    Rule {
        id: "exllamav2-kinds",
        servers: &[Exllamav2],
        conventions: &["gptq", "auto-round", "exl2"],
        severity: Refused,
        requires: "integer weights with unquantized inputs",
        check: Check::Schemes(&[Accepted::new(IntWeights, &[], &[Inputs::None])]),
        source: EXLLAMA,
        fix: "use int4",
    },
];
