//! A generated text: printed piece by piece, with its speed.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_model::{DecodeStream, StopReason, Tokenizer};
use serde::Serialize;

use crate::context::Context;
use crate::error::StdoutError;
use crate::terminal;

/// Result of one generation.
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) stopped: StopReason,
    pub(super) speed: Speed,
}

/// Speed of one generation.
#[derive(Clone, Copy)]
pub(super) struct Speed {
    /// Prompt tokens that were computed.
    pub(super) prompt: usize,
    /// Prompt tokens that are told: in a conversation the new ones, without the end of the turn before, which may be computed
    /// again.
    pub(super) told: usize,
    /// Time to the first token.
    pub(super) first: Duration,
    /// New tokens, and the time for those after the first.
    pub(super) new: usize,
    pub(super) rest: Duration,
}

impl Speed {
    pub(super) fn prefill(&self) -> f64 {
        rate(self.prompt, self.first)
    }

    pub(super) fn decode(&self) -> f64 {
        rate(self.new.saturating_sub(1), self.rest)
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "prefill {} tokens, {} tok/s", self.told, three_digits(self.prefill()))?;
        if self.new > 1 {
            write!(f, "; decode {} tokens, {} tok/s", self.new, three_digits(self.decode()))?;
        }
        Ok(())
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if tokens == 0 { 0.0 } else { tokens as f64 / time.as_secs_f64().max(1e-9) }
}

/// Rounds to about three significant digits, as text.
fn three_digits(x: f64) -> String {
    let decimals = if x < 10.0 { 2 } else { usize::from(x < 100.0) };
    format!("{x:.decimals$}")
}

/// Text of a generation, printed piece by piece unless the JSON report takes standard output.
pub(super) struct Writer<'t> {
    pub(super) stream: DecodeStream<'t>,
    pub(super) text: String,
    pub(super) prints: bool,
    pub(super) start: Instant,
    pub(super) first: Option<Instant>,
    pub(super) tokens: Vec<u32>,
}

impl<'t> Writer<'t> {
    /// Begins after `prompt`, whose computation starts now.
    pub(super) fn new(tokenizer: &'t Tokenizer, prompt: &[u32], context: &Context) -> Result<Self> {
        let mut stream = tokenizer.stream();
        stream.skip(prompt)?;
        let (text, prints, tokens) = (String::new(), context.prints_text(), Vec::new());
        Ok(Writer { stream, text, prints, start: Instant::now(), first: None, tokens })
    }

    pub(super) fn push(&mut self, token: u32) -> Result<()> {
        self.first.get_or_insert_with(Instant::now);
        self.tokens.push(token);
        let piece = self.stream.push(token)?;
        emit(&mut self.text, &piece, self.prints)
    }

    /// Ends the text of a prompt of which `computed` tokens were computed.
    pub(super) fn finish(self, computed: usize, stopped: StopReason) -> Result<Answer> {
        let end = Instant::now();
        let Writer { stream, mut text, prints, start, first, tokens } = self;
        emit(&mut text, &stream.finish()?, prints)?;
        let first = first.unwrap_or(end);
        let speed = Speed {
            prompt: computed,
            told: computed,
            first: first.duration_since(start),
            new: tokens.len(),
            rest: end.duration_since(first),
        };
        Ok(Answer { text, tokens, stopped, speed })
    }
}

fn emit(text: &mut String, piece: &str, prints: bool) -> Result<()> {
    text.push_str(piece);
    if prints {
        let mut out = io::stdout().lock();
        let piece = if out.is_terminal() { terminal::generated(piece) } else { piece.into() };
        out.write_all(piece.as_bytes()).and_then(|()| out.flush()).map_err(StdoutError)?;
    }
    Ok(())
}

/// Counts of proposed tokens.
#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Drafted {
    pub(super) proposed: u64,
    pub(super) accepted: u64,
}

impl Drafted {
    /// Returns the counts since `before`.
    pub(super) fn since(self, before: Drafted) -> Drafted {
        Drafted { proposed: self.proposed - before.proposed, accepted: self.accepted - before.accepted }
    }
}

/// Describes speed and proposals.
pub(super) fn told(speed: &Speed, drafted: Option<Drafted>) -> String {
    match drafted.filter(|drafted| drafted.proposed > 0) {
        None => speed.to_string(),
        Some(Drafted { proposed, accepted }) => {
            format!("{speed}; {accepted} of {proposed} proposed tokens accepted")
        }
    }
}
