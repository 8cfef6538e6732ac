//! Patterns and spellings by which configurations name modules.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fancy_regex::{Regex, RegexBuilder};
use serde_json::Value;

/// Steps that a pattern with look-around may take on one name: a hostile one takes exponentially many.
const MAX_STEPS: usize = 20_000;

/// Regular expression in Python's syntax, look-around included.
#[derive(Clone, Debug)]
pub(super) struct Pattern {
    regex: Regex,
    /// True once it took too many steps; it then matches nothing.
    exceeded: Arc<AtomicBool>,
}

impl Pattern {
    /// Compiles `text`.
    ///
    /// # Errors
    /// What is wrong with the expression.
    pub(super) fn new(text: &str) -> Result<Self, String> {
        let regex = RegexBuilder::new(text).backtrack_limit(MAX_STEPS).build();
        let regex = regex.map_err(|error| error.to_string())?;
        Ok(Pattern { regex, exceeded: Arc::default() })
    }

    /// Compiles `text` as an expression for the start of a name.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(super) fn of_start(text: &str) -> Result<Self, String> {
        Self::new(&format!("^(?:{text})"))
    }

    /// True if it matches `name`.
    pub(super) fn is_match(&self, name: &str) -> bool {
        if self.exceeded.load(Ordering::Relaxed) {
            return false;
        }
        self.regex.is_match(name).unwrap_or_else(|_| {
            self.exceeded.store(true, Ordering::Relaxed);
            false
        })
    }

    /// Returns a note if it took too many steps to be followed.
    pub(super) fn note(&self) -> Option<String> {
        let exceeded = self.exceeded.load(Ordering::Relaxed);
        exceeded
            .then(|| format!("the pattern {} takes too many steps: it is not followed", self.regex.as_str()))
    }
}

/// Modules that a list of a configuration names, usually those left unquantized.
#[derive(Clone, Debug, Default)]
pub(super) struct Skipped {
    /// Parts of names.
    names: HashSet<String>,
    /// Patterns for the start of names, or with wildcards for whole names.
    patterns: Vec<Pattern>,
}

impl Skipped {
    /// Reads the lists that `value` has under `keys`. An entry names a module, those in it, and those whose name ends or
    /// has a part so; `*` stands for any characters, and `re:` begins a regular expression. Entries that cannot be read
    /// name nothing: the tensors decide.
    pub(super) fn parse(value: &Value, keys: &[&str]) -> Self {
        let mut skipped = Skipped::default();
        let lists = keys.iter().filter_map(|key| value.get(key)?.as_array()).flatten();
        for text in lists.filter_map(Value::as_str) {
            if let Some(pattern) = text.strip_prefix("re:") {
                skipped.patterns.extend(Pattern::of_start(pattern));
            } else if text.contains('*') {
                let parts: Vec<_> = text.split('*').map(regex::escape).collect();
                skipped.patterns.extend(Pattern::new(&format!("^{}$", parts.join(".*"))));
            } else {
                skipped.names.insert(text.trim_matches('.').to_owned());
            }
        }
        skipped
    }

    /// True if there are no entries.
    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.patterns.is_empty()
    }

    /// True if an entry names `module`: it is one or several of the parts between its dots, or a pattern matches.
    pub(super) fn has(&self, module: &str) -> bool {
        let starts = std::iter::once(0).chain(module.match_indices('.').map(|(at, _)| at + 1));
        let ends = |from: usize| {
            module[from..].match_indices('.').map(move |(at, _)| from + at).chain([module.len()])
        };
        let mut parts = starts.flat_map(|from| ends(from).map(move |to| &module[from..to]));
        parts.any(|part| self.names.contains(part)) || self.patterns.iter().any(|p| p.is_match(module))
    }
}

/// Prefixes of a text model's modules within larger models, by tool and version.
const PREFIXES: [&str; 5] =
    ["", "model.", "language_model.model.", "model.language_model.", "language_model."];

