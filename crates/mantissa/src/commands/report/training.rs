//! HTML page of a training run.

use std::path::Path;

use anyhow::Result;
use mantissa_jobs::json_lines;
use mantissa_jobs::learning::{DeadParameter, Learning, Span};
use mantissa_jobs::run_files::{self, LogLine, RunFile, RunState};
use mantissa_jobs::train::trainable_words;
use mantissa_store::{json, regular};
use mantissa_train::scaling::ScaleEvent;

use super::experts::Routing;
use super::gemms::Gemms;
use super::health::{Health, STEP};
use super::texts::name;
use crate::commands::train::data;
use crate::error::BadInput;
use crate::output::{Align, Table, bytes, count, counted, number, number_of};
use crate::report::{Axis, Html, LineChart, Page, Series, pairs, table, tiles};

/// Maximum size of `run.json` and `config.toml` in bytes.
const MAX_FILE: u64 = 1 << 20;
/// Maximum number of steps of a log.
const MAX_STEPS: usize = 10_000_000;

/// Seconds after which the page of a living run is loaded again.
pub const RELOAD: u32 = 10;

/// Page of a training run.
pub struct RunPage {
    /// The page.
    pub page: Page,
    /// Outcome in a sentence.
    pub outcome: String,
    /// State of the run.
    pub state: RunState,
}

/// Makes the page of the run in the folder `run`.
///
/// # Errors
/// Files that cannot be read or are not those of a run.
pub fn page(run: &Path) -> Result<RunPage> {
    let about = about(&run.join(run_files::RUN))?;
    // Before the log: of a run that ends meanwhile, the page is loaded once more.
    let state = RunState::of(run, about.as_ref())?;
    let log = read_log(&run.join(run_files::LOG))?;
    let mut page = Page::new(&format!("Training run {}", name(run)));
    if matches!(state, RunState::Living(_)) {
        page = page.reloading(RELOAD);
    }
    let mut learning = Learning::default();
    log.iter().for_each(|line| line.tell(&mut learning));
    let outcome = verdict(run, &log, about.as_ref(), &state, learning.summary().as_deref());
    page.push(Html::lead(&outcome));
    page.push(tiles(figures(&log, about.as_ref())));
    if let Some(data) = about.as_ref().and_then(|about| about.data.as_ref()) {
        page.push(Html::paragraph(&format!("Data: {}.", data::sentence(data))));
    }
    page.push(not_learning(&learning).unwrap_or_default());
    page.push(Html::heading("Training curves"));
    page.push(Html::grid(charts(&log)));
    page.push(scale_events(&log).unwrap_or_default());
    Gemms::read(&run.join(run_files::TELEMETRY))?.show(&mut page);
    Routing::read(&run.join(run_files::TELEMETRY))?.show(&mut page);
    Health::read(&run.join(run_files::TELEMETRY))?.show(&mut page);
    if let Some(about) = &about {
        page.push(Html::heading("Memory and machine"));
        page.push(Html::details("Memory by purpose", [table("Memory by purpose", &memory(about))]));
        page.push(pairs("Machine", machine(about)));
    }
    let config = run.join(run_files::CONFIG);
    if config.is_file() {
        page.push(Html::heading("Settings"));
        page.push(Html::details("All settings", [Html::preformatted(&read_text(&config)?)]));
    }
    Ok(RunPage { page, outcome, state })
}

pub(super) fn read_log(path: &Path) -> Result<Vec<LogLine>> {
    let mut log = Vec::new();
    json_lines::read(path, |line: LogLine| {
        if log.len() >= MAX_STEPS {
            let found = format!("more than {MAX_STEPS} steps");
            return Err(BadInput::new(
                path.display().to_string(),
                found,
                format!("at most {MAX_STEPS} steps"),
            )
            .into());
        }
        log.push(line);
        Ok(())
    })?;
    Ok(log)
}

/// Reads the description of the run, if it exists.
pub(super) fn about(path: &Path) -> Result<Option<RunFile>> {
    if !path.is_file() {
        return Ok(None);
    }
    let value = json::read_strict(path, MAX_FILE, "a run's run.json")?;
    let about = serde_json::from_value(value);
    Ok(Some(about.map_err(|error| {
        BadInput::new(path.display().to_string(), error.to_string(), "the run.json of mantissa train")
    })?))
}

