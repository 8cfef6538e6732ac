//! Answers to the field's standing questions, with the figures of a model and a device.
//!
//! A [`Topic`] is data: the files in `explain/texts` hold the question, the lines of the answer with placeholders, and
//! the command that measures what the answer claims. Code computes the named values, for a [`Deployment`].
//! Figures come from the other modules of this crate and from `mantissa_num`; measured ones name their page.

// Layer: what an answer is about, and measurements.
mod deployment;
mod measures;
mod number;

// Layer: named values.
mod value;
mod values;

// Layer: texts.
mod expression;
mod template;

// Layer: topics.
mod corrections;
mod lists;
mod scenarios;
mod topic;

use serde::Serialize;

use value::Subject;

pub use deployment::Deployment;
pub use measures::{accumulator_error, sqnr};
pub use number::{Anatomy, AnatomyError, anatomy};
pub use topic::{Group, Topic, groups, topics};

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

impl Topic {
    /// Finds a topic by its name, in any case.
    pub fn named(name: &str) -> Option<&'static Topic> {
        topics().find(|topic| topic.name.eq_ignore_ascii_case(name))
    }

    /// Answers for a model, a device and a load; `model` is the model as a user types it, which MODEL stands for.
    pub fn explain(&'static self, deployment: &Deployment<'_>, model: &str) -> Explained {
        let typed = |text: &str| text.replace("MODEL", model);
        let corrections = self.corrections.iter().filter_map(|id| corrections::by_id(*id));
        Explained {
            topic: &self.name,
            question: &self.question,
            answer: self.lines(&Subject::new(deployment)).iter().map(|line| typed(line)).collect(),
            corrections: corrections.map(|c| format!("not \"{}\", but {}", c.said, c.right)).collect(),
            measure: typed(&self.measure),
        }
    }
}

#[cfg(test)]
mod tests;
