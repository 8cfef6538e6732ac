//! An experiment as its file has it.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

/// An experiment.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// What it asks.
    pub title: String,
    /// The experiment is done with each; `seed=` among an arm's changes keeps that arm to one.
    #[serde(default = "one")]
    pub seeds: Vec<u64>,
    /// What is run.
    #[serde(rename = "arm")]
    pub arms: Vec<Arm>,
    /// What must hold of it.
    #[serde(rename = "check")]
    pub checks: Vec<Check>,
}

fn one() -> Vec<u64> {
    vec![1]
}

/// A run, or another measurement, whose figures checks name as `arm.figure`.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Arm {
    /// Trains. Figures: validation loss before and after (`start`, `loss`, infinite where the run diverged) and their difference
    /// `gain`, the greatest loss of a step `worst`, and the share of stored weights that are other than before, `changed`.
    Train {
        /// Name.
        name: String,
        /// The arm whose weights it begins with; fresh ones without.
        from: Option<String>,
        /// Changes of the base settings.
        #[serde(default)]
        set: Vec<String>,
    },
    /// Gradients of one batch, of the mean loss times 2^`log2_scale`, divided by that again, against those in f32 of the same
    /// weights. Figures over the decoder's linear weights: `error`, the norm of the difference over the norm, and `zeros`, the
    /// share of gradients that are 0 and should not be. `scale` is the whole factor of the loss, as a power of two.
    Gradients {
        /// Name.
        name: String,
        /// The arm whose weights it takes.
        from: String,
        /// Changes of the base settings.
        #[serde(default)]
        set: Vec<String>,
        /// Power of two that the loss is multiplied by.
        log2_scale: i32,
        /// Whether PyTorch's dynamic loss scale is found first and applied too.
        #[serde(default)]
        dynamic: bool,
        /// How operands of the decoder's linear layers are stored, `dgrad.left` for example, instead of what the policy says.
        #[serde(default)]
        operands: BTreeMap<String, String>,
    },
    /// The loss scales of steps of which some overflow. Figure: `wrong`, the number that are not as expected.
    Scaler {
        /// Name.
        name: String,
        /// `pytorch` or `megatron`.
        rule: String,
        /// The first scale.
        initial: f32,
        /// Good steps before it grows.
        interval: u32,
        /// Steps, from 1, that overflow.
        overflows: Vec<usize>,
        /// The scale of each step.
        expected: Vec<f32>,
    },
    /// Runs that are stopped, saved and gone on with, for each policy, rule of loss scaling and kind of moments. Figures:
    /// `combinations`, and `different`, the number of losses and weights that differ from those of the run that was not stopped.
    Resume {
        /// Name.
        name: String,
        /// Changes of the base settings.
        set: Vec<String>,
        /// Policies; `fp16:megatron` has a rule of loss scaling.
        policies: Vec<String>,
        /// `optimizer.moments`.
        moments: Vec<String>,
        /// Steps after which runs are stopped, one after the other.
        stops: Vec<usize>,
    },
}

impl Arm {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Arm::Train { name, .. }
            | Arm::Gradients { name, .. }
            | Arm::Scaler { name, .. }
            | Arm::Resume { name, .. } => name,
        }
    }
}

/// `(of - minus) / over`, its magnitude where `abs` says so, lies between `min` and `max`, in the mean of all seeds.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// What it says.
    pub says: String,
    /// A figure, `arm.figure`.
    pub of: String,
    /// A figure that is subtracted.
    pub minus: Option<String>,
    /// A figure that the rest is divided by.
    pub over: Option<String>,
    /// Whether the sign counts.
    #[serde(default)]
    pub abs: bool,
    /// Least value.
    pub min: Option<f64>,
    /// Greatest value.
    pub max: Option<f64>,
    /// What was published, or measured by others.
    #[serde(default)]
    pub published: String,
}

impl Experiment {
    /// Reads `file`.
    ///
    /// # Errors
    /// A text that names the file and what is wrong with it.
    pub fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
    }
}
