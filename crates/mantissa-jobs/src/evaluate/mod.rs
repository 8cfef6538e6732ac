//! Evaluation of a model: perplexity and quality loss on a text, or accuracy on tasks.

mod groups;
mod job;
mod models;
mod tasks;
mod text;
mod value;

pub use job::EvaluateReport;
pub use tasks::{TaskEvaluation, TaskResult};
pub use text::TextEvaluation;
pub use value::Evaluate;
