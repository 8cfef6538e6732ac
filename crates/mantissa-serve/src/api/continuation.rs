//! Continuation of one text in the terms that replies share: no conversation, no tools, no thoughts.

use std::sync::Arc;

use mantissa_model::Bos;
use serde::Deserialize;

use super::answer::Answer;
use super::body::Sampling;
use super::generate::{Plan, check_tokens};
use super::preparation::{Preparation, prepare};
use super::{ApiError, App, Artifact};
use crate::engine::{Caller, Job};

/// Request without fields of its own beside those of sampling and form.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Nothing {}

/// Piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PromptPart {
    /// A text.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// Tokenizes a prompt of pieces: the first text has the tokens that begin one.
pub(super) fn tokens(
    app: &Preparation,
    artifact: &Artifact,
    prompt: &[PromptPart],
) -> Result<Vec<u32>, ApiError> {
    let mut all = Vec::new();
    for (i, part) in prompt.iter().enumerate() {
        match part {
            PromptPart::Text(text) => {
                let bos = if i == 0 { Bos::Auto } else { Bos::Never };
                all.extend(app.encode(artifact, text, bos)?);
            }
            PromptPart::Tokens(tokens) => {
                check_tokens(artifact, "prompt", tokens)?;
                all.extend(tokens);
            }
        }
    }
    Ok(all)
}

/// Checks a request to continue `prompt`, and makes its job.
///
/// # Errors
/// Status 400 that names the field.
pub(super) async fn check(
    app: &Arc<App>,
    caller: Caller,
    artifact: Arc<Artifact>,
    prompt: Vec<PromptPart>,
    sampling: Sampling<Nothing>,
) -> Result<(Answer, Vec<Job>), ApiError> {
    let Sampling { sampled, form, bytes, .. } = sampling;
    prepare(app, caller, bytes, move |app| {
        let params = sampled.check(&app.limits, &artifact, app.random())?;
        app.check_room(&artifact, params.n)?;
        let prompts = vec![tokens(app, &artifact, &prompt)?];
        let grammar = form.grammar()?;
        let constraint =
            grammar.map(|(grammar, field)| app.compile(&artifact, &grammar, field)).transpose()?;
        let plan = Plan { artifact, params, prompts, default_tokens: None };
        let jobs = plan.jobs(app, constraint)?;
        Ok((Answer::new(app, plan, None, None), jobs))
    })
    .await
}
