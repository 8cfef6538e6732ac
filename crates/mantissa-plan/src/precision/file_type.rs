//! Types that llama.cpp's file types mix (`llama_tensor_get_type` of src/llama-quant.cpp), as `mantissa quantize` writes them
//! without an importance matrix.

use std::iter::once;

use crate::shape::{ModelShape, Role};

/// Rules of a file type; of each projection the first that applies to a layer holds.
pub type Mixture = &'static [Rule];

/// Type of a projection in some of the layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    role: Role,
    layers: Layers,
    name: &'static str,
}

/// Layers that a rule reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layers {
    All,
    /// All, if at least four query heads share a key head.
    Grouped,
    /// First and last eighth, and every third in between (`use_more_bits`).
    MoreBits,
    /// So many of the first.
    First(u64),
    /// First `1 / n`.
    Part(u64),
}
use Layers::{All, First, Grouped, MoreBits, Part};

impl Layers {
    /// Number of a model's layers that are reached.
    fn count(self, shape: &ModelShape) -> u64 {
        let n = shape.layers;
        let more_bits = |i: &u64| *i < n / 8 || *i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
        match self {
            All => n,
            Grouped if shape.heads < 4 * shape.kv_heads.max(1) => 0,
            Grouped => n,
            MoreBits => (0..n).filter(more_bits).count() as u64,
            First(count) => n.min(count),
            Part(part) => n / part,
        }
    }
}

const fn rule(role: Role, layers: Layers, name: &'static str) -> Rule {
    Rule { role, layers, name }
}

/// Q4_K_M and Q5_K_M.
pub const MORE_BITS: Mixture = &[rule(Role::Value, MoreBits, "q6_k"), rule(Role::Down, MoreBits, "q6_k")];

/// IQ4_XS.
pub const IQ4_XS: Mixture = &[rule(Role::Value, Grouped, "q5_k"), rule(Role::Down, Part(8), "q5_k")];

/// Q3_K_M.
pub const Q3_K_M: Mixture = &[
    rule(Role::Value, First(2), "q5_k"),
    rule(Role::Value, All, "q4_k"),
    rule(Role::Down, Part(16), "q5_k"),
    rule(Role::Down, All, "q4_k"),
    rule(Role::Output, All, "q4_k"),
];

/// Q2_K.
pub const Q2_K: Mixture = &[
    rule(Role::Value, Grouped, "q4_k"),
    rule(Role::Value, All, "q3_k"),
    rule(Role::Down, All, "q3_k"),
    rule(Role::Output, All, "q3_k"),
];

/// Returns the types of a projection with the share of the layers that each has; `base` has the rest.
pub fn types(
    base: &'static str,
    mixture: Mixture,
    shape: &ModelShape,
    role: Role,
) -> impl Iterator<Item = (&'static str, f64)> {
    let all = shape.layers.max(1);
    let mut left = all;
    let mut found = Vec::new();
    for rule in mixture.iter().filter(|rule| rule.role == role) {
        // A later rule has what the earlier ones leave.
        let reached = rule.layers.count(shape).min(left);
        found.push((rule.name, reached));
        left -= reached;
    }
    found.into_iter().chain(once((base, left))).map(move |(name, layers)| (name, layers as f64 / all as f64))
}

/// Returns the type that llama.cpp stores in place of one whose blocks of 256 do not divide the rows (llama.cpp
/// src/llama-quant.cpp, `tensor_type_fallback`): one with blocks of 32, or f16 where those do not divide them either.
pub fn stored_type(name: &'static str, cols: usize) -> &'static str {
    let narrow = match name {
        "q2_k" | "q3_k" | "iq4_xs" => "iq4_nl",
        "q4_k" => "q5_0",
        "q5_k" => "q5_1",
        "q6_k" => "q8_0",
        other => other,
    };
    match (cols % 256, cols % 32) {
        (0, _) => name,
        (_, 0) => narrow,
        _ => "f16",
    }
}
