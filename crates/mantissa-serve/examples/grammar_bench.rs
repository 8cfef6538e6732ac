//! Times of a constrained step: compilation of a schema, masks, checks of one token, and advances.
//!
//! `cargo run --release -p mantissa-serve --example grammar_bench -- TOKENIZER.gguf|FOLDER…`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::time::Instant;

use mantissa_model::{Bos, Tokenizer};
use mantissa_runtime::TokenMask;
use mantissa_serve::grammar::{Grammar, Grammars};
use serde_json::json;

const REPLY: &str = r#"{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "address": {"street": "12 St James's Square", "city": "London", "zip": "SW1Y 4JH"}, "tags": ["mathematics", "analytical engine", "poetry of numbers"], "score": 0.9375, "active": true, "note": "She wrote the first published algorithm intended for a machine, in the notes to a translation of a paper about the Analytical Engine."}"#;

fn micros(times: &mut [f64]) -> String {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    format!("mean {mean:8.1} µs, median {:8.1}, p99 {:8.1}", at(0.5), at(0.99))
}

fn main() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 80 },
            "age": { "type": "integer", "minimum": 0, "maximum": 150 },
            "email": { "type": "string" },
            "address": {
                "type": "object",
                "properties": { "street": { "type": "string" }, "city": { "type": "string" }, "zip": { "type": "string" } },
                "required": ["street", "city", "zip"],
                "additionalProperties": false
            },
            "tags": { "type": "array", "items": { "type": "string" }, "maxItems": 8 },
            "score": { "type": "number" },
            "active": { "type": "boolean" },
            "note": { "type": "string" }
        },
        "required": ["name", "age", "email", "address", "tags", "score", "active", "note"],
        "additionalProperties": false
    });
    for path in std::env::args().skip(1) {
        let tokenizer = Tokenizer::load(Path::new(&path)).unwrap();
        let (ids, vocabulary) = (tokenizer.encode(REPLY, Bos::Never).unwrap(), tokenizer.len());
        let grammars = Grammars::new(vocabulary);
        let begin = Instant::now();
        grammars.compile(&tokenizer, &Grammar::JsonObject).unwrap();
        let prepared = begin.elapsed();
        let begin = Instant::now();
        let fresh = grammars.compile(&tokenizer, &Grammar::JsonSchema(schema.clone())).unwrap();
        let compiled = begin.elapsed();
        println!(
            "{path}: {vocabulary} tokens; vocabulary {prepared:.1?}, schema {compiled:.1?}, reply {} tokens",
            ids.len()
        );
        if !fresh.boxed_clone().allows(ids[0]).unwrap() {
            println!("  this tokenizer begins the reply with a space, which JSON does not");
            continue;
        }
        let (mut masks, mut checks, mut advances) = (Vec::new(), Vec::new(), Vec::new());
        let mut mask = TokenMask::default();
        let seconds = |times: &mut Vec<f64>, begin: Instant| times.push(begin.elapsed().as_secs_f64() * 1e6);
        for _ in 0..20 {
            let mut constraint = fresh.boxed_clone();
            for &id in &ids {
                let begin = Instant::now();
                assert!(constraint.allows(id).unwrap());
                seconds(&mut checks, begin);
                let begin = Instant::now();
                mask.reset(vocabulary);
                constraint.mask(&mut mask).unwrap();
                seconds(&mut masks, begin);
                assert!(mask.contains(id), "{id}");
                let begin = Instant::now();
                constraint.accept(id).unwrap();
                constraint.is_complete().unwrap();
                seconds(&mut advances, begin);
            }
        }
        println!("  mask    {}", micros(&mut masks));
        println!("  check   {}", micros(&mut checks));
        println!("  advance {}", micros(&mut advances));
    }
}
