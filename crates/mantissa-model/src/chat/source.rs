//! Limits on the source of a template: its size, and the depth of what the engine would recurse into.
//!
//! The source is cut into tags as the engine cuts it: a tag ends outside of strings and brackets, and the text of a raw
//! block holds none. A limit on something that the engine reads otherwise would not hold.

mod dialect;

use std::borrow::Cow;

use super::error::ChatError;
use super::functions::PERCENT;

/// Longest accepted template, in bytes. The longest of public models have 30 kB.
pub const MAX_TEMPLATE: usize = 256 << 10;

/// Longest tag, `{{ … }}` or `{% … %}`, in bytes: an expression of that many operators is a tree as deep.
const MAX_TAG: usize = 8 << 10;

/// Largest number of tags. Those of public models have up to about a thousand.
const MAX_TAGS: usize = 10_000;

/// Largest depth of blocks in blocks, and of brackets in brackets. The engine's own limit on both together is 150.
const MAX_DEPTH: usize = 100;

/// Largest number of `elif` branches of a template; the engine parses each inside the one before.
const MAX_ELIF: usize = 1000;

/// Longest line in characters, and largest number of lines: the engine counts both in 16 bits.
const MAX_LINE: usize = (1 << 16) - 2;

/// Words that open a block, which an `end` of the word closes.
const BLOCKS: [&str; 9] =
    ["if", "for", "macro", "call", "filter", "with", "block", "autoescape", "generation"];

fn limit<T>(found: String, allowed: String) -> Result<T, ChatError> {
    Err(ChatError::Limit { found, allowed })
}

/// Checks the limits, turns every line end into `\n` as Jinja does, writes escapes and `%` after a string as the engine reads
/// them, and removes the `{% generation %}` tags, which only training needs.
///
/// # Errors
/// [`ChatError::Limit`]; [`ChatError::Template`] for what the engine reads otherwise than Jinja ([`dialect`]).
pub(super) fn prepare(template: &str) -> Result<String, ChatError> {
    if template.len() > MAX_TEMPLATE {
        return limit(format!("a template of {} bytes", template.len()), format!("up to {MAX_TEMPLATE}"));
    }
    let template = &template.replace("\r\n", "\n").replace('\r', "\n");
    let (mut out, mut rest) = (String::with_capacity(template.len()), template.as_str());
    let mut counted = Counted::default();
    while let Some((before, open, after)) = next_tag(rest) {
        counted.tag()?;
        out.push_str(before);
        out.push_str(open.mark);
        let inside = match open.kind {
            TagKind::Comment => after.find("#}").map_or(after, |end| &after[..end]),
            TagKind::Block if raw_block(after).is_some() => raw_block(after).unwrap_or(after),
            TagKind::Block => expression(after, "%}")?,
            TagKind::Variable => expression(after, "}}")?,
        };
        let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match (open.kind, word) {
            (TagKind::Block, "generation") => out.push_str(&inside.replace(word, "if true")),
            (TagKind::Block, "endgeneration") => out.push_str(&inside.replace(word, "endif")),
            (TagKind::Comment, _) => out.push_str(inside),
            (TagKind::Block, _) if raw_block(after).is_some() => dialect::raw(inside, &mut out),
            _ => {
                let line = || 1 + template[..template.len() - after.len()].matches('\n').count();
                let fault = |message| ChatError::Template { line: line(), message };
                dialect::check(word).map_err(fault)?;
                let read = match inside.contains('\\') {
                    true => Cow::Owned(dialect::strings(inside).map_err(fault)?),
                    false => Cow::Borrowed(inside),
                };
                match read.contains('%') {
                    true => format_operators(&read, &mut out),
                    false => out.push_str(&read),
                }
            }
        }
        if open.kind == TagKind::Block {
            counted.block(word)?;
        }
        rest = &after[inside.len()..];
    }
    check_lines(template)?;
    out.push_str(rest);
    Ok(out)
}

/// Numbers of parts of a template up to a tag.
#[derive(Default)]
struct Counted {
    tags: usize,
    elifs: usize,
    depth: usize,
}

impl Counted {
    fn tag(&mut self) -> Result<(), ChatError> {
        self.tags += 1;
        if self.tags > MAX_TAGS {
            return limit("a template of more tags".to_owned(), format!("up to {MAX_TAGS}"));
        }
        Ok(())
    }

    /// Counts a block tag with these words.
    fn block(&mut self, words: &str) -> Result<(), ChatError> {
        let word = words.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or_default();
        if word == "elif" {
            self.elifs += 1;
        } else if BLOCKS.contains(&word) {
            self.depth += 1;
        } else if word.strip_prefix("end").is_some_and(|word| BLOCKS.contains(&word)) {
            self.depth = self.depth.saturating_sub(1);
        }
        if self.elifs > MAX_ELIF {
            return limit("more elif branches".to_owned(), format!("up to {MAX_ELIF}"));
        }
        if self.depth > MAX_DEPTH {
            return limit(
                "blocks nested deeper".to_owned(),
                format!("up to {MAX_DEPTH} blocks in each other"),
            );
        }
        Ok(())
    }
}

