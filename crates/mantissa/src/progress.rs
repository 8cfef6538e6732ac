//! Progress display: a bar on a terminal, a line every few seconds elsewhere.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use crate::memory::kib_field;
use crate::output::{bytes, count};

/// Interval of lines if standard error is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// Unit of progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Items with this plural name.
    Items(&'static str),
}

impl Unit {
    fn amount(self, n: u64) -> String {
        match self {
            Unit::Bytes => bytes(n),
            Unit::Items(_) => count(n),
        }
    }

    fn name(self) -> String {
        match self {
            Unit::Bytes => String::new(),
            Unit::Items(name) => format!(" {name}"),
        }
    }
}

/// Progress on standard error; can be shared between threads.
pub struct Progress(Kind);

enum Kind {
    Silent,
    Bar(ProgressBar),
    Lines(Mutex<Lines>),
}

impl Progress {
    /// Starts counting to `total` (0 if unknown); silent if `quiet`.
    pub fn new(total: u64, unit: Unit, quiet: bool) -> Self {
        Progress(match (quiet, io::stderr().is_terminal()) {
            (true, _) => Kind::Silent,
            (false, true) => Kind::Bar(bar(total, unit)),
            (false, false) => Kind::Lines(Mutex::new(Lines::new(total, unit))),
        })
    }

    /// Sets the current activity.
    pub fn message(&self, text: impl Into<String>) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Bar(bar) => bar.set_message(text.into()),
            Kind::Lines(lines) => lock(lines).message = text.into(),
        }
    }

    /// Marks `n` items as done before; they do not count for the rate.
    pub fn begin_at(&self, n: u64) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Bar(bar) => {
                bar.set_position(n);
                bar.reset_eta();
            }
            Kind::Lines(lines) => {
                let mut lines = lock(lines);
                (lines.before, lines.done) = (n, n);
            }
        }
    }

    /// Sets the number of items done.
    pub fn set(&self, n: u64) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Bar(bar) => bar.set_position(n),
            Kind::Lines(lines) => lock(lines).set(n, Instant::now()),
        }
    }

    /// Adds to the number of items done.
    pub fn add(&self, n: u64) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Bar(bar) => bar.inc(n),
            Kind::Lines(lines) => {
                let mut lines = lock(lines);
                let done = lines.done.saturating_add(n);
                lines.set(done, Instant::now());
            }
        }
    }

    /// Ends the display and removes the bar.
    pub fn finish(&self) {
        if let Kind::Bar(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

fn lock(lines: &Mutex<Lines>) -> std::sync::MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

fn bar(total: u64, unit: Unit) -> ProgressBar {
    let amounts = match unit {
        Unit::Bytes => "{bytes}/{total_bytes}  {bytes_per_sec}".into(),
        Unit::Items(name) => format!("{{human_pos}}/{{human_len}} {name}  {{per_sec}}"),
    };
    let template = match (total, unit) {
        (0, Unit::Items(name)) => format!("{{msg}} {{human_pos}} {name}  {{per_sec}}  {{memory}}"),
        _ => format!("{{msg}} {{wide_bar}} {amounts}  ETA {{eta}}  {{memory}}"),
    };
    let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let memory = |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        // A failed redraw is made good by the next.
        let _ = out.write_str(&anonymous_memory().map(bytes).unwrap_or_default());
    };
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr())
        .with_style(style.with_key("memory", memory))
}

/// State of the line display.
struct Lines {
    total: u64,
    unit: Unit,
    /// Items done before this process started.
    before: u64,
    done: u64,
    message: String,
    start: Instant,
    last: Instant,
}

impl Lines {
    fn new(total: u64, unit: Unit) -> Self {
        let now = Instant::now();
        Lines { total, unit, before: 0, done: 0, message: String::new(), start: now, last: now }
    }

    fn set(&mut self, n: u64, now: Instant) {
        self.done = n;
        if now.saturating_duration_since(self.last) >= INTERVAL {
            self.last = now;
            let _ = writeln!(io::stderr().lock(), "{}", self.line(now, anonymous_memory()));
        }
    }

    /// Formats the rate (per second) and the remaining time.
    fn rate(&self, rate: f64) -> String {
        let per_second = match self.unit {
            Unit::Items(_) if rate < 10.0 => format!("{rate:.2}"),
            unit => unit.amount(rate as u64),
        };
        match self.total.saturating_sub(self.done) as f64 / rate {
            left if self.total > 0 => format!(", {per_second}/s, {left:.0} s left"),
            _ => format!(", {per_second}/s"),
        }
    }

    fn line(&self, now: Instant, memory: Option<u64>) -> String {
        let seconds = now.saturating_duration_since(self.start).as_secs_f64();
        let mut text = match self.message.as_str() {
            "" => String::new(),
            message => format!("{message}: "),
        };
        let amount = |n| self.unit.amount(n);
        let of = if self.total > 0 { format!(" of {}", amount(self.total)) } else { String::new() };
        let _ = write!(text, "{}{of}{}", amount(self.done), self.unit.name());
        let here = self.done.saturating_sub(self.before);
        if here > 0 && seconds > 0.0 {
            text += &self.rate(here as f64 / seconds);
        }
        if let Some(memory) = memory {
            let _ = write!(text, ", {} memory", bytes(memory));
        }
        text
    }
}

/// Returns the anonymous resident memory of this process in bytes; `None` if unknown.
pub fn anonymous_memory() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/self/status").ok()?, "RssAnon:")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let mut lines = Lines::new(30, Unit::Items("layers"));
        lines.message = "quantize".into();
        lines.done = 12;
        let line = lines.line(lines.start + Duration::from_secs(6), Some(312_000_000));
        assert_eq!(line, "quantize: 12 of 30 layers, 2.00/s, 9 s left, 312 MB memory");
        (lines.before, lines.done) = (10, 12);
        assert!(lines.line(lines.start + Duration::from_secs(6), None).contains("0.33/s, 54 s left"));
        let mut open = Lines::new(0, Unit::Items("steps"));
        open.done = 3;
        assert_eq!(open.line(open.start + Duration::from_secs(6), None), "3 steps, 0.50/s");
        let begun = Lines::new(2_000_000, Unit::Bytes);
        assert_eq!(begun.line(begun.start, None), "0 B of 2.00 MB");
    }

    #[test]
    fn the_bar_template_is_valid() {
        for (total, unit) in [(10, Unit::Bytes), (10, Unit::Items("layers")), (0, Unit::Items("steps"))] {
            let bar = bar(total, unit);
            bar.set_draw_target(ProgressDrawTarget::hidden());
            bar.inc(3);
            assert_eq!(bar.position(), 3);
        }
    }

    #[test]
    fn memory_is_read_where_proc_is() {
        match std::fs::metadata("/proc/self/status") {
            Ok(_) => assert!(anonymous_memory().unwrap() > 4096),
            Err(_) => println!("skipped: no /proc"),
        }
    }
}
