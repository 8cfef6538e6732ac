//! llama.cpp's file types as data: the block type of each tensor of a model, and what it stores for rows that blocks do not
//! divide.
//!
//! The table follows `llama_tensor_get_type` of llama.cpp's `src/llama-quant.cpp` for dense decoders of the Llama
//! family, so a file called `Q4_K_M` has the expected size and mixture. `general.file_type` is `llama_ftype` of
//! `include/llama.h`. Unlike other recipes, a file type includes embedding and head. What writes files and what plans their
//! bytes both read this table.

use mantissa_num::CodecId;
use mantissa_num::CodecId::{
    Iq1M, Iq1S, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K,
    Q6K, Q8_0, Tq1_0, Tq2_0,
};

use crate::kinds::LinearKind;

/// A file type.
#[derive(Clone, Copy, Debug)]
pub struct FileType {
    /// Name as a recipe.
    pub name: &'static str,
    /// `general.file_type`.
    pub number: u32,
    /// Block type of tensors without a rule.
    pub base: CodecId,
    rules: &'static [Rule],
}

impl PartialEq for FileType {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number && self.name == other.name
    }
}

/// A tensor of a model as file types distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// Output head, including a tied embedding.
    Head,
    /// Untied embedding.
    Embedding,
    /// A linear layer of decoder layer `layer`.
    Linear {
        /// Kind.
        kind: LinearKind,
        /// Index of the layer.
        layer: usize,
    },
}

/// Sizes of a decoder on which types depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoderSizes {
    /// Number of layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
}

/// Rule of a file type; the first that applies is used.
#[derive(Clone, Copy, Debug)]
struct Rule {
    of: Of,
    when: When,
    ty: CodecId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Head,
    Embedding,
    Is(LinearKind),
}

/// Condition of a rule. Fractions of layers are rounded down.
#[derive(Clone, Copy, Debug)]
enum When {
    Always,
    /// At least four query heads share a key head.
    Grouped,
    /// The first and last eighth of the layers, and every third in between, starting at the third.
    MoreBits,
    /// First `1 / n` of the layers.
    FirstPart(usize),
    /// First layers.
    First(usize),
    /// All but the first and the last eighth of the layers.
    Middle,
    /// No importance matrix is given.
    Blind,
    /// First eighth of the layers, without an importance matrix.
    FirstBlind,
    /// First eighth of the layers, with an importance matrix.
    FirstSeen,
}

const fn rule(of: Of, when: When, ty: CodecId) -> Rule {
    Rule { of, when, ty }
}

const V: Of = Of::Is(LinearKind::V);
const K: Of = Of::Is(LinearKind::K);
const Q: Of = Of::Is(LinearKind::Q);
const O: Of = Of::Is(LinearKind::O);
const GATE: Of = Of::Is(LinearKind::Gate);
const UP: Of = Of::Is(LinearKind::Up);
const DOWN: Of = Of::Is(LinearKind::Down);

/// Head of most file types.
const HEAD: Rule = rule(Of::Head, When::Always, Q6K);
/// Head of file types below three bits.
const LOW_HEAD: Rule = rule(Of::Head, When::Always, Q5K);

const fn of(name: &'static str, number: u32, base: CodecId, rules: &'static [Rule]) -> FileType {
    FileType { name, number, base, rules }
}

