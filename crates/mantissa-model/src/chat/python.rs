//! Python's values as templates written for Jinja expect them: methods of strings and lists, and how values print.
//!
//! Methods are those of Python 3 (Library Reference, "Text Sequence Type") that [`minijinja_contrib`] lacks or reads with
//! fewer arguments; all others go there.

use std::fmt::Write;

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Longest text that padding adds, in bytes.
const MAX_WIDTH: usize = 1 << 16;

/// Makes the error of a call with wrong arguments.
pub(super) fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// Calls `method` of `value`.
pub(super) fn call(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let known = match value.as_str() {
        Some(text) => of_text(text, method, args)?,
        None => of_sequence(value, method, args)?,
    };
    match known {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Calls a method of a string; `None` if it is not among these.
fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "split" | "rsplit" => split(text, method == "rsplit", args)?,
        "partition" | "rpartition" => {
            let (mark,): (&str,) = from_args(args)?;
            let found = if method == "partition" { text.find(mark) } else { text.rfind(mark) };
            let parts = match found.filter(|_| !mark.is_empty()) {
                Some(at) => [&text[..at], mark, &text[at + mark.len()..]],
                None if mark.is_empty() => return Err(invalid("empty separator")),
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, method, args)?,
        "startswith" | "endswith" if args.len() > 1 => {
            let (what, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
            // Nothing begins or ends past the end, not even an empty text.
            let Some(part) = slice(text, start, end).0 else { return Ok(Some(Value::from(false))) };
            let ends =
                |one: &str| if method == "startswith" { part.starts_with(one) } else { part.ends_with(one) };
            match what.as_str() {
                Some(one) => Value::from(ends(one)),
                None => Value::from(what.try_iter()?.any(|one| one.as_str().is_some_and(ends))),
            }
        }
        "strip" | "lstrip" | "rstrip" => {
            let (chars,): (Option<&str>,) = from_args(args)?;
            let cut = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
            Value::from(match method {
                "strip" => text.trim_matches(cut),
                "lstrip" => text.trim_start_matches(cut),
                _ => text.trim_end_matches(cut),
            })
        }
        "splitlines" => {
            let (keeps,): (Option<bool>,) = from_args(args)?;
            lines(text, keeps.unwrap_or(false)).into_iter().collect()
        }
        "join" => join(text, args)?,
        "ljust" | "rjust" | "center" | "zfill" => pad(text, method, args)?,
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "isdigit" | "isdecimal" if text.is_ascii() => {
            Value::from(!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
        }
        _ => return in_case(text, method, args),
    }))
}

/// Calls a method of a string that is about its case; `None` if it is not among these.
fn in_case(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss")),
        "swapcase" => {
            let swap = |c: char| match c.is_lowercase() {
                true => c.to_uppercase().collect::<String>(),
                false => c.to_lowercase().collect(),
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "istitle" => {
            let (mut cased, mut before) = (false, false);
            let is_title = text.chars().all(|c| {
                let fits = if c.is_uppercase() { !before } else { !c.is_lowercase() || before };
                before = c.is_uppercase() || c.is_lowercase();
                cased |= before;
                fits
            });
            Value::from(cased && is_title)
        }
        _ => return Ok(None),
    }))
}

/// Joins texts with `mark` between them (`str.join`).
fn join(mark: &str, args: &[Value]) -> Result<Value, Error> {
    let (items,): (&Value,) = from_args(args)?;
    let mut out = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        let Some(item) = item.as_str() else {
            let got = item.kind();
            return Err(invalid(format!("sequence item {i}: expected a string, got {got}")));
        };
        if i > 0 {
            out.push_str(mark);
        }
        out.push_str(item);
    }
    Ok(Value::from(out))
}

/// Begins words with capital letters, in lower case otherwise (`str.title`).
fn title(text: &str) -> String {
    let mut before = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match before {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        before = c.is_lowercase() || c.is_uppercase();
    }
    out
}

/// Calls a method of a list or tuple; `None` if it is not among these.
fn of_sequence(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let is_sequence = value.kind() == ValueKind::Seq;
    Ok(match method {
        "index" if is_sequence => {
            let (what,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *what);
            Some(Value::from(at.ok_or_else(|| invalid("the value is not in the list"))?))
        }
        "copy" if is_sequence || value.kind() == ValueKind::Map => {
            let () = from_args(args)?;
            Some(value.clone())
        }
        _ => None,
    })
}

