//! Expressions in texts: `100 * linear_bytes(W4A16 INT4) / memory`.
//!
//! ```text
//! condition   sum [ (< | > | =) sum ]          with `not ` before it: the opposite
//! sum         product { (+ | -) product }
//! product     factor { (* | /) factor }
//! factor      number | name [ (argument, …) ] | $field | (sum)
//! ```
//!
//! Operators have a space on both sides. An argument is text, which the value reads as a name or as an expression.

use super::value::{Args, Fault, Row, Subject, Value};
use super::values;

/// Parsed expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expression {
    /// Number.
    Number(f64),
    /// Field of the row.
    Field(String),
    /// Value with the texts of its arguments.
    Named(String, Vec<String>),
    /// Operation on two expressions.
    Binary(Box<Expression>, char, Box<Expression>),
    /// Opposite of a condition.
    Not(Box<Expression>),
}

/// Subject and row for which an expression is evaluated.
pub(super) struct Scope<'a> {
    /// Model, device and load.
    pub(super) subject: &'a Subject<'a>,
    /// Fields of the line's row; empty without.
    pub(super) row: &'a Row,
}

/// Operators from the weakest to the strongest.
const LEVELS: [&[char]; 3] = [&['<', '>', '='], &['+', '-'], &['*', '/']];

/// Splits at a separator that is in no parentheses and braces; from the last one if `last`.
fn split<'a>(text: &'a str, separators: &[char], last: bool) -> Option<(&'a str, char, &'a str)> {
    let mut depth = 0i32;
    let mut found = None;
    let bytes = text.as_bytes();
    for (at, c) in text.char_indices() {
        match c {
            '(' | '{' => depth += 1,
            ')' | '}' => depth -= 1,
            c if depth == 0 && separators.contains(&c) => {
                let spaced = at > 0 && bytes[at - 1] == b' ' && bytes.get(at + 1) == Some(&b' ');
                if spaced && (last || found.is_none()) {
                    found = Some((at, c));
                }
            }
            _ => {}
        }
    }
    found.map(|(at, c)| (&text[..at - 1], c, &text[at + 2..]))
}

/// Splits at the first ` c ` that is in no parentheses and braces.
pub(super) fn split_first(text: &str, separator: char) -> Option<(&str, &str)> {
    split(text, &[separator], false).map(|(before, _, after)| (before, after))
}

/// Splits arguments at their commas.
fn arguments(text: &str) -> Vec<String> {
    let mut depth = 0i32;
    let mut parts = vec![String::new()];
    for c in text.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        match (c, parts.last_mut()) {
            (',', _) if depth == 0 => parts.push(String::new()),
            (c, Some(part)) => part.push(c),
            _ => {}
        }
    }
    parts.iter().map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

impl Expression {
    /// Parses an expression.
    ///
    /// # Errors
    /// [`Fault::Syntax`].
    pub(super) fn parse(text: &str) -> Result<Self, Fault> {
        let text = text.trim();
        if let Some(rest) = text.strip_prefix("not ") {
            return Ok(Expression::Not(Box::new(Self::parse(rest)?)));
        }
        for level in LEVELS {
            if let Some((left, operator, right)) = split(text, level, true) {
                let (left, right) = (Self::parse(left)?, Self::parse(right)?);
                return Ok(Expression::Binary(Box::new(left), operator, Box::new(right)));
            }
        }
        if let Ok(number) = text.parse::<f64>() {
            return Ok(Expression::Number(number));
        }
        let word = |text: &str| {
            let starts = text.chars().next().is_some_and(|c| c.is_ascii_lowercase());
            starts && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        };
        if let Some(field) = text.strip_prefix('$') {
            return Ok(Expression::Field(field.to_owned()));
        }
        let (name, list) = match text.split_once('(') {
            Some(("", rest)) if rest.ends_with(')') => return Self::parse(&rest[..rest.len() - 1]),
            Some((name, rest)) => match rest.strip_suffix(')') {
                Some(inside) => (name, arguments(inside)),
                None => return Err(Fault::Syntax(text.to_owned(), "expected ) at the end")),
            },
            None => (text, Vec::new()),
        };
        match word(name) {
            true => Ok(Expression::Named(name.to_owned(), list)),
            false => Err(Fault::Syntax(text.to_owned(), "expected a number, a name or $field")),
        }
    }

