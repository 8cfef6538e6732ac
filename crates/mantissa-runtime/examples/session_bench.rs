//! Measures what needs the session API: shared prefixes and prompt lookup. Prints JSON.
//!
//!     session_bench prefix MODEL [tokens] [threads]
//!     session_bench lookup MODEL [tasks] [threads]
//!
//! MODEL is a folder or a GGUF file with a tokenizer. The continuation of a lookup task is given, because a synthetic
//! model copies nothing: the model computes every step, and the given token is taken instead of its choice. So the
//! figures are those of a model that would write exactly this text.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a command for developers")]

use std::path::Path;
use std::time::Instant;

use mantissa_model::{Bos, Tokenizer};
use mantissa_runtime::{EventKind, FastModel, Request, Runtime, RuntimeOptions, Speculation};
use mantissa_store::convention::ModelFiles;

/// Text of the tasks: held-out stories, code and prose of the demo model.
const STORIES: &str = include_str!("../../mantissa-jobs/demo/text/stories.txt");
const CODE: &str = include_str!("../../mantissa-jobs/demo/text/code.txt");
const PROSE: &str = include_str!("../../mantissa-jobs/demo/text/prose.txt");
const SEPARATOR: &str = "<|endoftext|>";

/// Renamings of the edit tasks: the output is the text with the second word in place of the first.
const RENAMED: [(&str, &str); 6] =
    [("Lily", "Sarah"), ("dog", "cat"), ("self", "this"), ("the", "a"), ("usize", "u64"), ("was", "is")];

/// Bytes of a task's text.
const LENGTH: usize = 900;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, model, ..] = arguments.as_slice() else {
        eprintln!("session_bench prefix|lookup MODEL [number] [threads]");
        std::process::exit(2)
    };
    let number = |i: usize| arguments.get(i).map(|text: &String| text.parse::<usize>().expect("a number"));
    let threads = number(3).unwrap_or(2);
    let files = ModelFiles::open(Path::new(model)).expect("a model");
    let model = FastModel::load(&files, threads).expect("a model that runs");
    let json = match what.as_str() {
        "prefix" => prefix(&model, number(2).unwrap_or(2048)),
        "lookup" => {
            let tokenizer = Tokenizer::load(files.dir()).expect("a tokenizer");
            let tasks = number(2).unwrap_or(6);
            let (edits, prose) = (edits(tasks), prose(tasks));
            let of = |tasks| lookup(&model, &tokenizer, tasks);
            format!("{{\"edits\": {}, \"prose\": {}}}", of(edits), of(prose))
        }
        _ => panic!("prefix or lookup"),
    };
    println!("{json}");
}

/// Runs two prompts with a common beginning of `tokens` tokens and 64 tokens of their own.
fn prefix(model: &FastModel, tokens: usize) -> String {
    let vocabulary = model.config().vocab_size;
    let common = |i: usize| (i * i * 7 + i * 13 + 5) % vocabulary;
    let prompt = |own: usize| -> Vec<u32> {
        let own = (0..64).map(|i| (own * 31 + i * 17) % vocabulary);
        (0..tokens).map(common).chain(own).map(|token| token as u32).collect()
    };
    let options = RuntimeOptions::batch(2, tokens + 80);
    let mut runtime = Runtime::new(model, options).unwrap();
    let mut first_token = |own| {
        let before = runtime.shared_tokens();
        let request =
            Request { prompt: prompt(own), max_new_tokens: 2, ignore_eos: true, ..Request::default() };
        let start = Instant::now();
        runtime.add(request).unwrap();
        let mut first = None;
        while !runtime.is_idle() {
            let found = runtime.step().unwrap().iter().any(|e| matches!(e.kind, EventKind::Token { .. }));
            first = first.or(found.then(|| start.elapsed().as_secs_f64()));
        }
        (first.unwrap_or(f64::NAN), runtime.shared_tokens() - before)
    };
    let (alone, _) = first_token(1);
    let (shared, skipped) = first_token(2);
    format!(
        "{{\"prefix_tokens\": {tokens}, \"skipped_tokens\": {skipped}, \"skipped_share\": {:.4}, \"first_token_s\": {alone:.4}, \
         \"first_token_shared_s\": {shared:.4}}}",
        skipped as f64 / tokens as f64
    )
}

