//! Progress display: a bar on a terminal, a line every few seconds elsewhere.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

pub use mantissa_jobs::memory::anonymous as anonymous_memory;
use mantissa_jobs::{Gauge, Polling, Silent, bytes, short};
pub use mantissa_jobs::{Meter as Progress, Unit};

use crate::interrupt;
use crate::terminal::{line, to_stderr};

/// Interval of lines if standard error is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

/// Progress of a command on standard error; silent with `--quiet`. A signal stops the work.
pub struct Terminal {
    quiet: bool,
}

impl Terminal {
    /// Makes the progress of a command.
    pub fn new(quiet: bool) -> Self {
        Terminal { quiet }
    }
}

impl mantissa_jobs::Progress for Terminal {
    fn start(&self, total: u64, unit: Unit, status: bool) -> Box<dyn Gauge> {
        match (self.quiet, terminal()) {
            (true, _) => Box::new(Silent),
            (false, Some(columns)) => {
                let pace = Arc::new(Mutex::new(Pace::new(total)));
                Box::new(Bar(bar((total, unit), columns, status, &pace), pace))
            }
            (false, None) => Box::new(Log(Mutex::new(Lines::new(total, unit)))),
        }
    }

    fn note(&self, text: &str) {
        if !self.quiet {
            to_stderr(text);
        }
    }

    fn warn(&self, text: &str) {
        if !self.quiet {
            to_stderr(&format!("warning: {text}"));
        }
    }

    fn stops(&self) -> bool {
        interrupt::received().is_some()
    }

    fn polling(&self, polling: Polling) {
        interrupt::polling(polling);
    }

    fn keep_message(&self, message: Option<String>) {
        interrupt::keep_message(message);
    }
}

/// Time that a stretch of work takes, by what is done and by its prediction.
struct Pace {
    total: u64,
    /// Units done before the time counts.
    before: u64,
    start: Instant,
    /// Predicted seconds of the units that are not done before.
    expected: Option<f64>,
}

/// Share of the work from which on its pace alone decides the remaining time.
const DECISIVE: f64 = 0.25;

impl Pace {
    fn new(total: u64) -> Self {
        Pace { total, before: 0, start: Instant::now(), expected: None }
    }

    /// Returns the seconds left with `done` units done at `now`; `None` if neither pace nor prediction is known.
    fn left(&self, done: u64, now: Instant) -> Option<f64> {
        let (here, all) = (done.saturating_sub(self.before), self.total.saturating_sub(self.before));
        let seconds = now.saturating_duration_since(self.start).as_secs_f64();
        if self.total == 0 || all == 0 {
            return None;
        }
        let share = here as f64 / all as f64;
        let measured = (share > 0.0 && seconds > 0.0).then(|| seconds / share);
        let whole = match (measured, self.expected) {
            (Some(measured), Some(expected)) => {
                let weight = (share / DECISIVE).min(1.0);
                weight * measured + (1.0 - weight) * expected
            }
            (Some(measured), None) => measured,
            // Nothing is done yet: what the prediction leaves.
            (None, expected) => return expected.map(|expected| (expected - seconds).max(0.0)),
        };
        Some(whole * (1.0 - share))
    }
}

/// Bar on a terminal.
struct Bar(ProgressBar, Arc<Mutex<Pace>>);

impl Gauge for Bar {
    fn message(&self, text: &str) {
        self.0.set_prefix(line(&short(text)));
    }

    fn status(&self, text: &str) {
        self.0.set_message(line(text));
    }

    fn expect(&self, seconds: f64) {
        lock(&self.1).expected = Some(seconds);
    }

    fn begin_at(&self, n: u64) {
        let mut pace = lock(&self.1);
        (pace.before, pace.start) = (n, Instant::now());
        drop(pace);
        self.0.set_position(n);
        self.0.reset_eta();
    }

    fn set(&self, n: u64) {
        self.0.set_position(n);
    }

    fn add(&self, n: u64) {
        self.0.inc(n);
    }

    fn note(&self, text: &str) {
        self.0.println(line(text));
    }

    fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// Lines on a standard error that is no terminal.
struct Log(Mutex<Lines>);

impl Gauge for Log {
    fn followed_by(&self, next: &str) {
        next.clone_into(&mut lock(&self.0).next);
    }

    fn message(&self, text: &str) {
        lock(&self.0).message = short(text);
    }

    fn status(&self, text: &str) {
        text.clone_into(&mut lock(&self.0).message);
    }

    fn expect(&self, seconds: f64) {
        lock(&self.0).pace.expected = Some(seconds);
    }

    fn begin_at(&self, n: u64) {
        let mut lines = lock(&self.0);
        let now = Instant::now();
        (lines.pace.before, lines.pace.start) = (n, now);
        lines.set(n, now);
    }

