//! Training runs as jobs.

use std::path::{Path, PathBuf};
use std::time::Instant;

use mantissa_ranks::Link;
use mantissa_store::{Kind, TOOL};
use mantissa_train::config::RunConfig;
use serde::{Deserialize, Serialize};

use super::complete::{CompleteRun, identity};
use super::events;
use super::previous_run::PreviousRun;
use super::ranks::{Ranks, take_part_of_process};
use super::ready_run::ReadyRun;
use super::report::{RankReport, TrainReport};
use super::results;
use super::run_folder::RunFolder;
use super::setup::Setup;
use super::start::StartMode;
use super::train_loop::{TrainLoop, examinable};
use crate::data_report::DataReport;
use crate::embedded;
use crate::error::{BadInput, JobError, Result, resumes};
use crate::escape::{line, quoted};
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::machine::{Machine, peak_anonymous};
use crate::run_files::{DONE, RUNNING, RunFile, outcome_of};
use crate::settings::read_settings;

/// Arguments of a training run.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainArguments {
    /// Settings file (TOML).
    pub config: PathBuf,
    /// Changes of settings, `section.key=value`.
    pub set: Vec<String>,
    /// Folder for event files of TensorBoard.
    pub tensorboard: Option<PathBuf>,
    /// Mode of starting.
    pub start: StartMode,
    /// Ranks of the run. They change no result.
    pub ranks: Ranks,
}

/// Training run of a settings file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Name of the settings in messages: their file, or the command that made them.
    name: String,
    /// Settings file, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    /// Folder that paths of the settings are relative to; `None` for the parent of the embedded model, which every
    /// process unpacks to another place. All other paths of the settings are then absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<PathBuf>,
    /// Settings with all defaults.
    #[serde(with = "as_toml")]
    settings: RunConfig,
    /// Folder for event files of TensorBoard. They are no part of the settings, so that any start of a run may have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tensorboard: Option<PathBuf>,
    start: StartMode,
    /// Notes on the settings, for the one who gave them.
    #[serde(skip)]
    notes: Vec<String>,
    /// Ranks, which change no result.
    #[serde(skip)]
    ranks: Ranks,
}

/// Prediction for a run that is not started.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainPreview {
    /// Number of parameters.
    pub parameters: u64,
    /// Number of parameters that train, those of adapters included.
    pub trainable_parameters: u64,
    /// Precision policy.
    pub policy: String,
    /// Kind of the optimizer.
    pub optimizer: String,
    /// Predicted bytes by purpose.
    pub memory: Vec<(&'static str, u64)>,
    /// Bytes of optimizer state in a file.
    pub paged: u64,
    /// Trained tensors.
    pub tensors: Vec<TrainedTensor>,
}

/// Tensor that a run trains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainedTensor {
    /// Name.
    pub name: String,
    /// Number of parameters.
    pub parameters: usize,
    /// True if weight decay applies to it.
    pub decays: bool,
}

impl Train {
    /// Reads the settings file and applies the changes.
    ///
    /// # Errors
    /// A file that cannot be read; settings that are no run's.
    pub fn resolve(arguments: &TrainArguments) -> Result<Self> {
        let TrainArguments { config, set, tensorboard, start, ranks } = arguments;
        let name = config.display().to_string();
        let text = read_settings(config)?;
        refuse_data(config, &text)?;
        let (settings, notes) = RunConfig::parse_with_notes(&name, &text, set)?;
        let base = config.parent().unwrap_or(Path::new("")).to_owned();
        let tensorboard = tensorboard.clone();
        let (file, base, start) = (Some(config.clone()), Some(base), *start);
        Ok(Train { name, file, base, settings, tensorboard, start, notes, ranks: ranks.clone() })
    }

    /// Makes the run of `settings`, which messages call `name`; their paths are relative to the working folder, or if
    /// they are `embedded`, to the place of the embedded model.
    pub(crate) fn of_settings(
        name: &str,
        embedded: bool,
        (settings, notes): (RunConfig, Vec<String>),
        tensorboard: Option<PathBuf>,
        start: StartMode,
    ) -> Self {
        let base = (!embedded).then(PathBuf::new);
        let ranks = Ranks::default();
        Train { name: name.to_owned(), file: None, base, settings, tensorboard, start, notes, ranks }
    }

    /// Returns the folder that paths of the settings are relative to.
    fn base(&self) -> Result<PathBuf> {
        match &self.base {
            Some(base) => Ok(base.clone()),
            None => Ok(embedded::parent()?),
        }
    }

