//! Limits of grammars, which come from clients.

use llguidance::api::ParserLimits;
use serde_json::{Value, json};

use super::GrammarError;

/// Longest schema as text, in bytes.
const SCHEMA: usize = 256 << 10;
/// Deepest schema.
const DEPTH: usize = 64;
/// Longest regular expression, in bytes.
pub(super) const REGEX: usize = 8 << 10;
/// Longest grammar, in bytes.
pub(super) const GRAMMAR: usize = 256 << 10;
/// Deepest nesting of brackets in a grammar or regular expression.
const BRACKETS: usize = 100;
/// White space between the parts of a JSON value: enough to indent it, and too little for a model to stay in it.
const WHITE: &str = r"[\x20\x0A\x0D\x09]{1,16}";

/// Limits of the parser: a mask takes at most some tens of milliseconds, the states of a lexer some tens of megabytes.
pub(super) fn parser() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 30_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Returns the schema with the parser's options, in place of such options of the client.
pub(super) fn schema(schema: &Value) -> Result<Value, GrammarError> {
    check_depth(schema)?;
    let found = schema.to_string().len();
    if found > SCHEMA {
        return Err(limit(format!("{found} bytes"), format!("a schema of up to {SCHEMA} bytes")));
    }
    match schema {
        Value::Object(_) | Value::Bool(true) => Ok(options(schema.clone())),
        _ => Err(GrammarError::Invalid("a schema that is no object".into())),
    }
}

/// Sets the parser's options in a schema.
pub(crate) fn options(schema: Value) -> Value {
    let mut map = match schema {
        Value::Object(map) => map,
        _ => serde_json::Map::new(),
    };
    map.insert("x-guidance".into(), json!({ "whitespace_pattern": WHITE }));
    Value::Object(map)
}

fn check_depth(schema: &Value) -> Result<(), GrammarError> {
    let mut open = vec![(schema, 1)];
    while let Some((value, depth)) = open.pop() {
        if depth > DEPTH {
            return Err(limit("a deeper one".into(), format!("a schema of up to {DEPTH} levels")));
        }
        match value {
            Value::Array(items) => open.extend(items.iter().map(|item| (item, depth + 1))),
            Value::Object(map) => open.extend(map.values().map(|item| (item, depth + 1))),
            _ => {}
        }
    }
    Ok(())
}

/// Checks the length of a text, and the nesting of its brackets wherever they stand.
pub(super) fn text(what: &str, text: &str, longest: usize) -> Result<(), GrammarError> {
    if text.len() > longest {
        return Err(limit(format!("{} bytes", text.len()), format!("a {what} of up to {longest} bytes")));
    }
    if text.trim().is_empty() {
        return Err(GrammarError::Invalid(format!("an empty {what}")));
    }
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > BRACKETS {
        return Err(limit("more".into(), format!("a {what} with up to {BRACKETS} levels of brackets")));
    }
    Ok(())
}

fn limit(found: String, allowed: String) -> GrammarError {
    GrammarError::Limit { found, allowed }
}

/// Shortens a message to one line of a few hundred characters: it may quote the grammar.
pub(super) fn shorten(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
}
