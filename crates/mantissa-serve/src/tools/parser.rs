//! Calls in the text of a reply, as it is generated.

use super::json::{CallScanner, Step};
use super::syntax::{Body, Syntax};

/// Part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text that is no call.
    Text(String),
    /// Thought before the text.
    Thought(String),
    /// A call begins.
    Call {
        /// Its number in the reply, from 0.
        index: usize,
        /// Name of the tool.
        name: String,
    },
    /// More of the arguments of a call, as JSON text.
    Arguments {
        /// Number of the call.
        index: usize,
        /// The text.
        text: String,
    },
}

#[derive(Clone, Debug)]
enum State {
    /// Before any text, in a format in which a reply that begins with a brace is a call.
    Start,
    /// In text.
    Text,
    /// In text, to the end.
    Plain,
    /// After the opening text.
    Open,
    /// In the object of a call.
    Object(CallScanner),
    /// After a name that is followed by the arguments, in their object.
    Arguments(CallScanner),
    /// After a call.
    After,
}

/// Separates calls from text.
#[derive(Clone, Debug)]
pub struct Parser {
    syntax: &'static Syntax,
    names: Vec<String>,
    state: State,
    /// Text that is not decided yet.
    pending: String,
    /// Text of the call so far, to be given back as text if it is none.
    raw: String,
    index: usize,
    /// True once the call in progress was reported.
    begun: bool,
    has_arguments: bool,
}

impl Parser {
    /// Creates a parser of replies in the format `syntax` that may call the tools `names`.
    pub fn new(syntax: &'static Syntax, names: Vec<String>) -> Self {
        let state = if syntax.open.is_empty() { State::Start } else { State::Text };
        Parser {
            syntax,
            names,
            state,
            pending: String::new(),
            raw: String::new(),
            index: 0,
            begun: false,
            has_arguments: false,
        }
    }

    /// Number of calls so far.
    pub fn calls(&self) -> usize {
        self.index + usize::from(self.begun)
    }

