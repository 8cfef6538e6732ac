//! The engine's thread: begins, steps and ends jobs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use mantissa_model::LoadError;
use mantissa_runtime::{Event, EventKind, FastModel, Phase, Request, Runtime, SequenceState};

use super::active::Active;
use super::job::{Ending, Failure, Pending, Update};
use super::state::{EngineOptions, Load, Shared, SlotState, Stage};
use crate::fair::{Booking, Caller, Client};

/// Time between two descriptions of the load.
const PUBLISHED: Duration = Duration::from_millis(50);

/// Longest pause while no job has a place.
const PAUSE: Duration = Duration::from_millis(2);

/// Time of a token before the first pass.
const TOKEN_SECONDS: f64 = 1e-3;

/// Time over which the speed is measured.
const SPEED: Duration = Duration::from_secs(1);

/// Candidate for a place.
#[derive(Clone, Copy)]
enum Next {
    /// The job at this index, which gave up its place.
    Again(usize),
    /// The next job of this client.
    Begin(Client),
}

/// State of the thread.
pub(super) struct Worker<'m> {
    shared: &'m Shared,
    model: &'m FastModel,
    draft: Option<&'m FastModel>,
    runtime: Runtime<'m>,
    active: Vec<Active>,
    /// Jobs that were at work at a fault, to be run one at a time.
    suspects: VecDeque<Pending>,
    /// True while a suspect is at work, alone.
    alone: bool,
    number: u64,
    published: Instant,
    /// True if jobs were begun or have ended since.
    changed: bool,
    /// Start and tokens of the present measurement of speed.
    speed: (Instant, usize),
    /// Shared tokens and proposals of the runtime at the last count.
    counted: (u64, u64, u64),
    /// Time in passes of the model at the last count.
    passed: Duration,
    /// End of the last step, and the processor time of the thread until then.
    stepped: Option<(Instant, Duration)>,
    /// Turn that was booked with the end of the last one.
    booking: Option<Booking>,
    /// Mean time of a token in the passes, and the time in passes before the last step.
    token_seconds: f64,
    pass_before: Duration,
}

/// Processor time that the thread has used.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Makes a session.
fn session<'m>(
    shared: &Shared,
    model: &'m FastModel,
    draft: Option<&'m FastModel>,
) -> Result<Runtime<'m>, LoadError> {
    let runtime = Runtime::new(model, shared.options.runtime)?;
    match draft {
        Some(draft) => runtime.with_draft(draft),
        None => Ok(runtime),
    }
}

impl<'m> Worker<'m> {
    pub(super) fn new(
        shared: &'m Shared,
        model: &'m FastModel,
        draft: Option<&'m FastModel>,
    ) -> Result<Self, LoadError> {
        let now = Instant::now();
        Ok(Worker {
            shared,
            model,
            draft,
            runtime: session(shared, model, draft)?,
            active: Vec::new(),
            suspects: VecDeque::new(),
            alone: false,
            number: 0,
            published: now,
            changed: false,
            speed: (now, 0),
            counted: (0, 0, 0),
            passed: Duration::ZERO,
            stepped: None,
            booking: None,
            token_seconds: TOKEN_SECONDS,
            pass_before: Duration::ZERO,
        })
    }

    /// Works until the engine is stopped.
    pub(super) fn run(mut self) {
        self.publish(true);
        loop {
            match self.wait() {
                Stage::Stopped => break,
                Stage::Cancelling => self.fail_all(&Failure::Stopping),
                Stage::Open | Stage::Draining => {}
            }
            self.sweep();
            self.charge();
            self.admit();
            self.publish(self.changed);
            match self.active.iter().any(|active| active.detached.is_none()) {
                true => self.step(),
                false => self.wait_for_detached(),
            }
            self.publish(self.changed);
        }
        self.fail_all(&Failure::Stopping);
    }

