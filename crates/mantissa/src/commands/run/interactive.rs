//! Chat over one session: a line per message.

use std::io::{self, BufRead, IsTerminal};

use anyhow::Result;
use mantissa_jobs::embedded;
use mantissa_model::{Bos, Message, StopReason, Tokenizer, chat};
use mantissa_store::convention::ModelFiles;

use super::answer::{Answer, told};
use super::args::{Args, Engine, longest_turn, options, sampling};
use super::fast::{Loaded, Session};
use super::{prompt, reference};
use crate::commands::render_chat;
use crate::context::Context;
use crate::error::BadInput;
use crate::interrupt::{self, Asking};

/// Lines that are commands, with their meaning; any other line is a message.
const COMMANDS: [(&[&str], &str, Line); 3] = [
    (&["/exit", "/bye", "/quit"], "end the conversation (so does the end of input)", Line::End),
    (&["/clear"], "forget all messages but the system's", Line::Clear),
    (&["/help", "/?"], "list these commands", Line::Help),
];
/// Command that sets the system message, before its text.
const SYSTEM: &str = "/system";
/// Command that sets the temperature, before its value.
const SET: &str = "/set temperature";
/// Hint on how to leave, after Ctrl-C.
const LEAVE: &str = "Ctrl-C again or /bye ends the conversation";
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
    let hint = "leave out --interactive, or name one: --chat-template NAME";
    let template = render_chat::template(args.model.named(), tokenizer, hint)?;
    let limit = args.longest(files, context)?;
    let terminal = io::stdin().is_terminal();
    let mut sampling = sampling(args, files, context);
    let (prompt, longest) = longest_turn(args, sampling, limit);
    let sizes = (prompt, &longest);
    let loaded = match engine {
        Engine::Fast => Some(Loaded::load(args, files, tokenizer, sizes, context)?),
        Engine::Reference => None,
    };
    let decoder = match &loaded {
        None => Some(reference::load(args, prompt, limit, context)?),
        Some(_) => None,
    };
    let mut session = loaded.as_ref().map(Loaded::session).transpose()?;
    loaded.iter().for_each(|loaded| context.note(&loaded.memory()));
    if args.model.is_embedded() {
        context.note(embedded::ABOUT);
    }
    if terminal {
        context.note("a message per line; /help lists commands, /bye ends the conversation");
    }
    let mut conversation = Conversation::new(args, template, tokenizer, limit);
    // For the whole conversation: a signal between an answer and the next question must not end it.
    let asking = terminal.then(|| interrupt::asking(LEAVE));
    loop {
        let line = match read(asking.as_ref())? {
            Line::Message(line) => line,
            Line::Clear => {
                conversation.clear();
                context.note("the conversation begins anew");
                continue;
            }
            Line::Help => {
                help().iter().for_each(|line| context.note(line));
                continue;
            }
            Line::Temperature(temperature) => {
                sampling.temperature = temperature;
                context.note(&format!("temperature {temperature} from the next answer on"));
                continue;
            }
            Line::System(text) => {
                conversation.set_system(text);
                context.note("another system message from the next answer on; /clear forgets the others");
                continue;
            }
            Line::Unknown(word) => {
                context.note(&unknown(&word));
                continue;
            }
            Line::End => return Ok(()),
        };
        let (tokens, new) = conversation.ask(line, context)?;
        let before = session.as_ref().and_then(Session::drafted).unwrap_or_default();
        let options = options(args, sampling, (tokens.len(), limit), context);
        let mut answer = match (&mut session, &decoder) {
            (Some(session), _) => session.answer(tokenizer, &tokens, &options, context)?,
            (None, Some(decoder)) => reference::answer(decoder, tokenizer, &tokens, &options, context)?,
            (None, None) => return Ok(()),
        };
        crate::output::to_stdout(|out| writeln!(out))?;
        answer.speed.told = new;
        let drafted = session.as_ref().and_then(Session::drafted).map(|now| now.since(before));
        context.note(&told(&answer.speed, drafted));
        match answer.stopped {
            StopReason::Caller => context.note(&format!("stopped; {LEAVE}")),
            StopReason::Length => args.note_length((tokens.len(), answer.tokens.len()), limit, context),
            _ => {}
        }
        conversation.answered(tokens, answer);
    }
}

