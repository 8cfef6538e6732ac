//! Thoughts of a reply: their marks, their separation from the answer, and a limit of their tokens.
//!
//! Models that think write the thought between two marks, at the beginning of the reply. Some chat templates write the
//! first mark into the prompt. [`Splitter`] takes the text of a reply as it is generated, and separates both;
//! [`ThoughtLimit`] ends a thought after a number of tokens, and begins the form of the answer after it.

mod limit;
mod splitter;

pub(crate) use self::limit::ThoughtLimit;
pub(crate) use self::splitter::{Said, Splitter};

/// Marks of a thought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    /// Text before a thought.
    pub(crate) open: &'static str,
    /// Text after it.
    pub(crate) close: &'static str,
}

/// Marks of the models that think.
static ALL: [Marks; 4] = [
    // DeepSeek R1, Qwen 3, QwQ, GLM, SmolLM 3, Kimi K2 Thinking and others.
    Marks { open: "<think>", close: "</think>" },
    // Magistral and Ministral 3 of Mistral.
    Marks { open: "[THINK]", close: "[/THINK]" },
    // Command R7B and A Reasoning of Cohere.
    Marks { open: "<|START_THINKING|>", close: "<|END_THINKING|>" },
    // Seed OSS of ByteDance.
    Marks { open: "<seed:think>", close: "</seed:think>" },
];

impl Marks {
    /// Marks that a chat template knows.
    pub(crate) fn of(template: Option<&str>) -> Option<&'static Self> {
        let template = template?;
        ALL.iter().find(|marks| template.contains(marks.close))
    }

    /// True if `prompt` ends with the beginning of a thought.
    pub(crate) fn is_open(&self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_the_marks() {
        let open = |template| Marks::of(Some(template)).map(|marks| marks.open);
        assert_eq!(open("{{ content.split('</think>')[-1] }}"), Some("<think>"));
        assert_eq!(open("[THINK]{{ x }}[/THINK]"), Some("[THINK]"));
        assert_eq!(open("<seed:think></seed:think>"), Some("<seed:think>"));
        assert_eq!(open("<|im_start|>"), None);
        assert!(ALL[0].is_open("<|im_start|>assistant\n<think>\n"));
        assert!(!ALL[0].is_open("<think>\n\n</think>\n\n"));
    }
}