/// File types that can be written by name.
pub const FILE_TYPES: [FileType; 29] = [
    of("q4_0", 2, Q4_0, &[HEAD, rule(DOWN, When::FirstSeen, Q4_1)]),
    of("q4_1", 3, Q4_1, &[HEAD]),
    of("q5_0", 8, Q5_0, &[HEAD, rule(DOWN, When::FirstSeen, Q5_1)]),
    of("q5_1", 9, Q5_1, &[HEAD]),
    of("q8_0", 7, Q8_0, &[]),
    of(
        "q2_k",
        10,
        Q2K,
        &[
            HEAD,
            rule(V, When::Grouped, Q4K),
            rule(V, When::Always, Q3K),
            rule(DOWN, When::Always, Q3K),
            rule(O, When::Always, Q3K),
        ],
    ),
    of("q2_k_s", 21, Q2K, &[HEAD, rule(V, When::Grouped, Q4K), rule(DOWN, When::FirstPart(8), Q4K)]),
    of("q3_k_s", 11, Q3K, &[HEAD]),
    of(
        "q3_k_m",
        12,
        Q3K,
        &[
            HEAD,
            rule(V, When::First(2), Q5K),
            rule(V, When::Always, Q4K),
            rule(DOWN, When::FirstPart(16), Q5K),
            rule(DOWN, When::Always, Q4K),
            rule(O, When::Always, Q4K),
        ],
    ),
    of(
        "q3_k_l",
        13,
        Q3K,
        &[HEAD, rule(V, When::Always, Q5K), rule(DOWN, When::Always, Q5K), rule(O, When::Always, Q5K)],
    ),
    of("q4_k_s", 14, Q4K, &[HEAD, rule(V, When::First(4), Q5K), rule(DOWN, When::FirstPart(8), Q5K)]),
    of("q4_k_m", 15, Q4K, &[HEAD, rule(V, When::MoreBits, Q6K), rule(DOWN, When::MoreBits, Q6K)]),
    of("q5_k_s", 16, Q5K, &[HEAD]),
    of("q5_k_m", 17, Q5K, &[HEAD, rule(V, When::MoreBits, Q6K), rule(DOWN, When::MoreBits, Q6K)]),
    of("q6_k", 18, Q6K, &[]),
    of("iq1_s", 24, Iq1S, &IQ1),
    of("iq1_m", 31, Iq1M, &IQ1),
    of("iq2_xxs", 19, Iq2Xxs, &IQ2),
    of("iq2_xs", 20, Iq2Xs, &IQ2),
    of("iq2_s", 28, Iq2Xs, &IQ2_S),
    of("iq2_m", 29, Iq2S, &IQ2_S),
    of(
        "iq3_xxs",
        23,
        Iq3Xxs,
        &[
            LOW_HEAD,
            rule(Of::Embedding, When::Always, Iq3S),
            rule(V, When::Grouped, Q4K),
            rule(V, When::Blind, Iq3S),
            rule(K, When::Always, Iq2S),
            rule(Q, When::Always, Iq2S),
            rule(DOWN, When::FirstBlind, Q4K),
            rule(DOWN, When::Blind, Q3K),
            rule(O, When::Always, Iq3S),
        ],
    ),
    of(
        "iq3_xs",
        22,
        Iq3S,
        &[
            HEAD,
            rule(V, When::Grouped, Q4K),
            rule(K, When::Always, Iq3Xxs),
            rule(Q, When::Always, Iq3Xxs),
            rule(GATE, When::Middle, Iq3Xxs),
            rule(UP, When::Middle, Iq3Xxs),
        ],
    ),
    of("iq3_s", 26, Iq3S, &[HEAD, rule(V, When::Grouped, Q4K)]),
    of(
        "iq3_m",
        27,
        Iq3S,
        &[HEAD, rule(V, When::Always, Q4K), rule(DOWN, When::FirstPart(8), Q4K), rule(O, When::Always, Q4K)],
    ),
    of("iq4_nl", 25, Iq4Nl, &[HEAD, rule(V, When::Grouped, Q5K)]),
    of("iq4_xs", 30, Iq4Xs, &[HEAD, rule(V, When::Grouped, Q5K), rule(DOWN, When::FirstBlind, Q5K)]),
    of("tq1_0", 36, Tq1_0, &[HEAD, rule(Of::Embedding, When::Always, Q4K)]),
    of("tq2_0", 37, Tq2_0, &[HEAD, rule(Of::Embedding, When::Always, Q4K)]),
];

const IQ1: [Rule; 6] = [
    LOW_HEAD,
    rule(Of::Embedding, When::Always, Q2K),
    rule(V, When::Grouped, Q4K),
    rule(V, When::Always, Q2K),
    rule(DOWN, When::FirstPart(8), Q2K),
    rule(O, When::Always, Iq2Xxs),
];

