//! Reply of a model to a conversation: text and calls of tools, in the terms that all APIs share.

use super::generate::Plan;
use super::reply::{End, Usage};
use super::{ApiError, App};
use crate::engine::Stream;
use crate::text::{Delta, Finish, Generation, TokenInfo};
use crate::tools::{Parser, Piece, Syntax};

/// Reply that was checked, and can be generated.
pub(crate) struct Answer {
    pub(crate) plan: Plan,
    /// Format of the calls, and the tools that may be called.
    pub(crate) tools: Option<(&'static Syntax, Vec<String>)>,
    /// Number that no other reply has.
    pub(crate) number: u64,
}

/// Next part of one choice.
#[derive(Debug, Default)]
pub(crate) struct Part {
    /// Index of the choice.
    pub(crate) index: usize,
    /// Text and calls.
    pub(crate) pieces: Vec<Piece>,
    /// Probabilities of the tokens, if asked for.
    pub(crate) infos: Vec<TokenInfo>,
    /// Reason for the end with this part.
    pub(crate) end: Option<End>,
}

/// Choices of a reply while they are generated.
pub(crate) struct Parts<'t> {
    generation: Generation<'t>,
    parsers: Vec<Option<Parser>>,
    prompt: usize,
}

impl Answer {
    /// Creates an answer to a plan; `app` gives it its number.
    pub(crate) fn new(app: &App, plan: Plan, tools: Option<(&'static Syntax, Vec<String>)>) -> Self {
        Answer { plan, tools, number: app.random() }
    }

    /// Unique part of its ids.
    pub(crate) fn id(&self) -> String {
        format!("{:016x}", self.number)
    }

    /// Name of its model.
    pub(crate) fn model(&self) -> &str {
        &self.plan.artifact.name
    }

    /// Begins to read the choices from `stream`.
    ///
    /// # Errors
    /// [`ApiError`] if the tokenizer fails.
    pub(crate) fn parts(&self, stream: Stream) -> Result<Parts<'_>, ApiError> {
        let plan = &self.plan;
        let generation =
            Generation::new(&plan.artifact.tokenizer, stream, plan.choices(), &plan.params.stops)?;
        let (markers, parser) = match &self.tools {
            None => (&[][..], None),
            Some((syntax, names)) => (syntax.markers, Some(Parser::new(syntax, names.clone()))),
        };
        Ok(Parts {
            generation: generation.with_markers(markers),
            parsers: vec![parser; plan.choices().count()],
            prompt: plan.prompt_tokens(),
        })
    }
}

impl Parts<'_> {
    /// Waits for the next part that is not empty; `None` when all choices have ended.
    ///
    /// # Errors
    /// A job that failed.
    pub(crate) async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        while let Some(delta) = self.generation.next().await? {
            let part = self.part(delta);
            if part.end.is_some() || !part.pieces.is_empty() || !part.infos.is_empty() {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    fn part(&mut self, delta: Delta) -> Part {
        let Delta { index, text, infos, finish, .. } = delta;
        let mut pieces = match &mut self.parsers[index] {
            Some(parser) => parser.push(&text),
            None if text.is_empty() => Vec::new(),
            None => vec![Piece::Text(text)],
        };
        let end = finish.map(|finish| {
            pieces.extend(self.parsers[index].take().map(Parser::finish).unwrap_or_default());
            match finish {
                Finish::Stop(None) => End::Stop,
                Finish::Stop(Some(text)) => End::StopText(text),
                Finish::Length => End::Length,
            }
        });
        Part { index, pieces, infos, end }
    }

    /// Tokens so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage { prompt: self.prompt, cached: self.generation.cached(), new: self.generation.generated() }
    }
}
