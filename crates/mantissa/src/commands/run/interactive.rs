//! Chat over one session: a line per message.

use std::io::{self, BufRead, IsTerminal};

use anyhow::Result;
use mantissa_model::{Bos, Message, Tokenizer, chat};
use mantissa_store::convention::ModelFiles;

use super::fast::{Loaded, Session};
use super::{Args, Engine, options, prompt, reference, told};
use crate::commands::{model, render_chat};
use crate::context::Context;
use crate::error::BadInput;

/// Word that ends the conversation.
const EXIT: &str = "/exit";
/// Longest message in bytes.
const LINE: u64 = 1 << 20;

/// Runs a conversation until the end of input.
pub(super) fn run(
    args: &Args,
    engine: Engine,
    files: &ModelFiles,
    tokenizer: &Tokenizer,
    context: &Context,
) -> Result<()> {
    if !context.prints_text() {
        return Err(BadInput::new("--interactive", "--json", "one of both").into());
    }
    let hint = "fix: leave out --interactive";
    let template = render_chat::template(args.model.named(), tokenizer, hint)?;
    let limit = model::context_length(files)?.min(args.context);
    let terminal = io::stdin().is_terminal();
    let loaded = match engine {
        Engine::Fast => Some(Loaded::load(args, files, tokenizer, context)?),
        Engine::Reference => None,
    };
    let decoder = match &loaded {
        None => Some(reference::load(args, limit.saturating_sub(args.n), limit, context)?.decoder),
        Some(_) => None,
    };
    let longest = options(args, 0, limit, context);
    let mut session = match &loaded {
        Some(loaded) => Some(loaded.session(args, limit - longest.max_new_tokens, &longest, context)?),
        None => None,
    };
    let mut messages: Vec<Message> = args.system.iter().map(|text| Message::new("system", text)).collect();
    while let Some(line) = read(terminal)? {
        messages.push(Message::new("user", line));
        let rendered = render_chat::render(
            args.model.named(),
            template,
            &chat::context(&messages, tokenizer.special_tokens()),
        )?;
        let tokens = prompt::encode(&rendered, Bos::Never, tokenizer, context)?;
        let options = options(args, tokens.len(), limit, context);
        let answer = match (&mut session, &decoder) {
            (Some(session), _) => session.answer(tokenizer, &tokens, &options, context)?,
            (None, Some(decoder)) => reference::answer(decoder, tokenizer, &tokens, &options, context)?,
            (None, None) => return Ok(()),
        };
        crate::output::to_stdout(|out| writeln!(out))?;
        context.note(&told(&answer.speed, session.as_ref().and_then(Session::drafted)));
        messages.push(Message::new("assistant", answer.text));
    }
    Ok(())
}

/// Reads the next message that is not empty; `None` at the end. Asks for it on a terminal.
fn read(terminal: bool) -> Result<Option<String>> {
    loop {
        if terminal {
            eprint!("> ");
        }
        let mut line = String::new();
        let read = io::Read::take(io::stdin().lock(), LINE).read_line(&mut line)?;
        let text = line.trim();
        if read == 0 || text == EXIT {
            return Ok(None);
        }
        if !text.is_empty() {
            return Ok(Some(text.to_owned()));
        }
    }
}
