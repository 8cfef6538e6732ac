//! Limit of a thought, as a constraint of the runtime.

use std::sync::Arc;
use std::time::Duration;

use mantissa_model::Tokenizer;
use mantissa_runtime::{Constraint, ConstraintError, Offer, TokenMask, Verdict};

use super::Marks;
use crate::artifact::Artifact;

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

impl ThoughtLimit {
    /// Advances by a token that may follow, outside of a form of the answer.
    fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
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
            Place::Closing(at) if at + 1 < self.close.len() => Place::Closing(at + 1),
            Place::Closing(_) | Place::Answer => Place::Answer,
        };
        Ok(())
    }
}

impl Constraint for ThoughtLimit {
    fn offer(&mut self, offer: Offer, mask: &mut TokenMask) -> Result<Verdict, ConstraintError> {
        if let (Place::Answer, Some(answer)) = (self.place, &mut self.answer) {
            return answer.offer(offer, mask);
        }
        let closes = match self.place {
            Place::Closing(at) => self.close.get(at).copied(),
            _ => None,
        };
        // A form of the answer is not ended by a thought.
        let may_end = closes.is_none() && self.answer.is_none();
        match offer {
            Offer::End if may_end => return Ok(Verdict::Taken { complete: true }),
            Offer::Token(token) if closes.is_none_or(|close| close == token) => {
                self.advance(token)?;
                return Ok(Verdict::Taken { complete: false });
            }
            _ => {}
        }
        match closes {
            Some(token) => mask.set(token, true),
            None => mask.words_mut().fill(u32::MAX),
        }
        Ok(Verdict::Refused { may_end })
    }

    fn wait(&mut self, patience: Duration) -> bool {
        self.answer.as_mut().is_none_or(|answer| answer.wait(patience))
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}
