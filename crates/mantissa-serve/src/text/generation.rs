//! Text of the choices of one request, from the updates of an engine.

use std::time::{Duration, Instant};

use mantissa_model::{DecodeStream, StopReason, Tokenizer};
use mantissa_runtime::EventKind;

use super::{Piece, Pieces, Stops};
use crate::engine::{Ending, Failure, Progress, Stream, Update};
use crate::error::ApiError;

/// Reason for the end of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// A stop token or, if `Some`, this stop string.
    Stop(Option<String>),
    /// The token limit, the context or the time limit.
    Length,
}

/// Times of a request at work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Times {
    /// Time at which it was begun.
    pub(crate) begun: Option<Instant>,
    /// From there to the first token.
    pub(crate) prompt: Duration,
    /// From the first token to the last.
    pub(crate) new: Duration,
}

/// A token with its probability.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenInfo {
    /// The token.
    pub(crate) token: u32,
    /// Text of the token by itself.
    pub(crate) piece: Piece,
    /// Characters of the text before the token: of the prompt's text for a token of the prompt, else of the choice's.
    /// Special tokens have no text there, and the tokens of one character the same offset.
    pub(crate) offset: usize,
    /// Natural logarithm of its probability; `None` for the first of a prompt.
    pub(crate) logprob: Option<f32>,
    /// Most probable tokens: their texts and logarithms of probability.
    pub(crate) top: Vec<(u32, Piece, f32)>,
}

/// Next piece of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Index of the choice.
    pub(crate) index: usize,
    /// Probabilities of the tokens of the prompt, if asked for, with the first piece.
    pub(crate) prompt: Vec<TokenInfo>,
    /// Text, which may be empty.
    pub(crate) text: String,
    /// Tokens since the last piece.
    pub(crate) tokens: Vec<u32>,
    /// Probabilities of these tokens, if asked for.
    pub(crate) infos: Vec<TokenInfo>,
    /// Reason for the end with this piece.
    pub(crate) finish: Option<Finish>,
    /// How much of the prompt has been computed; the piece has nothing else then.
    pub(crate) progress: Option<Progress>,
}

/// A choice at work.
#[derive(Debug)]
struct Choice<'t> {
    stream: DecodeStream<'t>,
    /// Characters of the text of all tokens so far.
    chars: usize,
    stops: Stops,
    prompt: Vec<TokenInfo>,
    /// Text of the prompt's tokens with probabilities, and its characters so far.
    prompt_stream: DecodeStream<'t>,
    prompt_chars: usize,
    /// Tokens whose text is held back.
    tokens: Vec<u32>,
    infos: Vec<TokenInfo>,
    generated: usize,
    /// True for the first choice of a prompt.
    first: bool,
    ended: bool,
}

impl Choice<'_> {
    /// Makes a piece of `text` and all that was held.
    fn delta(&mut self, index: usize, text: String, finish: Option<Finish>) -> Delta {
        let [prompt, infos] = [&mut self.prompt, &mut self.infos].map(std::mem::take);
        let tokens = std::mem::take(&mut self.tokens);
        Delta { index, prompt, text, tokens, infos, finish, progress: None }
    }
}

/// Choices of one request at work.
#[derive(Debug)]
pub(crate) struct Generation<'t> {
    tokenizer: &'t Tokenizer,
    /// Texts of single tokens, from the first that is reported on.
    pieces: Option<Pieces<'t>>,
    /// Number of tokens before which no stop string ends a choice.
    least: usize,
    stream: Stream,
    choices: Vec<Choice<'t>>,
    open: usize,
    cached: usize,
    /// Times at which the first choice was begun, and of its first token and the last one of all.
    begun: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    /// Special tokens that stand in the text by their names.
    markers: Vec<(u32, &'static str)>,
}

