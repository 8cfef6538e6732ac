//! `mantissa train`: trains a model from a TOML file, with checkpoints from which it resumes bit-exactly.

mod autopsy;
pub(super) mod data;
mod init;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::Job;
use mantissa_jobs::run_files::DONE;
use mantissa_jobs::train::{
    RankReport, Ranks, Results, StartMode, Train, TrainArguments, TrainPreview, TrainReport, TrainedTensor,
    trainable_words,
};
use mantissa_quant::Recipe;
use mantissa_ranks::{MpiLink, Rank};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use mantissa_train::config::RunConfig;
use mantissa_train::{GemmState, Policy, recipes};
use serde::Serialize;

use super::execute::Execute;
use super::next_steps::quoted;
use super::quantize::ALREADY;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::output::{Align, Table, bytes, count, counted, labelled};
use mantissa_jobs::embedded;

/// Train a model from a TOML file
///
/// The run's folder is the setting `out`. It holds the settings with all defaults, the tokens, a log with one
/// JSON line per step, tensor health for some steps, checkpoints, and at the end the model as a Hugging Face
/// folder. `mantissa report` makes a page of it. On SIGINT or SIGTERM the run writes a checkpoint and stops; the
/// same command resumes it bit-exactly. The first checkpoint is written after the first step. --init prints
/// complete settings to start from.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa train --init small --data my.txt > run.toml
  mantissa train run.toml
  mantissa train run.toml --set precision.policy=bf16 --set optimizer.lr=3e-4
  mantissa train run.toml --resume
  mantissa train run.toml --dry-run
  mantissa train run.toml --ranks 2 --set parallel.leaves=8 \\
      --set data.accumulate=8 --set data.batch=1
  mantissa train --show-policy nvfp4
  mantissa train --autopsy runs/first --step 40")]
pub struct Args {
    /// Settings file (TOML)
    #[arg(required_unless_present_any = ["show_policy", "init", "autopsy", "data", "minutes"])]
    config: Option<PathBuf>,
    /// Print settings with a model of this size
    ///
    /// Text becomes a model in three commands: mantissa train --init small --data my.txt > run.toml; mantissa train
    /// run.toml; mantissa run runs/small/model --chat -p 'Once'. A tokenizer is trained on the data.
    #[arg(long, value_name = "SIZE", value_enum,
        conflicts_with_all = ["config", "set", "resume", "restart", "dry_run", "show_policy"])]
    init: Option<init::Size>,
    /// Text, .jsonl or token file to train on (repeatable)
    #[arg(long, value_name = "FILE", requires = "init")]
    data: Vec<String>,
    /// Time to train for, instead of a number of steps
    #[arg(long, value_name = "N", requires = "init", value_parser = minutes)]
    minutes: Option<f64>,
    /// Print a precision policy as a table of settings, or list
    ///
    /// A name (bf16, fp8-current, nvfp4 …), or list for all names.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["config", "set", "resume", "restart", "dry_run"])]
    show_policy: Option<String>,
    /// Name the operand at fault in a step of a run
    ///
    /// RUN is the run's folder. The step is replayed bit-exactly from the last checkpoint before it, then in f32 and with
    /// single operands in the run's format. Changes nothing.
    #[arg(long, value_name = "RUN",
        conflicts_with_all = ["config", "set", "resume", "restart", "dry_run", "show_policy", "init"])]
    autopsy: Option<PathBuf>,
    /// Step to examine [default: the one that failed]
    ///
    /// Without it: the step that ended the run, else the first in which something ceased to learn, the last skipped one, the
    /// largest spike or rise of the loss.
    #[arg(long, value_name = "N", requires = "autopsy")]
    step: Option<u64>,
    /// Override a setting: section.key=value (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Write event files for TensorBoard to DIR/RUN
    ///
    /// RUN is the last part of the run's folder. A resumed run continues them.
    #[arg(long, value_name = "DIR", requires = "config")]
    tensorboard: Option<PathBuf>,
    /// Resume from the last sound checkpoint of the run
    #[arg(long, conflicts_with = "restart")]
    resume: bool,
    /// Start over: remove the files of the existing run
    #[arg(long)]
    restart: bool,
    /// Preview memory and weight decay; write nothing
    #[arg(long)]
    dry_run: bool,
    /// Ranks in this process: 1, 2, 4 or 8
    ///
    /// Each hosts an equal share of parallel.leaves, with its share of --threads. The bits of the run do not depend on it.
    /// Several processes: mpiexec -n N mantissa train FILE.
    #[arg(long, value_name = "N", requires = "config")]
    ranks: Option<usize>,
}

