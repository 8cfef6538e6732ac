//! Reads the JSON object of a call while it is generated.

/// Progress of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The name of the tool.
    Name(String),
    /// A piece of the arguments, as JSON text.
    Arguments(String),
    /// The object is complete.
    End,
    /// The text is no such object.
    Fault,
}

/// Place in the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the opening brace.
    Start,
    /// Before a key, or the closing brace.
    Key,
    /// In a key.
    InKey,
    /// Before the colon.
    Colon,
    /// Before a value.
    Value,
    /// In a value.
    InValue,
    /// After a value.
    Next,
    Done,
}

/// Scanner of `{"name": …, "arguments": {…}}`, in any order, with other keys ignored.
#[derive(Clone, Debug)]
pub(super) struct CallScanner {
    /// Keys of the arguments.
    arguments: &'static [&'static str],
    place: Place,
    /// Text of the key or value that is being read.
    text: String,
    key: String,
    nesting: Nesting,
    named: bool,
    /// Arguments that came before the name.
    early: String,
}

/// Nesting within a value.
#[derive(Clone, Copy, Debug, Default)]
struct Nesting {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Takes a character of a value. Returns true if an object, array or string is complete with it.
    fn take(&mut self, c: char) -> bool {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return !self.in_string && self.depth == 0;
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

impl CallScanner {
    pub(super) fn new(arguments: &'static [&'static str]) -> Self {
        CallScanner {
            arguments,
            place: Place::Start,
            text: String::new(),
            key: String::new(),
            nesting: Nesting::default(),
            named: false,
            early: String::new(),
        }
    }

    /// Takes a character; adds what it completes to `out`.
    pub(super) fn push(&mut self, c: char, out: &mut Vec<Step>) {
        let white = c.is_ascii_whitespace();
        match self.place {
            Place::Start | Place::Key | Place::Colon | Place::Value | Place::Next | Place::Done if white => {}
            Place::Start if c == '{' => self.place = Place::Key,
            Place::Key if c == '"' => self.begin(Place::InKey, c),
            Place::Key if c == '}' => self.end(out),
            Place::InKey => {
                self.text.push(c);
                if self.nesting.take(c) {
                    self.key = serde_json::from_str(&self.text).unwrap_or_default();
                    self.place = Place::Colon;
                }
            }
            Place::Colon if c == ':' => self.place = Place::Value,
            Place::Value => {
                self.begin(Place::InValue, c);
                self.stream(c, out);
            }
            Place::InValue => self.value(c, out),
            Place::Next if c == ',' => self.place = Place::Key,
            Place::Next if c == '}' => self.end(out),
            _ => out.push(Step::Fault),
        }
    }

    /// True if a value is complete and the object is not.
    pub(super) fn is_after_value(&self) -> bool {
        self.place == Place::Next
    }

    fn begin(&mut self, place: Place, c: char) {
        self.place = place;
        self.nesting = Nesting::default();
        self.text.clear();
        self.text.push(c);
        self.nesting.take(c);
    }

    /// True if the value is an object of arguments, which is passed on as it comes.
    fn streams(&self) -> bool {
        self.arguments.contains(&self.key.as_str()) && self.text.starts_with('{')
    }

    fn stream(&mut self, c: char, out: &mut Vec<Step>) {
        if !self.streams() {
            return;
        }
        if self.named {
            match out.last_mut() {
                Some(Step::Arguments(text)) => text.push(c),
                _ => out.push(Step::Arguments(c.into())),
            }
        } else {
            self.early.push(c);
        }
    }

    fn value(&mut self, c: char, out: &mut Vec<Step>) {
        let bare = self.nesting.depth == 0 && !self.nesting.in_string;
        if bare && matches!(c, ',' | '}') {
            // A number, true, false or null ends before this character.
            self.place = Place::Next;
            return self.push(c, out);
        }
        self.text.push(c);
        self.stream(c, out);
        if self.nesting.take(c) {
            self.place = Place::Next;
            self.finish_value(out);
        }
    }

    fn finish_value(&mut self, out: &mut Vec<Step>) {
        let text = || serde_json::from_str::<String>(&self.text);
        if self.key == "name" && !self.named {
            match text() {
                Ok(name) => {
                    self.named = true;
                    out.push(Step::Name(name));
                    if !self.early.is_empty() {
                        out.push(Step::Arguments(std::mem::take(&mut self.early)));
                    }
                }
                Err(_) => out.push(Step::Fault),
            }
        } else if self.arguments.contains(&self.key.as_str()) && self.text.starts_with('"') {
            // Some models write the arguments as JSON in a string.
            match text() {
                Ok(text) if self.named => out.push(Step::Arguments(text)),
                Ok(text) => self.early = text,
                Err(_) => out.push(Step::Fault),
            }
        }
    }

    fn end(&mut self, out: &mut Vec<Step>) {
        self.place = Place::Done;
        out.push(if self.named { Step::End } else { Step::Fault });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(text: &str) -> Vec<Step> {
        let (mut scanner, mut out) = (CallScanner::new(&["arguments", "parameters"]), Vec::new());
        text.chars().for_each(|c| scanner.push(c, &mut out));
        out
    }

    #[test]
    fn objects_of_calls_are_read() {
        let expected =
            [Step::Name("f".into()), Step::Arguments("{\"a\": [1, \"}\\\"\"], \"b\": {}}".into()), Step::End];
        assert_eq!(scan("{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\\\"\"], \"b\": {}}}"), expected);
        assert_eq!(
            scan(" {\"arguments\": {\"a\": [1, \"}\\\"\"], \"b\": {}}, \"id\": 3,\n\"name\": \"f\"}"),
            expected
        );
        assert_eq!(
            scan("{\"id\": null, \"name\": \"f\", \"parameters\": \"{\\\"a\\\": 1}\"}"),
            [Step::Name("f".into()), Step::Arguments("{\"a\": 1}".into()), Step::End]
        );
    }

    #[test]
    fn other_texts_are_faults() {
        for text in
            ["x", "{}", "{\"a\": 1}", "{\"name\": 3}", "{\"name\": {}}", "{name: 1}", "{\"name\" \"f\"}"]
        {
            assert!(scan(text).contains(&Step::Fault) || scan(text).is_empty(), "{text}: {:?}", scan(text));
        }
    }
}
