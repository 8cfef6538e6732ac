//! Texts with placeholders, as the files in `texts/` hold them.
//!
//! ```text
//! {EXPRESSION}                 the value, as it prints itself
//! {EXPRESSION:FORMAT}          the value in a format: see `FORMATS`
//! {EXPRESSION|WORDS}           WORDS if it is absent; after a format too
//! {CONDITION ? TEXT | TEXT}    one of two texts, which may have placeholders; the second may be left out
//! ```

use super::expression::{Expression, Scope, split_first};
use super::value::{Fault, Value};
use crate::recommend::{gb, rate};
use crate::shape::billions;

/// Piece of a text.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    /// Words.
    Words(String),
    /// Value in a format, with the words for an absent one.
    Placeholder {
        /// Value.
        value: Expression,
        /// Format; empty for none.
        format: String,
        /// Words for an absent value.
        absent: Option<String>,
    },
    /// One of two texts.
    Choice(Expression, Vec<Piece>, Vec<Piece>),
}

/// Formats a number.
type Write = fn(f64) -> String;

/// Formats of numbers by name. Beside them: `.2` (digits after the point), `+.2` (with its sign), `.2e` (powers of ten).
const FORMATS: [(&str, Write); 7] = [
    ("GB", gb),
    ("rate", rate),
    ("bytes", bytes),
    ("billions", |x| billions(x as u64)),
    ("power", |x| format!("{:e}", x as f32)),
    ("digits", digits),
    ("kl", |x| format!("{x:.5}").trim_start_matches('0').to_owned()),
];

/// Formats the bytes of a token.
fn bytes(bytes: f64) -> String {
    if bytes < 1e4 { format!("{bytes:.0} bytes") } else { format!("{:.0} kB", bytes / 1e3) }
}

/// Formats a figure with four digits.
fn digits(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => format!("{value:.3e}"),
        v if v < 10.0 => format!("{value:.3}"),
        v if v < 1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Formats a value.
fn formatted(value: &Value, format: &str) -> Result<String, Fault> {
    let wrong = |why| Err(Fault::Syntax(format.to_owned(), why));
    let number = match value {
        Value::Number(number) => *number,
        Value::Text(text) if format.is_empty() => return Ok(text.clone()),
        Value::Flag(_) => return wrong("yes or no is for conditions"),
        _ => return wrong("expected no format for words"),
    };
    if format.is_empty() {
        return Ok(number.to_string());
    }
    if let Some((_, apply)) = FORMATS.iter().find(|(name, _)| *name == format) {
        return Ok(apply(number));
    }
    let (signed, rest) = format.strip_prefix('+').map_or((false, format), |rest| (true, rest));
    let (power, rest) = rest.strip_suffix('e').map_or((false, rest), |rest| (true, rest));
    let places = rest.strip_prefix('.').and_then(|places| places.parse::<usize>().ok());
    match (places, signed, power) {
        (Some(places), false, false) => Ok(format!("{number:.places$}")),
        (Some(places), true, false) => Ok(format!("{number:+.places$}")),
        (Some(places), false, true) => Ok(format!("{number:.places$e}")),
        _ => wrong("no such format"),
    }
}

/// Parses a text into its pieces.
///
/// # Errors
/// [`Fault::Syntax`].
pub(super) fn parse(text: &str) -> Result<Vec<Piece>, Fault> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(start) = rest.find('{') {
        if start > 0 {
            pieces.push(Piece::Words(rest[..start].to_owned()));
        }
        let mut depth = 0i32;
        let closes = |c: char| {
            depth += i32::from(c == '{') - i32::from(c == '}');
            depth == 0
        };
        let unclosed = || Fault::Syntax(text.to_owned(), "a { has no }");
        let length = rest[start..].find(closes).ok_or_else(unclosed)?;
        pieces.push(placeholder(&rest[start + 1..start + length])?);
        rest = &rest[start + length + 1..];
    }
    if !rest.is_empty() {
        pieces.push(Piece::Words(rest.to_owned()));
    }
    Ok(pieces)
}

