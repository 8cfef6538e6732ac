//! Reads JSON Lines samples: conversations, rendered with the chat template, and plain documents.

use std::path::Path;

use mantissa_model::{Bos, Message, Tokenizer, chat};
use mantissa_store::{TextFile, TextPart};
use serde::Deserialize;
use serde_json::Value;

use crate::chat::{render, template};
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;
use crate::text::bytes;

/// Bytes of memory per byte of a line while its JSON is parsed and rendered; messages can be as short as 30
/// bytes.
const PER_BYTE: u64 = 24;

/// Line of the file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    /// Complete conversation.
    Conversation { messages: Vec<Message> },
    /// Plain document.
    Document { text: String },
}

/// True if the file name ends in `.jsonl`.
pub fn is_of_lines(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

/// Maximum line length in bytes, more than any tokenizer accepts.
const MAX_LINE: u64 = 64 << 20;

/// Non-blank lines of a file. A file is read twice, first to count; a pipe can be read only once and is held
/// in memory.
pub struct Lines<'a> {
    path: &'a Path,
    held: Option<String>,
    /// Number of lines.
    pub count: usize,
}

impl<'a> Lines<'a> {
    /// Counts the lines of `path`.
    ///
    /// # Errors
    /// An unreadable file; a line or pipe that does not fit into memory.
    pub fn count(path: &'a Path, host: &Host) -> Result<Self> {
        let file = TextFile::open(path)?;
        let mut lines = Lines { path, held: None, count: 0 };
        if file.size().is_none() {
            let left = host.memory_left();
            let text = file.whole(left)?;
            let beyond = || host.over_memory(&path.display().to_string(), left.saturating_add(1), left);
            lines.held = Some(text.ok_or_else(beyond)?);
        }
        let mut count = 0;
        lines.read(host, |_, _| {
            count += 1;
            Ok(true)
        })?;
        Ok(Lines { count, ..lines })
    }

    /// Passes the lines at `places` (ascending indices among non-blank lines) to `each`, with their line
    /// numbers from 1.
    ///
    /// # Errors
    /// As [`count`](Self::count), and errors of `each`.
    pub fn each(
        &self,
        places: &[usize],
        host: &Host,
        mut each: impl FnMut(usize, &str) -> Result<()>,
    ) -> Result<()> {
        let (mut places, mut at) = (places.iter().copied().peekable(), 0);
        self.read(host, |number, line| {
            while places.next_if_eq(&at).is_some() {
                each(number, line)?;
            }
            at += 1;
            Ok(places.peek().is_some())
        })
    }

    /// Passes every non-blank line to `each` until it returns that it has enough.
    fn read(&self, host: &Host, mut each: impl FnMut(usize, &str) -> Result<bool>) -> Result<()> {
        let numbered = |number: usize| number + 1;
        if let Some(text) = &self.held {
            for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                if !each(numbered(i), line)? {
                    break;
                }
            }
            return Ok(());
        }
        let (mut file, left) = (TextFile::open(self.path)?, host.memory_left());
        for i in 0.. {
            match file.part("\n", left.min(MAX_LINE))? {
                TextPart::End => break,
                TextPart::Text(line) if line.trim().is_empty() => {}
                TextPart::Text(line) if each(numbered(i), line.strip_suffix('\r').unwrap_or(line))? => {}
                TextPart::Text(_) => break,
                TextPart::TooLong => return Err(self.too_long(numbered(i), left, host)),
            }
        }
        Ok(())
    }

    fn too_long(&self, number: usize, left: u64, host: &Host) -> JobError {
        let line = format!("{}: line {number}", self.path.display());
        if left < MAX_LINE {
            return host.over_memory(&line, left.saturating_add(1), left).into();
        }
        let most = bytes(MAX_LINE);
        BadInput::new(line, format!("more than {most}"), format!("at most {most}")).into()
    }
}

/// Tokenizes a line, cut to `length` tokens. A conversation is rendered with the chat template of `model`,
/// whose special tokens are the only ones; a document gets the tokenizer's BOS.
///
/// # Errors
/// A line of another form, a model without a chat template, a template that refuses the conversation.
pub fn tokens(
    (number, line): (usize, &str),
    file: &str,
    model: &Path,
    tokenizer: &Tokenizer,
    length: usize,
    host: &Host,
) -> Result<Vec<u32>> {
    let place = format!("{file}: line {number}");
    let affordable = |bytes: usize, per_byte: u64| {
        host.require_more_memory(&place, (bytes as u64).saturating_mul(per_byte))
    };
    affordable(line.len(), PER_BYTE)?;
    let line: Line = serde_json::from_str(line).map_err(|error| {
        let allowed = "{\"messages\": [{\"role\": …, \"content\": …}, …]} or {\"text\": …}";
        // The place has the line of the file.
        let found = error.to_string().replace(" at line 1 column ", " at column ");
        BadInput::new(place.clone(), found, allowed)
    })?;
    let (text, bos) = match line {
        Line::Document { text } => (text, Bos::Auto),
        Line::Conversation { messages } => (conversation(&messages, model, tokenizer, host)?, Bos::Never),
    };
    affordable(text.len(), Tokenizer::ENCODING)?;
    let mut tokens = tokenizer.encode(&text, bos)?;
    tokens.truncate(length);
    if tokens.is_empty() {
        return Err(BadInput::new(place, "no token", "a text of at least one token").into());
    }
    tokens.shrink_to_fit();
    Ok(tokens)
}

/// Renders a complete conversation with the chat template of `model`.
fn conversation(messages: &[Message], model: &Path, tokenizer: &Tokenizer, host: &Host) -> Result<String> {
    let template = template(model, tokenizer, "fix: use lines of {\"text\": …}")?;
    let mut conversation = chat::context(messages, tokenizer.special_tokens());
    // The conversation already has its answers.
    conversation["add_generation_prompt"] = Value::Bool(false);
    render(model, template, &conversation, host.chat(model)?)
}