    /// Takes part in the run of rank 0 at the other end of `link`, and writes nothing.
    ///
    /// # Errors
    /// Files that cannot be read here; a rank that is lost.
    pub fn take_part(&self, link: Box<dyn Link>, host: &Host) -> Result<()> {
        let base = self.base()?;
        // Rank 0 decides about the end.
        host.saving(|| take_part_of_process(link, &base, host.threads), |_: &JobError| false)
    }

    /// Returns the settings with all defaults.
    pub fn settings(&self) -> &RunConfig {
        &self.settings
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> PathBuf {
        self.base.as_deref().unwrap_or(Path::new("")).join(&self.settings.out)
    }

    /// Predicts memory and weight decay of the run; writes nothing.
    ///
    /// # Errors
    /// As [`Job::run`], before it writes anything.
    pub fn preview(&self, host: &Host) -> Result<TrainPreview> {
        // Nothing is lost by a stop.
        let _left = host.leaving(format!("{}: {}", self.settings.out, resumes(false)));
        self.notes.iter().for_each(|note| host.note(note));
        let setup = self.setup(self.previous().how(self.start), host)?;
        let tensor = |(param, decays): &(mantissa_train::ParamInfo, bool)| TrainedTensor {
            name: param.tensor.name.clone(),
            parameters: param.range.len(),
            decays: *decays,
        };
        Ok(TrainPreview {
            parameters: setup.replica.config.parameters(),
            trainable_parameters: setup.trainable(),
            policy: setup.replica.policy.name.clone().into_owned(),
            optimizer: self.settings.optimizer.kind.clone(),
            tensors: setup.decays.iter().map(tensor).collect(),
            memory: setup.memory,
            paged: setup.paged,
        })
    }

    fn setup(&self, start: StartMode, host: &Host) -> Result<Setup> {
        Setup::new(&self.settings, &self.name, &self.base()?, (start, &self.ranks), host)
    }

    /// Names the command that began the run, as far as it is known here.
    fn started_by(&self) -> String {
        match &self.file {
            Some(file) => format!("mantissa train {}", file.display()),
            None => format!("mantissa {}", self.name),
        }
    }

    fn previous(&self) -> PreviousRun {
        let out = if self.file.is_some() { "--set out=FOLDER" } else { "--out FOLDER" };
        PreviousRun::read(&self.folder(), &self.settings.resolved(), out)
    }

    /// Returns the models that are read: the initial one and the teacher. The embedded model is no file that is read.
    fn models(&self) -> Vec<PathBuf> {
        let (base, settings) = (self.base.as_deref().unwrap_or(Path::new("")), &self.settings);
        let teacher = settings.distill.as_ref().and_then(|distill| distill.teacher.as_ref());
        let is_file = |model: &&String| self.base.is_some() || **model != embedded::NAME;
        settings.model.init.iter().chain(teacher).filter(is_file).map(|model| base.join(model)).collect()
    }

    /// Returns the configuration of a model that is trained from nothing.
    fn own_config(&self) -> Option<PathBuf> {
        let (base, settings) = (self.base.as_deref().unwrap_or(Path::new("")), &self.settings);
        let is_read = settings.model.architecture.is_none()
            && settings.model.init.as_ref().is_none_or(|_| settings.model.config.is_some());
        is_read.then(|| settings.model_config(base))
    }

    /// Identifies the models that the run begins with.
    fn identity(&self) -> Result<String> {
        identity(&self.models(), self.own_config().as_deref())
    }

    /// Reports the finished run in the folder if it is that of this command: of the same settings, data and models, with its
    /// results as they were written. `None` if there is no finished run of these settings.
    ///
    /// # Errors
    /// A finished run of these settings that differs otherwise; data or results that cannot be read.
    fn complete(&self, host: &Host) -> Result<Option<TrainReport>> {
        let previous = self.previous();
        let about = previous.finished_alike().filter(|_| self.start == StartMode::New).cloned();
        let Some(about) = about else { return Ok(None) };
        // With the tokenizer of the run, if it trained its own.
        let setup = self.setup(StartMode::Continue, host)?;
        let run = CompleteRun { run: &self.folder(), settings: &self.settings, setup: &setup, about };
        match run.difference(&self.base()?, &self.identity()?)? {
            Some(difference) => Err(previous.differs(&difference)),
            None => {
                let report = run.report()?;
                let name = self.folder().display().to_string();
                // What was told at its start holds for those who ask again, and under --strict.
                if let Some(report) = &report {
                    host.warn_all(&report.data.past_warnings(&name))?;
                }
                Ok(report)
            }
        }
    }

    /// Describes the run at its start.
    fn description(&self, setup: &Setup, needs: u64, data: &DataReport, host: &Host) -> RunFile {
        RunFile {
            tool: TOOL.to_owned(),
            machine: Machine::this(),
            threads: host.threads,
            parameters: setup.replica.config.parameters(),
            trainable_parameters: Some(setup.trainable()),
            started_by: Some(self.started_by()),
            policy: setup.replica.policy.name.clone().into_owned(),
            memory: setup.memory.iter().map(|(name, bytes)| ((*name).to_owned(), *bytes)).collect(),
            predicted_peak_memory: needs,
            measured_peak_memory: None,
            steps: self.settings.schedule.steps,
            data: Some(data.clone()),
            models: None,
            merged_kl: None,
            quantized_kl: None,
            stopped_at: None,
            outcome: RUNNING.to_owned(),
        }
    }
}

impl Job for Train {
    const NAME: &'static str = "train";
    const VERSION: u32 = 1;
    type Report = TrainReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let (base, settings) = (self.base.as_deref().unwrap_or(Path::new("")), &self.settings);
        let mut inputs: Vec<PathBuf> = self.file.iter().cloned().collect();
        // The embedded model is no file that is read.
        let is_file = |model: &String| self.base.is_some() || *model != embedded::NAME;
        if settings.model.architecture.is_none() && settings.model.init.as_ref().is_none_or(is_file) {
            inputs.push(settings.model_config(base));
        }
        if let Some(tokenizer) = &settings.model.tokenizer {
            for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"]
            {
                inputs.push(base.join(tokenizer).join(file));
            }
        }
        for init in self.models() {
            // Each file is listed too: it may be a link into the run's folder.
            let files = std::fs::read_dir(&init).into_iter().flatten().flatten();
            inputs.extend(files.map(|file| file.path()));
            inputs.push(init);
        }
        let data = settings.data.files.iter().chain(&settings.validation.files);
        inputs.extend(data.map(|file| base.join(file)));
        inputs
    }

