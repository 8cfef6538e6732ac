//! Answers to the field's standing questions, with the figures of a model and a device.
//!
//! A [`Topic`] is data: a question, the function that computes its answer from a [`Deployment`], and the command that measures
//! what the answer claims. Figures come from the other modules of this crate and from `mantissa_num`; measured ones name
//! their page.

mod corrections;
mod formats;
mod inference;
mod measures;
mod number;
mod practice;
mod topic;
mod training;

use serde::Serialize;

pub use corrections::{CORRECTIONS, Correction, Figure};
pub use measures::{accumulator_error, sqnr};
pub use number::{Anatomy, AnatomyError, anatomy};
pub use topic::{Deployment, Topic};

/// Answer of a topic.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explained {
    /// Name of the topic.
    pub topic: &'static str,
    /// Question.
    pub question: &'static str,
    /// Lines of the answer.
    pub answer: Vec<String>,
    /// Widely repeated statements that are wrong, with what is right.
    pub corrections: Vec<String>,
    /// Command that measures it.
    pub measure: String,
}

/// Returns every topic.
pub fn topics() -> impl Iterator<Item = &'static Topic> {
    [inference::TOPICS, formats::TOPICS, training::TOPICS, practice::TOPICS].into_iter().flatten()
}

impl Topic {
    /// Finds a topic by its name, in any case.
    pub fn named(name: &str) -> Option<&'static Topic> {
        topics().find(|topic| topic.name.eq_ignore_ascii_case(name))
    }

    /// Answers for a model, a device and a load; `model` is the model as a user types it.
    pub fn explain(&self, deployment: &Deployment<'_>, model: &str) -> Explained {
        let corrections = self.corrections.iter().filter_map(|id| corrections::by_id(*id));
        Explained {
            topic: self.name,
            question: self.question,
            answer: (self.answer)(deployment),
            corrections: corrections.map(|c| format!("not \"{}\", but {}", c.said, c.right)).collect(),
            measure: self.measure.replace("MODEL", model),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::hardware::Device;
    use crate::parallel::Parallel;
    use crate::recommend::{Load, MAX_KL};
    use crate::shape::ModelShape;

    /// Questions of the guide, its mistakes, its decision tree, and the lesson's misunderstandings.
    fn asked() -> BTreeSet<String> {
        let sections = (1..=8).map(|n| format!("13.{n}"));
        let mistakes = (1..=12).map(|n| format!("14.{n}"));
        let questions = (1..=15).map(|n| format!("Q{n}"));
        let lesson = (1..=4).map(|n| format!("lesson {n}"));
        sections.chain(mistakes).chain(questions).chain(lesson).chain(["15.4".to_owned()]).collect()
    }

    #[test]
    fn every_standing_question_has_an_answer() {
        let answered: BTreeSet<String> =
            topics().flat_map(|topic| topic.answers).map(|id| (*id).to_owned()).collect();
        let missing: Vec<_> = asked().difference(&answered).cloned().collect();
        let unknown: Vec<_> = answered.difference(&asked()).cloned().collect();
        assert!(missing.is_empty() && unknown.is_empty(), "missing {missing:?}, unknown {unknown:?}");
        let names: BTreeSet<_> = topics().map(|topic| topic.name).collect();
        assert_eq!(names.len(), topics().count());
        let used: BTreeSet<u32> = topics().flat_map(|topic| topic.corrections).copied().collect();
        assert_eq!(used, (1..=32).collect());
    }

    #[test]
    fn answers_have_figures_everywhere() {
        for (model, device) in [
            ("32B", "rtx4090"),
            ("30B-A3B", "b200"),
            ("0.5B", "t4"),
            ("DeepSeek-V3", "mi300x"),
            ("8B", "v100"),
        ] {
            let (shape, device) = (ModelShape::named(model).unwrap(), Device::named(device).unwrap());
            let load = Load {
                context: 8192,
                batch: 4,
                prefill: 6144,
                decode: 1024,
                devices: 1,
                parallel: Parallel::Tensor,
                reduce_bits: 16.0,
                kv: None,
                max_kl: MAX_KL,
                memory: None,
            };
            for topic in topics() {
                let deployment = Deployment { shape: &shape, device: &device, load: &load };
                let found = topic.explain(&deployment, "demo");
                let text = found.answer.join("\n");
                assert!(
                    found.answer.len() >= 2 && text.contains(|c: char| c.is_ascii_digit()),
                    "{}: {text}",
                    topic.name
                );
                assert!(
                    !text.split(|c: char| !c.is_alphanumeric()).any(|word| ["NaN", "inf"].contains(&word)),
                    "{}: {text}",
                    topic.name
                );
                assert!(found.measure.starts_with("mantissa "), "{}", topic.name);
            }
        }
    }
}
