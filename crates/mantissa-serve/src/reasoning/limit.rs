//! Limit of a thought, as a constraint of the runtime.

use std::sync::Arc;

use mantissa_model::Tokenizer;
use mantissa_runtime::{Constraint, ConstraintError, TokenMask};

use super::Marks;
use crate::api::Artifact;

/// Place in a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before any text: a thought may begin.
    Before,
    /// In the thought.
    Thought,
    /// At this token of the mark that ends the thought.
    Closing(usize),
    /// In the answer.
    Answer,
}

/// Ends a thought after a number of tokens by the mark after it, and constrains only the answer.
#[derive(Clone, Debug)]
pub(crate) struct ThoughtLimit {
    artifact: Arc<Artifact>,
    marks: &'static Marks,
    place: Place,
    /// Tokens that the thought may still have; `None` for any number.
    left: Option<usize>,
    /// Tokens of the mark after a thought.
    close: Vec<u32>,
    /// Last tokens, whose text may hold a mark.
    last: Vec<u32>,
    /// Form of the answer.
    answer: Option<Box<dyn Constraint>>,
}

impl ThoughtLimit {
    /// Limits the thought of a reply to `most` tokens. `opened` is true if the prompt ends with the mark before a thought;
    /// else there must be no `answer`, which would begin with the reply. `close` holds the tokens of the mark after it.
    pub(crate) fn new(
        artifact: Arc<Artifact>,
        marks: &'static Marks,
        opened: bool,
        most: Option<usize>,
        close: Vec<u32>,
        answer: Option<Box<dyn Constraint>>,
    ) -> Self {
        let place = match (opened, most) {
            (false, _) => Place::Before,
            (true, Some(0)) => Place::Closing(0),
            (true, _) => Place::Thought,
        };
        ThoughtLimit { artifact, marks, place, left: most, close, last: Vec::new(), answer }
    }

    fn tokenizer(&self) -> &Tokenizer {
        &self.artifact.tokenizer
    }

    /// Text of the last tokens, with `token`.
    fn text(&mut self, token: u32) -> Result<String, ConstraintError> {
        self.last.push(token);
        // Each token of a mark has at least a byte of it; a few more may have none.
        let most = self.marks.open.len().max(self.marks.close.len()) + 8;
        let extra = self.last.len().saturating_sub(most);
        self.last.drain(..extra);
        self.tokenizer().decode_with_special(&self.last).map_err(|error| ConstraintError(error.to_string()))
    }

    /// Place after another token of a thought.
    fn thought(&self) -> Place {
        if self.left == Some(0) { Place::Closing(0) } else { Place::Thought }
    }
}

impl Constraint for ThoughtLimit {
    fn allows(&mut self, token: u32) -> Result<bool, ConstraintError> {
        match (self.place, &mut self.answer) {
            (Place::Closing(at), _) => Ok(self.close.get(at) == Some(&token)),
            (Place::Answer, Some(answer)) => answer.allows(token),
            _ => Ok(true),
        }
    }

    fn mask(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        match (self.place, &mut self.answer) {
            (Place::Closing(at), _) => {
                self.close.get(at).into_iter().for_each(|token| mask.set(*token, true));
            }
            (Place::Answer, Some(answer)) => answer.mask(mask)?,
            _ => mask.words_mut().fill(u32::MAX),
        }
        Ok(())
    }

    fn may_end(&mut self) -> Result<bool, ConstraintError> {
        match (self.place, &mut self.answer) {
            (Place::Closing(_), _) => Ok(false),
            (Place::Answer, Some(answer)) => answer.may_end(),
            (_, answer) => Ok(answer.is_none()),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.place = match self.place {
            Place::Before => {
                let text = self.text(token)?;
                match text.trim_start() {
                    text if text.starts_with(self.marks.open) => self.thought(),
                    text if self.marks.open.starts_with(text) => Place::Before,
                    _ => Place::Answer,
                }
            }
            Place::Thought => {
                self.left = self.left.map(|left| left.saturating_sub(1));
                if self.text(token)?.contains(self.marks.close) { Place::Answer } else { self.thought() }
            }
            Place::Closing(at) if self.close.get(at) == Some(&token) => match at + 1 {
                next if next < self.close.len() => Place::Closing(next),
                _ => Place::Answer,
            },
            Place::Closing(_) => {
                return Err(ConstraintError("expected the end of the thought, got another token".into()));
            }
            Place::Answer => {
                return self.answer.as_mut().map_or(Ok(()), |answer| answer.accept(token));
            }
        };
        Ok(())
    }

    fn is_complete(&mut self) -> Result<bool, ConstraintError> {
        match (self.place, &mut self.answer) {
            (Place::Answer, Some(answer)) => answer.is_complete(),
            _ => Ok(false),
        }
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