#[derive(Serialize)]
struct DryRun<'a> {
    parameters: u64,
    trainable_parameters: u64,
    policy: &'a str,
    optimizer: &'a str,
    /// Predicted bytes by purpose.
    memory: BTreeMap<&'static str, u64>,
    predicted_peak_memory: u64,
    /// Bytes of optimizer state in a file.
    #[serde(skip_serializing_if = "is_zero")]
    paged: u64,
    /// Names of the tensors with and without weight decay.
    decay: Vec<&'a str>,
    no_decay: Vec<&'a str>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[derive(Serialize)]
struct ShownPolicy<'a> {
    policy: &'a str,
    about: &'static str,
    /// TOML of the settings.
    toml: String,
}

/// Name that lists all policies.
const LIST: &str = "list";

#[derive(Serialize)]
struct PolicyList<'a> {
    policies: &'a [ListedPolicy],
}

#[derive(Serialize)]
struct ListedPolicy {
    policy: &'static str,
    about: &'static str,
}

#[derive(Serialize)]
struct Done<'a> {
    #[serde(flatten)]
    report: &'a TrainReport,
    /// Commands to type next.
    next: Vec<String>,
}

impl Execute for Args {
    const GROUP: Group = Group::Train;
    const TRAINS: bool = true;

    /// # Errors
    /// Settings that cannot be read.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        if let Some(run) = &self.autopsy {
            autopsy::paths(run, paths);
        }
        let Some(config) = &self.config else { return Ok(()) };
        let job = self.job(config, Ranks::default())?;
        if Rank::in_step()?.is_some_and(|rank| rank.index > 0) {
            // Rank 0 reads and writes.
            return Ok(());
        }
        job.inputs().into_iter().for_each(|path| paths.read(path));
        if !self.dry_run {
            job.outputs().into_iter().for_each(|output| paths.write(output.option, output.path, output.kind));
        }
        Ok(())
    }

    /// # Errors
    /// Settings, data or a model that cannot be trained, before anything is written; I/O;
    /// [`TrainError::Diverged`](mantissa_train::TrainError::Diverged).
    fn run(&self, context: &Context) -> Result<()> {
        if let Some(run) = &self.autopsy {
            return autopsy::run(run, self.step, context);
        }
        if let Some(size) = self.init {
            return init::run(size, &self.data, self.minutes, context);
        }
        match (&self.config, &self.show_policy) {
            (Some(config), _) => self.train(config, context),
            (None, name) => show_policy(name.as_deref().unwrap_or_default(), context),
        }
    }
}

impl Args {
    /// Trains, on as many ranks as are asked for or as a launcher has started.
    fn train(&self, config: &Path, context: &Context) -> Result<()> {
        let Some(rank) = Rank::in_step()? else {
            return execute(
                &self.job(config, Ranks::threads(self.ranks.unwrap_or(1)))?,
                self.dry_run,
                context,
            );
        };
        if let Some(ranks) = self.ranks.filter(|ranks| Some(*ranks) != rank.count) {
            let expected = format!("the number of processes of {}, or nothing", rank.launcher);
            return Err(BadInput::new("--ranks", ranks.to_string(), expected).into());
        }
        let processes = rank.count.unwrap_or(1);
        match (rank.index, self.dry_run) {
            (0, true) => execute(&self.job(config, Ranks::planned(processes))?, true, context),
            (_, true) => Ok(()),
            (0, false) => {
                execute(&self.job(config, Ranks::processes(Box::new(MpiLink::join(rank)?)))?, false, context)
            }
            (_, false) => {
                Ok(self.job(config, Ranks::default())?.take_part(Box::new(MpiLink::join(rank)?), context)?)
            }
        }
    }

    fn job(&self, config: &Path, ranks: Ranks) -> Result<Train> {
        let start = start_mode(self.resume, self.restart);
        let (config, set, tensorboard) = (config.to_owned(), self.set.clone(), self.tensorboard.clone());
        Ok(Train::resolve(&TrainArguments { config, set, tensorboard, start, ranks })?)
    }
}

