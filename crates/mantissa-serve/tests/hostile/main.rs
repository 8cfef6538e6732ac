//! Hostile requests against a running server: a table of what one client may say to cost time or memory, while another
//! client asks for plain answers. No row may stop the server, slow the other client down, or leave anything behind.
//!
//! The server runs in a process of its own, which is this program with another argument; so do the processes that hold
//! grammars. `MANTISSA_HOSTILE_SECONDS` sets the time of each row (default 1), a word on the command line chooses rows. Without
//! one, every third row runs, and every row with `MANTISSA_TESTS=all`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod process;
mod rows;

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use client::{Client, Sent};
use process::{Server, Usage};
use rows::{Row, rows};
use serde_json::json;

/// Longest median time of the other client's answers, as a multiple of that beside plain requests, and what is allowed
/// beyond it on a busy machine.
const SLOWER: f64 = 1.5;
const SLACK: Duration = Duration::from_millis(15);

/// Tries of a row whose times are too long: other work on the machine disturbs them.
const TRIES: usize = 4;

/// Time for what a row started to end.
const SETTLES: Duration = Duration::from_secs(30);

/// Memory that the server may keep: allocators and the caches of the longest sequences.
const KEPT: u64 = 96 << 20;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next();
    match first.as_deref() {
        Some(process::SERVER) => return process::serve(),
        Some(process::GRAMMARS) => {
            return mantissa_serve::grammar::fork_server().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        // Asked by tools that list tests.
        Some("--list") => return ExitCode::SUCCESS,
        _ => {}
    }
    let wanted = first.filter(|word| !word.starts_with('-'));
    let seconds = std::env::var("MANTISSA_HOSTILE_SECONDS").ok().and_then(|text| text.parse().ok());
    the_table_of_hostile_requests_holds(wanted.as_deref(), Duration::from_secs_f64(seconds.unwrap_or(1.0)))
}

