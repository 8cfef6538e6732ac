//! Two texts beside each other on a terminal.

use std::io::{self, Write};

/// Characters between the texts.
const GAP: &str = " │ ";

/// Writes two texts side by side in `width` columns, wrapped at spaces. Control characters are escaped.
///
/// # Errors
/// As `out`.
pub fn side_by_side(out: &mut dyn Write, width: usize, texts: [&str; 2]) -> io::Result<()> {
    let each = width.saturating_sub(GAP.chars().count()) / 2;
    let [left, right] = texts.map(|text| wrapped(text, each.max(1)));
    for i in 0..left.len().max(right.len()) {
        let line = |lines: &[String]| lines.get(i).cloned().unwrap_or_default();
        let both = format!("{:<each$}{GAP}{}", line(&left), line(&right));
        writeln!(out, "{}", both.trim_end())?;
    }
    Ok(())
}

/// Breaks `text` into lines of at most `width` characters, at spaces where there are any.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        for word in paragraph.split(' ').map(escaped) {
            let mut word: Vec<char> = word.chars().collect();
            let room = width.saturating_sub(line.chars().count() + usize::from(!line.is_empty()));
            if !line.is_empty() && word.len() > room {
                lines.push(std::mem::take(&mut line));
            } else if !line.is_empty() {
                line.push(' ');
            }
            while word.len() > width {
                let rest = word.split_off(width);
                lines.push(word.into_iter().collect());
                word = rest;
            }
            line.extend(word);
        }
        lines.push(line);
    }
    lines
}

/// Returns `word` with control characters escaped.
fn escaped(word: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    word.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_wrap_at_spaces_and_lines_stay_within_the_width() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("abcdefghij kl", 4), ["abcd", "efgh", "ij", "kl"]);
        assert_eq!(wrapped("a\n\nb\tc", 9), ["a", "", "b\\tc"]);
        assert_eq!(wrapped("", 5), [""]);
        let mut out = Vec::new();
        let result = side_by_side(&mut out, 13, ["one two", "three four five"]);
        assert!(result.is_ok());
        assert_eq!(String::from_utf8_lossy(&out), "one   │ three\ntwo   │ four\n      │ five\n");
    }
}
