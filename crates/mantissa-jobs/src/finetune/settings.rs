//! Settings of runs that start from a model.

use std::path::Path;

use mantissa_train::config::RunConfig;
use toml::{Table, Value};

use super::arguments::{HeldOutData, TrainedWeights, TuningArguments};
use super::extent::Extent;
use crate::error::{BadInput, JobError, Result};
use crate::host::Host;
use crate::model::ModelPath;
use crate::train::Train;

/// Model to train, and what it learns from.
pub(crate) struct Tuned<'a> {
    /// Name of the command, for messages.
    pub(crate) name: &'static str,
    /// Model to train.
    pub(crate) model: &'a ModelPath,
    /// Weights to train.
    pub(crate) weights: TrainedWeights,
    /// Options.
    pub(crate) tuning: &'a TuningArguments,
    /// Teacher with the other keys of `[distill]`, if the run has one.
    pub(crate) teacher: Option<(&'a ModelPath, Vec<(&'static str, Value)>)>,
    /// Other keys of `[precision]`.
    pub(crate) precision: Vec<(&'static str, Value)>,
}

impl Tuned<'_> {
    /// Makes the run with this `seed`. Reads the data if an option is to be chosen by them.
    ///
    /// # Errors
    /// Options that do not fit each other; data or a model that cannot be read.
    pub(crate) fn resolve(&self, seed: u64, host: &Host) -> Result<Train> {
        let tuning = self.tuning;
        let all = self.weights == TrainedWeights::All;
        if all && (tuning.merge || tuning.requantize.is_some()) {
            let error = BadInput::new("--merge", "--adapter none", "an adapter to merge");
            return Err(error.with_fix("leave out --merge: all weights are written to DIR/model").into());
        }
        let settings = toml::to_string(&self.settings(seed, host)?).map_err(unwritable)?;
        let settings = RunConfig::parse_with_notes(self.name, &settings, &tuning.set)?;
        let tensorboard = tuning.tensorboard.clone();
        Ok(Train::of_settings(self.name, self.is_embedded(), settings, tensorboard, tuning.start))
    }

    /// True if the model or the teacher is the embedded one. Settings name it without its place, so that another process,
    /// which unpacks it elsewhere, can resume the run.
    fn is_embedded(&self) -> bool {
        let teacher = self.teacher.iter().map(|(teacher, _)| *teacher);
        teacher.chain([self.model]).any(ModelPath::is_embedded)
    }

    /// Returns the place of a model in the settings.
    fn place(&self, model: &ModelPath) -> Result<Value> {
        match model.is_embedded() {
            true => Ok(text(&model.named().display().to_string())),
            false => self.absolute(model),
        }
    }

    /// Returns a path that does not depend on the folder of the settings.
    fn absolute(&self, path: &Path) -> Result<Value> {
        let path = if self.is_embedded() { std::path::absolute(path)? } else { path.to_owned() };
        Ok(Value::String(path.display().to_string()))
    }

    /// Makes the settings of the run.
    fn settings(&self, seed: u64, host: &Host) -> Result<Table> {
        let tuning = self.tuning;
        let extent = Extent::new(self.model, tuning, seed, host)?;
        let (length, steps) = (extent.length, extent.steps);
        let data = tuning.data.iter().map(|file| self.absolute(file)).collect::<Result<Vec<_>>>()?;
        let (batch, window) = (number(extent.batch as u64), number(length as u64));
        let mut entries = vec![("files", Value::Array(data)), ("length", window), ("batch", batch)];
        entries.extend(extent.is_chat.then_some(("chat", Value::Boolean(true))));
        let precision = [("policy", text(&tuning.policy))].into_iter().chain(self.precision.clone());
        let mut sections = vec![
            ("seed", number(seed)),
            ("out", self.absolute(&tuning.out)?),
            ("model", table(vec![("init", self.place(self.model)?)])),
            ("data", table(entries)),
            ("precision", table(precision.collect())),
        ];
        if let Some((teacher, keys)) = &self.teacher {
            let keys = [("teacher", self.place(teacher)?)].into_iter().chain(keys.iter().cloned());
            sections.push(("distill", table(keys.collect())));
        }
        sections.extend(adapter(self.weights, tuning).map(|adapter| ("adapter", adapter)));
        // --set chooses it too, so that no key of another is written.
        let kind = tuning.set_text("optimizer.kind").unwrap_or(&tuning.optimizer);
        let mut optimizer = vec![
            ("kind", text(kind)),
            ("lr", Value::Float(tuning.lr)),
            ("moments", text(&tuning.moments)),
            ("weight_decay", Value::Float(0.0)),
        ];
        if mantissa_train::optimizer_uses(kind, "beta2") {
            optimizer.push(("beta2", Value::Float(0.999)));
        }
        let schedule = vec![
            ("steps", number(steps)),
            ("kind", text("constant")),
            ("warmup", number(steps.div_ceil(33))),
        ];
        sections.push(("optimizer", table(optimizer)));
        sections.push(("schedule", table(schedule)));
        sections.extend(self.validation(&extent, host)?.map(|validation| ("validation", validation)));
        sections.push(("telemetry", table(vec![("every", number(0))])));
        Ok(sections.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// Makes the table `[validation]`, measured ten times in the run, and says what is held out.
    fn validation(&self, extent: &Extent, host: &Host) -> Result<Option<Value>> {
        let patience = self.tuning.patience;
        let every = extent.steps.div_ceil(10);
        let mut entries = vec![("every", number(every)), ("patience", number(patience))];
        let what = if extent.is_chat { "conversations" } else { "text" };
        match &extent.validation {
            Some(HeldOutData::Share(share)) if *share > 0.0 => {
                host.note(&format!(
                    "holding out {} % of the {what}: validation every {every} steps (--validation 0: none)",
                    100.0 * share
                ));
                entries.push(("share", Value::Float(*share)));
            }
            Some(HeldOutData::File(file)) => {
                entries.push(("files", Value::Array(vec![self.absolute(file)?])));
            }
            _ if patience > 0 => {
                let error = BadInput::new("--patience", format!("{patience}, without validation"), "0");
                return Err(error.with_fix("--validation 0.1").into());
            }
            _ => return Ok(None),
        }
        Ok(Some(table(entries)))
    }
}

/// Makes the table `[adapter]`; `None` if all weights train.
fn adapter(weights: TrainedWeights, args: &TuningArguments) -> Option<Value> {
    let list = |names: &[String]| Value::Array(names.iter().map(|name| text(name)).collect());
    let targets = if args.target.is_empty() { vec!["*".to_owned()] } else { args.target.clone() };
    let mut entries = vec![
        ("kind", text(weights.adapter()?)),
        ("rank", number(args.rank as u64)),
        ("alpha", Value::Float(args.alpha)),
        ("dropout", Value::Float(args.dropout)),
        ("rslora", Value::Boolean(args.rslora)),
        ("targets", list(&targets)),
        ("train", list(&args.train)),
        ("loftq", number(args.loftq as u64)),
        ("merge", Value::Boolean(args.merge)),
    ];
    entries.extend(args.base_scheme.as_ref().map(|scheme| ("base", text(scheme))));
    entries.extend(args.requantize.as_ref().map(|scheme| ("requantize", text(scheme))));
    Some(table(entries))
}

/// Makes a text value.
pub(crate) fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn number(n: u64) -> Value {
    Value::Integer(i64::try_from(n).unwrap_or(i64::MAX))
}

/// Makes a table.
pub(crate) fn table(entries: Vec<(&str, Value)>) -> Value {
    Value::Table(entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// Makes the error of settings that TOML cannot hold: a bug.
fn unwritable(error: toml::ser::Error) -> JobError {
    BadInput::new("settings", error.to_string(), "values that TOML can hold").into()
}
