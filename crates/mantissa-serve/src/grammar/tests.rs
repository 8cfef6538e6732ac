use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use mantissa_model::Tokenizer;
use mantissa_runtime::{Constraint, ConstraintError, Offer, TokenMask, Verdict};
use serde_json::json;

use super::*;
use crate::fair::{Caller, Client};

/// A constraint that is asked until it answers.
#[derive(Debug)]
struct Asked {
    constraint: Box<dyn Constraint>,
    mask: TokenMask,
    vocabulary: usize,
}

impl Asked {
    /// Offers a token or an end; the mask holds those that may follow if it is refused.
    fn offer(&mut self, offer: Offer) -> Result<Verdict, ConstraintError> {
        loop {
            self.mask.reset(self.vocabulary);
            match self.constraint.offer(offer, &mut self.mask)? {
                Verdict::Pending => _ = self.constraint.wait(std::time::Duration::from_secs(1)),
                verdict => return Ok(verdict),
            }
        }
    }

    fn takes(&mut self, token: u32) -> bool {
        matches!(self.offer(Offer::Token(token)), Ok(Verdict::Taken { .. }))
    }
}

/// A compiler with its tokenizer.
struct Compiler {
    tokenizer: Tokenizer,
    grammars: Grammars,
    vocabulary: usize,
}

impl Compiler {
    fn compile(&self, grammar: &Grammar) -> Result<Asked, GrammarError> {
        let constraint = self.grammars.compile(&self.tokenizer, grammar)?;
        Ok(Asked { constraint, mask: TokenMask::default(), vocabulary: self.vocabulary })
    }
}

fn grammars() -> Compiler {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny/llama2-gqa-tied");
    let tokenizer = Tokenizer::load(&dir).unwrap();
    let vocabulary = tokenizer.len();
    let grammars = Grammars::new(vocabulary, Confinement::threads(), 1 << 30);
    Compiler { tokenizer, grammars, vocabulary }
}

/// A text of random allowed tokens, and true if it ended by itself.
fn random(grammars: &Compiler, asked: &Asked, seed: u64) -> (String, bool) {
    let constraint = asked.constraint.boxed_clone();
    let mut asked = Asked { constraint, mask: TokenMask::default(), vocabulary: grammars.vocabulary };
    let (mut state, mut ids) = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1, Vec::new());
    let text = |ids: &[u32]| grammars.tokenizer.decode(ids).unwrap();
    while ids.len() < 3000 {
        // No token of this number is in the vocabulary: the refusal tells those that may follow.
        let Verdict::Refused { may_end } = asked.offer(Offer::Token(u32::MAX - 1)).unwrap() else { panic!() };
        let allowed: Vec<u32> =
            (0..grammars.vocabulary as u32).filter(|token| asked.mask.contains(*token)).collect();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if may_end && (allowed.is_empty() || state >> 62 == 0) {
            assert!(matches!(asked.offer(Offer::End), Ok(Verdict::Taken { .. })));
            return (text(&ids), true);
        }
        let token = allowed[(state >> 33) as usize % allowed.len()];
        let Verdict::Taken { complete } = asked.offer(Offer::Token(token)).unwrap() else { panic!() };
        ids.push(token);
        if complete {
            return (text(&ids), true);
        }
    }
    (text(&ids), false)
}

/// A complete text of random tokens that `grammar` allows.
pub(crate) fn random_text(grammar: &Grammar, seed: u64) -> String {
    let grammars = grammars();
    let constraint = grammars.compile(grammar).unwrap_or_else(|e| panic!("{e}: {grammar:?}"));
    let (text, ended) = random(&grammars, &constraint, seed);
    assert!(ended, "{text}");
    text
}

/// `None` if `grammar` does not allow `text`; else true if a text may end there.
pub(crate) fn follows(grammar: &Grammar, text: &str) -> Option<bool> {
    let grammars = grammars();
    let mut constraint = grammars.compile(grammar).unwrap_or_else(|e| panic!("{e}: {grammar:?}"));
    for id in grammars.tokenizer.encode(text, mantissa_model::Bos::Never).unwrap() {
        if !constraint.takes(id) {
            return None;
        }
    }
    Some(matches!(constraint.offer(Offer::End), Ok(Verdict::Taken { .. })))
}

