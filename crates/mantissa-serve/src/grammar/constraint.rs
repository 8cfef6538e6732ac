//! A grammar that a process holds, as a constraint of the runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mantissa_runtime::{Constraint, ConstraintError, Offer, TokenMask, Verdict};

use super::limits::shorten;
use super::process::{Ended, Process};
use super::wire::{Answer, Ask, Outcome};
use crate::fair::{Caller, Gate, Place};

/// Processor time that a sequence may take for its grammar, at once and for each token. Masks of schemas take tenths of a
/// millisecond.
const SHARE: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(2)];

/// Processor time that the grammars of a request have taken and that was not charged yet.
#[derive(Debug, Default)]
pub(crate) struct Meter(AtomicU64);

impl Meter {
    fn add(&self, micros: u64) {
        self.0.fetch_add(micros, Ordering::Relaxed);
    }

    /// Takes as many whole `units` of the time as there are; the rest stays.
    pub(crate) fn take(&self, unit: Duration) -> usize {
        let unit = u64::try_from(unit.as_micros()).unwrap_or(u64::MAX).max(1);
        let units = self.0.load(Ordering::Relaxed) / unit;
        self.0.fetch_sub(units * unit, Ordering::Relaxed);
        usize::try_from(units).unwrap_or(usize::MAX)
    }
}

/// State of a grammar in a sequence.
#[derive(Debug)]
pub(super) struct GrammarConstraint {
    process: Arc<Process>,
    /// Places for offers at work, and the client that they are charged to.
    gate: Arc<Gate>,
    caller: Caller,
    meter: Arc<Meter>,
    /// Number in the process, and true if the process knows it.
    sequence: u32,
    known: bool,
    /// Tokens taken.
    taken: Vec<u32>,
    asked: Option<Asked>,
    /// Processor time.
    used: Duration,
}

/// An offer without an answer.
#[derive(Debug)]
struct Asked {
    offer: Offer,
    place: Option<Place>,
    sent: bool,
    /// Answer that came while nobody asked.
    answer: Option<Answer>,
}

impl GrammarConstraint {
    pub(super) fn new(process: Arc<Process>, gate: Arc<Gate>, caller: Caller, meter: Arc<Meter>) -> Self {
        let sequence = process.sequence();
        let (taken, used) = (Vec::new(), Duration::ZERO);
        GrammarConstraint { process, gate, caller, meter, sequence, known: false, taken, asked: None, used }
    }

    /// Sends the offer, if its place was given. Returns true if it is sent.
    fn send(&mut self) -> bool {
        let Some(asked) = &mut self.asked else { return false };
        if !asked.sent && asked.place.as_ref().is_none_or(Place::is_given) {
            let before = if self.known { Vec::new() } else { self.taken.clone() };
            let ask = Ask::Offer { sequence: self.sequence, offer: asked.offer, before };
            self.process.ask(self.sequence, &ask, !self.known);
            (asked.sent, self.known) = (true, true);
        }
        asked.sent
    }

    /// Takes the answer, if it has come, and gives the place up. Returns true if it is there.
    ///
    /// # Errors
    /// The process has ended.
    fn receive(&mut self) -> Result<bool, ConstraintError> {
        if !self.send() {
            return if self.process.is_alive() { Ok(false) } else { Err(ended()) };
        }
        let Some(asked) = &mut self.asked else { return Ok(false) };
        if asked.answer.is_none() {
            asked.answer = self.process.answer(self.sequence).map_err(|Ended| ended())?;
            if let Some(Answer { micros, .. }) = asked.answer {
                let place = asked.place.take();
                place.into_iter().for_each(|mut place| place.charge(Duration::from_micros(micros)));
            }
        }
        Ok(asked.answer.is_some())
    }

    /// Counts the time of an answer.
    ///
    /// # Errors
    /// More than the sequence's share.
    fn count(&mut self, micros: u64) -> Result<(), ConstraintError> {
        let time = Duration::from_micros(micros);
        self.meter.add(micros);
        self.used += time;
        let tokens = u32::try_from(self.taken.len()).unwrap_or(u32::MAX);
        if self.used <= SHARE[0].saturating_add(SHARE[1].saturating_mul(tokens)) {
            return Ok(());
        }
        let (at_once, each) = (SHARE[0].as_millis(), SHARE[1].as_millis());
        let used = self.used.as_millis();
        Err(ConstraintError(format!(
            "expected a grammar that takes at most {at_once} ms of processor time and {each} ms a token, got {used} ms for {tokens} tokens; fix: make it less ambiguous"
        )))
    }
}

impl Constraint for GrammarConstraint {
    fn offer(&mut self, offer: Offer, mask: &mut TokenMask) -> Result<Verdict, ConstraintError> {
        if self.asked.as_ref().is_none_or(|asked| asked.offer != offer) {
            let place = self.gate.enter(self.caller);
            self.asked = Some(Asked { offer, place, sent: false, answer: None });
        }
        if !self.receive()? {
            return Ok(Verdict::Pending);
        }
        let answer = self.asked.take().and_then(|asked| asked.answer);
        let Some(Answer { micros, outcome, .. }) = answer else { return Ok(Verdict::Pending) };
        self.count(micros)?;
        match outcome {
            Outcome::Failed(message) => Err(ConstraintError(shorten(&message))),
            Outcome::Taken { complete } => {
                if let Offer::Token(token) = offer {
                    self.taken.push(token);
                }
                Ok(Verdict::Taken { complete })
            }
            Outcome::Refused { may_end, words } => {
                mask.words_mut().iter_mut().zip(words).for_each(|(word, allowed)| *word = allowed);
                Ok(Verdict::Refused { may_end })
            }
            Outcome::Done => Err(ConstraintError("the process of the grammar gave no answer".into())),
        }
    }

    fn wait(&mut self, patience: Duration) -> bool {
        // An answer is taken at once, whoever asks for it when: the process and the place are free for others.
        if self.receive().unwrap_or(true) {
            return true;
        }
        let sent = self.asked.as_ref().is_some_and(|asked| asked.sent);
        sent && self.process.wait(self.sequence, patience) && self.receive().unwrap_or(true)
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        let (process, gate, meter) = (&self.process, &self.gate, &self.meter);
        let mut copy = Self::new(Arc::clone(process), Arc::clone(gate), self.caller, Arc::clone(meter));
        copy.taken.clone_from(&self.taken);
        copy.used = self.used;
        Box::new(copy)
    }
}

/// Error of a process that has ended.
fn ended() -> ConstraintError {
    ConstraintError(
        "the grammar exceeded its limits of memory or processor time; fix: make it simpler".into(),
    )
}

impl Drop for GrammarConstraint {
    fn drop(&mut self) {
        if self.known {
            let place = self.asked.take().and_then(|asked| asked.place);
            self.process.forget(self.sequence, place);
        }
    }
}