/// A conversation and the tokens of its last turn.
struct Conversation<'a> {
    args: &'a Args,
    template: &'a str,
    tokenizer: &'a Tokenizer,
    /// Most tokens of the conversation.
    limit: usize,
    messages: Vec<Message>,
    /// Conversation up to the last answer, as rendered, and its tokens.
    held: (String, Vec<u32>),
    rendered: String,
}

impl<'a> Conversation<'a> {
    fn new(args: &'a Args, template: &'a str, tokenizer: &'a Tokenizer, limit: usize) -> Self {
        let messages = args.system.iter().map(|text| Message::new("system", text)).collect();
        let (held, rendered) = Default::default();
        Conversation { args, template, tokenizer, limit, messages, held, rendered }
    }

    /// Number of messages of the system: 0 or 1, before all others.
    fn of_system(&self) -> usize {
        usize::from(self.messages.first().is_some_and(|message| message.role == "system"))
    }

    /// Forgets all messages but the system's.
    fn clear(&mut self) {
        self.messages.truncate(self.of_system());
        (self.held, self.rendered) = Default::default();
    }

    /// Replaces the system's message.
    fn set_system(&mut self, text: String) {
        let before = self.of_system();
        self.messages.splice(..before, [Message::new("system", text)]);
        (self.held, self.rendered) = Default::default();
    }

    /// Adds a message of the user and returns the tokens of the conversation, and the number of those that are new. If they leave no room for an answer, the
    /// oldest messages go until a quarter of the context is free.
    fn ask(&mut self, line: String, context: &Context) -> Result<(Vec<u32>, usize)> {
        self.messages.push(Message::new("user", line));
        let room = self.args.room(self.limit);
        let mut tokens = self.tokens(context)?;
        if tokens.0.len() + room <= self.limit {
            return Ok(tokens);
        }
        let first = self.of_system();
        let before = self.messages.len();
        while tokens.0.len() + room > self.limit - self.limit / 4 && self.messages.len() > first + 1 {
            self.messages.drain(first..first + 2);
            tokens = self.tokens(context)?;
        }
        if self.messages.len() < before {
            let (dropped, limit) = (before - self.messages.len(), self.limit);
            context.note(&format!(
                "context of {limit} tokens is full: the oldest {dropped} messages were left out"
            ));
        }
        Ok(tokens)
    }

    /// Renders the conversation and tokenizes it; returns the tokens, and the number of those that are new. Tokens of earlier turns stay those that the model generated, even if
    /// their text has others, because those are in its cache.
    fn tokens(&mut self, context: &Context) -> Result<(Vec<u32>, usize)> {
        let variables = chat::context(&self.messages, self.tokenizer.special_tokens());
        self.rendered = render_chat::render(self.args.model.named(), self.template, &variables)?;
        let encode = |text: &str| prompt::encode(text, Bos::Never, self.tokenizer, context);
        let anew = encode(&self.rendered)?;
        let Some(rest) = self.rendered.strip_prefix(&self.held.0).filter(|_| !self.held.1.is_empty()) else {
            let new = anew.len();
            return Ok((anew, new));
        };
        let rest = encode(rest)?;
        let joined = [self.held.1.as_slice(), &rest].concat();
        // Some tokenizers begin every text with a space.
        let same =
            self.tokenizer.decode_with_special(&joined)? == self.tokenizer.decode_with_special(&anew)?;
        Ok((if same { joined } else { anew }, rest.len()))
    }

    /// Adds the answer to `prompt`.
    fn answered(&mut self, mut prompt: Vec<u32>, answer: Answer) {
        if answer.tokens.is_empty() && answer.stopped == StopReason::Caller {
            // Stopped before its first token: there was no turn.
            self.messages.pop();
            return;
        }
        prompt.extend(&answer.tokens);
        self.held = (format!("{}{}", self.rendered, answer.text), prompt);
        self.messages.push(Message::new("assistant", answer.text));
    }
}

