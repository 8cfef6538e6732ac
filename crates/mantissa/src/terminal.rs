//! The one way of text to a terminal.
//!
//! Messages and tables hold text of files and clients. A name can hold commands for the terminal, marks that turn the
//! direction of what follows, or a megabyte. So everything that is printed passes here: misleading characters are
//! escaped and lines are cut, whatever the place that made them forgot.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

pub use mantissa_jobs::escape::{Escaping, line};
use mantissa_store::shown::misleads;

/// Prints `text` as one line of standard error. A failure cannot be reported anywhere.
pub fn to_stderr(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", line(text));
}

/// Escapes misleading characters of a JSON text, which has them in strings only, so that it stands for the same value.
pub fn json(text: &str) -> Cow<'_, str> {
    let foreign = |c: char| misleads(c) && c != '\n';
    if !text.contains(foreign) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if foreign(c) {
            let mut units = [0; 2];
            c.encode_utf16(&mut units).iter().for_each(|unit| out += &format!("\\u{unit:04x}"));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Escapes what would act on a terminal in a text that a model generates, which may have marks of its script.
pub fn generated(text: &str) -> Cow<'_, str> {
    let acts = |c: char| {
        c.is_control() && !matches!(c, '\n' | '\t')
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| if acts(c) { c.escape_unicode().to_string() } else { c.to_string() };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// True if a person reads the output and can answer: standard input and output are terminals.
pub fn is_person() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

/// Prints a hint below a line that was begun, and the sign that a line is asked for.
pub fn ask_again(hint: &str, sign: &str) {
    // A failure to write to standard error cannot be reported anywhere.
    let _ = write!(io::stderr().lock(), "\n{hint}\n{sign}");
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn json_keeps_its_value() {
        let value = serde_json::json!({"a\u{202e}": "\u{1b}\u{7f}\u{9b}\u{e0041}ü\n"});
        let text = serde_json::to_string_pretty(&value).unwrap();
        let escaped = json(&text);
        assert!(!escaped.contains(|c: char| misleads(c) && c != '\n'), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
    }

    #[test]
    fn generated_text_keeps_the_marks_of_its_script() {
        assert_eq!(generated("a\tb\n👩\u{200d}🚀"), "a\tb\n👩\u{200d}🚀");
        assert_eq!(generated("\u{1b}]0;x\u{7}\u{202e}"), "\\u{1b}]0;x\\u{7}\\u{202e}");
    }
}
