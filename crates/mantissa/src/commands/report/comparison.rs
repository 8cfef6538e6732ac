//! HTML page that compares training runs: curves over each other, settings that differ, final figures.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::run_files::{self, LogLine, RunFile, RunState};
use mantissa_train::config::flat_settings;
use serde::Serialize;

use super::health::STEP;
use super::texts::name;
use super::training::{about, median, read_log, read_text};
use crate::output::{Align, Table, bytes, count, sentence};
use crate::report::{Axis, Html, LineChart, Page, Series, table};

/// Most runs of one page: as many as there are colours.
pub const MOST: usize = 8;

/// Final figures of a run.
#[derive(Clone, Debug, Serialize)]
pub struct RunRow {
    /// Folder of the run.
    pub run: PathBuf,
    /// Name that tells it from the others.
    pub name: String,
    /// State, such as `done`.
    pub state: &'static str,
    /// Precision policy.
    pub policy: Option<String>,
    /// Number of parameters.
    pub parameters: Option<u64>,
    /// Number of parameters that train.
    pub trainable_parameters: Option<u64>,
    /// Number of steps.
    pub steps: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Loss of the last step, nats/token.
    pub loss: Option<f64>,
    /// Smoothed loss of the last step.
    pub smoothed_loss: Option<f64>,
    /// Smoothed loss at the most tokens that all runs have.
    pub loss_at_common_tokens: Option<f64>,
    /// Least validation loss, and its step.
    pub validation_loss: Option<f64>,
    /// Step of the least validation loss.
    pub validation_step: Option<u64>,
    /// Median tokens/s.
    pub tokens_per_s: Option<f64>,
    /// Seconds of training.
    pub seconds: Option<f64>,
    /// Number of skipped steps.
    pub skipped: u64,
    /// Peak anonymous memory, bytes.
    pub measured_peak_memory: Option<u64>,
}

/// Setting in which runs differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Dotted key.
    pub key: String,
    /// Value of each run, as TOML; `None` where it is not set.
    pub values: Vec<Option<String>>,
}

/// Comparison of runs.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Runs, in the order of the command line.
    pub runs: Vec<RunRow>,
    /// Most tokens that all runs have.
    pub common_tokens: u64,
    /// Settings in which they differ.
    pub differences: Vec<Difference>,
    /// Sentences that the figures support.
    pub summary: Vec<String>,
}

/// Run that was read.
struct Read {
    log: Vec<LogLine>,
    about: Option<RunFile>,
    settings: String,
    state: RunState,
}

/// Reads the runs and compares them; also makes the page.
///
/// # Errors
/// Files that cannot be read or are not those of a run.
pub fn compare(paths: &[PathBuf]) -> Result<(Comparison, Page)> {
    let read = paths.iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let names = names(paths);
    let common = read.iter().map(|run| run.log.last().map_or(0, |line| line.tokens)).min().unwrap_or(0);
    let all = paths.iter().zip(&names).zip(&read);
    let runs: Vec<RunRow> = all.map(|((path, name), run)| row(path, name, run, common)).collect();
    let settings: Vec<&str> = read.iter().map(|run| run.settings.as_str()).collect();
    let differences = differences(settings.iter().copied());
    let mut summary = summary(&runs, common);
    // Behind the losses, which it limits.
    let losses = summary.iter().take_while(|line| line.contains("loss")).count();
    summary.splice(losses..losses, noise(&runs, &settings));
    let comparison = Comparison { runs, common_tokens: common, differences, summary };
    let page = page(&comparison, &read);
    Ok((comparison, page))
}

fn read(run: &Path) -> Result<Read> {
    let about = about(&run.join(run_files::RUN))?;
    let state = RunState::of(run, about.as_ref())?;
    let config = run.join(run_files::CONFIG);
    let settings = if config.is_file() { read_text(&config)? } else { String::new() };
    Ok(Read { log: read_log(&run.join(run_files::LOG))?, about, settings, state })
}

/// Returns names that tell the runs apart: of their folders, or their whole paths.
fn names(paths: &[PathBuf]) -> Vec<String> {
    let short: Vec<String> = paths.iter().map(|path| name(path)).collect();
    match short.iter().collect::<BTreeSet<_>>().len() == short.len() {
        true => short,
        false => paths.iter().map(|path| path.display().to_string()).collect(),
    }
}

