//! Grammars of replies with calls.

use std::fmt::Write;

use serde_json::{Value, json};

use super::syntax::{Body, Syntax};
use super::{Choice, Tool};
use crate::grammar::{Grammar, schema_options};

/// Most calls of a reply.
const CALLS: usize = 16;

/// Grammar of a reply to a request with `tools`, with several calls if `parallel`: calls alone if `choice` requires one,
/// or text with calls whose arguments follow their schemas if one of the tools is strict. `None` if all replies will do.
/// `special` returns the id of a special token by its name.
///
/// # Errors
/// The name of the tool if `choice` names one that is not there; the empty string if there are none.
pub fn grammar(
    syntax: &Syntax,
    tools: &[Tool],
    choice: &Choice,
    parallel: bool,
    special: &dyn Fn(&str) -> Option<u32>,
) -> Result<Option<Grammar>, String> {
    let (allowed, parallel): (Vec<&Tool>, bool) = match choice {
        Choice::None => return Ok(None),
        Choice::Auto if !tools.iter().any(|tool| tool.strict) => return Ok(None),
        Choice::Auto | Choice::Required => (tools.iter().collect(), parallel),
        Choice::Named(name) => (tools.iter().filter(|tool| tool.name == *name).collect(), false),
    };
    if allowed.is_empty() {
        let name = if let Choice::Named(name) = choice { name.clone() } else { String::new() };
        return Err(name);
    }
    let mark = |text: &str| match special(text) {
        _ if text.is_empty() => String::new(),
        Some(id) => format!("<[{id}]>"),
        None => Value::from(text).to_string(),
    };
    let (close, inner, between) = (mark(syntax.close), mark(syntax.inner), mark(syntax.between));
    let mut out = String::new();
    let is_open = *choice == Choice::Auto;
    let open = match is_open {
        false => mark(syntax.open),
        true => write_text(syntax, special(syntax.open), parallel, &mut out),
    };
    let more = |between: &str| match parallel {
        true => format!("({between} call){{0,{}}}", CALLS - 1),
        false => String::new(),
    };
    let _ = match (syntax.is_list, is_open) {
        (true, _) => writeln!(out, "calls: {open} \"[\" call {} \"]\"", more("\",\"")),
        // Text before a call includes what stands between two.
        (false, true) if !syntax.open.is_empty() => writeln!(out, "calls: call"),
        (false, _) => writeln!(out, "calls: call {}", more(&between)),
    };
    if !is_open {
        out.push_str("start: calls\n");
    }
    let names: Vec<String> = (0..allowed.len()).map(|i| format!("tool{i}")).collect();
    let any = names.join(" | ");
    let _ = match syntax.is_list {
        true => writeln!(out, "call: {any}"),
        false => writeln!(out, "call: {open} {inner} ({any}) {inner} {close}"),
    };
    for (name, tool) in names.iter().zip(allowed) {
        let _ = match syntax.body {
            Body::Object => writeln!(out, "{name}: %json {}", call_schema(syntax, tool)),
            Body::NameThen(between) => {
                let (tool_name, between) = (Value::from(tool.name.as_str()), mark(between));
                let arguments = schema_options(arguments(tool, ""));
                writeln!(out, "{name}: {tool_name} {between} %json {arguments}")
            }
        };
    }
    Ok(Some(Grammar::Lark(out)))
}

/// Writes the beginning of the grammar of text that may contain calls; returns what stands before a call.
fn write_text(syntax: &Syntax, open: Option<u32>, parallel: bool, out: &mut String) -> String {
    let most = if parallel && !syntax.is_list { CALLS } else { 1 };
    match open {
        _ if syntax.open.is_empty() => {
            // A reply that begins otherwise than with a brace is text.
            out.push_str("start: calls | TEXT\nTEXT: /([^ \\n\\r\\t{](?s:.)*)?/\n");
            String::new()
        }
        Some(id) => {
            // Special tokens are no text.
            let _ = writeln!(out, "start: TEXT (calls TEXT){{0,{most}}}\nTEXT: /(?s:.*)/");
            format!("<[{id}]>")
        }
        None => {
            let open = Value::from(syntax.open);
            let literal: String = syntax.open.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
            let _ = writeln!(
                out,
                "start: calls{{0,{most}}} TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*){literal}(?s:.*)/\nbefore[lazy]: /(?s:.*)/ {open}"
            );
            "before".into()
        }
    }
}

/// Schema of the object of a call.
fn call_schema(syntax: &Syntax, tool: &Tool) -> Value {
    let key = syntax.arguments[0];
    schema_options(json!({
        "type": "object",
        "properties": { "name": { "const": tool.name }, key: arguments(tool, &format!("/properties/{key}")) },
        "required": ["name", key],
        "additionalProperties": false,
    }))
}

/// Schema of a tool's arguments, which stands at `path` of another one: references point from there.
fn arguments(tool: &Tool, path: &str) -> Value {
    let mut schema = match &tool.parameters {
        Value::Object(map) if !map.is_empty() => tool.parameters.clone(),
        _ => json!({ "type": "object" }),
    };
    if schema.get("type").is_none() {
        schema["type"] = json!("object");
    }
    move_references(&mut schema, path, 0);
    schema
}

fn move_references(schema: &mut Value, path: &str, depth: usize) {
    // Deeper schemas are refused later.
    if depth > 200 {
        return;
    }
    match schema {
        Value::Object(map) => {
            for (key, value) in map.iter_mut() {
                match value {
                    Value::String(text) if key == "$ref" && text.starts_with('#') => {
                        *text = format!("#{path}{}", &text[1..]);
                    }
                    value => move_references(value, path, depth + 1),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, path, depth + 1)),
        _ => {}
    }
}
