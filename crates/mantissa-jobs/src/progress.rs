//! Progress of a job, as its caller shows it, and the caller's wish to stop.

use crate::text::{bytes, count};

/// Unit of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Items with this plural name.
    Items(&'static str),
}

impl Unit {
    /// Formats an amount without the name of the items.
    pub fn amount(self, n: u64) -> String {
        match self {
            Unit::Bytes => bytes(n),
            Unit::Items(_) => count(n),
        }
    }

    /// Returns the name of the items after a space; empty for bytes.
    pub fn name(self) -> String {
        match self {
            Unit::Bytes => String::new(),
            Unit::Items(name) => format!(" {name}"),
        }
    }

    /// Formats a rate, without the time.
    pub fn per_second(self, rate: f64) -> String {
        match self {
            Unit::Items(_) if rate < 10.0 => format!("{rate:.2}"),
            unit => unit.amount(rate as u64),
        }
    }
}

/// Promise of a job to its caller about how it ends after [`Progress::stops`] has become true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Does not ask: only the end of the process stops the work, and what it left unfinished is removed.
    Never,
    /// Asks between steps and ends within seconds.
    Soon,
    /// Asks between steps and saves what it has, however long that takes.
    Saving,
}

/// Shows what a job does and says if it should stop: a terminal, a log, a function of Python, a test.
pub trait Progress: Send + Sync {
    /// Starts showing one stretch of work of `total` units (0 if unknown). With `status`, there is room for figures of
    /// each step ([`Gauge::status`]).
    fn start(&self, total: u64, unit: Unit, status: bool) -> Box<dyn Gauge>;

    /// Shows a note, one line.
    fn note(&self, text: &str);

    /// Shows a warning, one line.
    fn warn(&self, text: &str);

    /// True if the job should save its work and end.
    fn stops(&self) -> bool {
        false
    }

    /// Takes note of how the work from here on ends when it should stop.
    fn polling(&self, polling: Polling) {
        let _ = polling;
    }

    /// Keeps the message of a stop that the work does not ask for; `None` removes it.
    fn keep_message(&self, message: Option<String>) {
        let _ = message;
    }
}

/// Display of one stretch of work; shared between threads. Dropping it ends the display.
pub trait Gauge: Send + Sync {
    /// Sets the current activity.
    fn message(&self, text: &str);

    /// Sets the figures of the current step.
    fn status(&self, text: &str);

    /// Names what follows this stretch of work, which its remaining time does not count.
    fn followed_by(&self, next: &str) {
        let _ = next;
    }

    /// Names the predicted seconds of this stretch of work, which its remaining time follows until enough is done.
    fn expect(&self, seconds: f64) {
        let _ = seconds;
    }

    /// Marks `n` units as done before; they and the time so far do not count for the rate.
    fn begin_at(&self, n: u64);

    /// Sets the number of units done.
    fn set(&self, n: u64);

    /// Adds to the number of units done.
    fn add(&self, n: u64);

    /// Shows a line next to the display.
    fn note(&self, text: &str);

    /// Ends the display.
    fn finish(&self);
}

/// Handle of a job on the display of one stretch of work; ends it when dropped.
pub struct Meter(Box<dyn Gauge>);

impl Meter {
    /// Makes the handle of `gauge`.
    pub fn new(gauge: Box<dyn Gauge>) -> Self {
        Meter(gauge)
    }

    /// Sets the current activity; the name of a tensor may be shown shortened.
    pub fn message(&self, text: impl AsRef<str>) {
        self.0.message(text.as_ref());
    }

    /// Sets the figures of the current step.
    pub fn status(&self, text: impl AsRef<str>) {
        self.0.status(text.as_ref());
    }

    /// Names what follows this stretch of work, which its remaining time does not count.
    pub fn followed_by(&self, next: impl AsRef<str>) {
        self.0.followed_by(next.as_ref());
    }

    /// Names the predicted seconds of this stretch of work, which its remaining time follows until enough is done.
    pub fn expect(&self, seconds: f64) {
        self.0.expect(seconds);
    }

    /// Marks `n` units as done before; they and the time so far do not count for the rate.
    pub fn begin_at(&self, n: u64) {
        self.0.begin_at(n);
    }

    /// Sets the number of units done.
    pub fn set(&self, n: u64) {
        self.0.set(n);
    }

    /// Adds to the number of units done.
    pub fn add(&self, n: u64) {
        self.0.add(n);
    }

    /// Shows a line next to the display.
    pub fn note(&self, text: impl AsRef<str>) {
        self.0.note(text.as_ref());
    }

    /// Ends the display.
    pub fn finish(&self) {
        self.0.finish();
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// Progress that shows nothing and never stops.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _: u64, _: Unit, _: bool) -> Box<dyn Gauge> {
        Box::new(Silent)
    }

    fn note(&self, _: &str) {}

    fn warn(&self, _: &str) {}
}

impl Gauge for Silent {
    fn message(&self, _: &str) {}

    fn status(&self, _: &str) {}

    fn begin_at(&self, _: u64) {}

    fn set(&self, _: u64) {}

    fn add(&self, _: u64) {}

    fn note(&self, _: &str) {}

    fn finish(&self) {}
}
