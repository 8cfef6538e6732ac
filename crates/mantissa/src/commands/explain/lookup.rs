//! Words in place of a topic: topics whose name or question has them, a term of the glossary, a scheme or a recipe.

use std::path::Path;

use mantissa_num::Scheme;
use mantissa_plan::explain::{Topic, topics};
use mantissa_quant::Recipe;
use serde::Serialize;

use crate::help::{GlossaryEntry, glossary_entry, stem};

/// Most topics that a word may have in common: more are no answer.
const MOST: usize = 8;

/// Words of questions that name nothing.
const ASKING: [&str; 22] = [
    "what", "what's", "which", "how", "why", "when", "who", "is", "are", "does", "do", "did", "mean",
    "means", "the", "a", "an", "of", "explain", "about", "tell", "me",
];

/// Meaning of words in place of a topic.
#[derive(Default, Serialize)]
pub(super) struct Meant {
    /// Topics whose names or questions have the words.
    #[serde(skip)]
    pub(super) topics: Vec<&'static Topic>,
    /// Term of the glossary.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) term: Option<GlossaryEntry>,
    /// Commands that show the scheme or recipe of this name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) commands: Vec<String>,
}

impl Meant {
    /// Finds what `name` may mean.
    pub(super) fn by(name: &str) -> Self {
        let typed: Vec<String> = words(name).collect();
        let is_question = |word: &str| ASKING.contains(&&*word.to_lowercase());
        // A question is about what is left of it.
        let left: Vec<&str> = name
            .split_whitespace()
            .map(|word| word.trim_matches(['?', '!', ',', '"', '\'']))
            .filter(|word| !word.is_empty() && !is_question(word))
            .collect();
        let left = left.join(" ");
        let wanted: Vec<String> = words(&left).collect();
        let has_all = |text: &str| {
            let there: Vec<String> = words(text).collect();
            !wanted.is_empty() && wanted.iter().all(|word| there.contains(word))
        };
        let same = topics().find(|topic| words(&topic.name).eq(typed.iter().cloned()));
        let named: Vec<_> = topics().filter(|topic| has_all(&topic.name)).collect();
        let asked = || topics().filter(|topic| has_all(&format!("{} {}", topic.name, topic.question)));
        let mut topics = match (same, named.len()) {
            (Some(topic), _) => vec![topic],
            (None, 1) => named,
            _ => asked().collect(),
        };
        if topics.len() > MOST {
            topics.clear();
        }
        // A file of this name is none that was asked for.
        let name = left.as_str();
        let is_recipe = !name.is_empty() && !Path::new(name).exists() && Recipe::load(name).is_ok();
        let kinds = [("schemes", name.parse::<Scheme>().is_ok()), ("recipes", is_recipe)];
        let commands = kinds.into_iter().filter(|(_, is_known)| *is_known);
        Meant {
            topics,
            term: glossary_entry(name),
            commands: commands.map(|(command, _)| format!("mantissa {command} {name}")).collect(),
        }
    }

    /// True if the words mean nothing that is known.
    pub(super) fn is_empty(&self) -> bool {
        self.topics.is_empty() && self.term.is_none() && self.commands.is_empty()
    }
}

/// Returns the words of a text, in lower case and without the ending of the plural.
fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()).map(stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_find_topics_by_name_then_by_question() {
        let names = |name: &str| -> Vec<&str> {
            Meant::by(name).topics.iter().map(|topic| topic.name.as_str()).collect()
        };
        assert_eq!(names("rotation"), ["rotations"]);
        assert_eq!(names("Block Scale"), ["block-scales"]);
        assert_eq!(names("kv_cache"), ["kv-cache"]);
        assert_eq!(names("microscaling"), ["block-scales"]);
        assert_eq!(names("nvfp4"), ["formats", "block-scales"]);
        assert_eq!(names("GPTQ"), ["awq-gptq-fp8"]);
        assert_eq!(names("scale")[..1], ["scales"]);
        assert_eq!(names("what is nvfp4?"), names("nvfp4"));
        assert_eq!(names("How does rotation"), ["rotations"]);
        for none in ["what", "", "xyzzy", "-"] {
            assert!(names(none).is_empty(), "{none}");
        }
    }

    #[test]
    fn terms_schemes_and_recipes_are_known() {
        let nvfp4 = Meant::by("nvfp4");
        assert_eq!(nvfp4.commands, ["mantissa schemes nvfp4", "mantissa recipes nvfp4"]);
        assert!(Meant::by("KL").term.is_some_and(|entry| entry.meaning.contains("ln")));
        assert_eq!(Meant::by("What is nvfp4?").commands.len(), 2);
        assert_eq!(Meant::by("gptq-int4-g128").commands, ["mantissa recipes gptq-int4-g128"]);
        assert!(Meant::by("xyzzy").is_empty() && Meant::by("perplexities").term.is_some());
    }
}
