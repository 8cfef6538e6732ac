//! From a checked request to jobs of an engine.

use std::sync::Arc;

use mantissa_runtime::{Constraint, Request};

use super::params::Params;
use super::preparation::Preparation;
use super::{ApiError, App, Artifact};
use crate::engine::{Caller, Job, Refused, Stream};

/// Jobs of a request, ready to be queued.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) artifact: Arc<Artifact>,
    pub(crate) params: Params,
    /// Tokens of each prompt.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// New tokens if the request names no number; `None` fills the context.
    pub(crate) default_tokens: Option<usize>,
}

impl Plan {
    /// Prompt of each choice.
    pub(crate) fn choices(&self) -> impl Iterator<Item = &[u32]> {
        let n = self.params.n;
        self.prompts.iter().flat_map(move |prompt| std::iter::repeat_n(prompt.as_slice(), n))
    }

    /// Number of tokens of all prompts.
    pub(crate) fn prompt_tokens(&self) -> usize {
        self.prompts.iter().map(Vec::len).sum()
    }

    /// Makes the jobs. `constraint` limits the tokens of each choice.
    ///
    /// # Errors
    /// Status 400 for a request outside of the limits.
    pub(crate) fn jobs(
        &self,
        app: &Preparation,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Vec<Job>, ApiError> {
        let count = self.choices().count();
        if count > app.limits.choices {
            let allowed = format!("at most {} choices over all prompts", app.limits.choices);
            return Err(ApiError::field("n", format!("{count} choices"), &allowed));
        }
        let context = self.artifact.engine.runtime().context;
        let job = |(i, prompt): (usize, &[u32])| {
            let request = self.params.request(prompt, i % self.params.n, self.default_tokens, context)?;
            let request = Request { constraint: constraint.clone(), ..request };
            let meter = Arc::clone(&app.meter);
            Ok(Job { progress: self.params.progress, meter, ..Job::new(request, self.params.deadline()) })
        };
        self.choices().enumerate().map(job).collect()
    }
}

/// Queues the jobs of a request.
///
/// # Errors
/// Status 429 or 503 if they are not queued.
pub(crate) fn submit(
    app: &App,
    artifact: &Artifact,
    jobs: Vec<Job>,
    caller: Caller,
) -> Result<Stream, ApiError> {
    artifact.engine.submit(jobs, caller).map_err(|refused| counted(app, refused))
}

/// Counts a refusal, and makes the error that says it.
pub(super) fn counted(app: &App, refused: Refused) -> ApiError {
    let error = ApiError::from(refused);
    app.metrics.refused(error.code.unwrap_or("other"));
    error
}

/// Checks tokens that a client sends.
pub(crate) fn check_tokens(artifact: &Artifact, name: &str, tokens: &[u32]) -> Result<(), ApiError> {
    let vocabulary = artifact.model.config().vocab_size;
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        Some(token) => Err(ApiError::field(name, token, &format!("tokens below {vocabulary}"))),
        None => Ok(()),
    }
}