const IQ2: [Rule; 5] = [
    LOW_HEAD,
    rule(Of::Embedding, When::Always, Q2K),
    rule(V, When::Grouped, Q4K),
    rule(V, When::Always, Q2K),
    rule(DOWN, When::FirstPart(8), Q2K),
];

const IQ2_S: [Rule; 6] = [
    LOW_HEAD,
    rule(Of::Embedding, When::Always, Iq3S),
    rule(V, When::Grouped, Q4K),
    rule(V, When::Always, Iq3S),
    rule(DOWN, When::FirstPart(8), Iq3S),
    rule(O, When::Always, Iq3S),
];

/// Fallbacks for types whose blocks of 256 do not divide a row: llama.cpp's choice with blocks of 32.
const SMALLER: [(CodecId, CodecId); 16] = [
    (Q4K, Q5_0),
    (Q5K, Q5_1),
    (Q6K, Q8_0),
    (Q2K, Iq4Nl),
    (Q3K, Iq4Nl),
    (Iq1S, Iq4Nl),
    (Iq1M, Iq4Nl),
    (Iq2Xxs, Iq4Nl),
    (Iq2Xs, Iq4Nl),
    (Iq2S, Iq4Nl),
    (Iq3Xxs, Iq4Nl),
    (Iq3S, Iq4Nl),
    (Iq4Xs, Iq4Nl),
    (Tq1_0, Iq4Nl),
    (Tq2_0, Iq4Nl),
    (CodecId::Q8K, Q8_0),
];

/// Returns the type that is stored for rows of `cols`: the wanted one, or the one with blocks of 32 (llama.cpp,
/// `tensor_type_fallback`). `None` where neither divides them: f16.
pub fn stored_type(wanted: CodecId, cols: usize) -> Option<CodecId> {
    let smaller = SMALLER.iter().find(|(known, _)| *known == wanted).map(|(_, smaller)| *smaller);
    let divides = |codec: &CodecId| cols.is_multiple_of(codec.codec().elements);
    [Some(wanted), smaller].into_iter().flatten().find(divides)
}

impl FileType {
    /// Returns the file type of this name.
    pub fn parse(name: &str) -> Option<Self> {
        FILE_TYPES.into_iter().find(|ty| ty.name == name)
    }

    /// Returns the types of an untied embedding and of the head, which depend on no size.
    pub fn tables(&self) -> [CodecId; 2] {
        [TensorRole::Embedding, TensorRole::Head]
            .map(|part| self.choose(DecoderSizes::default(), part, false))
    }

    /// Returns the types of a projection over the layers of a model, each with the number of layers that have it, without an
    /// importance matrix.
    pub fn over_layers(&self, sizes: DecoderSizes, kind: LinearKind) -> Vec<(CodecId, usize)> {
        let mut found: Vec<(CodecId, usize)> = Vec::new();
        for layer in 0..sizes.layers {
            let codec = self.choose(sizes, TensorRole::Linear { kind, layer }, false);
            match found.iter_mut().find(|(known, _)| *known == codec) {
                Some((_, count)) => *count += 1,
                None => found.push((codec, 1)),
            }
        }
        found
    }

