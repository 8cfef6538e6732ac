//! Classifies the regular expressions of a `tokenizer.json`: those that run in linear time on any text, and the
//! others.
//!
//! The tokenizers library runs them on `fancy-regex`. Expressions that plain `regex` supports run on a finite
//! automaton. Others (look-around, atomic groups, references) run on a backtracking machine that can take exponential
//! time and, past its limit, silently leaves the rest of the text unsplit. So of the second kind only the expressions
//! of known tokenizers are accepted. Plain expressions never backtrack. But a search that runs far and then fails
//! restarts at the next character, which is quadratic; texts are limited if that can happen.

use regex_syntax::hir::{Hir, HirKind};

/// Longest accepted expression. Those of public models have up to 1 kB, with tables of characters 10 kB.
const MAX_EXPRESSION: usize = 32 << 10;

/// Longest part of an expression that counts as bounded, in bytes of text.
const BOUNDED: usize = 256;

/// Alternatives that are not linear by their form but are in the tokenizers that use them: each fails only if another
/// of the same expression matches what it has read, or after one step back.
const KNOWN: [&str; 22] = [
    r"\s+(?!\S)",
    r"\s*[\r\n]+",
    r"\s*[\r\n]",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}++",
    r"\p{N}{1,3}+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
    // Jais 2's white space.
    r"\s{512}(?!\S)",
    r"\s{256}(?!\S)",
    r"\s{128}(?!\S)",
    r"\s{64}(?!\S)",
    r"\s{32}(?!\S)",
    r"\s{16}(?!\S)",
    r"\s{8}(?!\S)",
    r"\s{4}(?!\S)",
    r"\s{1,2}(?!\S)",
    // SentencePiece's trimming, as the GGUF import writes it.
    r"\A +",
    r" +\z",
];

/// Expressions that look ahead over all digits of a number, with the bytes of their shortest match: each search is linear, all of
/// them are quadratic.
const KNOWN_QUADRATIC: [(&str, usize); 3] = [
    (r"\d{1,3}(?=(?:\d{3})*\b)", 1),
    (r"(?=(\d{3})+(?!\d))", 0),
    (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", 1),
];

/// Time of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cost {
    /// Time is linear in the text.
    Linear,
    /// Time may be quadratic in the text.
    Quadratic,
}

/// Bounds of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Measure {
    pub(super) cost: Cost,
    /// Bytes of its shortest match.
    pub(super) shortest: usize,
}

/// Measures an expression; the error states what is wrong with it.
pub(super) fn measure(pattern: &str) -> Result<Measure, String> {
    if pattern.len() > MAX_EXPRESSION {
        return Err(format!("a regular expression of {} bytes", pattern.len()));
    }
    if let Some((_, shortest)) = KNOWN_QUADRATIC.iter().find(|(known, _)| *known == pattern) {
        return Ok(Measure { cost: Cost::Quadratic, shortest: *shortest });
    }
    let (mut cost, mut shortest) = (Cost::Linear, usize::MAX);
    let mut known = false;
    for branch in branches(pattern) {
        if KNOWN.contains(&branch) {
            (known, shortest) = (true, shortest.min(1));
            continue;
        }
        let plain = regex_syntax::parse(branch).ok().filter(|_| !is_possessive(branch));
        let Some(hir) = plain else {
            return Err("look-around, a possessive or atomic part, a reference or a broken expression".into());
        };
        shortest = shortest.min(hir.properties().minimum_len().unwrap_or(0));
        if !is_linear(&hir) {
            cost = Cost::Quadratic;
        }
    }
    if known && cost == Cost::Quadratic {
        return Err("look-around next to parts that can fail late".into());
    }
    // The size of the automaton, because counted repetitions multiply.
    if !known {
        regex::Regex::new(pattern).map_err(|_| "an expression whose automaton is too large".to_owned())?;
    }
    Ok(Measure { cost, shortest })
}

/// Splits an expression into its top-level alternatives.
fn branches(pattern: &str) -> Vec<&str> {
    let (mut depth, mut class, mut escaped, mut start) = (0usize, 0usize, false, 0);
    let mut all = Vec::new();
    for (i, c) in pattern.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '[' => class += 1,
            ']' => class = class.saturating_sub(1),
            _ if class > 0 => {}
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                all.push(&pattern[start..i]);
                start = i + 1;
            }
            _ => {}
        }
    }
    all.push(&pattern[start..]);
    all
}