/// A prompt and the text that continues it.
struct Task {
    prompt: String,
    continuation: String,
}

/// Documents of a text that hold `word`.
fn documents(text: &'static str, word: &str) -> Vec<&'static str> {
    text.split(SEPARATOR).map(str::trim).filter(|text| text.len() > 400 && text.contains(word)).collect()
}

/// At most [`LENGTH`] bytes, up to the end of a word.
fn cut(text: &str) -> &str {
    let end = text.char_indices().map(|(i, _)| i).take_while(|i| *i <= LENGTH).last().unwrap_or(0);
    text[..end].rsplit_once(' ').map_or(text, |(text, _)| text)
}

/// "Repeat this text with X renamed", and the text renamed.
fn edits(tasks: usize) -> Vec<Task> {
    (0..tasks)
        .map(|i| {
            let (from, to) = RENAMED[i % RENAMED.len()];
            let found = [STORIES, CODE, PROSE].map(|text| documents(text, from)).concat();
            let text = cut(found[i * 5 % found.len()]);
            Task {
                prompt: format!("Repeat this text with {to} instead of {from}.\n\n{text}\n\n"),
                continuation: text.replace(from, to),
            }
        })
        .collect()
}

/// The first third of a story or an article, and the rest.
fn prose(tasks: usize) -> Vec<Task> {
    (0..tasks)
        .map(|i| {
            let found = documents(if i % 2 == 0 { STORIES } else { PROSE }, "the");
            let text = cut(found[i * 3 % found.len()]);
            let at = text.char_indices().map(|(i, _)| i).find(|i| *i >= text.len() / 3).unwrap_or(0);
            Task { prompt: text[..at].to_owned(), continuation: text[at..].to_owned() }
        })
        .collect()
}

/// Runs every task without and with prompt lookup, in turns, and returns the speeds.
fn lookup(model: &FastModel, tokenizer: &Tokenizer, tasks: Vec<Task>) -> String {
    let vocabulary = model.config().vocab_size as u32;
    let encode = |text: &str| -> Vec<u32> {
        tokenizer.encode(text, Bos::Never).unwrap().into_iter().filter(|token| *token < vocabulary).collect()
    };
    let (mut seconds, mut tokens, mut proposed, mut accepted) = ([0.0; 2], 0, 0, 0);
    for (i, task) in tasks.iter().enumerate() {
        let (prompt, mut forced) = (encode(&task.prompt), encode(&task.continuation));
        forced.truncate(model.config().max_position_embeddings - prompt.len());
        tokens += forced.len() - 1;
        // The one that runs first changes from task to task.
        for turn in 0..2 {
            let on = (turn + i) % 2;
            let speculation = [Speculation::Off, Speculation::Lookup][on];
            let context = prompt.len() + forced.len();
            let options = RuntimeOptions { speculation, ..RuntimeOptions::single(context) };
            let mut runtime = Runtime::new(model, options).unwrap();
            let request = Request {
                prompt: prompt.clone(),
                max_new_tokens: forced.len(),
                forced: forced.clone(),
                ignore_eos: true,
                ..Request::default()
            };
            runtime.add(request).unwrap();
            let mut start = None;
            while !runtime.is_idle() {
                let made = !runtime.step().unwrap().is_empty();
                // The step with the first token is prefill.
                start = start.or(made.then(Instant::now));
            }
            seconds[on] += start.map_or(0.0, |start| start.elapsed().as_secs_f64());
            proposed += runtime.proposals().proposed;
            accepted += runtime.proposals().accepted;
        }
    }
    let [plain, speculated] = seconds.map(|seconds| tokens as f64 / seconds);
    format!(
        "{{\"tasks\": {}, \"tokens\": {tokens}, \"off_tokens_per_s\": {plain:.3}, \"lookup_tokens_per_s\": {speculated:.3}, \
         \"ratio\": {:.4}, \"proposed\": {proposed}, \"accepted\": {accepted}}}",
        tasks.len(),
        speculated / plain
    )
}
