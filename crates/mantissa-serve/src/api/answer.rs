//! Reply of a model to a conversation: text and calls of tools, in the terms that all APIs share.

use super::generate::Plan;
use super::reply::{End, Usage};
use super::{ApiError, App};
use crate::engine::{Progress, Stream};
use crate::reasoning::{Marks, Said, Splitter};
use crate::text::{Delta, Finish, Generation, TokenInfo};
use crate::tools::{Parser, Piece, Syntax};

/// Reply that was checked, and can be generated.
pub(crate) struct Answer {
    pub(crate) plan: Plan,
    /// Format of the calls, and the tools that may be called.
    pub(crate) tools: Option<(&'static Syntax, Vec<String>)>,
    /// Marks of thoughts to separate, and true if the prompt begins one.
    pub(crate) thoughts: Option<(&'static Marks, bool)>,
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
    /// How much of the prompt has been computed; the part has nothing else then.
    pub(crate) progress: Option<Progress>,
}

/// Choices of a reply while they are generated.
pub(crate) struct Parts<'t> {
    generation: Generation<'t>,
    splitters: Vec<Option<Splitter>>,
    parsers: Vec<Option<Parser>>,
    prompt: usize,
    /// Tokens of thoughts.
    thought: usize,
}

impl Answer {
    /// Creates an answer to a plan; `app` gives it its number.
    pub(crate) fn new(
        app: &App,
        plan: Plan,
        tools: Option<(&'static Syntax, Vec<String>)>,
        thoughts: Option<(&'static Marks, bool)>,
    ) -> Self {
        Answer { plan, tools, thoughts, number: app.random() }
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
        let generation = Generation::new(
            &plan.artifact.tokenizer,
            stream,
            plan.choices(),
            &plan.params.stops,
            plan.params.min_tokens,
        )?;
        let parser = self.tools.as_ref().map(|(syntax, names)| Parser::new(syntax, names.clone()));
        let splitter = self.thoughts.map(|(marks, opened)| Splitter::new(marks, opened));
        let markers = self.tools.iter().flat_map(|(syntax, _)| syntax.markers).copied();
        let marks = self.thoughts.iter().flat_map(|(marks, _)| [marks.open, marks.close]);
        let choices = plan.choices().count();
        Ok(Parts {
            generation: generation.with_markers(markers.chain(marks)),
            splitters: vec![splitter; choices],
            parsers: vec![parser; choices],
            prompt: plan.prompt_tokens(),
            thought: 0,
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
            let says = part.end.is_some() || part.progress.is_some();
            if says || !part.pieces.is_empty() || !part.infos.is_empty() {
                return Ok(Some(part));
            }
        }
        Ok(None)
    }

    fn part(&mut self, delta: Delta) -> Part {
        let Delta { index, text, infos, finish, tokens, progress, .. } = delta;
        let splitter = &mut self.splitters[index];
        self.thought +=
            splitter.as_ref().filter(|splitter| splitter.is_thought()).map_or(0, |_| tokens.len());
        let said = match splitter {
            Some(splitter) => splitter.push(&text),
            None => vec![Said::Text(text)],
        };
        let mut pieces = Vec::new();
        said.into_iter().for_each(|said| self.parse(index, said, &mut pieces));
        let end = finish.map(|finish| {
            let rest = self.splitters[index].take().map(Splitter::finish).unwrap_or_default();
            rest.into_iter().for_each(|said| self.parse(index, said, &mut pieces));
            pieces.extend(self.parsers[index].take().map(Parser::finish).unwrap_or_default());
            match finish {
                Finish::Stop(None) => End::Stop,
                Finish::Stop(Some(text)) => End::StopText(text),
                Finish::Length => End::Length,
            }
        });
        Part { index, pieces, infos, end, progress }
    }

    /// Looks for calls in a part of the answer; a thought has none.
    fn parse(&mut self, index: usize, said: Said, pieces: &mut Vec<Piece>) {
        match (said, &mut self.parsers[index]) {
            (Said::Thought(text), _) => pieces.push(Piece::Thought(text)),
            (Said::Text(text), Some(parser)) => pieces.extend(parser.push(&text)),
            (Said::Text(text), None) if text.is_empty() => {}
            (Said::Text(text), None) => pieces.push(Piece::Text(text)),
        }
    }

    /// Tokens so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt: self.prompt,
            cached: self.generation.cached(),
            new: self.generation.generated(),
            thought: self.thought,
            times: self.generation.times(),
        }
    }
}