fn check_lines(template: &str) -> Result<(), ChatError> {
    let mut lines = 0;
    for line in template.split('\n') {
        lines += 1;
        // No line has more characters than bytes.
        if line.len() > MAX_LINE && line.chars().count() > MAX_LINE {
            let found = format!("a line of {} characters", line.chars().count());
            return limit(found, format!("up to {MAX_LINE}"));
        }
    }
    if lines > MAX_LINE {
        limit(format!("a template of {lines} lines"), format!("up to {MAX_LINE}"))
    } else {
        Ok(())
    }
}

/// Returns the content of a tag up to its `close`, which counts outside of strings and brackets only.
fn expression<'a>(after: &'a str, close: &str) -> Result<&'a str, ChatError> {
    let bytes = after.as_bytes();
    let (mut at, mut depth) = (0, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            _ if depth == 0 && bytes[at..].starts_with(close.as_bytes()) => break,
            quote @ (b'\'' | b'"') => {
                at += 1;
                while at < bytes.len() && bytes[at] != quote {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
        if depth > MAX_DEPTH {
            return limit("brackets nested deeper".to_owned(), format!("up to {MAX_DEPTH} in each other"));
        }
        if at > MAX_TAG {
            return limit("a longer tag".to_owned(), format!("tags of up to {MAX_TAG} bytes"));
        }
    }
    // Every mark is ASCII, so only a string that does not end can end inside a character.
    Ok(after.get(..at).unwrap_or(after))
}

/// Writes an expression with `"text" % operand` as `"text"|percent_format(operand)`, which binds alike: the engine has the
/// operator for numbers only. Recurses into brackets, whose depth is limited.
fn format_operators(expression: &str, out: &mut String) {
    let mut rest = expression;
    while let Some(at) = rest.find(['\'', '"']) {
        let end = at + quoted(&rest[at..]);
        out.push_str(&rest[..end]);
        rest = &rest[end..];
        let Some(after) = rest.trim_start().strip_prefix('%') else { continue };
        let after = after.trim_start();
        let long = operand(after);
        if long == 0 {
            continue;
        }
        out.push('|');
        out.push_str(PERCENT);
        out.push('(');
        format_operators(&after[..long], out);
        out.push(')');
        rest = &after[long..];
    }
    out.push_str(rest);
}

/// Length of the string that begins `text`, with its quotes.
fn quoted(text: &str) -> usize {
    let mut characters = text.char_indices();
    let quote = characters.next().map_or('"', |(_, c)| c);
    while let Some((at, c)) = characters.next() {
        if c == '\\' {
            characters.next();
        } else if c == quote {
            return at + 1;
        }
    }
    text.len()
}

/// Length of the operand that begins `text`: a value with its attributes, indices, calls and filters; 0 if there is none.
fn operand(text: &str) -> usize {
    let word = |text: &str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let white = |text: &str| text.len() - text.trim_start().len();
    let sign = text.len() - text.trim_start_matches(['-', '+', ' ']).len();
    let mut at = sign
        + match text[sign..].chars().next() {
            Some('\'' | '"') => quoted(&text[sign..]),
            Some('(' | '[' | '{') => group(&text[sign..]),
            _ => word(&text[sign..]),
        };
    if at == sign {
        return 0;
    }
    loop {
        let gap = white(&text[at..]);
        let next = &text[at + gap..];
        at += match next.chars().next() {
            Some('(' | '[') => gap + group(next),
            Some('.' | '|') => {
                let inner = 1 + white(&next[1..]);
                let long = word(&next[inner..]);
                if long == 0 {
                    return at;
                }
                gap + inner + long
            }
            _ => return at,
        };
    }
}

/// Length of the brackets that begin `text`, with their content.
fn group(text: &str) -> usize {
    let (mut at, mut depth) = (0, 0usize);
    while let Some(c) = text[at..].chars().next() {
        at += match c {
            '\'' | '"' => quoted(&text[at..]),
            c => c.len_utf8(),
        };
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// Returns what follows the mark of a raw block up to its end tag, or all if it has none; `None` for another tag.
fn raw_block(after: &str) -> Option<&str> {
    let text = basic_tag(after, "raw")?;
    let from = after.len() - text.len();
    let end = text.match_indices("{%").find(|(at, _)| basic_tag(&text[at + 2..], "endraw").is_some());
    Some(end.map_or(after, |(at, _)| &after[..from + at]))
}

/// Returns the text after a tag that consists of `word`.
fn basic_tag<'a>(after: &'a str, word: &str) -> Option<&'a str> {
    let after = after.strip_prefix(['-', '+']).unwrap_or(after);
    let after = after.trim_ascii_start().strip_prefix(word)?.trim_ascii_start();
    after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TagKind {
    Variable,
    Block,
    Comment,
}

struct Open {
    mark: &'static str,
    kind: TagKind,
}

const TAGS: [Open; 3] = [
    Open { mark: "{{", kind: TagKind::Variable },
    Open { mark: "{%", kind: TagKind::Block },
    Open { mark: "{#", kind: TagKind::Comment },
];

/// Splits off the text before the next tag, the tag, and what follows its mark. Reads no byte twice.
fn next_tag(text: &str) -> Option<(&str, &'static Open, &str)> {
    text.match_indices('{').find_map(|(at, _)| {
        let tag = TAGS.iter().find(|tag| text[at..].starts_with(tag.mark))?;
        Some((&text[..at], tag, &text[at + tag.mark.len()..]))
    })
}
