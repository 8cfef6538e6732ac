//! Differences between the engine and Jinja: escapes in strings, line ends after a raw tag, and forms that the engine reads in
//! silence as something else, which are refused.

use std::fmt::Write;

use super::{group, quoted};

/// Writes a raw block, with its text: Jinja keeps a line end after the tag that begins it.
pub(super) fn raw(block: &str, out: &mut String) {
    let from = block.find("%}").map_or(block.len(), |at| at + 2);
    let (tag, text) = block.split_at(from);
    out.push_str(tag);
    if text.starts_with('\n') && !tag.ends_with("-%}") && !tag.ends_with("+%}") {
        out.push('\n');
    }
    out.push_str(text);
}

/// Writes the escapes of the strings in a tag as the engine reads them.
///
/// # Errors
/// An escape that it has no form for.
pub(super) fn strings(tag: &str) -> Result<String, String> {
    let (mut out, mut rest) = (String::with_capacity(tag.len()), tag);
    while let Some(at) = rest.find(['\'', '"']) {
        let end = at + quoted(&rest[at..]);
        out.push_str(&rest[..at]);
        escapes(&rest[at..end], &mut out)?;
        rest = &rest[end..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Writes a string in its quotes.
fn escapes(text: &str, out: &mut String) -> Result<(), String> {
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let Some(kind) = rest.chars().next() else {
            out.push('\\');
            break;
        };
        let mut long = kind.len_utf8();
        match kind {
            'a' => out.push_str("\\u0007"),
            'v' => out.push_str("\\u000b"),
            // No escape in Python, which keeps both characters.
            '/' => out.push_str("\\\\/"),
            // The string goes on in the next line.
            '\n' => {}
            'U' => {
                let code = rest.get(1..9).and_then(|digits| u32::from_str_radix(digits, 16).ok());
                let c = code.and_then(char::from_u32);
                let c = c.ok_or_else(|| "an escape \\U without eight digits of a character".to_owned())?;
                for unit in c.encode_utf16(&mut [0; 2]) {
                    _ = write!(out, "\\u{unit:04x}");
                }
                long = 9;
            }
            'N' => return Err("an escape \\N{…}: write the character itself".to_owned()),
            _ => {
                out.push('\\');
                out.push(kind);
            }
        }
        rest = &rest[long..];
    }
    out.push_str(rest);
    Ok(())
}

/// Checks the words of a tag for forms that the engine reads in silence otherwise than Jinja.
///
/// # Errors
/// The form.
pub(super) fn check(words: &str) -> Result<(), String> {
    reversed_slices(words)?;
    let after = |word: &str| words.strip_prefix(word).filter(|rest| rest.starts_with(char::is_whitespace));
    if let Some((name, value)) = after("with").and_then(mutual) {
        return Err(format!(
            "with: {name} in the value of another variable, {value}: write a with of its own"
        ));
    }
    let parameters = after("macro").and_then(|rest| {
        let brackets = &rest[rest.find('(')?..];
        brackets[..group(brackets)].strip_prefix('(')?.strip_suffix(')')
    });
    if let Some((name, value)) = parameters.and_then(mutual) {
        return Err(format!(
            "macro: {name} in the default of another parameter, {value}: set it in the macro"
        ));
    }
    Ok(())
}

/// Finds a slice with a negative step that ends at 0, or at what may be 0: the engine takes the first item too.
fn reversed_slices(words: &str) -> Result<(), String> {
    let mut at = 0;
    while let Some(c) = words[at..].chars().next() {
        if c == '[' {
            let inside = &words[at..at + group(&words[at..])];
            let inside =
                inside.strip_prefix('[').map_or("", |inside| inside.strip_suffix(']').unwrap_or(inside));
            if let [_, end, step] = parts(inside, ':')[..] {
                let (end, step) = (end.trim(), step.trim());
                let is_other = end.is_empty() || end.parse::<u64>().is_ok_and(|end| end > 0);
                if step.starts_with('-') && !is_other {
                    return Err(format!(
                        "a slice [{inside}] with a negative step: leave out its end, or use a number above 0"
                    ));
                }
            }
        }
        at += if matches!(c, '\'' | '"') { quoted(&words[at..]) } else { c.len_utf8() };
    }
    Ok(())
}

/// Finds a value of `name=value, …` that names an earlier one; returns that name and the value.
fn mutual(list: &str) -> Option<(&str, &str)> {
    let mut names: Vec<&str> = Vec::new();
    for part in parts(list, ',') {
        let (name, value) = part.split_once('=').map_or((part, ""), |(name, value)| (name, value));
        if let Some(other) = names.iter().find(|other| mentions(value, other)) {
            return Some((other, value.trim()));
        }
        names.push(name.trim());
    }
    None
}

/// True if an expression has this variable.
fn mentions(expression: &str, name: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut at, mut before) = (0, ' ');
    while let Some(c) = expression[at..].chars().next() {
        let long = match c {
            '\'' | '"' => quoted(&expression[at..]),
            c if is_word(c) => {
                let rest = &expression[at..];
                let long = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                if before != '.' && &rest[..long] == name {
                    return true;
                }
                long
            }
            c => c.len_utf8(),
        };
        if !c.is_whitespace() {
            before = c;
        }
        at += long;
    }
    false
}

/// Cuts a text at the marks outside of strings and brackets.
fn parts(text: &str, mark: char) -> Vec<&str> {
    let (mut all, mut from, mut at) = (Vec::new(), 0, 0);
    while let Some(c) = text[at..].chars().next() {
        let long = match c {
            '\'' | '"' => quoted(&text[at..]),
            '(' | '[' | '{' => group(&text[at..]),
            c => c.len_utf8(),
        };
        if c == mark {
            all.push(&text[from..at]);
            from = at + long;
        }
        at += long;
    }
    all.push(&text[from..]);
    all
}