    fn outputs(&self) -> Vec<JobOutput> {
        let run = JobOutput { option: "out", path: self.folder(), kind: Kind::Run };
        let events = self.tensorboard.as_ref().map(|dir| JobOutput {
            option: "--tensorboard",
            path: events::folder(dir, &self.folder()),
            kind: Kind::Run,
        });
        [run].into_iter().chain(events).collect()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        Ok(self.setup(self.previous().how(self.start), host)?.needs())
    }

    /// Trains, writes checkpoints and, at the end, the model.
    ///
    /// # Errors
    /// Settings, data or a model that cannot be trained, before anything is written; I/O;
    /// [`TrainError::Diverged`](mantissa_train::TrainError::Diverged); [`JobError::Stopped`].
    fn run(&self, host: &Host) -> Result<TrainReport> {
        let (settings, run) = (&self.settings, self.folder());
        let start = self.previous().how(self.start);
        self.notes.iter().for_each(|note| host.note(note));
        if let Some(report) = self.complete(host)? {
            self.ranks.dismiss()?;
            return Ok(report);
        }
        // Until a step is done, a restart loses nothing.
        let left = host.leaving(format!("{}: {}", settings.out, resumes(false)));
        let setup = self.setup(start, host)?;
        let needs = setup.needs();
        let explain = |error| self.previous().explain(error);
        let folder = RunFolder::open(&run, start).map_err(explain)?;
        host.require_memory("train", needs + needs / 20)?;
        let mut ready =
            ReadyRun::new(folder, &setup, settings, (&self.base()?, &self.ranks), host).map_err(explain)?;
        let (data, others) = (ready.data.clone(), std::mem::take(&mut ready.others));
        let mut about = self.description(&setup, needs, &data, host);
        about.models = Some(self.identity()?);
        if let Some(adapter) = &settings.adapter {
            let trained = trainable_words(setup.trainable(), setup.replica.config.parameters());
            host.note(&format!("training {}: {trained}", adapter.words()));
        }
        let begin = Instant::now();
        let mut train_loop = TrainLoop::new(ready, settings, &setup, self.tensorboard.as_deref())?;
        let resumed_at = start.resumes().then(|| train_loop.trainer.progress().steps);
        about.write(&run)?;
        left.change(format!("{}: {}", settings.out, resumes(start == StartMode::Restart)));
        let outcome =
            host.saving(|| train_loop.run(host), |error: &JobError| matches!(error, JobError::Stopped(_)));
        let progress = train_loop.trainer.progress();
        let outcome = outcome.and_then(|loss| {
            train_loop.take_best()?.iter().for_each(|warning| host.warn(warning));
            let folder = &train_loop.checkpoints.folder;
            let results = results::write(&mut train_loop.trainer, &setup, settings, folder, host)?;
            Ok((loss, results, train_loop.trainer.end_group()?))
        });
        about.measured_peak_memory = peak_anonymous();
        if settings.schedule.steps == 0 {
            about.steps = progress.steps;
        }
        let (loss, results, traffic) = match outcome {
            Ok(found) => found,
            Err(error) => {
                match &error {
                    // The other ranks end in order; the stop matters more than a failure of that.
                    JobError::Stopped(_) => drop(train_loop.trainer.end_group()),
                    // They may be at any place of an exchange.
                    _ => train_loop.trainer.abandon_group(),
                }
                let error = others.cause(error);
                about.outcome = line(&error.to_string());
                if let JobError::Stopped(stopped) = &error {
                    about.stopped_at = Some(stopped.steps);
                }
                // The first error matters more.
                let _ = about.write(&run);
                return Err(error);
            }
        };
        others.wait();
        (about.merged_kl, about.quantized_kl) = (results.merged_kl, results.quantized_kl);
        DONE.clone_into(&mut about.outcome);
        // A stop tells to resume the run if and only if it is not done.
        let written = || {
            let written = about.write(&run);
            drop(left);
            written
        };
        host.orderly(written, |_| false)?;
        let parameters = train_loop.trainer.model().parameters().table().iter().count();
        let learning = train_loop.learning();
        Ok(TrainReport {
            run,
            already_complete: false,
            outcome: outcome_of(learning),
            learning: learning.report(parameters),
            examinable: learning.is_failing() && examinable(settings),
            results,
            data,
            parameters: setup.replica.config.parameters(),
            trainable_parameters: setup.trainable(),
            steps: progress.steps,
            resumed_at,
            skipped: progress.skipped,
            tokens: progress.tokens,
            loss,
            validation_loss: train_loop.best().map(|(_, loss)| loss),
            exported_step: train_loop.trainer.progress().steps,
            seconds: begin.elapsed().as_secs_f64(),
            predicted_peak_memory: needs,
            measured_peak_memory: peak_anonymous(),
            worst_gemms: train_loop.worst_gemms,
            ranks: traffic.into_iter().map(RankReport::from).collect(),
        })
    }
}