impl<'t> Generation<'t> {
    /// Begins with the prompts of all choices, which are the jobs of `stream`. No stop string ends one before its
    /// token `least`.
    pub(crate) fn new<'p>(
        tokenizer: &'t Tokenizer,
        stream: Stream,
        prompts: impl Iterator<Item = &'p [u32]>,
        stops: &[String],
        least: usize,
    ) -> Result<Self, ApiError> {
        let mut last = None;
        let choice = |prompt: &'p [u32]| {
            let first = last.replace(prompt.as_ptr()) != Some(prompt.as_ptr());
            let mut stream = tokenizer.stream();
            stream.skip(prompt)?;
            let stops = Stops::new(stops.to_vec());
            Ok(Choice {
                stream,
                chars: 0,
                stops,
                prompt: Vec::new(),
                prompt_stream: tokenizer.stream(),
                prompt_chars: 0,
                tokens: Vec::new(),
                infos: Vec::new(),
                generated: 0,
                first,
                ended: false,
            })
        };
        let choices: Vec<_> = prompts.map(choice).collect::<Result<_, ApiError>>()?;
        let markers = Vec::new();
        Ok(Generation {
            tokenizer,
            pieces: None,
            least,
            stream,
            open: choices.len(),
            choices,
            cached: 0,
            begun: None,
            first: None,
            last: None,
            markers,
        })
    }

    /// Writes the special tokens `names` into the text.
    pub(crate) fn with_markers(mut self, names: impl Iterator<Item = &'static str>) -> Self {
        self.markers = names.filter_map(|name| Some((self.tokenizer.special_id(name)?, name))).collect();
        self
    }

    /// Tokens generated so far, over all choices.
    pub(crate) fn generated(&self) -> usize {
        self.choices.iter().map(|choice| choice.generated).sum()
    }

    /// Tokens of the prompts that were not computed, because another sequence had them.
    pub(crate) fn cached(&self) -> usize {
        self.cached
    }

    /// Times so far.
    pub(crate) fn times(&self) -> Times {
        let between = |from: Option<Instant>, to: Option<Instant>| {
            from.zip(to).map_or(Duration::ZERO, |(from, to)| to.duration_since(from))
        };
        let (prompt, new) = (between(self.begun, self.first), between(self.first, self.last));
        Times { begun: self.begun, prompt, new }
    }

    /// Waits for the next piece that has text, probabilities, progress or an end; `None` when all choices have ended.
    ///
    /// # Errors
    /// A job that failed; the others are cancelled when the generation is dropped.
    pub(crate) async fn next(&mut self) -> Result<Option<Delta>, ApiError> {
        while self.open > 0 {
            let Some((index, update)) = self.stream.next().await else {
                // The engine's thread has ended without a word.
                return Err(ApiError::failed(&Failure::Stopping));
            };
            let delta = match update {
                Update::News(EventKind::Started { cached }) => {
                    // The other choices share it with the first one.
                    if self.choices[index].first {
                        self.cached += cached;
                    }
                    None
                }
                Update::News(EventKind::PromptToken { token, logprob, top }) => {
                    let choice = &mut self.choices[index];
                    let offset = choice.prompt_chars;
                    choice.prompt_chars += choice.prompt_stream.push(token)?.chars().count();
                    let info = self.info(token, offset, logprob, &top)?;
                    self.choices[index].prompt.push(info);
                    None
                }
                Update::Begun => {
                    self.begun.get_or_insert_with(Instant::now);
                    None
                }
                Update::News(EventKind::Token { token, logprob, top }) => {
                    let now = Instant::now();
                    self.first.get_or_insert(now);
                    self.last = Some(now);
                    self.token(index, token, logprob, &top)?
                }
                // Vectors, and kinds that the engine reports as failures.
                Update::News(_) => None,
                Update::Progress(progress) => {
                    Some(Delta { index, progress: Some(progress), ..Delta::default() })
                }
                Update::Finished(ending) => self.finish(index, ending)?,
                Update::Failed(failure) => return Err(ApiError::failed(&failure)),
            };
            if let Some(delta) = delta {
                return Ok(Some(delta));
            }
        }
        Ok(None)
    }

    /// Names a token and the most probable ones.
    fn info(
        &mut self,
        token: u32,
        offset: usize,
        logprob: Option<f32>,
        top: &[(u32, f32)],
    ) -> Result<TokenInfo, ApiError> {
        let pieces = self.pieces.get_or_insert_with(|| Pieces::new(self.tokenizer));
        let named = |&(id, value): &(u32, f32)| Ok((id, pieces.piece(id)?, value));
        let top = top.iter().map(named).collect::<Result<_, ApiError>>()?;
        Ok(TokenInfo { token, piece: pieces.piece(token)?, offset, logprob, top })
    }

    /// Adds a token to a choice.
    fn token(
        &mut self,
        index: usize,
        token: u32,
        logprob: Option<f32>,
        top: &[(u32, f32)],
    ) -> Result<Option<Delta>, ApiError> {
        if self.choices[index].ended {
            return Ok(None);
        }
        let offset = self.choices[index].chars;
        let mut new = self.choices[index].stream.push(token)?;
        let mut info = logprob.map(|_| self.info(token, offset, logprob, top)).transpose()?;
        if let Some(info) = &mut info {
            info.offset += flushed(&new, &info.piece);
        }
        let choice = &mut self.choices[index];
        choice.generated += 1;
        new.extend(self.markers.iter().filter(|(id, _)| *id == token).map(|(_, name)| *name));
        choice.chars += new.chars().count();
        choice.tokens.push(token);
        choice.infos.extend(info);
        let (text, stopped) = match choice.generated >= self.least {
            true => choice.stops.push(&new),
            false => (new, false),
        };
        let finish = stopped.then(|| Finish::Stop(choice.stops.found()));
        if stopped {
            choice.ended = true;
            self.open -= 1;
            self.stream.cancel(index);
        }
        let choice = &mut self.choices[index];
        if text.is_empty() && !stopped && (choice.stops.holds() || choice.infos.is_empty()) {
            return Ok(None);
        }
        Ok(Some(choice.delta(index, text, finish)))
    }

    /// Ends a choice.
    fn finish(&mut self, index: usize, ending: Ending) -> Result<Option<Delta>, ApiError> {
        let choice = &mut self.choices[index];
        if std::mem::replace(&mut choice.ended, true) {
            return Ok(None);
        }
        self.open -= 1;
        let rest = std::mem::replace(&mut choice.stream, self.tokenizer.stream()).finish()?;
        let (mut text, stopped) = choice.stops.push(&rest);
        let finish = match (stopped, ending) {
            (true, _) => Finish::Stop(choice.stops.found()),
            (false, Ending::Stopped(StopReason::Token(_) | StopReason::Constraint)) => Finish::Stop(None),
            (false, Ending::Stopped(StopReason::Length | StopReason::Caller) | Ending::Time) => {
                Finish::Length
            }
        };
        if !stopped {
            text += &choice.stops.finish();
        }
        Ok(Some(choice.delta(index, text, Some(finish))))
    }
}

/// Number of characters in `new`, the text that a token added, before the token's own: of earlier tokens with a part of a character,
/// which turned out to be none.
fn flushed(new: &str, piece: &Piece) -> usize {
    let own = piece.text().and_then(|text| new.strip_suffix(text));
    own.map_or(0, |before| before.chars().count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_earlier_tokens_comes_before_that_of_a_token() {
        let flushed = |new: &str, own: &[u8]| flushed(new, &Piece { bytes: own.to_vec() });
        assert_eq!(flushed(" avoid", b" avoid"), 0);
        assert_eq!(flushed("\u{fffd} avoid", b" avoid"), 1);
        assert_eq!(flushed("\u{fffd}\u{fffd}x", b"x"), 2);
        // A part of a character, one that it completes, and a name that is not in the text.
        assert_eq!(flushed("", b"\xe2\x82"), 0);
        assert_eq!(flushed("\u{20ac}", b"\xac"), 0);
        assert_eq!(flushed("", b"</s>"), 0);
    }
}
