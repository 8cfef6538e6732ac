//! Accuracy of an output on a task.

use mantissa_eval::tasks::{Group, Score};
use serde::{Deserialize, Serialize};

/// Score of an output on a task. `score.reference` and the `reference` of each group compare it with the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskScore {
    /// Built-in task, or name of the file without its folder.
    pub task: String,
    /// SHA-256 of the task file.
    pub sha256: String,
    /// SHA-256 of the tokens of all items, which template and tokenizer decide.
    pub tokens_sha256: String,
    /// True if the chat template rendered the prompts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chat: bool,
    /// Score of all items.
    #[serde(flatten)]
    pub score: Score,
    /// Score of each group, in order of first appearance.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<Group>,
}
