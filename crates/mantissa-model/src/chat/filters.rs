//! Filters of Jinja 3 that the engine lacks or reads otherwise (`jinja2/filters.py`).

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, Value};

use super::python::{self, invalid};

/// Longest text that a filter adds at once, in bytes.
const MAX_WIDTH: usize = 1 << 16;

/// Adds the filters and tests to an engine.
pub(super) fn add(engine: &mut Environment<'_>) {
    engine.add_filter("indent", indent);
    engine.add_filter("trim", trim);
    engine.add_filter("replace", replace);
    engine.add_filter("default", default);
    engine.add_filter("d", default);
    engine.add_filter("center", center);
    engine.add_filter("wordcount", |value: &Value| words(&python::text(value)).count());
    for name in ["e", "escape"] {
        engine.add_filter(name, |value: &Value| match value.is_safe() {
            true => value.clone(),
            false => escaped(value),
        });
    }
    engine.add_filter("forceescape", escaped);
    engine.add_test("iterable", |value: &Value| {
        !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
            && (value.is_undefined() || value.try_iter().is_ok())
    });
}

/// Positional and named arguments of a filter.
struct Arguments<'a> {
    filter: &'static str,
    positional: &'a [Value],
    named: &'a Kwargs,
}

impl<'a> Arguments<'a> {
    /// Takes the arguments of a filter that has at most as many as `names`.
    fn new(
        filter: &'static str,
        names: &[&str],
        positional: &'a [Value],
        named: &'a Kwargs,
    ) -> Result<Self, Error> {
        match positional.len() <= names.len() {
            true => Ok(Arguments { filter, positional, named }),
            false => Err(invalid(format!("{filter}: expected at most {} arguments", names.len()))),
        }
    }

    /// Returns argument `at`, which may be given by its name; none if it is `none`.
    fn get(&self, at: usize, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.positional.get(at) {
            Some(value) => Some(value.clone()),
            None => self.named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    }

    fn flag(&self, at: usize, name: &str) -> Result<bool, Error> {
        Ok(self.get(at, name)?.is_some_and(|value| value.is_true()))
    }

    /// Returns an argument that is a text.
    fn text(&self, at: usize, name: &str) -> Result<Option<String>, Error> {
        let filter = self.filter;
        let text = |value: Value| match value.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(invalid(format!("{filter}: {name}: expected a text, got {value}"))),
        };
        self.get(at, name)?.map(text).transpose()
    }

    /// Returns an argument that is a number of at most [`MAX_WIDTH`], negative ones as 0.
    fn width(&self, at: usize, name: &str) -> Result<Option<usize>, Error> {
        let filter = self.filter;
        let width = |value: Value| {
            let fault =
                || invalid(format!("{filter}: {name}: expected a number up to {MAX_WIDTH}, got {value}"));
            let number = i64::try_from(value.clone()).map_err(|_| fault())?;
            let number = usize::try_from(number.max(0)).map_err(|_| fault())?;
            if number <= MAX_WIDTH { Ok(number) } else { Err(fault()) }
        };
        self.get(at, name)?.map(width).transpose()
    }
}

/// `indent(width=4, first=False, blank=False)`: the width may be a text.
fn indent(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let arguments = Arguments::new("indent", &["width", "first", "blank"], &positional, &named)?;
    let width = arguments.get(0, "width")?;
    let indentation = match width.as_ref().and_then(Value::as_str) {
        Some(text) if text.len() <= MAX_WIDTH => text.to_owned(),
        _ => " ".repeat(arguments.width(0, "width")?.unwrap_or(4)),
    };
    let (first, blank) = (arguments.flag(1, "first")?, arguments.flag(2, "blank")?);
    named.assert_all_used()?;
    let text = python::text(value);
    let mut out = String::new();
    // As Jinja does: a newline is added, so that one at the end is a line of its own.
    for (i, line) in python::lines(&(text + "\n"), false).into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `trim(chars=None)`.
fn trim(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let chars = Arguments::new("trim", &["chars"], &positional, &named)?.text(0, "chars")?;
    named.assert_all_used()?;
    let text = python::text(value);
    Ok(match chars {
        Some(chars) => text.trim_matches(|c| chars.contains(c)).to_owned(),
        None => text.trim_matches(python::is_space).to_owned(),
    })
}

/// `replace(old, new, count=None)`.
fn replace(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let arguments = Arguments::new("replace", &["old", "new", "count"], &positional, &named)?;
    let given = |at, name| {
        let value = arguments.get(at, name)?;
        value.map(|value| python::text(&value)).ok_or_else(|| invalid(format!("replace: expected {name}")))
    };
    let (old, new) = (given(0, "old")?, given(1, "new")?);
    let count = match arguments.get(2, "count")? {
        Some(count) => usize::try_from(i64::try_from(count)?).unwrap_or(usize::MAX),
        None => usize::MAX,
    };
    named.assert_all_used()?;
    Ok(python::text(value).replacen(&old, &new, count))
}

/// `default(default_value="", boolean=False)`.
fn default(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let arguments = Arguments::new("default", &["default_value", "boolean"], &positional, &named)?;
    let other = match positional.first() {
        Some(other) => other.clone(),
        None => named.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let boolean = arguments.flag(1, "boolean")?;
    named.assert_all_used()?;
    Ok(if value.is_undefined() || boolean && !value.is_true() { other } else { value.clone() })
}

/// `center(width=80)`, with the extra space on the side where Python puts it.
fn center(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let width = Arguments::new("center", &["width"], &positional, &named)?.width(0, "width")?;
    named.assert_all_used()?;
    let (text, width) = (python::text(value), width.unwrap_or(80));
    let spaces = width.saturating_sub(text.chars().count());
    let left = spaces / 2 + (spaces & width & 1);
    Ok(format!("{}{text}{}", " ".repeat(left), " ".repeat(spaces - left)))
}

/// Iterates over the words of a text, as `\w+` finds them.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Escapes a text for HTML as markupsafe does.
fn escaped(value: &Value) -> Value {
    let mut out = String::new();
    for c in python::text(value).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Value::from_safe_string(out)
}