    fn set(&self, n: u64) {
        lock(&self.0).set(n, Instant::now());
    }

    fn add(&self, n: u64) {
        let mut lines = lock(&self.0);
        let done = lines.done.saturating_add(n);
        lines.set(done, Instant::now());
    }

    fn note(&self, text: &str) {
        to_stderr(text);
    }

    fn finish(&self) {}
}

fn lock<T>(shared: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fewest columns of the bar.
const BAR: usize = 20;

/// Columns of the texts behind the bar: percentage or amounts, rate, remaining time, memory.
const FIGURES: usize = 40;

/// Columns of a terminal that has room for amounts.
const WIDE: usize = 110;

/// Makes a bar for a terminal with this many columns, whose remaining time follows `pace` where that has a prediction;
/// `status` adds a line below it.
fn bar((total, unit): (u64, Unit), columns: usize, status: bool, pace: &Arc<Mutex<Pace>>) -> ProgressBar {
    let style = ProgressStyle::with_template(&template(total, unit, columns, status));
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    // A failed redraw is made good by the next.
    let amounts = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let whole = state.len().filter(|&len| len > 0).map(|len| format!(" of {}", unit.amount(len)));
        let _ = write!(out, "{}{}{}", unit.amount(state.pos()), whole.unwrap_or_default(), unit.name());
    };
    let rate = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = write!(out, "{}/s", unit.per_second(state.per_sec()));
    };
    let pace = Arc::clone(pace);
    let left = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let pace = lock(&pace);
        let left = pace.expected.and_then(|_| pace.left(state.pos(), Instant::now()));
        let _ = out.write_str(&duration(left.unwrap_or_else(|| state.eta().as_secs_f64())));
    };
    let memory = |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = out.write_str(&anonymous_memory().map_or_else(|| "?".to_owned(), bytes));
    };
    let style = style.with_key("amounts", amounts).with_key("rate", rate);
    let style = style.with_key("left", left).with_key("memory", memory);
    ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_style(style)
}

/// Returns the template of a bar: name, bar, figures.
fn template(total: u64, unit: Unit, columns: usize, status: bool) -> String {
    let status = if status { "\n{wide_msg}" } else { "" };
    if total == 0 {
        let rate = if matches!(unit, Unit::Items(_)) { "  {rate}" } else { "" };
        return format!("{{prefix}} {{amounts}}{rate}  memory {{memory}}{status}");
    }
    let name = columns.saturating_sub(BAR + FIGURES).clamp(10, 28);
    if columns < WIDE {
        return format!(
            "{{prefix:{name}!}} {{bar:{BAR}}} {{percent:>3}}%  {{rate}}  ETA {{left}}  mem {{memory}}{status}"
        );
    }
    format!("{{prefix:{name}!}} {{bar:{BAR}}} {{amounts}}  {{rate}}  ETA {{left}}  memory {{memory}}{status}")
}

/// Formats a time in seconds, minutes or hours.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// State of the line display.
struct Lines {
    unit: Unit,
    pace: Pace,
    done: u64,
    message: String,
    /// What follows this stretch of work; empty if nothing is known to.
    next: String,
    last: Instant,
}

impl Lines {
    fn new(total: u64, unit: Unit) -> Self {
        let pace = Pace::new(total);
        let last = pace.start;
        Lines { unit, pace, done: 0, message: String::new(), next: String::new(), last }
    }

    fn set(&mut self, n: u64, now: Instant) {
        self.done = n;
        if now.saturating_duration_since(self.last) >= INTERVAL {
            self.last = now;
            to_stderr(&self.line(now, anonymous_memory()));
        }
    }

    fn line(&self, now: Instant, memory: Option<u64>) -> String {
        let Pace { total, before, start, .. } = self.pace;
        let seconds = now.saturating_duration_since(start).as_secs_f64();
        let mut text = match self.message.as_str() {
            "" => String::new(),
            message => format!("{message}: "),
        };
        let amount = |n| self.unit.amount(n);
        let of = if total > 0 { format!(" of {}", amount(total)) } else { String::new() };
        let _ = write!(text, "{}{of}{}", amount(self.done), self.unit.name());
        let here = self.done.saturating_sub(before);
        if here > 0 && seconds > 0.0 {
            let _ = write!(text, ", {}/s", self.unit.per_second(here as f64 / seconds));
        }
        if let Some(left) = self.pace.left(self.done, now) {
            let next = if self.next.is_empty() { String::new() } else { format!(", then {}", self.next) };
            let _ = write!(text, ", {} left{next}", duration(left));
        }
        if let Some(memory) = memory {
            let _ = write!(text, ", {} memory", bytes(memory));
        }
        text
    }
}