/// Returns the mode of starting that `--resume` and `--restart` ask for.
pub(super) fn start_mode(resume: bool, restart: bool) -> StartMode {
    match (resume, restart) {
        (true, _) => StartMode::Resume,
        (_, true) => StartMode::Restart,
        _ => StartMode::New,
    }
}

/// Runs or previews a training run.
///
/// # Errors
/// As the command.
pub(super) fn execute(job: &Train, preview: bool, context: &Context) -> Result<()> {
    if preview {
        return dry_run(job, context);
    }
    let report = job.run(context)?;
    let command = command(job.settings(), &report);
    let autopsy = report.examinable.then(|| format!("mantissa train --autopsy {}", quoted(&report.run)));
    let page = format!("mantissa report {}", quoted(&report.run));
    let rounded = rounded(job.settings(), &report);
    let next =
        [autopsy.clone(), command.clone(), rounded.clone(), Some(page)].into_iter().flatten().collect();
    let done = Done { report: &report, next };
    let commands = [("cause", &autopsy), ("run", &command), ("quantize", &rounded)];
    context.report(&done, |out| human(out, &report, commands))?;
    let failed = report.outcome.strip_prefix(DONE).filter(|rest| !rest.is_empty());
    context.refuse_warnings(&failed.map(|_| report.outcome.clone()).into_iter().collect::<Vec<_>>())
}

/// Returns the command that runs the results of a run with these settings.
fn command(settings: &RunConfig, TrainReport { results, data, .. }: &TrainReport) -> Option<String> {
    // A model continues what it was trained on: conversations or texts.
    let prompt = if data.is_chat() { "--chat -p 'Hello'" } else { "-p 'Once'" };
    let command = |model: &Path| format!("mantissa run {} {prompt}", quoted(model));
    let requantized = results.quantized.as_ref().filter(|_| settings.adapter.is_some());
    if let Some(model) = requantized.or(results.model.as_ref()) {
        return Some(command(model));
    }
    let init = settings.model.init.as_deref();
    // The embedded model is named, because its folder is removed.
    let embedded = init.filter(|init| *init == embedded::NAME && results.base.is_none()).map(Path::new);
    let base = embedded.or(results.adapter_base.as_deref())?;
    Some(format!("{} --adapter {}", command(base), quoted(results.adapter.as_deref()?)))
}

/// Returns the command that rounds a trained model to the format that its weights had in the matmuls: what is written are
/// the weights before rounding.
fn rounded(settings: &RunConfig, TrainReport { run, results, .. }: &TrainReport) -> Option<String> {
    let model = results.model.as_ref().filter(|_| results.quantized.is_none())?;
    let scheme = settings.policy()?.linear.fprop.right.scheme.to_string();
    // Scales of a history are those of a run.
    let scheme = scheme.split('@').next()?;
    let recipe = Recipe::load(&format!("rtn-{scheme}")).ok()?;
    let format = &recipe.weights.format;
    if format.bits_per_weight(1024, 1024) >= 16.0 || settings.adapter.is_some() {
        return None;
    }
    let out = format!("{}-{}", run.display(), scheme.replace(':', "-"));
    let (model, out) = (quoted(model), quoted(Path::new(&out)));
    Some(format!("mantissa quantize {model} --recipe {} --format native --out {out}", recipe.name))
}

/// Describes the tensors of a folder: `mostly f32, 3.67 MB`, or the format of a quantized one.
fn stored(path: &Path) -> Option<String> {
    let files = ModelFiles::open(path).ok()?;
    let size = bytes(files.checkpoint().total_bytes());
    if files.is_quantized() {
        return Some(format!("{}, {size}", files.convention_name()));
    }
    let mut by_dtype = BTreeMap::<_, u64>::new();
    for tensor in files.checkpoint().tensors() {
        *by_dtype.entry(tensor.dtype.name().to_lowercase()).or_default() += tensor.len;
    }
    let (most, _) = by_dtype.into_iter().max_by_key(|(_, bytes)| *bytes)?;
    Some(format!("mostly {most}, {size}"))
}

/// Parses a number of minutes.
fn minutes(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|minutes| (1e-3..=1e6).contains(minutes));
    found.ok_or_else(|| "expected minutes from 0.001 to 1000000".to_owned())
}

