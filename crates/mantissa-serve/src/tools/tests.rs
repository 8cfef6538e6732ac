use serde_json::json;

use super::*;

/// Pieces of `text` that arrives in parts of `part` characters, joined.
fn parse(template: &str, text: &str, part: usize) -> Vec<Piece> {
    let mut parser = Parser::new(Syntax::of(Some(template)), vec!["get_weather".into(), "f".into()]);
    let chars: Vec<char> = text.chars().collect();
    let mut all: Vec<Piece> = Vec::new();
    let mut add = |pieces: Vec<Piece>| {
        for piece in pieces {
            match (all.last_mut(), piece) {
                (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
                (
                    Some(Piece::Arguments { index: before_index, text: before }),
                    Piece::Arguments { index, text },
                ) if *before_index == index => before.push_str(&text),
                (_, piece) => all.push(piece),
            }
        }
    };
    for part in chars.chunks(part) {
        add(parser.push(&part.iter().collect::<String>()));
    }
    add(parser.finish());
    all
}

fn text(text: &str) -> Piece {
    Piece::Text(text.into())
}

fn call(index: usize, name: &str, arguments: &str) -> [Piece; 2] {
    [Piece::Call { index, name: name.into() }, Piece::Arguments { index, text: arguments.into() }]
}

const HERMES: &str = "<tool_call></tool_call>";
const LLAMA: &str = "<|start_header_id|> parameters";

#[test]
fn calls_are_found_however_the_text_is_cut() {
    let arguments = "{\"city\": \"Zür\\\"ich {\", \"days\": [1, 2]}";
    let [begin, end] = call(0, "get_weather", arguments);
    let object = format!("{{\"name\": \"get_weather\", \"arguments\": {arguments}}}");
    let second = call(1, "f", "{}");
    for (template, reply, before, calls) in [
        (HERMES, format!("<tool_call>\n{object}\n</tool_call>"), "", 1),
        (
            HERMES,
            format!(
                "I look.\n\n<tool_call>{object}</tool_call>\n<tool_call>\n{{\"name\": \"f\"}}\n</tool_call>"
            ),
            "I look.",
            2,
        ),
        (LLAMA, object.replace("arguments", "parameters"), "", 1),
        (LLAMA, format!("{object}; {{\"name\": \"f\", \"parameters\": {{}}}}"), "", 2),
        ("[TOOL_CALLS]", format!("[TOOL_CALLS] [{object}, {{\"name\": \"f\", \"arguments\": {{}}}}]"), "", 2),
        ("[TOOL_CALLS]", format!("Hm.[TOOL_CALLS][{object}]"), "Hm.", 1),
        (
            "[TOOL_CALLS][ARGS]",
            format!("[TOOL_CALLS]get_weather[ARGS]{arguments}[TOOL_CALLS]f[ARGS]{{}}"),
            "",
            2,
        ),
        ("", format!(" {object}"), "", 1),
    ] {
        for part in [1, 2, 3, 7, 1000] {
            let mut expected = Vec::new();
            if !before.is_empty() {
                expected.push(text(before));
            }
            expected.extend([begin.clone(), end.clone()]);
            if calls == 2 {
                expected.extend(second.clone());
            }
            assert_eq!(parse(template, &reply, part), expected, "{part}: {reply}");
        }
    }
}

#[test]
fn text_that_is_no_call_is_returned() {
    for (template, reply) in [
        (HERMES, "Just text with < and <tool and <tool_calls."),
        (HERMES, "<tool_call>\nnot json"),
        (HERMES, "<tool_call>{\"name\": 3}"),
        (HERMES, "ends in <tool_c"),
        (LLAMA, "{\"name\": \"other\", \"parameters\": {}} is no tool"),
        (LLAMA, "{\"answer\": 42}"),
        (LLAMA, "text {\"name\": \"f\", \"parameters\": {}}"),
        ("[TOOL_CALLS]", "[TOOL_CALLS] none"),
        ("", "{\"a\": [1, 2"),
        ("", "   "),
    ] {
        for part in [1, 3, 1000] {
            let joined: String = parse(template, reply, part)
                .into_iter()
                .map(|piece| if let Piece::Text(text) = piece { text } else { panic!("{reply}: {piece:?}") })
                .collect();
            assert_eq!(joined, reply, "{part}");
        }
    }
}

#[test]
fn a_reply_that_is_cut_ends_in_its_call() {
    let pieces = parse(HERMES, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1", 2);
    assert_eq!(pieces, call(0, "f", "{\"a\": 1"));
}

#[test]
fn ids_differ_and_have_nine_characters() {
    let mut ids: Vec<_> = (0..50).flat_map(|reply| (0..3).map(move |index| call_id(reply, index))).collect();
    assert!(ids.iter().all(|id| id.len() == 9 && id.chars().all(|c| c.is_ascii_alphanumeric())));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 150);
}

fn tools() -> Vec<Tool> {
    let tool =
        |name: &str, parameters| Tool { name: name.into(), description: None, parameters, strict: false };
    vec![
        tool(
            "get_weather",
            json!({
                "type": "object",
                "properties": { "city": { "$ref": "#/$defs/city" }, "days": { "type": "integer", "minimum": 1, "maximum": 9 } },
                "required": ["city", "days"],
                "additionalProperties": false,
                "$defs": { "city": { "enum": ["Bern", "Zug"] } }
            }),
        ),
        tool("f", json!({ "type": "object", "properties": {}, "additionalProperties": false })),
    ]
}

/// Texts of forced grammars are calls with valid arguments, in every format.
#[test]
fn forced_replies_are_calls() {
    for template in [HERMES, LLAMA, "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]", ""] {
        let syntax = Syntax::of(Some(template));
        for (choice, parallel) in
            [(Choice::Required, true), (Choice::Required, false), (Choice::Named("get_weather".into()), true)]
        {
            let grammar = grammar(syntax, &tools(), &choice, parallel, &|_| None).unwrap().unwrap();
            for seed in 0..12 {
                let reply = crate::grammar::tests::random_text(&grammar, seed);
                let pieces = parse(template, &reply, 3);
                let names: Vec<&str> = pieces
                    .iter()
                    .filter_map(
                        |piece| if let Piece::Call { name, .. } = piece { Some(name.as_str()) } else { None },
                    )
                    .collect();
                assert!(!names.is_empty() && pieces.len() == 2 * names.len(), "{reply}: {pieces:?}");
                assert!(parallel || names.len() == 1, "{reply}");
                for (piece, name) in pieces.iter().skip(1).step_by(2).zip(&names) {
                    let Piece::Arguments { text, .. } = piece else { panic!("{piece:?}") };
                    let value: Value = serde_json::from_str(text).unwrap();
                    if *name == "f" {
                        assert_eq!(value, json!({}));
                        assert_eq!(choice, Choice::Required);
                    } else {
                        assert!(["Bern", "Zug"].contains(&value["city"].as_str().unwrap()), "{text}");
                        assert!((1..=9).contains(&value["days"].as_i64().unwrap()), "{text}");
                    }
                }
            }
        }
        assert_eq!(grammar(syntax, &tools(), &Choice::Auto, true, &|_| None), Ok(None));
        let missing = Choice::Named("g".into());
        assert_eq!(grammar(syntax, &tools(), &missing, true, &|_| None), Err("g".into()));
        assert_eq!(grammar(syntax, &[], &Choice::Required, true, &|_| None), Err(String::new()));
    }
}

/// With strict tools a reply is any text, and calls in it are valid.
#[test]
fn strict_tools_constrain_calls_and_not_text() {
    let tools: Vec<_> = tools().into_iter().map(|tool| Tool { strict: true, ..tool }).collect();
    let call = "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 3}}";
    let list = |inner: &str| format!("[TOOL_CALLS][{inner}]");
    let wrong = call.replace("Bern", "Rome");
    let hermes = |inner: &str| format!("<tool_call>\n{inner}\n</tool_call>");
    for (template, good, bad) in [
        (
            HERMES,
            vec!["Hi <b> <tool".into(), hermes(call), format!("I look.\n{}\n{}", hermes(call), hermes(call))],
            vec![hermes(&wrong), "a <tool_call> b".into(), "<tool_call>\n{\"name\": \"other\"".into()],
        ),
        (
            LLAMA,
            vec!["Hi { } there".into(), call.replace("arguments", "parameters"), String::new()],
            vec!["{\"a\": 1}".into(), wrong.replace("arguments", "parameters")],
        ),
        (
            "[TOOL_CALLS]",
            vec!["Hi [TOOL".into(), list(call), format!("Hi {}", list(call))],
            vec![list(&wrong)],
        ),
    ] {
        let grammar =
            grammar(Syntax::of(Some(template)), &tools, &Choice::Auto, true, &|_| None).unwrap().unwrap();
        for text in good {
            assert_eq!(crate::grammar::tests::follows(&grammar, &text), Some(true), "{template}: {text}");
        }
        for text in bad {
            assert_eq!(crate::grammar::tests::follows(&grammar, &text), None, "{template}: {text}");
        }
    }
}