fn row(path: &Path, name: &str, run: &Read, common: u64) -> RunRow {
    let last = run.log.last();
    let validated = run.log.iter().filter_map(|line| Some((line.validation_loss?, line.step)));
    let best = validated.filter(|(loss, _)| loss.is_finite()).min_by(|a, b| a.0.total_cmp(&b.0));
    let at = run.log.iter().rev().find(|line| line.tokens <= common);
    let about = run.about.as_ref();
    RunRow {
        run: path.to_owned(),
        name: name.to_owned(),
        state: run.state.word(),
        policy: about.map(|about| about.policy.clone()),
        parameters: about.map(|about| about.parameters),
        trainable_parameters: about.and_then(|about| about.trainable_parameters),
        steps: last.map_or(0, |line| line.step),
        tokens: last.map_or(0, |line| line.tokens),
        loss: last.map(|line| line.loss),
        smoothed_loss: last.map(|line| line.smoothed_loss),
        loss_at_common_tokens: at.map(|line| line.smoothed_loss),
        validation_loss: best.map(|(loss, _)| loss),
        validation_step: best.map(|(_, step)| step),
        tokens_per_s: median(run.log.iter().map(|line| line.tokens_per_s)),
        seconds: last.map(|line| line.seconds),
        skipped: last.map_or(0, |line| line.skipped),
        measured_peak_memory: about.and_then(|about| about.measured_peak_memory),
    }
}

/// Lists the settings in which runs differ; the folder of the run is no setting here.
fn differences<'t>(settings: impl Iterator<Item = &'t str>) -> Vec<Difference> {
    let all: Vec<_> = settings.map(flat_settings).collect();
    let keys: BTreeSet<&String> = all.iter().flat_map(|run| run.keys()).filter(|key| *key != "out").collect();
    let of = |key: &String| Difference {
        key: key.clone(),
        values: all.iter().map(|run| run.get(key).cloned()).collect(),
    };
    let differs = |difference: &Difference| difference.values.windows(2).any(|pair| pair[0] != pair[1]);
    keys.into_iter().map(of).filter(differs).collect()
}

/// Says which run has the least loss, by what is comparable.
fn summary(runs: &[RunRow], common: u64) -> Vec<String> {
    let mut lines = Vec::new();
    let ranked = |of: fn(&RunRow) -> Option<f64>| {
        let mut found: Vec<(&RunRow, f64)> = runs.iter().filter_map(|run| Some((run, of(run)?))).collect();
        found.sort_by(|a, b| a.1.total_cmp(&b.1));
        found
    };
    let said = |found: &[(&RunRow, f64)]| {
        let Some((first, rest)) = found.split_first() else { return String::new() };
        let others =
            rest.iter().map(|(run, loss)| format!("{} {loss:.4} (+{:.4})", run.name, loss - first.1));
        let all: Vec<_> = std::iter::once(format!("{} {:.4}", first.0.name, first.1)).chain(others).collect();
        all.join(", ")
    };
    let validated = ranked(|run| run.validation_loss);
    if validated.len() == runs.len() {
        lines.push(format!("least validation loss: {}", said(&validated)));
    }
    let at = ranked(|run| run.loss_at_common_tokens);
    if at.len() > 1 {
        lines.push(format!(
            "smoothed loss at {} tokens, the most that all have: {}",
            count(common),
            said(&at)
        ));
    }
    let mut fast = ranked(|run| run.tokens_per_s.map(|speed| -speed));
    fast.retain(|(_, speed)| *speed < 0.0);
    if let ([first, .., last], true) = (fast.as_slice(), fast.len() == runs.len()) {
        let times = first.1 / last.1;
        lines.push(format!(
            "fastest: {} with {} tok/s, {times:.2} times {}",
            first.0.name,
            count(-first.1 as u64),
            last.0.name
        ));
    }
    let skipped: Vec<_> = runs.iter().filter(|run| run.skipped > 0).collect();
    if !skipped.is_empty() {
        let each = skipped.iter().map(|run| format!("{} {}", run.name, run.skipped));
        lines.push(format!("skipped steps: {}", each.collect::<Vec<_>>().join(", ")));
    }
    let ended = |run: &&RunRow| run.state != "done";
    let open: Vec<_> =
        runs.iter().filter(ended).map(|run| format!("{} is {}", run.name, run.state)).collect();
    if !open.is_empty() {
        lines.push(format!("not done: {}", open.join(", ")));
    }
    lines
}