/// Prints a policy.
fn show_policy(name: &str, context: &Context) -> Result<()> {
    if name == LIST {
        return list_policies(context);
    }
    let Some(policy) = Policy::by_name(name, 0) else {
        let meant = Policy::meant_by(name);
        let names = if meant.is_empty() { Policy::names().collect() } else { meant };
        let fix = format!("--show-policy {}", names.first().map_or(LIST, |name| *name));
        return Err(BadInput::new("--show-policy", name, names.join(", ")).with_fix(fix).into());
    };
    let about = recipes().iter().find(|recipe| recipe.name == name).map_or("", |recipe| recipe.about);
    let shown = ShownPolicy { policy: name, about, toml: policy.to_toml() };
    context.report(&shown, |out| {
        if !about.is_empty() {
            writeln!(out, "# {about}")?;
        }
        write!(out, "{}", shown.toml)
    })
}

/// Prints all policies with a description each.
fn list_policies(context: &Context) -> Result<()> {
    let all: Vec<_> = Policy::described().map(|(policy, about)| ListedPolicy { policy, about }).collect();
    context.report(&PolicyList { policies: &all }, |out| {
        for ListedPolicy { policy, about } in &all {
            // The first clause; --show-policy NAME has the rest.
            let first = about.split(": ").next().unwrap_or(about);
            writeln!(out, "{policy:<16} {}", first.split("; ").next().unwrap_or(first))?;
        }
        writeln!(
            out,
            "\nuse         --set precision.policy=NAME; one of them: mantissa train --show-policy NAME"
        )
    })
}

fn dry_run(job: &Train, context: &Context) -> Result<()> {
    let preview = job.preview(context)?;
    let needs = preview.memory.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let names = |decays: bool| {
        let chosen = preview.tensors.iter().filter(move |tensor| tensor.decays == decays);
        chosen.map(|tensor| tensor.name.as_str()).collect::<Vec<_>>()
    };
    let report = DryRun {
        parameters: preview.parameters,
        trainable_parameters: preview.trainable_parameters,
        policy: &preview.policy,
        optimizer: &preview.optimizer,
        memory: preview.memory.iter().copied().collect(),
        predicted_peak_memory: needs,
        paged: preview.paged,
        decay: names(true),
        no_decay: names(false),
    };
    context.report(&report, |out| {
        let mut table = Table::new([("memory", Align::Left), ("predicted", Align::Right)]);
        for (name, n) in &preview.memory {
            table.row([(*name).to_owned(), bytes(*n)]);
        }
        table.row(["total".to_owned(), bytes(needs)]);
        table.write(out)?;
        if preview.paged > 0 {
            writeln!(out, "optimizer state in a file of the run's folder: {}", bytes(preview.paged))?;
        }
        writeln!(out)?;
        decay_table(&preview, job.settings().optimizer.common.weight_decay).write(out)?;
        let DryRun { parameters, trainable_parameters: trained, policy, optimizer, .. } = report;
        let trained = match &job.settings().adapter {
            Some(adapter) => {
                let trained = trainable_words(trained, parameters);
                format!("adapter {}\ntrains {trained}, ", adapter.words())
            }
            None => format!("{parameters} parameters, "),
        };
        writeln!(out, "\n{trained}policy {policy}, optimizer {optimizer}")
    })
}

/// Makes a table of tensors, layers merged, with their weight decay.
fn decay_table(preview: &TrainPreview, weight_decay: f64) -> Table {
    let mut rows: Vec<(String, bool, usize, usize)> = Vec::new();
    for TrainedTensor { name, parameters, decays } in &preview.tensors {
        let parts = name.split('.').map(|part| if part.parse::<u32>().is_ok() { "*" } else { part });
        let name = parts.collect::<Vec<_>>().join(".");
        match rows.iter_mut().find(|row| (&row.0, row.1) == (&name, *decays)) {
            Some(row) => (row.2, row.3) = (row.2 + 1, row.3 + parameters),
            None => rows.push((name, *decays, 1, *parameters)),
        }
    }
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("tensors", Align::Right),
        ("parameters", Align::Right),
        ("weight decay", Align::Right),
    ]);
    for (name, decays, number, weights) in rows {
        let decay = if decays { weight_decay.to_string() } else { "-".to_owned() };
        table.row([name, number.to_string(), count(weights as u64), decay]);
    }
    table
}