/// True if a quantifier is followed by `+`: plain `regex` reads that as a repetition of the repetition, `fancy-regex`
/// as a possessive quantifier.
fn is_possessive(branch: &str) -> bool {
    let (mut class, mut after) = (0usize, false);
    let mut rest = branch.chars();
    while let Some(c) = rest.next() {
        let quantifier = class == 0 && matches!(c, '?' | '*' | '+' | '}');
        if c == '+' && quantifier && after {
            return true;
        }
        after = quantifier;
        match c {
            // An escape with its name in braces: the braces of `\p{L}` do not count.
            '\\' => {
                let named = rest.next().is_some_and(|c| matches!(c, 'p' | 'P' | 'x' | 'u' | 'U' | 'b' | 'B'));
                if named && rest.as_str().starts_with('{') {
                    rest.by_ref().find(|c| *c == '}');
                }
            }
            '[' => class += 1,
            ']' => class = class.saturating_sub(1),
            _ => {}
        }
    }
    false
}

/// True if a search that has begun an unbounded repetition can only succeed: a bounded beginning, one repetition of
/// something bounded, and nothing required after it.
fn is_linear(hir: &Hir) -> bool {
    let bounded = |hir: &Hir| hir.properties().maximum_len().is_some_and(|len| len <= BOUNDED);
    match hir.kind() {
        _ if bounded(hir) => true,
        HirKind::Capture(group) => is_linear(&group.sub),
        HirKind::Repetition(repetition) => bounded(&repetition.sub),
        HirKind::Alternation(parts) => parts.iter().all(is_linear),
        HirKind::Concat(parts) => {
            let Some(at) = parts.iter().position(|part| !bounded(part)) else { return false };
            let optional = |part: &Hir| {
                let properties = part.properties();
                properties.minimum_len() == Some(0) && properties.look_set().is_empty() && is_linear(part)
            };
            at <= 16 && is_linear(&parts[at]) && parts[at + 1..].iter().all(optional)
        }
        _ => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn cost(pattern: &str) -> Result<Cost, String> {
        measure(pattern).map(|measure| measure.cost)
    }

    #[test]
    fn expressions_of_public_tokenizers_are_linear() {
        for pattern in [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
            r"[一-龥぀-ゟ゠-ヿ]+",
            r" ?[^(\s|[.,!?…。，、।۔،])]+",
            r"\p{N}{1,3}",
            r"[0-9][0-9][0-9]",
            r" {2,}",
            r"\A +| +\z",
            r"",
        ] {
            assert_eq!(cost(pattern), Ok(Cost::Linear), "{pattern}");
        }
    }

    #[test]
    fn the_shortest_match_is_known() {
        for (pattern, shortest) in
            [(" {2,}", 2), (r"\A +| +\z", 1), ("ab|c*", 0), ("", 0), (r"\p{L}+|xyz", 1)]
        {
            assert_eq!(measure(pattern).unwrap().shortest, shortest, "{pattern}");
        }
    }

    #[test]
    fn slow_expressions_are_recognised() {
        for pattern in [r"(a+)+b", r"a*b", r".*[^a]|a", r"(a|ab)*c", r"x+$", r"\w+\b"] {
            assert_eq!(cost(pattern), Ok(Cost::Quadratic), "{pattern}");
        }
        for pattern in [
            r"(a+)+(?!b)",
            r"(?=(a+)+$)\1b",
            r"(a)\1",
            r"(?>a+)b",
            r"a++b",
            r"(a+)*+b",
            r"(?<=a)b",
            r"\s+(?!\S)|(a+)+b",
            r"\s+(?!\S)|a*b",
            r"(",
            r"a{1000}{1000}{1000}",
            r"\p{Nope}",
        ] {
            assert!(cost(pattern).is_err(), "{pattern}: {:?}", cost(pattern));
        }
        assert!(cost(&"a".repeat(MAX_EXPRESSION + 1)).is_err());
        assert!(cost(&"(".repeat(20_000)).is_err() && cost(&"[".repeat(20_000)).is_err());
    }
}