    /// Takes the next text of the reply, which contains the format's markers, and returns what it completes.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.pending.push_str(text);
        let mut out = Vec::new();
        while self.advance(&mut out) {}
        out
    }

    /// Returns the text that was held back, at the end of the reply.
    pub fn finish(mut self) -> Vec<Piece> {
        let mut text = String::new();
        match self.state {
            State::Object(_) | State::Arguments(_) | State::Open if !self.begun => text.push_str(&self.raw),
            State::After => self.pending.clear(),
            _ => {}
        }
        text.push_str(&self.pending);
        if text.is_empty() { Vec::new() } else { vec![Piece::Text(text)] }
    }

    /// Makes one step. Returns false if more text is needed.
    fn advance(&mut self, out: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Text => self.text(out),
            State::Plain => {
                give(std::mem::take(&mut self.pending), out);
                false
            }
            State::Open => self.open(out),
            State::Object(_) | State::Arguments(_) => self.scan(out),
            State::After => self.after(),
        }
    }

    fn start(&mut self) -> bool {
        match self.pending.trim_start().chars().next() {
            None => return false,
            Some('{') => self.begin(),
            Some(_) => self.state = State::Plain,
        }
        true
    }

    /// Begins a call.
    fn begin(&mut self) {
        self.state = State::Object(CallScanner::new(self.syntax.arguments));
    }

    fn text(&mut self, out: &mut Vec<Piece>) -> bool {
        let open = self.syntax.open;
        if let Some(at) = self.pending.find(open) {
            give(self.pending[..at].trim_end().to_owned(), out);
            self.pending.drain(..at + open.len());
            self.raw = open.to_owned();
            self.state = State::Open;
            return true;
        }
        // The beginning of an opening text may stand at the end, and white space before it.
        let held =
            (1..open.len()).rev().find(|n| open.get(..*n).is_some_and(|part| self.pending.ends_with(part)));
        let end = self.pending[..self.pending.len() - held.unwrap_or(0)].trim_end().len();
        give(self.pending.drain(..end).collect(), out);
        false
    }

    fn open(&mut self, out: &mut Vec<Piece>) -> bool {
        match self.syntax.body {
            Body::Object if self.syntax.is_list => {
                let rest = self.pending.trim_start();
                if rest.is_empty() {
                    return false;
                }
                let skipped = self.pending.len() - rest.len() + usize::from(rest.starts_with('['));
                self.raw.extend(self.pending.drain(..skipped));
                self.begin();
            }
            Body::Object => self.begin(),
            Body::NameThen(between) => {
                let Some(at) = self.pending.find(between) else { return false };
                let name: String = self.pending.drain(..at + between.len()).collect();
                self.raw.push_str(&name);
                let mut scanner = CallScanner::new(self.syntax.arguments);
                // The scanner sees the object of a call with this name.
                let name = name[..at].trim();
                let head = format!(
                    "{{\"name\": {}, \"{}\": ",
                    serde_json::Value::from(name),
                    self.syntax.arguments[0]
                );
                head.chars().for_each(|c| scanner.push(c, &mut Vec::new()));
                self.state = State::Arguments(scanner);
                self.begun = true;
                self.has_arguments = false;
                out.push(Piece::Call { index: self.index, name: name.to_owned() });
            }
        }
        true
    }

    fn scan(&mut self, out: &mut Vec<Piece>) -> bool {
        let mut steps = Vec::new();
        let mut taken = 0;
        let is_object = matches!(self.state, State::Object(_));
        let (State::Object(scanner) | State::Arguments(scanner)) = &mut self.state else { return false };
        for c in self.pending.chars() {
            if !is_object && scanner.is_after_value() {
                steps.push(Step::End);
                break;
            }
            scanner.push(c, &mut steps);
            taken += c.len_utf8();
            if matches!(steps.last(), Some(Step::End | Step::Fault)) {
                break;
            }
        }
        if !is_object && scanner.is_after_value() && steps.last() != Some(&Step::End) {
            steps.push(Step::End);
        }
        self.raw.extend(self.pending.drain(..taken));
        for step in steps {
            match step {
                Step::Name(name) => {
                    if self.syntax.open.is_empty() && !self.names.contains(&name) {
                        return self.give_up(out);
                    }
                    self.begun = true;
                    self.has_arguments = false;
                    out.push(Piece::Call { index: self.index, name });
                }
                Step::Arguments(text) => {
                    self.has_arguments = true;
                    out.push(Piece::Arguments { index: self.index, text });
                }
                Step::End => {
                    if !self.has_arguments {
                        out.push(Piece::Arguments { index: self.index, text: "{}".into() });
                    }
                    self.index += 1;
                    self.begun = false;
                    self.raw.clear();
                    self.state = State::After;
                    return true;
                }
                Step::Fault => return self.give_up(out),
            }
        }
        false
    }

    /// Gives the text of a call that is none back.
    fn give_up(&mut self, out: &mut Vec<Piece>) -> bool {
        let raw = std::mem::take(&mut self.raw);
        if self.begun {
            self.index += 1;
            self.begun = false;
        } else {
            give(raw, out);
        }
        self.state = if self.syntax.open.is_empty() { State::Plain } else { State::Text };
        true
    }

    fn after(&mut self) -> bool {
        let syntax = self.syntax;
        let rest = self.pending.trim_start();
        if rest.is_empty() {
            return false;
        }
        let white = self.pending.len() - rest.len();
        let skip = if !syntax.close.is_empty() {
            if rest.len() < syntax.close.len() && syntax.close.starts_with(rest) {
                return false;
            }
            self.state = State::Text;
            if rest.starts_with(syntax.close) { syntax.close.len() } else { 0 }
        } else if syntax.is_list || syntax.open.is_empty() {
            match rest.as_bytes()[0] {
                b',' | b';' => 1,
                b'{' => {
                    self.begin();
                    0
                }
                c => {
                    self.state = if syntax.open.is_empty() { State::Plain } else { State::Text };
                    usize::from(c == b']')
                }
            }
        } else {
            self.state = State::Text;
            0
        };
        self.pending.drain(..white + skip);
        true
    }
}

/// Adds text to the pieces.
fn give(text: String, out: &mut Vec<Piece>) {
    if text.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(Piece::Text(before)) => before.push_str(&text),
        _ => out.push(Piece::Text(text)),
    }
}
