//! Functions of templates: those that transformers adds to Jinja, and printing of values as Python prints them.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use serde_json::Value as Json;

use super::python::{self, invalid};
use super::time;

/// Begins the text of an error that a template raised.
pub(super) const RAISED: &str = "raised: ";

/// Longest indentation and separator of JSON, in bytes.
const MAX_INDENT: usize = 64;

/// `raise_exception(message)`.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// `strftime_now(format)`, in UTC.
fn strftime_now(format: &str) -> Result<String, Error> {
    time::now(format).map_err(|what| Error::new(ErrorKind::InvalidOperation, what))
}

/// Adds the functions, filters and methods of Python and of transformers to an engine.
pub(super) fn add(engine: &mut Environment<'_>) {
    engine.set_formatter(print);
    engine.set_unknown_method_callback(python::call);
    engine.add_function("raise_exception", raise_exception);
    engine.add_function("strftime_now", strftime_now);
    engine.add_filter("tojson", tojson);
    // Strings and dictionaries have a length and items too.
    engine.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    engine.add_filter("pprint", |value: &Value| python::repr(value));
    engine.add_filter("string", |value: &Value| python::text(value));
    engine.add_filter(PERCENT, |format: &str, arguments: &Value| python::percent(format, arguments));
}

/// Name of the filter that stands for the operator `%` after a string.
pub(super) const PERCENT: &str = "percent_format";

/// Prints values as Python does.
fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => escape_formatter(out, state, value),
        _ => Ok(python::write_repr(out, value)?),
    }
}

/// Signature of `tojson` in transformers, and its defaults.
struct JsonOptions {
    ensure_ascii: bool,
    /// White space of one level.
    indent: Option<String>,
    /// Between items, and after a key.
    separators: [String; 2],
    sort_keys: bool,
}

impl JsonOptions {
    fn read(positional: &[Value], options: &Kwargs) -> Result<Self, Error> {
        let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
        if positional.len() > names.len() {
            return Err(invalid(format!("tojson: expected at most {} arguments", names.len())));
        }
        let given = |at: usize| -> Result<Option<Value>, Error> {
            let value = match positional.get(at) {
                Some(value) => Some(value.clone()),
                None => options.get::<Option<Value>>(names[at])?,
            };
            Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
        };
        let indent = given(1)?.map(|given| match given.as_str() {
            Some(text) if text.len() <= MAX_INDENT => Ok(text.to_owned()),
            _ => match i64::try_from(given.clone()) {
                Ok(spaces) if spaces <= MAX_INDENT as i64 => {
                    Ok(" ".repeat(usize::try_from(spaces).unwrap_or(0)))
                }
                _ => {
                    Err(invalid(format!("indent: expected a text or number up to {MAX_INDENT}, got {given}")))
                }
            },
        });
        let indent = indent.transpose()?;
        let separators = match given(2)? {
            None => [if indent.is_some() { "," } else { ", " }, ": "].map(str::to_owned),
            Some(given) => {
                let texts: Option<Vec<String>> =
                    given.try_iter()?.map(|text| text.as_str().map(str::to_owned)).collect();
                let pair = texts.and_then(|texts| <[String; 2]>::try_from(texts).ok());
                pair.filter(|pair| pair.iter().all(|text| text.len() <= MAX_INDENT))
                    .ok_or_else(|| invalid(format!("separators: expected two texts, got {given}")))?
            }
        };
        let flag = |at: usize| Ok::<_, Error>(given(at)?.is_some_and(|given| given.is_true()));
        let read = JsonOptions { ensure_ascii: flag(0)?, indent, separators, sort_keys: flag(3)? };
        options.assert_all_used()?;
        Ok(read)
    }
}

/// `tojson` as in transformers: Python's `json.dumps` with `ensure_ascii=False`, without escapes for HTML.
fn tojson(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let options = JsonOptions::read(&positional, &options)?;
    if value.is_undefined() {
        return Err(invalid("tojson: expected a value, got an undefined one"));
    }
    let json = serde_json::to_value(value).map_err(|error| invalid(error.to_string()))?;
    let mut out = String::new();
    write_json(&mut out, &json, &options, 0);
    Ok(out)
}

fn write_json(out: &mut String, value: &Json, options: &JsonOptions, depth: usize) {
    match value {
        Json::Array(items) if !items.is_empty() => {
            list(out, ('[', ']'), options, depth, items.iter(), |out, item| {
                write_json(out, item, options, depth + 1);
            });
        }
        Json::Object(fields) if !fields.is_empty() => {
            let mut fields: Vec<_> = fields.iter().collect();
            if options.sort_keys {
                fields.sort_by_key(|(name, _)| *name);
            }
            list(out, ('{', '}'), options, depth, fields.into_iter(), |out, (name, value)| {
                write_text(out, name, options.ensure_ascii);
                out.push_str(&options.separators[1]);
                write_json(out, value, options, depth + 1);
            });
        }
        Json::String(text) => write_text(out, text, options.ensure_ascii),
        Json::Number(number) if number.is_f64() => {
            out.push_str(&python::float(number.as_f64().unwrap_or_default()));
        }
        other => out.push_str(&other.to_string()),
    }
}

/// Writes a string of JSON, with `\uXXXX` for each UTF-16 unit that is not ASCII if `ascii`.
fn write_text(out: &mut String, text: &str, ascii: bool) {
    for c in Json::from(text).to_string().chars() {
        if ascii && (c as u32) > 0x7e {
            for unit in c.encode_utf16(&mut [0; 2]) {
                _ = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(c);
        }
    }
}

fn list<T>(
    out: &mut String,
    (open, close): (char, char),
    options: &JsonOptions,
    depth: usize,
    items: impl Iterator<Item = T>,
    mut write: impl FnMut(&mut String, T),
) {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &options.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    };
    out.push(open);
    for (i, item) in items.enumerate() {
        if i > 0 {
            out.push_str(&options.separators[0]);
        }
        line(out, depth + 1);
        write(out, item);
    }
    line(out, depth);
    out.push(close);
}
