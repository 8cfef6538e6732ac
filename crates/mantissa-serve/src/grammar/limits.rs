//! Limits of grammars, which come from clients.

use llguidance::api::ParserLimits;
use serde_json::{Value, json};

use super::{Grammar, GrammarError, numbers};

/// Longest schema as text, in bytes.
const SCHEMA: usize = 256 << 10;
/// Deepest schema.
const DEPTH: usize = 64;
/// Longest regular expression, in bytes.
const REGEX: usize = 8 << 10;
/// Longest grammar, in bytes.
const GRAMMAR: usize = 256 << 10;
/// Deepest nesting of brackets in a grammar or regular expression.
const BRACKETS: usize = 100;
/// White space between the parts of a JSON value: enough to indent it, and too little for a model to stay in it.
const WHITE: &str = r"[\x20\x0A\x0D\x09]{1,16}";

/// Limits of the parser, per mask where not said otherwise. Measured on Zen 4 with grammars of JSON, a C-like and an
/// SQL-like language and a schema of 60 properties of four types each: 4 000 items, 500 in a row and 50 000 units of
/// fuel change no mask, 2 000, 200 and 20 000 end the schema. Masks take .05 ms on average and 9 ms at most; masks of
/// the most ambiguous grammar tried 5 and 28 ms, against 7 and 37 ms with the parser's own limits. A lexer's state
/// takes 1 to 2 kB.
pub(super) fn parser() -> ParserLimits {
    ParserLimits {
        step_max_items: 10_000,
        max_items_in_row: 1_000,
        step_lexer_fuel: 100_000,
        // Over the life of a sequence.
        max_lexer_states: 30_000,
        max_grammar_size: 200_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Checks the size of a grammar, and how deep it is nested, without recursion. Returns a text that no other grammar
/// has.
pub(super) fn check(grammar: &Grammar) -> Result<String, GrammarError> {
    match grammar {
        Grammar::JsonObject => Ok("object".into()),
        Grammar::JsonSchema(schema) => {
            check_depth(schema)?;
            if !matches!(schema, Value::Object(_) | Value::Bool(true)) {
                return Err(GrammarError::Invalid("a schema that is no object".into()));
            }
            numbers::check(schema)?;
            let text = schema.to_string();
            if text.len() > SCHEMA {
                let found = format!("{} bytes", text.len());
                return Err(limit(found, format!("a schema of up to {SCHEMA} bytes")));
            }
            Ok(format!("schema {text}"))
        }
        Grammar::Regex(regex) => {
            text("regular expression", regex, REGEX)?;
            Ok(format!("regex {regex}"))
        }
        Grammar::Lark(lark) => {
            text("grammar", lark, GRAMMAR)?;
            numbers::check_lark(lark)?;
            Ok(format!("lark {lark}"))
        }
        Grammar::Gbnf(gbnf) => {
            text("grammar", gbnf, GRAMMAR)?;
            Ok(format!("gbnf {gbnf}"))
        }
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
fn text(what: &str, text: &str, longest: usize) -> Result<(), GrammarError> {
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
