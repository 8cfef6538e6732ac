//! Functions of templates: those that transformers adds to Jinja, and printing of values as Python prints them.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};
use serde_json::Value as Json;

use super::time;

/// Begins the text of an error that a template raised.
pub(super) const RAISED: &str = "raised: ";

/// Deepest indentation of JSON, in spaces.
const MAX_INDENT: usize = 64;

/// `raise_exception(message)`.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// `strftime_now(format)`, in UTC.
pub(super) fn strftime_now(format: &str) -> Result<String, Error> {
    time::now(format).map_err(|what| Error::new(ErrorKind::InvalidOperation, what))
}

/// Prints booleans and none as Python does, everything else as the engine does.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => Ok(out.write_str("None")?),
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        _ => escape_formatter(out, state, value),
    }
}

/// `tojson` as in transformers: Python's `json.dumps` with `ensure_ascii=False`, without escapes for HTML.
pub(super) fn tojson(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let invalid = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    // Signature in transformers: ensure_ascii, indent, separators, sort_keys.
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(given) => Some(given),
        None => positional.get(1).cloned(),
    };
    let indent = match indent.filter(|given| !given.is_none() && !given.is_undefined()) {
        None => None,
        Some(given) => {
            let spaces = usize::try_from(given.clone()).ok().filter(|n| *n <= MAX_INDENT);
            Some(
                spaces
                    .ok_or_else(|| invalid(format!("indent: expected at most {MAX_INDENT}, got {given}")))?,
            )
        }
    };
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let _: (Option<Value>, Option<Value>) = (options.get("ensure_ascii")?, options.get("separators")?);
    options.assert_all_used()?;
    let json = serde_json::to_value(value).map_err(|error| invalid(error.to_string()))?;
    let mut out = String::new();
    write_json(&mut out, &json, indent, sorted, 0);
    Ok(out)
}

fn write_json(out: &mut String, value: &Json, indent: Option<usize>, sorted: bool, depth: usize) {
    match value {
        Json::Array(items) if !items.is_empty() => {
            list(out, ('[', ']'), indent, depth, items.iter(), |out, item| {
                write_json(out, item, indent, sorted, depth + 1);
            });
        }
        Json::Object(fields) if !fields.is_empty() => {
            let mut fields: Vec<_> = fields.iter().collect();
            if sorted {
                fields.sort_by_key(|(name, _)| *name);
            }
            list(out, ('{', '}'), indent, depth, fields.into_iter(), |out, (name, value)| {
                out.push_str(&Json::from(name.as_str()).to_string());
                out.push_str(": ");
                write_json(out, value, indent, sorted, depth + 1);
            });
        }
        other => out.push_str(&other.to_string()),
    }
}

fn list<T>(
    out: &mut String,
    (open, close): (char, char),
    indent: Option<usize>,
    depth: usize,
    items: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut String, T),
) {
    let line = |out: &mut String, depth: usize| {
        if let Some(spaces) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', spaces * depth));
        }
    };
    out.push(open);
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        line(out, depth + 1);
        write(out, item);
    }
    line(out, depth);
    out.push(close);
}