/// A line of the user.
#[derive(Clone)]
enum Line {
    Message(String),
    Clear,
    Help,
    End,
    /// The system message of the next answers.
    System(String),
    /// The sampling temperature of the next answers.
    Temperature(f32),
    /// A word that looks like a command and is none.
    Unknown(String),
}

/// Describes the commands, one per line.
fn help() -> Vec<String> {
    let set = format!("{SET} T: sample the next answers at temperature T; 0 is greedy");
    let named = COMMANDS.iter().map(|(words, meaning, _)| format!("{}: {meaning}", words.join(", ")));
    let system = format!("{SYSTEM} TEXT: answer under this system message from now on");
    named.chain([system, set]).collect()
}

/// Reads the next line that is not empty. Asks a person for it.
fn read(asking: Option<&Asking>) -> Result<Line> {
    loop {
        if asking.is_some() {
            eprint!("{}", interrupt::PROMPT);
        }
        let mut line = String::new();
        let read = io::Read::take(io::stdin().lock(), LINE).read_line(&mut line)?;
        asking.inspect(|asking| asking.heard());
        if read == 0 {
            return Ok(Line::End);
        }
        if let Some(line) = parse(&line) {
            return Ok(line);
        }
    }
}

/// Returns what a line asks for; `None` if it is empty. A space before the slash makes a message of what would be a command.
fn parse(line: &str) -> Option<Line> {
    let text = line.trim();
    let word = text.split_whitespace().next()?;
    if let Some((.., command)) = COMMANDS.iter().find(|(words, ..)| words.contains(&text)) {
        return Some(command.clone());
    }
    let system = text.strip_prefix(SYSTEM).filter(|text| text.starts_with(char::is_whitespace));
    if let Some(system) = system {
        return Some(Line::System(system.trim().to_owned()));
    }
    let temperature = text.strip_prefix(SET).and_then(|value| value.trim().parse::<f32>().ok());
    if let Some(temperature) = temperature.filter(|t| (0.0..=100.0).contains(t)) {
        return Some(Line::Temperature(temperature));
    }
    let name = line.strip_prefix('/').and_then(|_| word.strip_prefix('/'));
    let is_command = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphabetic());
    if name.is_some_and(is_command) {
        return Some(Line::Unknown(text.to_owned()));
    }
    Some(Line::Message(text.to_owned()))
}

/// Says that `text` is no command.
fn unknown(text: &str) -> String {
    let word = text.split_whitespace().next().unwrap_or_default();
    let known = COMMANDS.iter().any(|(words, ..)| words.contains(&word));
    let what = match known {
        true => format!("{word} takes no more words"),
        false => format!("unknown command {word}"),
    };
    format!("{what}; /help lists commands, and a space before the slash makes it a message")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn message(line: &str) -> Option<String> {
        match parse(line)? {
            Line::Message(text) => Some(text),
            _ => None,
        }
    }

    #[test]
    fn words_after_a_slash_are_commands_and_paths_are_text() {
        assert!(matches!(parse("/bye\n"), Some(Line::End)));
        assert!(matches!(parse(" /help \r\n"), Some(Line::Help)));
        assert!(parse(" \n").is_none());
        for text in ["/usr/bin/env is a path", "// a comment", "/ alone", "/2 of it", "a /bye", "/naïve?"] {
            assert_eq!(message(text).unwrap(), text);
        }
        assert_eq!(message(" /set\n").unwrap(), "/set");
        let said = |line: &str| match parse(line) {
            Some(Line::Unknown(text)) => unknown(&text),
            _ => String::new(),
        };
        for (line, set) in [("/set temperature 0.7\n", 0.7), ("/set temperature 0\n", 0.0)] {
            assert!(matches!(parse(line), Some(Line::Temperature(t)) if t == set), "{line}");
        }
        assert!(matches!(parse("/set temperature warm\n"), Some(Line::Unknown(_))));
        assert!(said("/set system x\n").starts_with("unknown command /set; /help lists commands"));
        assert!(matches!(parse("/system Be brief.\n"), Some(Line::System(text)) if text == "Be brief."));
        assert!(said("/system\n").starts_with("unknown command /system; "));
        assert!(said("/exti\n").starts_with("unknown command /exti; "));
        assert!(said("/clear it\n").starts_with("/clear takes no more words; "));
    }
}
