//! Interface of what renders chat templates.

use serde_json::Value;

use super::ApiError;

/// Renders chat templates. A template comes with a model and is not trusted: the implementation bounds its time and
/// memory.
pub trait Render: Send + Sync {
    /// Renders `template` with the variables of `context`.
    ///
    /// # Errors
    /// [`RenderError`].
    fn render(&self, template: &str, context: &Value) -> Result<String, RenderError>;
}

/// Reason for a conversation without a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The template refuses the conversation.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template is at fault, or exceeds its limits.
    #[error("the chat template failed: {0}")]
    Failed(String),
}

impl From<RenderError> for ApiError {
    fn from(error: RenderError) -> Self {
        match &error {
            RenderError::Refused(_) => ApiError::bad(error.to_string()).param("messages"),
            RenderError::Failed(_) => ApiError::internal(error.to_string()).code("chat_template_failed"),
        }
    }
}
