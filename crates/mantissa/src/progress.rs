//! Progress display: a bar on a terminal, a line every few seconds elsewhere.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
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
            (false, Some(columns)) => Box::new(Bar(bar(total, unit, columns, status))),
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

/// Bar on a terminal.
struct Bar(ProgressBar);

impl Gauge for Bar {
    fn message(&self, text: &str) {
        self.0.set_prefix(line(&short(text)));
    }

    fn status(&self, text: &str) {
        self.0.set_message(line(text));
    }

    fn begin_at(&self, n: u64) {
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

    fn begin_at(&self, n: u64) {
        let mut lines = lock(&self.0);
        (lines.before, lines.done) = (n, n);
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

fn lock(lines: &Mutex<Lines>) -> std::sync::MutexGuard<'_, Lines> {
    lines.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fewest columns of the bar.
const BAR: usize = 20;

/// Columns of the texts behind the bar: percentage or amounts, rate, remaining time, memory.
const FIGURES: usize = 40;

/// Columns of a terminal that has room for amounts.
const WIDE: usize = 110;

/// Makes a bar for a terminal with this many columns; `status` adds a line below it.
fn bar(total: u64, unit: Unit, columns: usize, status: bool) -> ProgressBar {
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
    let left = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = out.write_str(&duration(state.eta().as_secs_f64()));
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
    total: u64,
    unit: Unit,
    /// Items done before this process started.
    before: u64,
    done: u64,
    message: String,
    /// What follows this stretch of work; empty if nothing is known to.
    next: String,
    start: Instant,
    last: Instant,
}

impl Lines {
    fn new(total: u64, unit: Unit) -> Self {
        let now = Instant::now();
        Lines {
            total,
            unit,
            before: 0,
            done: 0,
            message: String::new(),
            next: String::new(),
            start: now,
            last: now,
        }
    }

    fn set(&mut self, n: u64, now: Instant) {
        self.done = n;
        if now.saturating_duration_since(self.last) >= INTERVAL {
            self.last = now;
            to_stderr(&self.line(now, anonymous_memory()));
        }
    }

    /// Formats the rate (per second) and the remaining time.
    fn rate(&self, rate: f64) -> String {
        let per_second = self.unit.per_second(rate);
        match self.total.saturating_sub(self.done) as f64 / rate {
            left if self.total > 0 => {
                let next = if self.next.is_empty() { String::new() } else { format!(", then {}", self.next) };
                format!(", {per_second}/s, {} left{next}", duration(left))
            }
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
    use std::sync::Arc;

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
        let line = lines.line(lines.start + Duration::from_secs(6), Some(312_000_000));
        assert_eq!(line, "quantize: 12 of 30 layers, 2.00/s, 9 s left, 312 MB memory");
        lines.next = "the evaluation".into();
        let line = lines.line(lines.start + Duration::from_secs(6), None);
        assert_eq!(line, "quantize: 12 of 30 layers, 2.00/s, 9 s left, then the evaluation");
        lines.next.clear();
        (lines.before, lines.done) = (10, 12);
        assert!(lines.line(lines.start + Duration::from_secs(6), None).contains("0.33/s, 54 s left"));
        let mut open = Lines::new(0, Unit::Items("steps"));
        open.done = 3;
        assert_eq!(open.line(open.start + Duration::from_secs(6), None), "3 steps, 0.50/s");
        let begun = Lines::new(2_000_000, Unit::Bytes);
        assert_eq!(begun.line(begun.start, None), "0 B of 2.00 MB");
    }

    /// Returns what a bar draws on a terminal with this many columns.
    fn drawn(columns: u16, unit: Unit, status: bool) -> String {
        let screen = Screen { columns, text: Arc::default() };
        let bar = bar(4000, unit, columns.into(), status);
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
