//! Engines of the model `demo`: isolation of faults, deadlines, cancelling.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mantissa_model::Sampling;
use mantissa_runtime::{
    Constraint, ConstraintError, EventKind, FastModel, Offer, Request, RuntimeOptions, TokenMask, Verdict,
};
use mantissa_store::convention::ModelFiles;

use super::*;
use crate::metrics::Metrics;

/// Allows every token, and panics at the `left`-th.
#[derive(Clone, Debug)]
struct Panics {
    left: usize,
}

impl Constraint for Panics {
    fn offer(&mut self, _: Offer, _: &mut TokenMask) -> Result<Verdict, ConstraintError> {
        assert!(self.left > 0, "on purpose");
        self.left -= 1;
        Ok(Verdict::Taken { complete: false })
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

fn engine(sequences: usize) -> Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/demo/model");
    let model = FastModel::load(&ModelFiles::open(&dir).unwrap(), 1).unwrap();
    let options = EngineOptions {
        runtime: RuntimeOptions::batch(sequences, 256),
        queue: 100,
        client_queue: 100,
        client_tokens: 10_000,
        share_prefixes: false,
        turns: Arc::default(),
        metrics: Metrics::new().engine("demo"),
    };
    Engine::start(Arc::new(model), None, options).unwrap()
}

fn job(token: u32) -> Job {
    let request = Request {
        prompt: vec![0, token, token + 1],
        max_new_tokens: 40,
        ignore_eos: true,
        sampling: Sampling { temperature: 1.0, seed: u64::from(token), ..Sampling::default() },
        ..Request::default()
    };
    Job::new(request, Instant::now() + Duration::from_secs(60))
}

const CALLER: Caller = Caller { client: Client::Own, priority: 0 };

/// Waits for the end of a job; returns its tokens and its last update.
fn end(stream: &mut Stream) -> (Vec<u32>, Update) {
    let mut tokens = Vec::new();
    loop {
        match stream.updates.blocking_recv() {
            Some((_, Update::News(EventKind::Token { token, .. }))) => tokens.push(token),
            Some((_, Update::Begun | Update::News(EventKind::Started { .. }))) => {}
            Some((_, update)) => return (tokens, update),
            None => panic!("no end"),
        }
    }
}

#[test]
fn a_panic_fails_its_job_alone() {
    let engine = engine(4);
    let submit = |job| engine.submit(vec![job], CALLER).unwrap();
    let alone: Vec<_> = [100, 200, 300].map(|token| end(&mut submit(job(token)))).into();
    let mut streams: Vec<_> = [100, 200, 300].map(|token| submit(job(token))).into();
    let mut faulty = job(400);
    faulty.request.constraint = Some(Box::new(Panics { left: 10 }));
    streams.insert(1, submit(faulty));
    let mut ends: Vec<_> = streams.iter_mut().map(end).collect();
    let (tokens, update) = ends.remove(1);
    assert_eq!((tokens.len(), update), (10, Update::Failed(Failure::Panicked)));
    assert_eq!(ends, alone);
    assert!(engine.shared.options.metrics.faults.get() >= 2);
    // The engine goes on.
    assert_eq!(end(&mut submit(job(100))), alone[0]);
}

#[test]
fn a_job_that_came_too_late_or_was_dropped_ends() {
    let engine = engine(1);
    let turn = engine.shared.options.turns.take();
    let first = engine.submit(vec![job(100)], CALLER).unwrap();
    let past = Job { deadline: Instant::now(), ..job(200) };
    let mut late = engine.submit(vec![past], CALLER).unwrap();
    let dropped = engine.submit(vec![job(300)], CALLER).unwrap();
    drop((dropped, first, turn));
    assert_eq!(end(&mut late).1, Update::Failed(Failure::Late));
    let begin = Instant::now();
    while engine.shared.options.metrics.cancelled.get() < 3 || !engine.is_idle() {
        assert!(begin.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_engine_that_is_dropped_fails_its_jobs() {
    let engine = engine(1);
    let turn = Arc::clone(&engine.shared.options.turns);
    let turn = turn.take();
    let mut streams: Vec<_> = (0..3).map(|i| engine.submit(vec![job(100 + i)], CALLER).unwrap()).collect();
    engine.cancel_all();
    drop(turn);
    for stream in &mut streams {
        assert_eq!(end(stream).1, Update::Failed(Failure::Stopping));
    }
    assert_eq!(engine.submit(vec![job(1)], CALLER).unwrap_err(), Refused::Stopping);
}

#[test]
fn a_prompt_beyond_the_context_fails_its_job() {
    let engine = engine(1);
    let mut long = job(100);
    long.request.max_new_tokens = 1000;
    let (_, update) = end(&mut engine.submit(vec![long], CALLER).unwrap());
    assert!(matches!(update, Update::Failed(Failure::Request(_))), "{update:?}");
}