/// True for the characters that Python's `str.isspace` accepts: Unicode white space and the separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// `split` and `rsplit`: by white space without a separator.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (given, most, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let given = match given {
        Some(given) => Some(given),
        None => options.get::<Option<Value>>("sep")?,
    };
    let most = match most {
        Some(most) => Some(most),
        None => options.get::<Option<i64>>("maxsplit")?,
    };
    options.assert_all_used()?;
    let most = most.and_then(|most| usize::try_from(most).ok());
    let parts: Vec<&str> = match given.filter(|given| !given.is_none()) {
        Some(given) => {
            let mark = given.as_str().filter(|mark| !mark.is_empty());
            let mark = mark.ok_or_else(|| invalid("separator: expected a string that is not empty"))?;
            match (most, from_end) {
                (None, _) => text.split(mark).collect(),
                (Some(most), false) => text.splitn(most.saturating_add(1), mark).collect(),
                (Some(most), true) => {
                    let mut parts: Vec<_> = text.rsplitn(most.saturating_add(1), mark).collect();
                    parts.reverse();
                    parts
                }
            }
        }
        None => words(text, from_end, most.unwrap_or(usize::MAX)),
    };
    Ok(parts.into_iter().collect())
}

/// Splits at runs of white space, at most `most` times: what remains then keeps its white space at the far end.
fn words(text: &str, from_end: bool, most: usize) -> Vec<&str> {
    let trimmed = |text| match from_end {
        true => str::trim_end_matches(text, is_space),
        false => str::trim_start_matches(text, is_space),
    };
    let (mut rest, mut words) = (trimmed(text), Vec::new());
    while !rest.is_empty() {
        let cut = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| words.len() < most) else {
            words.push(rest);
            break;
        };
        let after = at + rest[at..].chars().next().map_or(0, char::len_utf8);
        let (before, after) = (&rest[..at], &rest[after..]);
        let (word, more) = if from_end { (after, before) } else { (before, after) };
        words.push(word);
        rest = trimmed(more);
    }
    if from_end {
        words.reverse();
    }
    words
}

/// Splits at the line ends that Python knows, which stay if `keeps`.
pub(super) fn lines(text: &str, keeps: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let (mut rest, mut out) = (text, Vec::new());
    while let Some(at) = rest.find(is_end) {
        let long = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(1, char::len_utf8)
        };
        out.push(&rest[..if keeps { at + long } else { at }]);
        rest = &rest[at + long..];
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    out
}

/// Cuts characters `start..end` out of `text`, as Python's slices count them; `None` past the end. Returns the first
/// character's place too.
fn slice(text: &str, start: Option<i64>, end: Option<i64>) -> (Option<&str>, usize) {
    let count = text.chars().count();
    let place = |at: i64| match usize::try_from(at) {
        Ok(at) => at,
        Err(_) => count.saturating_sub(usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX)),
    };
    let (from, to) = (place(start.unwrap_or(0)), end.map_or(count, place).min(count));
    if from > count {
        return (None, from);
    }
    let byte = |n: usize| text.char_indices().nth(n).map_or(text.len(), |(at, _)| at);
    (Some(if from > to { "" } else { &text[byte(from)..byte(to)] }), from)
}