/// Layers that engines join into one, with its name.
const JOINED: [(&str, &[&str]); 4] = [
    ("qkv_proj", &["q_proj", "k_proj", "v_proj"]),
    ("gate_up_proj", &["gate_proj", "up_proj"]),
    ("w13", &["w1", "w3"]),
    ("fused_qkv_a_proj", &["q_a_proj", "kv_a_proj_with_mqa"]),
];

/// Returns the names that tools give `module`: with the prefix of another model around it, with `.linear` behind it, and
/// joined with other layers.
pub(super) fn spellings(module: &str) -> Vec<String> {
    let mut inner = module.strip_suffix(".linear").unwrap_or(module);
    while let Some(rest) = inner.strip_prefix("model.").or_else(|| inner.strip_prefix("language_model.")) {
        inner = rest;
    }
    let (parent, last) = match inner.rsplit_once('.') {
        Some((parent, last)) => (format!("{parent}."), last),
        None => (String::new(), inner),
    };
    let joined = JOINED.iter().filter(|(_, parts)| parts.contains(&last)).map(|(name, _)| *name);
    let names: Vec<_> = std::iter::once(last).chain(joined).map(|last| format!("{parent}{last}")).collect();
    let placed = PREFIXES.iter().flat_map(|prefix| names.iter().map(move |name| format!("{prefix}{name}")));
    placed.flat_map(|name| [format!("{name}.linear"), name]).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Instant;

    use serde_json::json;

    use super::*;

    #[test]
    fn patterns_look_around() {
        let pattern = Pattern::of_start(r"^(?!.*(mlp|layers\.1)).*$").unwrap();
        assert!(pattern.is_match("model.layers.0.self_attn.q_proj"));
        assert!(!pattern.is_match("model.layers.0.mlp.up_proj"));
        assert!(Pattern::of_start(r".*(?<=mlp\.)down_proj").unwrap().is_match("layers.0.mlp.down_proj"));
        assert!(Pattern::of_start("(").is_err());
    }

    #[test]
    fn a_pattern_that_backtracks_without_end_is_given_up_with_a_note() {
        let pattern = Pattern::of_start(r"(?=((a+)+)+$)(a|aa)+\1b").unwrap();
        let (name, began) = ("a".repeat(4096), Instant::now());
        assert!((0..1000).all(|_| !pattern.is_match(&name)));
        assert!(began.elapsed().as_secs() < 5, "{:?}", began.elapsed());
        assert!(pattern.note().unwrap().contains("too many steps"));
        assert_eq!(Pattern::of_start("a").unwrap().note(), None);
    }

    #[test]
    fn entries_name_parts_patterns_and_wildcards() {
        let keys = ["ignore", "modules_to_not_convert"];
        let lists = json!({
            "ignore": ["lm_head", "re:model\\.layers\\.(?!0).*k_proj", "model.layers.2*", 7],
            "modules_to_not_convert": ["self_attn.o_proj", "model.layers.1"],
        });
        let skipped = Skipped::parse(&lists, &keys);
        let names = ["lm_head", "model.layers.3.self_attn.k_proj", "model.layers.25.mlp.up_proj"];
        assert!(names.iter().all(|name| skipped.has(name)), "{skipped:?}");
        assert!(skipped.has("model.layers.0.self_attn.o_proj") && skipped.has("model.layers.1.mlp.up_proj"));
        let others = ["model.layers.0.self_attn.k_proj", "model.layers.10.mlp.up_proj", "my_lm_head"];
        assert!(!others.iter().any(|name| skipped.has(name)), "{skipped:?}");
        assert!(!Skipped::parse(&json!({"ignore": [""]}), &keys).has("lm_head"));
    }

    #[test]
    fn names_have_several_spellings() {
        let names = spellings("model.layers.0.self_attn.q_proj");
        for other in [
            "language_model.model.layers.0.self_attn.q_proj",
            "model.language_model.layers.0.self_attn.qkv_proj",
            "model.layers.0.self_attn.q_proj.linear",
            "layers.0.self_attn.q_proj",
        ] {
            assert!(names.iter().any(|name| name == other), "{other}");
        }
        assert!(spellings("language_model.lm_head").contains(&"lm_head".to_owned()));
        assert!(!names.contains(&"model.layers.0.self_attn.k_proj".to_owned()));
    }
}
