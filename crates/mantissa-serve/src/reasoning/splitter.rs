//! Thought and answer in the text of a reply, as it is generated.

use super::Marks;

/// Part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Part of the thought.
    Thought(String),
    /// Part of the answer.
    Text(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before any text: a mark may come.
    Before,
    /// In the thought, before and after its first text.
    Opened,
    Thought,
    /// After the thought, before the answer.
    Closed,
    /// In the answer, to the end.
    Answer,
}

/// Separates the thought of a reply from the answer. White space around both is left out.
#[derive(Clone, Debug)]
pub(crate) struct Splitter {
    marks: &'static Marks,
    state: State,
    /// Text that is not decided yet.
    pending: String,
}

impl Splitter {
    /// Begins a reply; `opened` is true if the prompt ends with the mark before a thought.
    pub(crate) fn new(marks: &'static Marks, opened: bool) -> Self {
        let state = if opened { State::Opened } else { State::Before };
        Splitter { marks, state, pending: String::new() }
    }

    /// True if the reply is in its thought.
    pub(crate) fn is_thought(&self) -> bool {
        matches!(self.state, State::Opened | State::Thought)
    }

    /// Takes the next text of the reply, which contains the marks, and returns what it completes.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Said> {
        if self.state == State::Answer {
            return if text.is_empty() { Vec::new() } else { vec![Said::Text(text.to_owned())] };
        }
        self.pending.push_str(text);
        let mut out = Vec::new();
        while self.advance(&mut out) {}
        out
    }

    /// Returns the text that was held back, at the end of the reply.
    pub(crate) fn finish(self) -> Vec<Said> {
        let is_thought = self.is_thought();
        match self.pending.trim_end() {
            "" => Vec::new(),
            thought if is_thought => vec![Said::Thought(thought.to_owned())],
            _ => vec![Said::Text(self.pending)],
        }
    }

    /// Makes one step. Returns false if more text is needed.
    fn advance(&mut self, out: &mut Vec<Said>) -> bool {
        match self.state {
            State::Before => {
                let text = self.pending.trim_start();
                if let Some(rest) = text.strip_prefix(self.marks.open) {
                    self.pending = rest.to_owned();
                    self.state = State::Opened;
                } else if self.marks.open.starts_with(text) {
                    return false;
                } else {
                    self.state = State::Answer;
                }
            }
            State::Opened => {
                self.skip_space();
                if self.pending.is_empty() {
                    return false;
                }
                self.state = State::Thought;
            }
            State::Thought => return self.think(out),
            State::Closed => {
                self.skip_space();
                if self.pending.is_empty() {
                    return false;
                }
                self.state = State::Answer;
            }
            State::Answer => {
                let text = std::mem::take(&mut self.pending);
                if !text.is_empty() {
                    out.push(Said::Text(text));
                }
                return false;
            }
        }
        true
    }

    /// Removes the white space that begins the text.
    fn skip_space(&mut self) {
        let space = self.pending.len() - self.pending.trim_start().len();
        self.pending.drain(..space);
    }

    /// Gives the part of the thought that no mark can end any more.
    fn think(&mut self, out: &mut Vec<Said>) -> bool {
        let close = self.marks.close;
        let (end, rest) = match self.pending.find(close) {
            Some(at) => (at, at + close.len()),
            None => {
                let begins = |n: &usize| close.get(..*n).is_some_and(|part| self.pending.ends_with(part));
                let held = (1..close.len()).rev().find(begins).unwrap_or(0);
                (self.pending.len() - held, 0)
            }
        };
        let kept = self.pending[..end].trim_end().len();
        if kept > 0 {
            out.push(Said::Thought(self.pending[..kept].to_owned()));
        }
        if rest > 0 {
            self.pending.drain(..rest);
            self.state = State::Closed;
            return true;
        }
        self.pending.drain(..kept);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::ALL;
    use super::*;

    /// Splits a text that comes in pieces of `size` characters; returns thought and answer.
    fn split(text: &str, opened: bool, size: usize) -> [String; 2] {
        let mut splitter = Splitter::new(&ALL[0], opened);
        let characters: Vec<char> = text.chars().collect();
        let mut all: Vec<Said> = Vec::new();
        for piece in characters.chunks(size) {
            all.extend(splitter.push(&piece.iter().collect::<String>()));
        }
        all.extend(splitter.finish());
        let mut out = [String::new(), String::new()];
        for said in all {
            match said {
                Said::Thought(text) => out[0] += &text,
                Said::Text(text) => out[1] += &text,
            }
        }
        out
    }

    #[test]
    fn a_thought_is_separated_however_it_comes() {
        for size in 1..9 {
            for (text, opened, expected) in [
                ("<think>\nI see. é\n</think>\n\nYes. ", false, ["I see. é", "Yes. "]),
                ("\nI see <b> a\n </think>\n\nYes", true, ["I see <b> a", "Yes"]),
                ("<think>\n\n</think>\n\nYes", false, ["", "Yes"]),
                (" No <think> here</think>", false, ["", " No <think> here</think>"]),
                ("<thin", false, ["", "<thin"]),
                ("cut off </thi", true, ["cut off </thi", ""]),
                ("", true, ["", ""]),
                ("a</think>b</think>", true, ["a", "b</think>"]),
            ] {
                assert_eq!(split(text, opened, size), expected.map(String::from), "{text:?} by {size}");
            }
        }
    }
}