/// `find`, `rfind`, `index`, `rindex` and `count`.
fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let (part, from) = slice(text, start, end);
    if method == "count" {
        return Ok(Value::from(part.map_or(0, |part| part.matches(what).count())));
    }
    let found = part.and_then(|part| {
        let at = if method.starts_with('r') { part.rfind(what) } else { part.find(what) };
        at.map(|at| from + part[..at].chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

/// `ljust`, `rjust`, `center` and `zfill`.
fn pad(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    if width > MAX_WIDTH {
        return Err(invalid(format!("width: expected at most {MAX_WIDTH}, got {width}")));
    }
    if fill.is_some_and(|fill| method == "zfill" || fill.chars().count() != 1) {
        return Err(invalid(format!("{method}: expected one character to fill with")));
    }
    let fill = fill.unwrap_or(if method == "zfill" { "0" } else { " " });
    let missing = width.saturating_sub(text.chars().count());
    let fills = |n: usize| fill.repeat(n);
    Ok(Value::from(match method {
        "ljust" => format!("{text}{}", fills(missing)),
        "rjust" => format!("{}{text}", fills(missing)),
        "zfill" => {
            let sign = if text.starts_with(['+', '-']) { &text[..1] } else { "" };
            format!("{sign}{}{}", fills(missing), &text[sign.len()..])
        }
        // CPython: the extra character is on the left if both the margin and the width are odd.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fills(left), fills(missing - left))
        }
    }))
}

/// `"format" % arguments`; `arguments` is a tuple of them, or one.
pub(super) fn percent(format: &str, arguments: &Value) -> Result<String, Error> {
    let arguments: Vec<Value> = match arguments.is_tuple() {
        true => arguments.try_iter()?.collect(),
        false => vec![arguments.clone()],
    };
    // `%s` prints as `str` does and `%r` as `repr`; the engine formats numbers.
    let (mut out, mut rest, mut next) = (String::new(), format, arguments.iter());
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let long = 1 + rest[at + 1..]
            .find(|c: char| !matches!(c, '0'..='9' | '#' | '-' | ' ' | '+' | '.'))
            .ok_or_else(|| invalid("incomplete format"))?;
        let mut kind = rest[at + long..].chars().next().unwrap_or('%');
        check_width(&rest[at..at + long])?;
        let mut end = at + long + kind.len_utf8();
        let mut named = None;
        if kind == '(' {
            let close = rest[end..].find(')').ok_or_else(|| invalid("incomplete format key"))?;
            let key = &rest[end..end + close];
            let value = arguments.first().unwrap_or(&Value::UNDEFINED).get_item(&Value::from(key))?;
            if value.is_undefined() {
                return Err(invalid(format!("the format names the key {key}, which is missing")));
            }
            named = Some(value);
            end += close + 1;
            let spec = rest[end..]
                .find(|c: char| c.is_ascii_alphabetic())
                .ok_or_else(|| invalid("incomplete format"))?;
            check_width(&rest[end..end + spec])?;
            kind = rest[end + spec..].chars().next().unwrap_or('s');
            end += spec + kind.len_utf8();
        }
        if kind == '%' {
            out.push('%');
            rest = &rest[end..];
            continue;
        }
        let value = named.as_ref().or_else(|| if named.is_none() { next.next() } else { None });
        let value = value.ok_or_else(|| invalid("not enough arguments for the format"))?;
        let spec = rest[at..end].rsplit(')').next().unwrap_or_default().trim_start_matches('%');
        let plain = format!("%{}", spec);
        let shown = match kind {
            's' => Value::from(text(value)),
            'r' => Value::from(repr(value)),
            'd' | 'i' | 'u' if !value.is_integer() && value.is_number() => {
                Value::from(f64::try_from(value.clone())?.trunc() as i64)
            }
            _ => value.clone(),
        };
        let plain = if kind == 'r' { plain.replace('r', "s") } else { plain };
        out += &minijinja::formatting::format(minijinja::formatting::FormatStyle::Printf, &plain, &[shown])?;
        rest = &rest[end..];
    }
    if next.next().is_some() && arguments.len() > 1 {
        return Err(invalid("not all arguments converted during string formatting"));
    }
    out.push_str(rest);
    Ok(out)
}

/// Checks that no number in a format, width or precision, makes a text long.
fn check_width(format: &str) -> Result<(), Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit());
    let long = |number: &str| !number.is_empty() && number.parse::<usize>().map_or(true, |n| n > MAX_WIDTH);
    match numbers.into_iter().find(|number| long(number)) {
        Some(number) => Err(invalid(format!("width: expected at most {MAX_WIDTH}, got {number}"))),
        None => Ok(()),
    }
}

/// Returns the text of `value` as Python's `str` gives it.
pub(super) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// Returns the text of `value` as Python's `repr` gives it, for the values of JSON and tuples.
pub(super) fn repr(value: &Value) -> String {
    let mut out = String::new();
    // A string takes everything.
    _ = write_repr(&mut out, value);
    out
}

/// Writes the text of `value` as Python's `repr` gives it.
///
/// # Errors
/// Those of `out`.
pub(super) fn write_repr(out: &mut dyn Write, value: &Value) -> std::fmt::Result {
    let list = |out: &mut dyn Write, marks: [&str; 2]| {
        out.write_str(marks[0])?;
        for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
            if i > 0 {
                out.write_str(", ")?;
            }
            write_repr(out, &item)?;
        }
        out.write_str(marks[1])
    };
    match value.kind() {
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => {
            out.write_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)))
        }
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq if value.is_tuple() => {
            list(out, ["(", if value.len() == Some(1) { ",)" } else { ")" }])
        }
        ValueKind::Seq | ValueKind::Iterable => list(out, ["[", "]"]),
        ValueKind::Map => {
            out.write_char('{')?;
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                if i > 0 {
                    out.write_str(", ")?;
                }
                write_repr(out, &key)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default())?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value}"),
    }
}

/// Writes a string as Python's `repr` does: in single quotes unless it has some and no double ones.
fn write_quoted(out: &mut dyn Write, text: &str) -> std::fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                write!(out, "\\x{:02x}", c as u32)?;
            }
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

/// Returns the shortest text of `x` that reads as `x`, as Python writes it: with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(x: f64) -> String {
    if !x.is_finite() {
        return if x.is_nan() {
            "nan".into()
        } else if x > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    if x != 0.0 && !(1e-4..1e16).contains(&x.abs()) {
        let text = format!("{x:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(("+", exponent), |rest| ("-", rest));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    format!("{x:?}")
}