/// Returns the columns of the terminal behind standard error; `None` if it is no terminal.
fn terminal() -> Option<usize> {
    let term = Term::stderr();
    term.is_term().then(|| usize::from(term.size().1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::io;

    /// Terminal that keeps what was drawn last.
    #[derive(Clone, Debug)]
    struct Screen {
        columns: u16,
        text: Arc<Mutex<String>>,
    }

    impl Screen {
        fn add(&self, text: &str) -> io::Result<()> {
            self.text.lock().unwrap().push_str(text);
            Ok(())
        }

        fn clear(&self) -> io::Result<()> {
            self.text.lock().unwrap().clear();
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            self.columns
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            self.clear()
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.add(&format!("{text}\n"))
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.add(text)
        }
        fn clear_line(&self) -> io::Result<()> {
            self.clear()
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let mut lines = Lines::new(30, Unit::Items("layers"));
        lines.message = "quantize".into();
        lines.done = 12;
        let at = lines.pace.start + Duration::from_secs(6);
        let line = lines.line(at, Some(312_000_000));
        assert_eq!(line, "quantize: 12 of 30 layers, 2.00/s, 9 s left, 312 MB memory");
        lines.next = "the evaluation".into();
        assert_eq!(lines.line(at, None), "quantize: 12 of 30 layers, 2.00/s, 9 s left, then the evaluation");
        lines.next.clear();
        (lines.pace.before, lines.done) = (10, 12);
        assert!(lines.line(at, None).contains("0.33/s, 54 s left"));
        let mut open = Lines::new(0, Unit::Items("steps"));
        open.done = 3;
        assert_eq!(open.line(open.pace.start + Duration::from_secs(6), None), "3 steps, 0.50/s");
        let begun = Lines::new(2_000_000, Unit::Bytes);
        assert_eq!(begun.line(begun.pace.start, None), "0 B of 2.00 MB");
    }

    /// A layer that was copied in no time says nothing about those to be solved: the prediction does, until a quarter is
    /// solved.
    #[test]
    fn the_remaining_time_begins_with_the_prediction() {
        let mut lines = Lines::new(100, Unit::Items("layers"));
        lines.pace.expected = Some(1000.0);
        (lines.pace.before, lines.done) = (20, 20);
        let left = |lines: &Lines, seconds: u64| {
            lines.pace.left(lines.done, lines.pace.start + Duration::from_secs(seconds)).unwrap()
        };
        let line = lines.line(lines.pace.start + Duration::from_secs(100), None);
        assert_eq!(line, "20 of 100 layers, 15 min left");
        // One of 80 in 50 s alone would be 4000 s.
        lines.done = 21;
        assert!((900.0..1300.0).contains(&left(&lines, 50)), "{}", left(&lines, 50));
        // Then the pace alone: 20 of 80 in 300 s.
        lines.done = 40;
        assert!((left(&lines, 300) - 900.0).abs() < 1e-6);
        lines.done = 100;
        assert!(left(&lines, 1200).abs() < 1e-6);
    }

    /// Returns what a bar draws on a terminal with this many columns.
    fn drawn(columns: u16, unit: Unit, status: bool) -> String {
        let screen = Screen { columns, text: Arc::default() };
        let pace = Arc::new(Mutex::new(Pace::new(4000)));
        let bar = bar((4000, unit), columns.into(), status, &pace);
        bar.set_draw_target(ProgressDrawTarget::term_like(Box::new(screen.clone())));
        bar.set_prefix(short("model.layers.12.mlp.down_proj.weight"));
        bar.set_message("loss 2.8312");
        bar.set_position(1000);
        bar.abandon();
        screen.text.lock().unwrap().trim_end().to_owned()
    }

    #[test]
    fn a_bar_fits_the_terminal_and_says_what_its_figures_are() {
        for columns in [80, 100, 120, 200] {
            for unit in [Unit::Bytes, Unit::Items("layers")] {
                let text = drawn(columns, unit, false);
                assert_eq!(text.lines().count(), 1, "{text}");
                let cells = text.chars().filter(|cell| ['█', '░', '▉', '▓', '▒'].contains(cell)).count();
                assert!(cells >= 20, "{columns}: {cells} cells: {text}");
                assert!(text.starts_with("layer 12 down_proj ") && text.contains("ETA "), "{text}");
                assert!(text.contains("mem") && text.contains("/s"), "{text}");
            }
        }
        let text = drawn(80, Unit::Items("steps"), true);
        // Rows are filled with spaces up to the width of the terminal, not ended.
        let second: String = text.chars().skip(80).collect();
        assert!(second.starts_with("loss 2.8312"), "{text}");
    }

    #[test]
    fn long_times_are_in_minutes_and_hours() {
        assert_eq!([9.4, 150.0, 9000.0].map(duration), ["9 s", "2 min", "2.5 h"]);
    }
}