/// Says how far losses differ by the seed alone: as measured where runs differ in nothing else, else that one seed does not tell.
fn noise(runs: &[RunRow], settings: &[&str]) -> Option<String> {
    let validated = runs.iter().all(|run| run.validation_loss.is_some());
    let loss = |run: &RunRow| if validated { run.validation_loss } else { run.loss_at_common_tokens };
    let losses: Vec<f64> = runs.iter().map(loss).collect::<Option<_>>()?;
    let without_seed = |text: &&str| {
        let mut flat = flat_settings(text);
        ["seed", "out"].iter().for_each(|key| drop(flat.remove(*key)));
        flat
    };
    let all: Vec<_> = settings.iter().map(without_seed).collect();
    let groups = all.iter().map(|of| (0..all.len()).filter(|&at| all[at] == *of).collect::<Vec<_>>());
    let range = |group: &[usize]| {
        let of_group = || group.iter().map(|&at| losses[at]);
        of_group().fold(f64::NEG_INFINITY, f64::max) - of_group().fold(f64::INFINITY, f64::min)
    };
    let seeds = |group: &Vec<usize>| {
        let seed = |&at: &usize| flat_settings(settings[at]).get("seed").cloned();
        group.iter().map(seed).collect::<BTreeSet<_>>().len()
    };
    let repeated = groups.filter(|group| !all[group[0]].is_empty() && seeds(group) > 1);
    let widest = repeated.max_by(|a, b| range(a).total_cmp(&range(b)));
    Some(match widest {
        Some(group) => {
            let names: Vec<&str> = group.iter().map(|&at| runs[at].name.as_str()).collect();
            format!(
                "by the seed alone, losses differ by up to {:.4} here ({}): smaller differences tell nothing",
                range(&group),
                names.join(", ")
            )
        }
        None => "one seed each, so noise is not measured: the same settings under another seed end at another loss, in small runs \
                 by 0.01 to 0.02 (mantissa help results/training); a run with --set seed=N (finetune --seed N) measures it"
            .to_owned(),
    })
}

/// Returns the table of final figures, a row for each run.
pub fn figures(comparison: &Comparison) -> Table {
    let right = Align::Right;
    let mut all = Table::new([
        ("run", Align::Left),
        ("state", Align::Left),
        ("policy", Align::Left),
        ("steps", right),
        ("tokens", right),
        ("smoothed loss", right),
        ("validation", right),
        ("tok/s", right),
        ("peak memory", right),
    ])
    .optional(["peak memory", "steps", "state"]);
    let loss = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.4}"));
    for run in &comparison.runs {
        all.row([
            run.name.clone(),
            run.state.to_owned(),
            run.policy.clone().unwrap_or_else(|| "-".to_owned()),
            run.steps.to_string(),
            count(run.tokens),
            loss(run.smoothed_loss),
            loss(run.validation_loss),
            run.tokens_per_s.map_or_else(|| "-".to_owned(), |speed| count(speed as u64)),
            run.measured_peak_memory.map_or_else(|| "-".to_owned(), bytes),
        ]);
    }
    all
}

/// Returns the table of settings that differ: a row for each key, and in it a line for each run.
pub fn settings(comparison: &Comparison) -> Option<Table> {
    let mut all = Table::new([("setting", Align::Left), ("run", Align::Left), ("value", Align::Left)]);
    for Difference { key, values } in &comparison.differences {
        for (i, (run, value)) in comparison.runs.iter().zip(values).enumerate() {
            let value = value.clone().unwrap_or_else(|| "not set".to_owned());
            all.row([if i == 0 { key.clone() } else { String::new() }, run.name.clone(), value]);
        }
    }
    (!comparison.differences.is_empty()).then_some(all)
}

fn page(comparison: &Comparison, read: &[Read]) -> Page {
    let names: Vec<_> = comparison.runs.iter().map(|run| run.name.as_str()).collect();
    let mut page = Page::new(&format!("Training runs {}", names.join(", ")));
    if read.iter().any(|run| matches!(run.state, RunState::Living(_))) {
        page = page.reloading(super::training::RELOAD);
    }
    let mut lines = comparison.summary.iter();
    if let Some(first) = lines.next() {
        page.push(Html::lead(&sentence(first)));
    }
    page.push(Html::list(&lines.cloned().collect::<Vec<_>>()));
    page.push(Html::heading("Curves"));
    page.push(Html::grid(charts(&names, read)));
    page.push(Html::heading("Final figures"));
    page.push(table("Final figures", &figures(comparison)));
    page.push(Html::heading("Settings that differ"));
    page.push(match settings(comparison) {
        Some(settings) => table("Settings that differ", &settings),
        None => Html::paragraph("None: the runs have the same settings."),
    });
    page
}

