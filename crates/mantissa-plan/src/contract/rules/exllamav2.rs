//! Rules of ExLlamaV2.

use super::super::subject::Kind;
use super::super::{Check, Rule, Server, Severity};
use super::sources::EXLLAMA;

use Kind::IntWeights;
use Server::Exllamav2;
use Severity::Refused;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "exllamav2-convention",
        servers: &[Exllamav2],
        conventions: &[],
        severity: Refused,
        requires: "exl2 or gptq tensors",
        check: Check::Convention(&["dense", "exl2", "gptq", "auto-round"]),
        source: EXLLAMA,
        fix: "mantissa convert --format gptq",
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
        id: "exllamav2-kinds",
        servers: &[Exllamav2],
        conventions: &["gptq", "auto-round"],
        severity: Refused,
        requires: "integer weights",
        check: Check::Kinds(&[IntWeights]),
        source: EXLLAMA,
        fix: "use int4",
    },
];