/// Says how many parameters train: `1,234 of 5,678 parameters (21.7 %)`.
pub fn trainable_words(trainable: u64, parameters: u64) -> String {
    let grouped = |n: u64| {
        let digits = n.to_string();
        let groups =
            digits.as_bytes().rchunks(3).rev().map(|group| String::from_utf8_lossy(group).into_owned());
        groups.collect::<Vec<_>>().join(",")
    };
    let share = 100.0 * trainable as f64 / parameters.max(1) as f64;
    let digits = if share < 0.1 { 3 } else { usize::from(share < 10.0) + usize::from(share < 99.95) };
    format!("{} of {} parameters ({share:.digits$} %)", grouped(trainable), grouped(parameters))
}

/// Refuses a text to train on in the place of settings: a file that is not named as TOML and is none.
///
/// # Errors
/// [`BadInput`] with the commands that make settings for it and train.
fn refuse_data(file: &Path, text: &str) -> Result<()> {
    let is_named = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("toml"));
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-\" ".contains(c);
    let is_header = |line: &str| {
        let name = line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        name.is_some_and(|name| name.chars().all(is_plain))
    };
    // What has tables are settings with a fault of their own.
    if is_named || text.lines().any(is_header) || text.parse::<toml::Table>().is_ok() {
        return Ok(());
    }
    let name = quoted(file);
    let fix = format!("mantissa train --init small --data {name} > run.toml, then mantissa train run.toml");
    let found = "no TOML: data to train on?";
    Err(BadInput::new(file.display().to_string(), found, "settings of a run").with_fix(fix).into())
}

/// Settings of a serialized run: TOML with all defaults, checked when it is read.
mod as_toml {
    use mantissa_train::config::RunConfig;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(settings: &RunConfig, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&settings.resolved())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RunConfig, D::Error> {
        let text = String::deserialize(deserializer)?;
        RunConfig::parse("settings", &text, &[]).map_err(D::Error::custom)
    }
}
