//! The prompt: from the command line or standard input, as it is or as a chat message.

use std::io::{self, IsTerminal, Read};

use anyhow::Result;
use mantissa_model::{Bos, Tokenizer};

use super::args::Args;
use crate::commands::render_chat;
use crate::context::Context;
use crate::error::BadInput;

/// A prompt and its tokens.
pub(super) struct Prompt {
    pub(super) text: String,
    /// Text as rendered by the chat template.
    pub(super) rendered: Option<String>,
    pub(super) tokens: Vec<u32>,
}

impl Prompt {
    /// Reads the prompt and tokenizes it, or the conversation rendered from it.
    pub(super) fn read(args: &Args, tokenizer: &Tokenizer, context: &Context) -> Result<Self> {
        let text = text(args, tokenizer)?;
        if args.chat && text.trim().is_empty() {
            let allowed = "a message: -p TEXT, or text on standard input";
            return Err(BadInput::new("--prompt", "an empty message of the user", allowed).into());
        }
        let of_chats = [("--system", &args.system), ("--chat-template", &args.chat_template)];
        if let Some((option, _)) = of_chats.iter().find(|(_, given)| given.is_some() && !args.chat) {
            let allowed = "--chat or --interactive with it";
            return Err(BadInput::new(*option, "a prompt that is not a chat message", allowed).into());
        }
        let conversation =
            || render_chat::conversation(&args.model, tokenizer, args.system.as_deref(), &text);
        let rendered = args.chat.then(conversation).transpose()?;
        // A chat template writes the special tokens itself.
        let bos = if rendered.is_some() { Bos::Never } else { args.bos.into() };
        let tokens = encode(rendered.as_deref().unwrap_or(&text), bos, tokenizer, context)?;
        Ok(Prompt { text, rendered, tokens })
    }
}

/// Tokenizes a text.
pub(super) fn encode(text: &str, bos: Bos, tokenizer: &Tokenizer, context: &Context) -> Result<Vec<u32>> {
    let needs = (text.len() as u64).saturating_mul(Tokenizer::ENCODING);
    context.require_more_memory("run: tokens of the prompt", needs)?;
    Ok(tokenizer.encode(text, bos)?)
}

/// Text of the prompt.
fn text(args: &Args, tokenizer: &Tokenizer) -> Result<String> {
    match args.prompt.as_deref().or(args.text.as_deref()) {
        Some("-") => {}
        Some(text) => return Ok(text.to_owned()),
        None if io::stdin().is_terminal() => {
            let allowed = "a prompt after the model, -p TEXT, --interactive, or a prompt on standard input";
            return Err(BadInput::new("--prompt", "none", allowed).into());
        }
        None => {}
    }
    let mut bytes = Vec::new();
    io::stdin().lock().take(tokenizer.max_text().saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > tokenizer.max_text() {
        return Err(tokenizer.too_long(bytes.len() as u64).into());
    }
    let mut text = String::from_utf8(bytes)
        .map_err(|_| BadInput::new("standard input", "bytes that are not UTF-8", "a UTF-8 text"))?;
    if text.ends_with('\n') {
        text.pop();
        text.truncate(text.strip_suffix('\r').map_or(text.len(), str::len));
    }
    Ok(text)
}