/// Parses what is between braces.
fn placeholder(text: &str) -> Result<Piece, Fault> {
    if let Some((condition, texts)) = split_first(text, '?') {
        let (yes, no) = split_first(texts, '|').unwrap_or((texts, ""));
        return Ok(Piece::Choice(Expression::parse(condition)?, parse(yes)?, parse(no)?));
    }
    // Colons inside of parentheses belong to names of schemes.
    let mut depth = 0i32;
    let ends = |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0 && (c == ':' || c == '|')
    };
    let (value, rest) = text.split_at(text.find(ends).unwrap_or(text.len()));
    let (format, absent) =
        rest.split_once('|').map_or((rest, None), |(format, absent)| (format, Some(absent)));
    Ok(Piece::Placeholder {
        value: Expression::parse(value)?,
        format: format.trim_start_matches(':').to_owned(),
        absent: absent.map(str::to_owned),
    })
}

/// Renders pieces.
///
/// # Errors
/// [`Fault`].
pub(super) fn render(pieces: &[Piece], scope: &Scope<'_>) -> Result<String, Fault> {
    let mut text = String::new();
    for piece in pieces {
        match piece {
            Piece::Words(words) => text.push_str(words),
            Piece::Choice(condition, yes, no) => {
                let chosen = if condition.evaluate(scope)?.holds() { yes } else { no };
                text.push_str(&render(chosen, scope)?);
            }
            Piece::Placeholder { value, format, absent } => {
                let found = value.evaluate(scope)?;
                match (&found, absent) {
                    (Value::Absent, Some(words)) => text.push_str(words),
                    (Value::Absent, None) => return Err(Fault::Absent(format!("{value:?}"))),
                    _ => text.push_str(&formatted(&found, format)?),
                }
            }
        }
    }
    Ok(text)
}

/// Calls `visit` with the name of every value and field of a text, those of branches included.
#[cfg(test)]
pub(super) fn names(pieces: &[Piece], visit: &mut dyn FnMut(&str)) {
    for piece in pieces {
        match piece {
            Piece::Words(_) => {}
            Piece::Placeholder { value, .. } => value.names(visit),
            Piece::Choice(condition, yes, no) => {
                condition.names(visit);
                names(yes, visit);
                names(no, visit);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::explain::tests::with_subject;
    use crate::explain::value::Row;

    /// Renders a text for an 8 B model on an H100.
    fn rendered(text: &str) -> Result<String, Fault> {
        let mut found = Ok(String::new());
        with_subject("8B", "h100", |subject| {
            let row: Row = vec![("name", Value::text("int8")), ("n", Value::Number(3.0))];
            found = parse(text).and_then(|pieces| render(&pieces, &Scope { subject, row: &row }));
        });
        found
    }

    #[test]
    fn placeholders_are_computed_and_formatted() {
        for (text, right) in [
            ("{1 + 2 * 3 - 4 / 8} {(1 + 2) * 3}", "6.5 9"),
            ("{2 - 1 - 1} {8 / 2 / 2}", "0 2"),
            ("{1 / 3:.2} {1 / 3:+.1} {1 / 3:.1e} {3e9:GB} {.00191:kl}", "0.33 +0.3 3.3e-1 3.00 GB .00191"),
            ("{$name} and {$n}", "int8 and 3"),
            ("{max($n, 1 + 1)}", "3"),
            ("{rate(int4)|none} {rate(int4) / 2:.1|none (yet)}", "none none (yet)"),
            ("{rate(int4) > 1 ? fast | slow} {rate(fp8) > 1 ? {$n:.1} times}", "slow 3.0 times"),
            ("{not rate(int4) ?  (none)}|", " (none)|"),
        ] {
            assert_eq!(rendered(text), Ok(right.to_owned()), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_text_is_an_error() {
        for text in [
            "{nothing}",
            "{$nothing}",
            "{1 + model}",
            "{model:.2}",
            "{1:.x}",
            "{rate(int4)}",
            "{rate(int5)}",
            "{kl()}",
            "{open",
            "{linear_bytes(BF16}",
            "{mixture}",
        ] {
            assert!(rendered(text).is_err(), "{text}");
        }
    }
}