fn human(out: &mut dyn Write, done: &TrainReport, commands: [(&str, &Option<String>); 3]) -> io::Result<()> {
    if done.outcome != DONE {
        labelled(out, "outcome", &done.outcome)?;
    }
    let loss = done.loss.map_or_else(|| "no step left".to_owned(), |loss| format!("last loss {loss:.4}"));
    let TrainReport { steps, skipped, tokens, seconds, .. } = done;
    let resumed = done.resumed_at.map_or_else(String::new, |step| format!(", resumed at step {step}"));
    let time = if done.already_complete { String::new() } else { format!(", {seconds:.1} s") };
    let steps = counted(*steps, "step");
    let all = format!("{steps} ({skipped} skipped{resumed}), {}, {loss}{time}", counted(*tokens, "token"));
    labelled(out, "trained", &all)?;
    if done.results.adapter.is_some() {
        labelled(out, "trainable", &trainable_words(done.trainable_parameters, done.parameters))?;
    }
    labelled(out, "data", &data::sentence(&done.data))?;
    if let Some(best) = done.validation_loss {
        labelled(
            out,
            "validation",
            &format!("loss {best:.4} at best; the model is that of step {}", done.exported_step),
        )?;
    }
    write_results(out, &done.results)?;
    if !done.worst_gemms.is_empty() {
        let columns =
            [("lowest SQNR, last telemetry", Align::Left), ("matmul", Align::Left), ("dB", Align::Right)];
        let mut table = Table::new(columns);
        for gemm in &done.worst_gemms {
            let sqnr = gemm.sqnr_db.unwrap_or(f64::NAN);
            let sqnr =
                if gemm.state == Some(GemmState::Dead) { "dead".to_owned() } else { format!("{sqnr:.1}") };
            table.row([gemm.linear.clone(), gemm.gemm.to_owned(), sqnr]);
        }
        table.write(out)?;
    }
    if !done.ranks.is_empty() {
        labelled(out, "ranks", &ranks(&done.ranks))?;
    }
    if done.already_complete {
        labelled(out, "time", ALREADY)?;
    }
    // Not wrapped, to be copied.
    for (name, command) in commands.into_iter().filter_map(|(name, command)| Some((name, command.as_ref()?)))
    {
        writeln!(out, "{name:<11} {command}")?;
    }
    writeln!(out, "next        mantissa report {}", quoted(&done.run))
}

/// Says what ranks sent, and which of them was waited for.
fn ranks(ranks: &[RankReport]) -> String {
    let sent = ranks.iter().map(|rank| rank.sent).sum::<u64>();
    let waited =
        ranks.iter().map(|rank| format!("{:.1}", rank.waited_seconds)).collect::<Vec<_>>().join(", ");
    let slowest =
        ranks.iter().enumerate().min_by(|(_, a), (_, b)| a.waited_seconds.total_cmp(&b.waited_seconds));
    let slowest = slowest.map_or(0, |(rank, _)| rank);
    format!(
        "{}: sent {}; waited {waited} s (rank {slowest} the least: it is the slowest)",
        ranks.len(),
        bytes(sent)
    )
}

/// Prints paths, which are not wrapped, to be copied, and divergences.
fn write_results(out: &mut dyn Write, results: &Results) -> io::Result<()> {
    let paths = [
        ("adapter", &results.adapter),
        ("base", &results.base),
        ("model", &results.model),
        ("quantized", &results.quantized),
    ];
    for (name, path) in paths {
        if let Some(path) = path {
            let size = stored(path).map_or_else(String::new, |size| format!(" ({size})"));
            writeln!(out, "{name:<11} {}{size}", path.display())?;
        }
    }
    let form = if results.adapter.is_some() { "adapter form" } else { "trained form" };
    for (name, kl) in [("merged", results.merged_kl), ("quantized", results.quantized_kl)] {
        if let Some(kl) = kl {
            labelled(out, name, &format!("KL {kl:.2e} nats/token from the {form}"))?;
        }
    }
    if let Some(about) = results.default_template {
        labelled(out, "template", &format!("default ({about}), because the model has none"))?;
    }
    Ok(())
}