    /// Evaluates the expression. Arithmetic with an absent value is absent.
    ///
    /// # Errors
    /// [`Fault`].
    pub(super) fn evaluate(&self, scope: &Scope<'_>) -> Result<Value, Fault> {
        match self {
            Expression::Number(number) => Ok(Value::Number(*number)),
            Expression::Field(name) => scope.field(name),
            Expression::Named(name, texts) => {
                let compute = values::find(name).ok_or_else(|| Fault::Unknown(name.clone()))?;
                let args = scope.arguments(name, texts)?;
                compute(scope.subject, &args)
            }
            Expression::Not(condition) => Ok(Value::Flag(!condition.evaluate(scope)?.holds())),
            Expression::Binary(left, operator, right) => {
                match (left.evaluate(scope)?, right.evaluate(scope)?) {
                    (Value::Number(a), Value::Number(b)) => operate(a, *operator, b),
                    (Value::Text(a), Value::Text(b)) if *operator == '=' => Ok(Value::Flag(a == b)),
                    (Value::Absent, _) | (_, Value::Absent) => Ok(Value::Absent),
                    _ => Err(Fault::Syntax(format!("{self:?}"), "expected two numbers")),
                }
            }
        }
    }

    /// Calls `visit` with the name of every value, those in arguments included.
    #[cfg(test)]
    pub(super) fn names(&self, visit: &mut dyn FnMut(&str)) {
        match self {
            Expression::Number(_) => {}
            Expression::Field(name) => visit(&format!("${name}")),
            Expression::Not(inner) => inner.names(visit),
            Expression::Binary(left, _, right) => {
                left.names(visit);
                right.names(visit);
            }
            Expression::Named(name, texts) => {
                visit(name);
                let known = |name: &str| name.starts_with('$') || values::find(name).is_some();
                for inner in texts.iter().filter_map(|text| Self::parse(text).ok()) {
                    inner.names(&mut |name| {
                        if known(name) {
                            visit(name);
                        }
                    });
                }
            }
        }
    }
}

/// Applies an operator.
fn operate(a: f64, operator: char, b: f64) -> Result<Value, Fault> {
    Ok(match operator {
        '+' => Value::Number(a + b),
        '-' => Value::Number(a - b),
        '*' => Value::Number(a * b),
        '/' => Value::Number(a / b),
        '<' => Value::Flag(a < b),
        '>' => Value::Flag(a > b),
        '=' => Value::Flag(a == b),
        _ => return Err(Fault::Syntax(operator.to_string(), "expected an operator")),
    })
}

impl Scope<'_> {
    /// Finds a field of the row.
    fn field(&self, name: &str) -> Result<Value, Fault> {
        let found = self.row.iter().find(|(field, _)| *field == name);
        found.map(|(_, value)| value.clone()).ok_or_else(|| Fault::Unknown(format!("${name}")))
    }

    /// Evaluates arguments: a field stands for its value, another text is a number too if it is an expression.
    pub(super) fn arguments<'b>(&self, name: &'b str, texts: &[String]) -> Result<Args<'b>, Fault> {
        let of = |text: &String| match text.strip_prefix('$') {
            Some(field) if field.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') => {
                Ok(match self.field(field)? {
                    Value::Number(x) => (x.to_string(), Some(x)),
                    Value::Text(text) => (text, None),
                    Value::Flag(flag) => (flag.to_string(), None),
                    Value::Absent => (String::new(), None),
                })
            }
            _ => {
                let value = Expression::parse(text).and_then(|inner| inner.evaluate(self));
                let number = match value {
                    Ok(Value::Number(number)) => Some(number),
                    _ => None,
                };
                Ok((text.clone(), number))
            }
        };
        Ok(Args { name, list: texts.iter().map(of).collect::<Result<_, Fault>>()? })
    }
}
