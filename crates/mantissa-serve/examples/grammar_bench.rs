//! Times of a constrained step: compilation of a schema, tokens that are taken, and tokens that are refused with a mask,
//! through the process that holds the grammar, as a server does.
//!
//! `cargo run --release -p mantissa-serve --example grammar_bench -- TOKENIZER.gguf|FOLDER…`
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use mantissa_model::{Bos, Tokenizer};
use mantissa_runtime::{Constraint, Offer, TokenMask, Verdict};
use mantissa_serve::grammar::{Confinement, Grammar, Grammars, fork_server};
use serde_json::json;

const REPLY: &str = r#"{"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "address": {"street": "12 St James's Square", "city": "London", "zip": "SW1Y 4JH"}, "tags": ["mathematics", "analytical engine", "poetry of numbers"], "score": 0.9375, "active": true, "note": "She wrote the first published algorithm intended for a machine, in the notes to a translation of a paper about the Analytical Engine."}"#;

fn micros(times: &mut [f64]) -> String {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let mean = times.iter().sum::<f64>() / times.len() as f64;
    format!("mean {mean:8.1} µs, median {:8.1}, p99 {:8.1}", at(0.5), at(0.99))
}

/// Argument with which this program is the fork server.
const FORK_SERVER: &str = "--fork-server";

/// Offers a token until there is an answer.
fn offer(constraint: &mut dyn Constraint, offer: Offer, mask: &mut TokenMask, vocabulary: usize) -> Verdict {
    loop {
        mask.reset(vocabulary);
        match constraint.offer(offer, mask).unwrap() {
            Verdict::Pending => _ = constraint.wait(Duration::from_secs(1)),
            verdict => return verdict,
        }
    }
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some(FORK_SERVER) {
        return fork_server().unwrap();
    }
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
        let command = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(FORK_SERVER);
            Ok(command)
        };
        let grammars = Grammars::new(vocabulary, Confinement::processes(command), 256 << 20);
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
        let mut mask = TokenMask::default();
        let first = Offer::Token(ids[0]);
        if !matches!(offer(fresh.boxed_clone().as_mut(), first, &mut mask, vocabulary), Verdict::Taken { .. })
        {
            println!("  this tokenizer begins the reply with a space, which JSON does not");
            continue;
        }
        let (mut refused, mut taken) = (Vec::new(), Vec::new());
        let seconds = |times: &mut Vec<f64>, begin: Instant| times.push(begin.elapsed().as_secs_f64() * 1e6);
        for _ in 0..20 {
            let mut constraint = fresh.boxed_clone();
            for &id in &ids {
                // No token has this number, so that the mask is asked for.
                let begin = Instant::now();
                let none = Offer::Token(u32::MAX - 1);
                assert!(matches!(
                    offer(constraint.as_mut(), none, &mut mask, vocabulary),
                    Verdict::Refused { .. }
                ));
                seconds(&mut refused, begin);
                assert!(mask.contains(id), "{id}");
                let begin = Instant::now();
                let verdict = offer(constraint.as_mut(), Offer::Token(id), &mut mask, vocabulary);
                assert!(matches!(verdict, Verdict::Taken { .. }));
                seconds(&mut taken, begin);
            }
        }
        println!("  refused, with a mask  {}", micros(&mut refused));
        println!("  taken                 {}", micros(&mut taken));
    }
}