#[test]
fn random_texts_follow_schemas() {
    let grammars = grammars();
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "kind": { "enum": ["a", "b c", "ü"] },
            "tags": { "type": "array", "items": { "$ref": "#/$defs/tag" }, "minItems": 1, "maxItems": 3 }
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": false,
        "$defs": { "tag": { "type": "string", "pattern": "^[a-z]{2,4}$" } }
    });
    let constraint = grammars.compile(&Grammar::JsonSchema(schema)).unwrap();
    for seed in 0..40 {
        let (text, ended) = random(&grammars, &constraint, seed);
        assert!(ended, "{text}");
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert!(value["name"].as_str().unwrap().chars().count() <= 12);
        assert!((0..=150).contains(&value["age"].as_i64().unwrap()));
        assert!(["a", "b c", "ü"].contains(&value["kind"].as_str().unwrap()));
        let tags = value["tags"].as_array().unwrap();
        assert!((1..=3).contains(&tags.len()), "{text}");
        assert!(tags.iter().all(|tag| (2..=4).contains(&tag.as_str().unwrap().len())), "{text}");
        assert_eq!(value.as_object().unwrap().len(), 4);
    }
}

#[test]
fn random_texts_follow_regexes_and_grammars() {
    let grammars = grammars();
    let regex = grammars.compile(&Grammar::Regex("[0-9]{3}-(ab|cd)+x?".into())).unwrap();
    let lark = grammars.compile(&Grammar::Lark("start: \"x\" (\"(\" start \")\")? \"y\"".into())).unwrap();
    let gbnf = "root ::= (expr \"=\" num \"\\n\")+\nexpr ::= term ([-+*/] term)*\nterm ::= num | \"(\" expr \")\"\nnum ::= [0-9]{1,3}\n";
    let gbnf = grammars.compile(&Grammar::Gbnf(gbnf.into())).unwrap();
    let five = grammars.compile(&Grammar::Gbnf("root ::= \"a\"{5,5}".into())).unwrap();
    let expected = regex::Regex::new("^[0-9]{3}-(ab|cd)+x?$").unwrap();
    for seed in 0..20 {
        let (text, ended) = random(&grammars, &regex, seed);
        assert!(ended && expected.is_match(&text), "{text}");
        let (text, ended) = random(&grammars, &lark, seed);
        let open = text.matches('(').count();
        assert!(ended && text.starts_with('x') && text.len() == 2 * open + 2 * (open + 1), "{text}");
        assert_eq!(random(&grammars, &five, seed), ("aaaaa".into(), true));
        let (text, ended) = random(&grammars, &gbnf, seed);
        if ended {
            assert!(text.ends_with('\n') && text.lines().all(|line| line.contains('=')), "{text}");
        }
    }
}

/// Such grammars are errors, and are found to be in bounded time.
#[test]
fn hostile_grammars_are_refused_soon() {
    let grammars = grammars();
    let deep =
        (0..200).fold(json!({ "type": "string" }), |inner, _| json!({ "type": "array", "items": inner }));
    let wide = json!({ "enum": (0..40_000).map(|i| format!("value {i}")).collect::<Vec<_>>() });
    for (name, grammar) in [
        ("deep schema", Grammar::JsonSchema(deep)),
        ("wide schema", Grammar::JsonSchema(wide)),
        ("schema that is a number", Grammar::JsonSchema(json!(3))),
        ("schema of nothing", Grammar::JsonSchema(json!(false))),
        ("unknown type", Grammar::JsonSchema(json!({ "type": "number_of_the_beast" }))),
        ("unsupported keyword", Grammar::JsonSchema(json!({ "type": "array", "uniqueItems": true }))),
        ("bad pattern", Grammar::JsonSchema(json!({ "type": "string", "pattern": "(" }))),
        ("look-ahead", Grammar::JsonSchema(json!({ "type": "string", "pattern": "^(?!a)b$" }))),
        ("missing reference", Grammar::JsonSchema(json!({ "$ref": "#/$defs/none" }))),
        ("remote reference", Grammar::JsonSchema(json!({ "$ref": "file:///etc/passwd" }))),
        ("lenient", Grammar::JsonSchema(json!({ "x-guidance": { "lenient": true }, "not": {} }))),
        ("nested groups", Grammar::Regex(format!("{}a{}", "(".repeat(4000), ")".repeat(4000)))),
        ("bad regex", Grammar::Regex("a(".into())),
        ("long regex", Grammar::Regex("a".repeat(100_000))),
        ("empty regex", Grammar::Regex(String::new())),
        (
            "nested rules",
            Grammar::Gbnf(format!("root ::= {}\"a\"{}", "(".repeat(60_000), ")".repeat(60_000))),
        ),
        ("bad gbnf", Grammar::Gbnf("root ::= \"a\" [".into())),
        ("bad lark", Grammar::Lark("start: (".into())),
        ("no start", Grammar::Lark("begin: \"a\"".into())),
    ] {
        let begin = Instant::now();
        let result = grammars.compile(&grammar);
        assert!(result.is_err(), "{name}");
        let message = result.unwrap_err().to_string();
        assert!(message.len() < 500 && !message.contains('\n'), "{name}: {message}");
        assert!(begin.elapsed().as_secs() < 10, "{name}: {:?}", begin.elapsed());
    }
}

