//! Grammars of clients: translation in this process, compilation and offers in processes with limits, as in a server.
#![no_main]

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use mantissa_model::Tokenizer;
use mantissa_runtime::{Constraint, Offer, TokenMask, Verdict};
use mantissa_serve::grammar::{Confinement, Grammar, Grammars, fork_server, translate};

/// Argument with which this program is the fork server.
const FORK_SERVER: &str = "--fork-server";

/// Longest time for the answer to one offer, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(15);

struct Compiler {
    tokenizer: Tokenizer,
    grammars: Grammars,
}

fn compiler() -> &'static Compiler {
    static COMPILER: OnceLock<Compiler> = OnceLock::new();
    COMPILER.get_or_init(|| {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny/llama2-gqa-tied");
        let tokenizer = Tokenizer::load(&dir).expect("a tokenizer of the tests");
        let command = || {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg(FORK_SERVER);
            Ok(command)
        };
        let grammars = Grammars::new(tokenizer.len(), Confinement::processes(command), 256 << 20);
        Compiler { tokenizer, grammars }
    })
}

/// Reads a grammar: its kind is the first byte.
fn grammar(data: &[u8]) -> Option<Grammar> {
    let (kind, text) = data.split_first()?;
    let text = std::str::from_utf8(text).ok()?;
    Some(match kind % 4 {
        0 => Grammar::Gbnf(text.to_owned()),
        1 => Grammar::Lark(text.to_owned()),
        2 => Grammar::Regex(text.to_owned()),
        _ => Grammar::JsonSchema(serde_json::from_str(text).ok()?),
    })
}

/// Checks that a message tells nothing of the program.
fn check(message: &str) {
    assert!(!message.contains("panic") && !message.contains("backtrace") && message.len() < 2000, "{message}");
}

/// Offers a token until there is an answer; false if the sequence has ended.
fn offer(constraint: &mut dyn Constraint, token: u32, mask: &mut TokenMask, vocabulary: usize) -> bool {
    let begin = Instant::now();
    loop {
        mask.reset(vocabulary);
        match constraint.offer(Offer::Token(token), mask) {
            Ok(Verdict::Pending) => {
                assert!(begin.elapsed() < PATIENCE, "no answer");
                constraint.wait(Duration::from_millis(100));
            }
            Ok(Verdict::Taken { complete }) => return !complete,
            Ok(Verdict::Refused { .. }) => return true,
            Err(error) => {
                check(&error.to_string());
                return false;
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(
    init: {
        if std::env::args().nth(1).as_deref() == Some(FORK_SERVER) {
            std::process::exit(i32::from(fork_server().is_err()));
        }
    },
    |data: &[u8]| {
        let Some(grammar) = grammar(data) else { return };
        if let Err(error) = translate(&grammar) {
            return check(&error.to_string());
        }
        let Compiler { tokenizer, grammars } = compiler();
        let mut constraint = match grammars.compile(tokenizer, &grammar) {
            Ok(constraint) => constraint,
            Err(error) => return check(&error.to_string()),
        };
        let (mut mask, vocabulary) = (TokenMask::default(), tokenizer.len());
        for step in 0..12u32 {
            // No token has this number: the refusal tells those that may follow.
            if !offer(constraint.as_mut(), u32::MAX - 1, &mut mask, vocabulary) {
                return;
            }
            let allowed: Vec<u32> = (0..vocabulary as u32).filter(|token| mask.contains(*token)).collect();
            let Some(token) = allowed.get(step as usize * 7919 % allowed.len().max(1)) else { return };
            if !offer(constraint.as_mut(), *token, &mut mask, vocabulary) {
                return;
            }
        }
    }
);