    /// Returns the types of every projection in a decoder of 32 layers whose key heads are shared by four query heads.
    pub fn example(&self) -> [(&'static str, Vec<(CodecId, usize)>); 7] {
        let sizes = DecoderSizes { layers: 32, heads: 32, kv_heads: 8 };
        let parts = [
            ("queries", LinearKind::Q),
            ("keys", LinearKind::K),
            ("values", LinearKind::V),
            ("output", LinearKind::O),
            ("gate", LinearKind::Gate),
            ("up", LinearKind::Up),
            ("down", LinearKind::Down),
        ];
        parts.map(|(part, kind)| (part, self.over_layers(sizes, kind)))
    }

    /// Returns the type of `part` of a model; `importance` is true if there is an importance matrix.
    pub fn choose(&self, sizes: DecoderSizes, part: TensorRole, importance: bool) -> CodecId {
        let (of, layer) = match part {
            TensorRole::Head => (Of::Head, 0),
            TensorRole::Embedding => (Of::Embedding, 0),
            TensorRole::Linear { kind, layer } => (Of::Is(kind.dense()), layer),
        };
        let n = sizes.layers;
        let grouped = sizes.heads >= 4 * sizes.kv_heads.max(1);
        let (first_eighth, last_eighth) = (layer < n / 8, layer >= 7 * n / 8);
        let applies = |when: When| match when {
            When::Always => true,
            When::Grouped => grouped,
            When::MoreBits => first_eighth || last_eighth || (layer - n / 8) % 3 == 2,
            When::FirstPart(part) => layer < n / part,
            When::First(count) => layer < count,
            When::Middle => !first_eighth && !last_eighth,
            When::Blind => !importance,
            When::FirstBlind => first_eighth && !importance,
            When::FirstSeen => first_eighth && importance,
        };
        self.rules.iter().find(|rule| rule.of == of && applies(rule.when)).map_or(self.base, |rule| rule.ty)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sizes(layers: usize, heads: usize, kv_heads: usize) -> DecoderSizes {
        DecoderSizes { layers, heads, kv_heads }
    }

    fn layers(name: &str, sizes: DecoderSizes, kind: LinearKind, importance: bool) -> Vec<CodecId> {
        let ty = FileType::parse(name).unwrap();
        (0..sizes.layers)
            .map(|layer| ty.choose(sizes, TensorRole::Linear { kind, layer }, importance))
            .collect()
    }

    /// Matches llama.cpp's log for a model of 16 layers.
    #[test]
    fn q4_k_m_gives_more_bits_to_half_of_v_and_down() {
        let model = sizes(16, 8, 4);
        let more: Vec<usize> = layers("q4_k_m", model, LinearKind::V, false)
            .iter()
            .enumerate()
            .filter(|(_, t)| **t == Q6K)
            .map(|(i, _)| i)
            .collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!(
            layers("q4_k_m", model, LinearKind::Down, true),
            layers("q4_k_m", model, LinearKind::V, true)
        );
        assert!(layers("q4_k_m", model, LinearKind::Up, true).iter().all(|t| *t == Q4K));
        let ty = FileType::parse("q4_k_m").unwrap();
        assert_eq!(
            (ty.choose(model, TensorRole::Head, true), ty.choose(model, TensorRole::Embedding, true)),
            (Q6K, Q4K)
        );
        assert_eq!(ty.tables(), [Q4K, Q6K]);
    }

    #[test]
    fn rules_depend_on_heads_layers_and_importance() {
        let (shared, own) = (sizes(16, 8, 2), sizes(16, 8, 8));
        assert_eq!(layers("q2_k", shared, LinearKind::V, true)[5], Q4K);
        assert_eq!(layers("q2_k", own, LinearKind::V, true)[5], Q3K);
        assert_eq!(layers("q3_k_m", own, LinearKind::V, true)[..3], [Q5K, Q5K, Q4K]);
        assert_eq!(layers("q3_k_m", own, LinearKind::Down, true)[..2], [Q5K, Q4K]);
        assert_eq!(layers("iq4_xs", own, LinearKind::Down, false)[..3], [Q5K, Q5K, Iq4Xs]);
        assert_eq!(layers("iq4_xs", own, LinearKind::Down, true)[..3], [Iq4Xs; 3]);
        assert_eq!(layers("q4_0", own, LinearKind::Down, true)[..3], [Q4_1, Q4_1, Q4_0]);
    }

    #[test]
    fn names_and_numbers_are_given_once() {
        for (i, a) in FILE_TYPES.iter().enumerate() {
            assert!(FILE_TYPES[..i].iter().all(|b| a.name != b.name && a.number != b.number), "{}", a.name);
        }
        for (wanted, smaller) in SMALLER {
            assert!(wanted.codec().elements == 256 && smaller.codec().elements == 32);
        }
    }

    #[test]
    fn ragged_rows_take_smaller_blocks_or_none() {
        assert_eq!([4096, 896, 80].map(|cols| stored_type(Q4K, cols)), [Some(Q4K), Some(Q5_0), None]);
        assert_eq!([896, 80].map(|cols| stored_type(Q8_0, cols)), [Some(Q8_0), None]);
    }
}