/// Tokens, on a horizontal axis.
const TOKENS: Axis = Axis::linear("tokens");

fn charts(names: &[&str], read: &[Read]) -> Vec<Html> {
    let series = |x: fn(&LogLine) -> u64, y: fn(&LogLine) -> Option<f64>| {
        let line = |(name, run): (&&str, &Read)| {
            let points = run.log.iter().filter_map(|line| Some((x(line) as f64, y(line)?)));
            Series::new(*name, points.collect())
        };
        names.iter().zip(read).map(line).collect::<Vec<_>>()
    };
    let (step, tokens) = (|line: &LogLine| line.step, |line: &LogLine| line.tokens);
    let loss = |line: &LogLine| Some(line.smoothed_loss);
    let nats = Axis::linear("nats/token");
    let chart = |title: &str, x, y, series: Vec<Series>| {
        let mut shown = series.iter().filter(|series| series.points.iter().any(|(_, y)| y.is_finite()));
        // A chart of one line has no legend, which would name the run.
        let title = match (shown.next(), shown.next()) {
            (Some(only), None) => format!("{title}: {}", only.name),
            _ => title.to_owned(),
        };
        LineChart { title: &title, x, y, series }.html()
    };
    let all = [
        chart("Loss, smoothed, by step", STEP, nats, series(step, loss)),
        chart("Loss, smoothed, by tokens", TOKENS, nats, series(tokens, loss)),
        chart("Validation loss", STEP, nats, series(step, |line| line.validation_loss)),
        chart("Gradient norm", STEP, Axis::log("before clipping"), series(step, |line| line.grad_norm)),
        chart("Learning rate", STEP, Axis::from_zero(""), series(step, |line| Some(line.lr))),
        chart("Throughput", STEP, Axis::from_zero("tok/s"), series(step, |line| Some(line.tokens_per_s))),
    ];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_differ_are_listed_with_all_values() {
        let texts = [
            "seed = 1\nout = \"a\"\n[optimizer]\nlr = 1e-3",
            "seed = 1\nout = \"b\"\n[optimizer]\nlr = 2e-3\neps = 1.0",
        ];
        let found = differences(texts.into_iter());
        let keys: Vec<_> = found.iter().map(|difference| difference.key.as_str()).collect();
        assert_eq!(keys, ["optimizer.eps", "optimizer.lr"]);
        assert_eq!(found[0].values, [None, Some("1.0".to_owned())]);
    }

    #[test]
    fn noise_is_measured_by_runs_that_differ_in_their_seed_alone() {
        let row = |name: &str, loss: f64| RunRow {
            run: PathBuf::from(name),
            name: name.to_owned(),
            state: "done",
            policy: None,
            parameters: None,
            trainable_parameters: None,
            steps: 1,
            tokens: 1,
            loss: Some(loss),
            smoothed_loss: Some(loss),
            loss_at_common_tokens: Some(loss),
            validation_loss: Some(loss),
            validation_step: Some(1),
            tokens_per_s: None,
            seconds: None,
            skipped: 0,
            measured_peak_memory: None,
        };
        let runs = [row("a", 3.0), row("b", 3.5), row("c", 3.03)];
        let settings = ["seed = 1\nout = \"a\"\nlr = 1", "seed = 1\nlr = 2", "seed = 2\nout = \"c\"\nlr = 1"];
        let said = noise(&runs, &settings).unwrap_or_default();
        assert!(said.starts_with("by the seed alone, losses differ by up to 0.0300 here (a, c)"), "{said}");
        let said = noise(&runs[..2], &settings[..2]).unwrap_or_default();
        assert!(said.starts_with("one seed each, so noise is not measured"), "{said}");
        // The same run twice is no second seed.
        let twice = noise(&[row("a", 3.0), row("b", 3.5)], &[settings[0], settings[0]]).unwrap_or_default();
        assert!(twice.starts_with("one seed each"), "{twice}");
        assert!(
            noise(
                &[
                    row("a", 3.0),
                    RunRow { validation_loss: None, loss_at_common_tokens: None, ..row("b", 1.0) }
                ],
                &["", ""]
            )
            .is_none()
        );
    }

    #[test]
    fn runs_of_one_name_have_their_paths() {
        let paths = ["a/run", "b/run"].map(PathBuf::from);
        assert_eq!(names(&paths), ["a/run", "b/run"]);
        assert_eq!(names(&["a/x", "b/y"].map(PathBuf::from)), ["x", "y"]);
    }
}
