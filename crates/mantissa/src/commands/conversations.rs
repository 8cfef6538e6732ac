//! Texts of a file of JSON lines: conversations in the form of the model's chat template, and plain documents.

use std::path::Path;

use anyhow::Result;
use mantissa_model::{Bos, Message, Tokenizer, chat};
use serde::Deserialize;
use serde_json::Value;

use super::render_chat;
use crate::error::BadInput;

/// A line of the file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    /// A conversation to its end.
    Conversation { messages: Vec<Message> },
    /// A document.
    Document { text: String },
}

/// Whether `path` is of such lines, by its name.
pub fn is_of_lines(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

/// The lines of `content`, each for [`tokens`], with their numbers from 1; empty ones left out.
pub fn lines(content: &str) -> Vec<(usize, &str)> {
    content
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line))
        .filter(|(_, line)| !line.trim().is_empty())
        .collect()
}

/// The tokens of a line, up to `length`: a conversation as the template of the model in `model` writes it, special tokens included and
/// no other; a document after the BOS that the tokenizer puts there.
///
/// # Errors
/// A line of another form, a model without a template, a template that refuses the conversation.
pub fn tokens(
    (number, line): (usize, &str),
    file: &str,
    model: &Path,
    tokenizer: &Tokenizer,
    length: usize,
) -> Result<Vec<u32>> {
    let line: Line = serde_json::from_str(line).map_err(|error| {
        let allowed = "{\"messages\": [{\"role\": …, \"content\": …}, …]} or {\"text\": …}";
        BadInput::new(format!("{file}: line {number}"), error.to_string(), allowed)
    })?;
    let mut tokens = match line {
        Line::Document { text } => tokenizer.encode(&text, Bos::Auto)?,
        Line::Conversation { messages } => {
            let template = render_chat::template(model, tokenizer, "or lines of {\"text\": …}")?;
            let mut context = chat::context(&messages, tokenizer.special_tokens());
            // It has its answers.
            context["add_generation_prompt"] = Value::Bool(false);
            tokenizer.encode(&render_chat::render(model, template, &context)?, Bos::Never)?
        }
    };
    tokens.truncate(length);
    if tokens.is_empty() {
        let allowed = "a text of at least one token; remove the line";
        return Err(BadInput::new(format!("{file}: line {number}"), "no token", allowed).into());
    }
    Ok(tokens)
}