    /// Waits while there is nothing to do.
    fn wait(&mut self) -> Stage {
        let idle = self.active.is_empty() && self.suspects.is_empty();
        if idle {
            // Others have the turn that was booked.
            self.booking = None;
        }
        let mut state = self.shared.lock();
        if idle {
            while state.queue.len() == 0 && matches!(state.stage, Stage::Open | Stage::Draining) {
                self.stepped = None;
                state = self.shared.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
            // Nothing is left to cancel: wait for the end.
            while state.queue.len() == 0 && state.stage == Stage::Cancelling {
                state = self.shared.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
        }
        state.stage
    }

    /// Waits for a moment until a job without a place can go on.
    fn wait_for_detached(&mut self) {
        // Others have the turn that was booked.
        self.booking = None;
        let mut detached = self.active.iter_mut().filter_map(|active| active.detached.as_mut());
        if let Some(first) = detached.next()
            && !first.is_ready(PAUSE)
        {
            // Nobody works on it yet.
            std::thread::sleep(PAUSE / 10);
        }
    }

    /// Ends all jobs with `failure`.
    fn fail_all(&mut self, failure: &Failure) {
        let waiting = self.shared.lock().queue.remove(|_| false);
        let all = waiting.into_iter().chain(self.suspects.drain(..));
        all.for_each(|pending| pending.send(Update::Failed(failure.clone())));
        for active in self.active.drain(..) {
            self.runtime.cancel(active.id);
            active.pending.send(Update::Failed(failure.clone()));
        }
        self.alone = false;
        self.changed = true;
    }

    /// Ends the jobs that nobody waits for, or whose time has passed.
    fn sweep(&mut self) {
        let now = Instant::now();
        let late = |pending: &Pending| pending.job.deadline <= now;
        let removed = self.shared.lock().queue.remove(|pending| !pending.is_gone() && !late(pending));
        for pending in removed {
            self.shared.options.metrics.cancelled.inc();
            if !pending.is_gone() {
                pending.send(Update::Failed(Failure::Late));
            }
        }
        let mut at = 0;
        while let Some(active) = self.active.get(at) {
            let gone = active.pending.is_gone();
            if !gone && !late(&active.pending) {
                at += 1;
                continue;
            }
            let active = self.active.remove(at);
            self.runtime.cancel(active.id);
            if gone {
                self.shared.options.metrics.cancelled.inc();
            } else {
                active.pending.send(Update::Finished(Ending::Time));
            }
            self.ended(&active);
        }
    }

    /// Begins jobs, as many as run at once.
    fn admit(&mut self) {
        if self.active.is_empty() {
            self.alone = false;
            if let Some(pending) = self.suspects.pop_front() {
                self.alone = true;
                self.begin(pending);
                return;
            }
        }
        if self.alone {
            return;
        }
        while let Some(next) = self.candidates().into_iter().find(|next| self.has_place_for(next)) {
            match next {
                Next::Again(at) => {
                    if let Some(detached) = self.active[at].detached.take() {
                        self.runtime.attach(detached);
                    }
                }
                Next::Begin(client) => {
                    let pending = self.shared.lock().queue.pop_of(|other| other == client);
                    let Some((_, pending)) = pending else { return };
                    self.begin(pending);
                }
            }
        }
    }

    /// Lists what may be begun: the jobs that gave up their places and can go on, and the next one of each client in
    /// the queue; sequences of the client served least first.
    fn candidates(&mut self) -> Vec<Next> {
        let mut ready = Vec::new();
        for (at, active) in self.active.iter_mut().enumerate() {
            // All are asked: an answer that nobody takes holds up others.
            if active.detached.as_mut().is_some_and(|job| job.is_ready(Duration::ZERO)) {
                ready.push((at, active.pending.caller.client));
            }
        }
        let state = self.shared.lock();
        let tag = |client| state.queue.tag(client);
        let again = ready.into_iter().map(|(at, client)| (tag(client), Next::Again(at)));
        let begin = state.queue.waiting().map(|client| (tag(client), Next::Begin(client)));
        let mut all: Vec<_> = again.chain(begin).collect();
        // Stable: of equals, those that were begun before go first.
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.into_iter().map(|(_, next)| next).collect()
    }

    /// True if there is a place for `next`. If all are taken, a job of another client gives up its place: one that
    /// waits for its constraint, or one of a client that has two places more.
    fn has_place_for(&mut self, next: &Next) -> bool {
        let client = match next {
            Next::Again(at) => self.active[*at].pending.caller.client,
            Next::Begin(client) => *client,
        };
        let mut places = HashMap::new();
        for active in self.active.iter().filter(|active| active.detached.is_none()) {
            *places.entry(active.pending.caller.client).or_insert(0) += 1;
        }
        if places.values().sum::<usize>() < self.shared.options.runtime.sequences {
            return true;
        }
        let held = |client: &Client| places.get(client).copied().unwrap_or(0);
        let own = held(&client);
        let most = places.keys().copied().max_by_key(held).filter(|most| held(most) >= own + 2);
        let runtime = &mut self.runtime;
        // The one begun last has the least to be computed again.
        let mut others = self.active.iter_mut().rev().filter(|active| active.detached.is_none());
        let gives = others.find(|active| {
            let other = active.pending.caller.client;
            other != client && (runtime.is_undecided(active.id) || Some(other) == most)
        });
        let Some(active) = gives else { return false };
        active.detached = runtime.detach(active.id);
        active.detached.is_some()
    }

    /// Charges new tokens to their clients, and the processor time of constraints as the tokens that the model computes
    /// in it.
    fn charge(&mut self) {
        let mut state = None;
        for active in &mut self.active {
            let made = active.pending.reported.tokens.len();
            let work = active.pending.job.meter.take(Duration::from_secs_f64(self.token_seconds));
            let tokens = work + (made - active.charged);
            active.charged = made;
            if tokens > 0 {
                let state = state.get_or_insert_with(|| self.shared.lock());
                state.queue.charge(active.pending.caller, tokens);
            }
        }
    }

    fn begin(&mut self, pending: Pending) {
        let forced = pending.reported.tokens.clone();
        let request = Request { forced, ..pending.job.request.clone() };
        let (now, prompt) = (Instant::now(), request.prompt.len());
        match self.runtime.add(request) {
            Err(error) => pending.send(Update::Failed(Failure::Request(error.to_string()))),
            Ok(id) => {
                let metrics = &self.shared.options.metrics;
                metrics.queue_seconds.observe(now.duration_since(pending.arrived).as_secs_f64());
                metrics.prompt_tokens.inc_by(prompt as u64);
                let charged = pending.reported.tokens.len();
                pending.send(Update::Begun);
                let mut state = self.shared.lock();
                state.queue.charge(pending.caller, prompt);
                state.working = self.active.len() + 1;
                drop(state);
                self.number += 1;
                let number = self.number;
                self.active.push(Active {
                    id,
                    pending,
                    number,
                    begun: now,
                    first: None,
                    last: now,
                    scored: 0,
                    made: 0,
                    cached: 0,
                    computed: None,
                    charged,
                    detached: None,
                });
                self.changed = true;
            }
        }
    }

    /// Clients of the sequences at work.
    fn callers(&self) -> Vec<Caller> {
        let at_work = self.active.iter().filter(|active| active.detached.is_none());
        at_work.map(|active| active.pending.caller).collect()
    }

    /// Runs one pass and reports what happened.
    fn step(&mut self) {
        let EngineOptions { metrics, turns, .. } = &self.shared.options;
        let asked = (Instant::now(), processor_time());
        let booking = self.booking.take().unwrap_or_else(|| turns.book(Vec::new()));
        let turn = turns.wait(booking, self.callers());
        let begin = Instant::now();
        let runtime = &mut self.runtime;
        let stepped = catch_unwind(AssertUnwindSafe(|| runtime.step().map(<[Event]>::to_vec)));
        let end = Instant::now();
        self.booking = Some(turn.again(turns));
        metrics.step_seconds.inc_by(end.duration_since(begin).as_secs_f64());
        let (passed, tokens) = (self.runtime.pass_time(), self.runtime.last_step_tokens());
        if tokens == 0 {
            // All wait for constraints that nobody works on yet.
            std::thread::sleep(PAUSE / 20);
        }
        if tokens > 0 && passed > self.pass_before {
            let seconds = (passed - self.pass_before).as_secs_f64() / tokens as f64;
            self.token_seconds += 0.1 * (seconds - self.token_seconds);
        }
        self.pass_before = passed;
        if let Some(last) = self.stepped.replace((end, processor_time())) {
            metrics.scheduler_seconds.inc_by(asked.0.duration_since(last.0).as_secs_f64());
            metrics.scheduler_processor_seconds.inc_by(asked.1.saturating_sub(last.1).as_secs_f64());
        }
        metrics.steps.inc();
        match stepped {
            Ok(Ok(events)) => {
                let is_start = |event: &Event| matches!(event.kind, EventKind::Started { .. });
                let (starts, others): (Vec<_>, Vec<_>) = events.into_iter().partition(is_start);
                starts.into_iter().for_each(|event| self.report(event, end));
                self.report_progress();
                others.into_iter().for_each(|event| self.report(event, end));
            }
            Ok(Err(error)) => self.fault(&Failure::Model(error.to_string())),
            Err(_) => self.fault(&Failure::Panicked),
        }
    }

    /// Reports an event to its job.
    fn report(&mut self, event: Event, now: Instant) {
        let Some(at) = self.active.iter().position(|active| active.id == event.sequence) else { return };
        let active = &mut self.active[at];
        let is_new = match event.kind {
            EventKind::Started { cached } => {
                active.cached = cached;
                !std::mem::replace(&mut active.pending.reported.started, true)
            }
            EventKind::PromptToken { .. } => {
                active.scored += 1;
                let is_new = active.scored > active.pending.reported.prompt;
                active.pending.reported.prompt = active.pending.reported.prompt.max(active.scored);
                is_new
            }
            EventKind::Embedding(_) => true,
            EventKind::Token { token, .. } => {
                active.made += 1;
                let is_new = active.made > active.pending.reported.tokens.len();
                if is_new {
                    self.speed.1 += 1;
                    active.take(token, now, &self.shared.options.metrics);
                }
                is_new
            }
            EventKind::Finished(reason) => return self.end(at, Update::Finished(Ending::Stopped(reason))),
            EventKind::Unconstrained(error) => {
                return self.end(at, Update::Failed(Failure::Request(error.to_string())));
            }
            EventKind::Broken => {
                let what = "all logits of a token were NaN".to_owned();
                return self.end(at, Update::Failed(Failure::Model(what)));
            }
            // Kinds that no request of this server asks for.
            _ => false,
        };
        if is_new {
            active.pending.send(Update::News(event.kind));
        }
    }

    /// Reports how much of the prompts has been computed to the jobs that ask for it: once before the first part, and
    /// after each.
    fn report_progress(&mut self) {
        let asks = |active: &&mut Active| {
            active.pending.job.progress && active.pending.reported.started && active.first.is_none()
        };
        for active in self.active.iter_mut().filter(asks) {
            let total = active.pending.job.request.prompt.len();
            if active.computed.is_none() {
                active.report_progress(active.cached);
            }
            // One that has ended has computed its prompt.
            let held = self.runtime.sequences().find(|state| state.id == active.id);
            let held = held.map_or(total, |state| state.held_tokens.min(total));
            if active.computed.is_none_or(|computed| held > computed) {
                active.report_progress(held);
            }
        }
    }

    /// Ends the job at index `at` with `update`.
    fn end(&mut self, at: usize, update: Update) {
        let active = self.active.remove(at);
        if let (Update::Finished(_), Some(tap)) = (&update, self.shared.tap.get()) {
            tap.offer(&active.pending.job.request.prompt, &active.pending.reported.tokens);
        }
        active.pending.send(update);
        self.ended(&active);
    }

    /// Counts a job that has ended.
    fn ended(&mut self, active: &Active) {
        self.changed = true;
        let seconds = active.begun.elapsed().as_secs_f64();
        self.shared.options.metrics.job_seconds.observe(seconds);
        let mut state = self.shared.lock();
        state.queue.charge(active.pending.caller, active.pending.reported.tokens.len() - active.charged);
        state.job_seconds += 0.1 * (seconds - state.job_seconds);
        state.working = self.active.len();
    }

    /// Makes a new session after a fault. A job that was alone fails; several are run again, one at a time.
    fn fault(&mut self, failure: &Failure) {
        self.shared.options.metrics.faults.inc();
        let at_work = std::mem::take(&mut self.active);
        if let [active] = at_work.as_slice() {
            active.pending.send(Update::Failed(failure.clone()));
            self.ended(active);
        } else {
            self.suspects.extend(at_work.into_iter().map(|active| active.pending));
        }
        self.alone = false;
        self.count();
        match session(self.shared, self.model, self.draft) {
            Ok(runtime) => {
                self.runtime = runtime;
                self.counted = (0, 0, 0);
                self.passed = Duration::ZERO;
                self.pass_before = Duration::ZERO;
            }
            // Memory for one session was there before; without it nothing can run.
            Err(_) => {
                self.shared.lock().stage = Stage::Cancelling;
            }
        }
    }

    /// Adds the counts of the runtime to the metrics.
    fn count(&mut self) {
        let metrics = &self.shared.options.metrics;
        let proposals = self.runtime.proposals();
        let now = (self.runtime.shared_tokens(), proposals.proposed, proposals.accepted);
        metrics.shared_tokens.inc_by(now.0 - self.counted.0);
        metrics.proposed_tokens.inc_by(now.1 - self.counted.1);
        metrics.accepted_tokens.inc_by(now.2 - self.counted.2);
        self.counted = now;
        let passed = self.runtime.pass_time();
        metrics.pass_seconds.inc_by((passed - self.passed).as_secs_f64());
        self.passed = passed;
    }

    /// Describes the load, if `always` or the last description is old.
    fn publish(&mut self, always: bool) {
        let now = Instant::now();
        if !always && now.duration_since(self.published) < PUBLISHED {
            return;
        }
        self.published = now;
        self.changed = false;
        self.count();
        let detached = self.active.iter().filter_map(|active| Some(active.detached.as_ref()?.state()));
        let all = self.runtime.sequences().chain(detached);
        let slots: Vec<_> = all.filter_map(|state| self.slot(&state, now)).collect();
        let cache = self.runtime.cache();
        let (kv_used, kv_blocks) = (cache.blocks - cache.free, cache.blocks);
        let metrics = &self.shared.options.metrics;
        let mut state = self.shared.lock();
        let since = now.duration_since(self.speed.0);
        let mut tokens_per_second = state.load.tokens_per_second;
        if since >= SPEED {
            tokens_per_second = self.speed.1 as f64 / since.as_secs_f64();
            self.speed = (now, 0);
        }
        state.working = self.active.len() + self.suspects.len();
        metrics.running.set(slots.len() as i64);
        metrics.queued.set(state.queue.len() as i64);
        metrics.kv_used.set(kv_used as i64);
        metrics.kv_blocks.set(kv_blocks as i64);
        state.load = Load { slots, queued: 0, tokens_per_second, kv_used, kv_blocks };
    }

    /// Describes a job at work.
    fn slot(&self, state: &SequenceState, now: Instant) -> Option<SlotState> {
        let active = self.active.iter().find(|active| active.id == state.id)?;
        Some(SlotState {
            id: active.number,
            state: match state.phase {
                Phase::Waiting => "waiting",
                Phase::Prefill => "prefill",
                Phase::Decode => "decode",
            },
            prompt_tokens: state.prompt_tokens,
            cached_tokens: state.cached_tokens,
            generated_tokens: state.new_tokens,
            max_tokens: state.max_new_tokens,
            held_tokens: state.held_tokens,
            priority: state.priority,
            seconds: now.duration_since(active.begun).as_secs_f64(),
            client: active.pending.caller.client,
        })
    }
}