/// Runs the rows whose names hold the `wanted` word, each for so much `time`.
fn the_table_of_hostile_requests_holds(wanted: Option<&str>, time: Duration) -> ExitCode {
    let server = Server::start();
    let mut failures = missing_endpoints(&server);
    let before = settled(&server, |_| true);
    println!("before: {before}");
    let mut run = 0;
    let mut plain = BTreeMap::new();
    // The table has at least three rows of each kind, one after the other.
    let whole = wanted.is_some() || std::env::var_os("MANTISSA_TESTS").is_some_and(|tests| tests == "all");
    let table = rows();
    let chosen = table.iter().filter(|row| wanted.is_none_or(|word| row.name.contains(word)));
    for row in chosen.step_by(if whole { 1 } else { 3 }) {
        run += 1;
        let ask = (row.plain)();
        let plain = *plain
            .entry((row.clients, ask.clone()))
            .or_insert_with(|| beside_plain(&server, row.clients, &ask, time));
        failures.extend(measure(&server, row, plain, time).err().map(|what| format!("{}: {what}", row.name)));
    }
    let (threads, processes, most) = (before.threads + 4, before.processes + 1, before.bytes + KEPT);
    let fits =
        |usage: &Usage| usage.threads <= threads && usage.processes <= processes && usage.bytes <= most;
    let after = settled(&server, fits);
    println!("after: {after}");
    if !fits(&after) {
        failures.push(format!("something is left after {} s", SETTLES.as_secs()));
    }
    failures.extend(server.stop().err());
    failures.iter().for_each(|what| println!("FAILED {what}"));
    let result = if failures.is_empty() { "ok" } else { "FAILED" };
    let failed = failures.len();
    println!(
        "\ntest result: {result}. {} passed; {failed} failed; 0 ignored",
        (run + 1usize).saturating_sub(failed)
    );
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Endpoints that the server describes and the table does not attack.
fn missing_endpoints(server: &Server) -> Vec<String> {
    let described = server.client("alice").get("/openapi.json").json();
    let attacked: BTreeSet<&str> = rows().iter().map(|row| row.path).collect();
    let paths = described["paths"].as_object().unwrap().keys();
    let missing = paths.filter(|path| !attacked.contains(path.as_str()));
    missing.map(|path| format!("{path}: no hostile row")).collect()
}

/// Waits until `fits` or for some time; returns what the server uses.
fn settled(server: &Server, fits: impl Fn(&Usage) -> bool) -> Usage {
    let begin = Instant::now();
    loop {
        let usage = server.usage();
        if fits(&usage) || begin.elapsed() > SETTLES {
            return usage;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Times of the other client's answers.
#[derive(Clone, Copy)]
struct Times {
    median: Duration,
    worst: Duration,
}

impl Times {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        Times { median: all[all.len() / 2], worst: all[all.len() - 1] }
    }
}

/// Runs `hostile` on `clients` threads until the other client has been served for `time`, at least five times.
fn beside(
    server: &Server,
    clients: usize,
    time: Duration,
    hostile: impl Fn(&Client) -> Sent + Sync,
) -> Result<(Times, BTreeMap<String, usize>), String> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let work = || {
            let client = server.client("mallory");
            let mut statuses = BTreeMap::new();
            while !stop.load(Ordering::Relaxed) {
                *statuses.entry(hostile(&client).to_string()).or_insert(0) += 1;
            }
            statuses
        };
        let threads: Vec<_> = (0..clients).map(|_| scope.spawn(work)).collect();
        // They are at work.
        thread::sleep(time / 4);
        let client = server.client("alice");
        let (begin, mut times, mut fault) = (Instant::now(), Vec::new(), None);
        let mut seed = 0;
        while fault.is_none() && (begin.elapsed() < time || times.len() < 5) {
            seed += 1;
            let one = Instant::now();
            let reply = client.post("/v1/completions", &plain_request(seed).to_string());
            times.push(one.elapsed());
            fault = (reply.status != 200)
                .then(|| format!("the other client got {}: {}", reply.status, reply.text()));
        }
        stop.store(true, Ordering::Relaxed);
        let mut statuses = BTreeMap::new();
        for thread in threads {
            for (status, count) in thread.join().unwrap() {
                *statuses.entry(status).or_insert(0) += count;
            }
        }
        fault.map_or_else(|| Ok((Times::of(times), statuses)), Err)
    })
}

fn plain_request(seed: u64) -> serde_json::Value {
    json!({ "prompt": "Once upon a time", "max_tokens": 24, "temperature": 1, "seed": seed, "ignore_eos": true })
}

/// Times beside so many clients that `ask` for a plain answer.
fn beside_plain(server: &Server, clients: usize, ask: &str, time: Duration) -> Times {
    let (times, _) = beside(server, clients, time, |client| client.send("/v1/completions", ask)).unwrap();
    println!("beside {clients} plain clients: median {:.1?}, worst {:.1?}", times.median, times.worst);
    times
}

/// Measures a row.
fn measure(server: &Server, row: &Row, plain: Times, time: Duration) -> Result<(), String> {
    let body = (row.body)();
    let send = |client: &Client| match row.abandon {
        Some(after) => client.abandon(row.path, &body, after),
        None if row.get => Sent::Status(client.get(row.path).status),
        None => client.send(row.path, &body),
    };
    let allowed = plain.median.mul_f64(SLOWER) + SLACK;
    let mut outcome = Ok(());
    for _ in 0..TRIES {
        let (times, statuses) = beside(server, row.clients, time, send)?;
        let multiple = |time: Duration| time.as_secs_f64() / plain.median.as_secs_f64();
        println!(
            "{:28} median {:5.2}, worst {:6.2} of plain; {statuses:?}; {}",
            row.name,
            multiple(times.median),
            multiple(times.worst),
            server.usage()
        );
        if let Some(status) = statuses.keys().find(|status| !row.allows(status)) {
            return Err(format!("expected {:?}, got {status}", row.statuses));
        }
        if times.median <= allowed {
            return Ok(());
        }
        outcome = Err(format!("expected a median of at most {allowed:.1?}, got {:.1?}", times.median));
    }
    outcome
}
