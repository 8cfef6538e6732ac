//! Counts of tokens in responses.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct Usage {
    /// Tokens of the prompts.
    prompt_tokens: usize,
    /// Tokens generated, over all choices.
    completion_tokens: usize,
    /// Their sum.
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

/// Generated tokens by kind.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct CompletionDetails {
    /// Tokens of thoughts.
    reasoning_tokens: usize,
}

/// Tokens of the prompts by kind.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
struct PromptDetails {
    /// Tokens that were not computed, because another sequence had them.
    cached_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
            completion_tokens_details: None,
        }
    }

    /// Adds the number of tokens of thoughts, if there are any.
    pub(crate) fn with_thought(self, reasoning_tokens: usize) -> Self {
        let details = (reasoning_tokens > 0).then_some(CompletionDetails { reasoning_tokens });
        Usage { completion_tokens_details: details, ..self }
    }
}

/// Options of a streamed response.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// True for a last event with the usage.
    #[serde(default)]
    include_usage: Option<bool>,
}

/// True if the usage is wanted.
pub(crate) fn wants_usage(options: Option<StreamOptions>) -> bool {
    options.and_then(|options| options.include_usage).unwrap_or(false)
}
