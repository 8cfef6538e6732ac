//! Fields of a request about thoughts.

use std::sync::Arc;

use mantissa_model::Bos;
use mantissa_runtime::Constraint;
use serde_json::{Map, Value, json};

use super::preparation::Preparation;
use super::turn::Rendered;
use super::{ApiError, App, Artifact};
use crate::reasoning::ThoughtLimit;

/// Fields about thoughts.
#[derive(Clone, Debug)]
pub(crate) struct Thinking {
    pub(crate) format: Option<String>,
    pub(crate) budget: Option<i64>,
    pub(crate) effort: Option<String>,
}

/// Checked fields about thoughts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Thoughts {
    /// True to separate thoughts from the text.
    pub(crate) separate: bool,
    /// Most tokens of a thought.
    budget: Option<usize>,
}

impl Thinking {
    /// Checks the fields, and adds them to the variables of the chat template as far as the request does not set these.
    ///
    /// # Errors
    /// Status 400 that names the field.
    pub(crate) fn check(self, app: &App, variables: &mut Map<String, Value>) -> Result<Thoughts, ApiError> {
        let separate = match self.format.as_deref() {
            None => app.reasoning.separate,
            Some("auto" | "deepseek") => true,
            Some("none") => false,
            Some(other) => return Err(ApiError::field("reasoning_format", other, "auto, deepseek or none")),
        };
        let budget =
            match self.budget {
                None => app.reasoning.budget,
                Some(-1) => None,
                Some(tokens) => Some(usize::try_from(tokens).map_err(|_| {
                    ApiError::field("reasoning_budget", tokens, "-1 (any number) or at least 0")
                })?),
            };
        if let Some(effort) = self.effort {
            if effort == "none" {
                variables.entry("enable_thinking").or_insert(json!(false));
            }
            variables.entry("reasoning_effort").or_insert(json!(effort));
        }
        Ok(Thoughts { separate, budget })
    }
}

impl Thoughts {
    /// Limits the thought of a reply to the budget. A form of the answer begins after a thought that the prompt begins; else
    /// it begins with the reply, which has no thought then.
    ///
    /// # Errors
    /// [`ApiError`] if the tokenizer fails.
    pub(crate) fn limit(
        &self,
        app: &Preparation,
        artifact: &Arc<Artifact>,
        rendered: &Rendered,
        answer: Option<Box<dyn Constraint>>,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let (Some(marks), opened) = (rendered.marks, rendered.opened) else { return Ok(answer) };
        let needed = if opened { self.budget.is_some() || answer.is_some() } else { self.budget.is_some() };
        if !needed || (!opened && answer.is_some()) {
            return Ok(answer);
        }
        let close = app.encode(artifact, marks.close, Bos::Never)?;
        let limit = ThoughtLimit::new(Arc::clone(artifact), marks, opened, self.budget, close, answer);
        Ok(Some(Box::new(limit)))
    }
}