/// Their automata are built as far as they are used, so they cost nothing until then, and little after.
#[test]
fn nested_repetitions_are_bounded() {
    let grammars = grammars();
    for grammar in [
        Grammar::Gbnf("root ::= (((\"ab\"{9999}){9999}){9999}){9999}".into()),
        Grammar::Regex("((([a-z]{1,999}){1,999}){1,999}){1,999}x".into()),
        Grammar::Regex("(a|aa)+(a|aa|aaa)*(b|a?){20,400}c".into()),
        Grammar::JsonSchema(json!({ "type": "string", "maxLength": 100_000_000 })),
        Grammar::Lark("start: (start start | \"a\")*".into()),
    ] {
        let begin = Instant::now();
        if let Ok(mut constraint) = grammars.compile(&grammar) {
            for _ in 0..50 {
                if constraint.offer(Offer::Token(u32::MAX - 1)).is_err() {
                    break;
                }
                let allowed = |token: &u32| constraint.mask.contains(*token);
                let Some(token) = (0..grammars.vocabulary as u32).find(allowed) else { break };
                if !constraint.takes(token) {
                    break;
                }
            }
        }
        assert!(begin.elapsed().as_secs() < 10, "{grammar:?}: {:?}", begin.elapsed());
    }
}

#[test]
fn compiled_grammars_are_kept_by_client_and_independent() {
    let grammars = grammars();
    let grammar = Grammar::Regex("ab|cd".into());
    let mut first = grammars.compile(&grammar).unwrap();
    let a = grammars.tokenizer.encode("a", mantissa_model::Bos::Never).unwrap()[0];
    assert!(first.takes(a));
    let copy = first.constraint.boxed_clone();
    let mut copy = Asked { constraint: copy, mask: TokenMask::default(), vocabulary: grammars.vocabulary };
    let mut second = grammars.compile(&grammar).unwrap();
    assert!(second.takes(a) && !first.takes(a) && !copy.takes(a));
    assert_eq!(grammars.grammars.kept_count(), 1);
    assert!(matches!(second.offer(Offer::End), Ok(Verdict::Refused { may_end: false })));
    let other = Wanted { caller: Caller { client: Client::Key(1), priority: 0 }, wanted: &|| true };
    let other = grammars.grammars.compile_for(&grammars.tokenizer, &grammar, other, Arc::default());
    assert!(other.is_ok());
    assert_eq!(grammars.grammars.kept_count(), 2, "nobody sees what another client has compiled");
}

#[test]
fn an_unknown_format_is_answered_by_the_known_ones() {
    let grammars = grammars();
    let schema = |format: &str| Grammar::JsonSchema(json!({ "type": "string", "format": format }));
    for format in holder::FORMATS {
        assert!(grammars.compile(&schema(format)).is_ok(), "{format}");
    }
    let error = grammars.compile(&schema("zip-code")).err().unwrap().to_string();
    assert!(error.contains("zip-code") && error.ends_with(&holder::FORMATS.join(", ")), "{error}");
    // However long what the client wrote is.
    let error = grammars.compile(&schema(&"x".repeat(5000))).err().unwrap().to_string();
    assert!(error.len() < 600 && error.ends_with(&holder::FORMATS.join(", ")), "{error}");
}