pub(super) fn read_text(path: &Path) -> Result<String> {
    let bytes = regular::read(path, MAX_FILE, "a file of a training run")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the outcome in a sentence: steps, loss from start to end, skipped steps.
fn verdict(
    run: &Path,
    log: &[LogLine],
    about: Option<&RunFile>,
    state: &RunState,
    failed: Option<&str>,
) -> String {
    let but = failed.map_or_else(String::new, |failed| format!(", but {failed}"));
    let outcome = match state {
        RunState::Living(process) => format!("Running in process {process}{but}"),
        RunState::Done => format!("Done{but}"),
        RunState::Stopped(step) => format!("Stopped at step {step}{but}; {}", resume(run, about)),
        RunState::Killed => format!("Killed{but}: no process trains it; {}", resume(run, about)),
        RunState::Failed(error) => format!("Stopped: {error}"),
        RunState::Unknown => "Outcome not recorded".to_owned(),
    };
    let (Some(first), Some(last)) = (log.first(), log.last()) else {
        return format!("{outcome}. No step is logged yet.");
    };
    // A timed run has no number of steps before it ends.
    let of = about.filter(|about| about.steps > 0);
    let of = of.map_or_else(String::new, |about| format!(" of {}", about.steps));
    let skipped = match last.skipped {
        0 => "no step skipped".to_owned(),
        1 => "1 step skipped for a gradient that overflowed".to_owned(),
        n => format!("{n} steps skipped for gradients that overflowed"),
    };
    format!(
        "{outcome}: {}{of} {}; loss {:.3} → {:.3} nats/token (smoothed {:.3}); {skipped}.",
        last.step,
        number_of(about.filter(|about| about.steps > 0).map_or(last.step, |about| about.steps), "step"),
        first.loss,
        last.loss,
        last.smoothed_loss
    )
}

/// Says from where and how a run is resumed.
fn resume(run: &Path, about: Option<&RunFile>) -> String {
    let Some(step) = run_files::last_checkpoint(run) else {
        return "it has no checkpoint to resume from".to_owned();
    };
    let command = about.and_then(|about| about.started_by.as_deref());
    let command = command.map_or_else(String::new, |command| format!(" ({command} …)"));
    format!("to resume {} from step {step}, rerun the command that began it{command}", run.display())
}

/// Lists the parameters that had no gradient; `None` if all had one in every step.
fn not_learning(learning: &Learning) -> Option<Html> {
    let dead = learning.report(0).dead;
    let columns =
        [("parameter", Align::Left), ("steps", Align::Right), ("from", Align::Right), ("to", Align::Right)];
    let mut list = Table::new(columns);
    for DeadParameter { parameter, span } in &dead {
        let Span { first_step, last_step, steps } = span;
        list.row([parameter.clone(), steps.to_string(), first_step.to_string(), last_step.to_string()]);
    }
    let title = format!("Parameters with a gradient of 0 ({})", dead.len());
    (!dead.is_empty()).then(|| Html::details(&title, [table(&title, &list)]))
}

/// Returns the main figures.
fn figures(log: &[LogLine], about: Option<&RunFile>) -> Vec<(&'static str, String, String)> {
    let mut all = Vec::new();
    if let Some(last) = log.last() {
        let each = format!("last step {:.4}", last.loss);
        all.push(("loss, smoothed", format!("{:.4}", last.smoothed_loss), each));
        all.push(("tokens", count(last.tokens), counted(last.step, "step")));
        let speed = median(log.iter().map(|line| line.tokens_per_s)).unwrap_or(0.0);
        all.push(("throughput", format!("{} tok/s", count(speed as u64)), "median of all steps".to_owned()));
    }
    if let Some(about) = about {
        let trained = about.trainable_parameters.filter(|trained| *trained != about.parameters);
        let parameters = format!("{} parameters", count(about.parameters));
        let trained = trained
            .map_or(parameters, |trained| format!("trains {}", trainable_words(trained, about.parameters)));
        all.push(("policy", about.policy.clone(), trained));
        let predicted = format!("{} predicted", bytes(about.predicted_peak_memory));
        let peak = about.measured_peak_memory;
        all.push(("peak memory", peak.map_or_else(|| "not recorded".to_owned(), bytes), predicted));
    }
    all
}

pub(super) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

fn charts(log: &[LogLine]) -> Vec<Html> {
    let points = |get: fn(&LogLine) -> Option<f64>| {
        log.iter().map(|line| (line.step as f64, get(line).unwrap_or(f64::NAN))).collect::<Vec<_>>()
    };
    let chart = |title, y, series| LineChart { title, x: STEP, y, series }.html();
    let one = |title, y, get| chart(title, y, vec![Series::new(title, points(get))]);
    let mut charts = vec![
        chart("Loss", Axis::linear("nats/token"), losses(log)),
        one("Gradient norm", Axis::log("before clipping"), |line| line.grad_norm),
        one("Learning rate", Axis::from_zero(""), |line| Some(line.lr)),
        one("Throughput", Axis::from_zero("tok/s"), |line| Some(line.tokens_per_s)),
    ];
    if log.iter().any(|line| line.loss_scale != 1.0) {
        charts.push(one("Loss scale", Axis::log(""), |line| Some(line.loss_scale)));
    }
    if log.last().is_some_and(|line| line.skipped > 0) {
        charts.push(one("Skipped steps", Axis::from_zero("").in_full(), |line| Some(line.skipped as f64)));
    }
    if log.iter().any(|line| line.memory.is_some()) {
        charts.push(one("Memory", Axis::from_zero("MB"), |line| Some(line.memory? as f64 / 1e6)));
    }
    charts.into_iter().flatten().collect()
}

/// Number of events of the loss scale that are listed.
const EVENTS: usize = 20;

/// Lists the last changes of the loss scale; `None` if there were none.
fn scale_events(log: &[LogLine]) -> Option<Html> {
    let events: Vec<_> = log.iter().filter_map(|line| Some((line, line.scale_event?))).collect();
    let first = events.len().saturating_sub(EVENTS);
    let columns = [("step", Align::Right), ("loss scale", Align::Right), ("event", Align::Left)];
    let mut list = Table::new(columns);
    for (line, event) in &events[first..] {
        let text = match event {
            ScaleEvent::Lowered => "overflow: step skipped, scale lowered",
            ScaleEvent::Overflow => "overflow: step skipped",
            ScaleEvent::Raised => "scale raised",
        };
        list.row([line.step.to_string(), format!("{:e}", line.loss_scale), text.to_owned()]);
    }
    let title = format!("Events of the loss scale ({})", events.len());
    (!events.is_empty()).then(|| Html::details(&title, [table(&title, &list)]))
}

fn losses(log: &[LogLine]) -> Vec<Series> {
    let points = |get: fn(&LogLine) -> f64| log.iter().map(|line| (line.step as f64, get(line))).collect();
    let mut series = vec![
        Series::new("each step", points(|line| line.loss)).faint(),
        Series::new("smoothed", points(|line| line.smoothed_loss)),
    ];
    let measured = log.iter().filter_map(|line| Some((line.step as f64, line.validation_loss?)));
    let measured: Vec<_> = measured.collect();
    if !measured.is_empty() {
        series.push(Series::new("validation", measured));
    }
    series
}

fn memory(about: &RunFile) -> Table {
    let mut table = Table::new([("purpose", Align::Left), ("size", Align::Right)]);
    let mut entries: Vec<_> = about.memory.iter().collect();
    entries.sort_by_key(|(_, n)| std::cmp::Reverse(**n));
    for (name, n) in entries {
        table.row([name.clone(), bytes(*n)]);
    }
    table.row(["total, predicted".to_owned(), bytes(about.predicted_peak_memory)]);
    if let Some(measured) = about.measured_peak_memory {
        table.row(["peak, measured".to_owned(), bytes(measured)]);
    }
    table
}

fn machine(about: &RunFile) -> [(&'static str, String); 6] {
    let machine = &about.machine;
    let memory = machine.memory.map_or_else(|| number(None, 3), bytes);
    [
        ("processor", machine.cpu.clone()),
        ("threads", format!("{} of {}", about.threads, machine.threads)),
        ("instruction set", machine.isa.clone()),
        ("memory", memory),
        ("system", machine.system.clone()),
        ("tool", about.tool.clone()),
    ]
}
