//! An experiment as its file has it.

use std::path::Path;

use serde::Deserialize;

/// An experiment.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Question of the experiment.
    pub title: String,
    /// Seeds to run; `seed=` among an arm's changes limits that arm to one.
    #[serde(default = "one")]
    pub seeds: Vec<u64>,
    /// Arms of the experiment.
    #[serde(rename = "arm")]
    pub arms: Vec<Arm>,
    /// Checks on the results.
    #[serde(rename = "check")]
    pub checks: Vec<Check>,
}

fn draw() -> u64 {
    1
}

fn order() -> usize {
    1
}

fn one() -> Vec<u64> {
    vec![1]
}

/// A run, or another measurement, whose figures checks name as `arm.figure`.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Arm {
    /// Trains. Figures: validation loss before and after (`start`, `loss`, infinite if the run diverged),
    /// their difference `gain`, the largest step loss `worst`, and the share `changed` of stored weights that
    /// differ from the initial ones.
    Train {
        /// Name.
        name: String,
        /// Arm whose weights it starts from; fresh ones if absent.
        from: Option<String>,
        /// Changes of the base settings.
        #[serde(default)]
        set: Vec<String>,
    },
    /// Compares the gradients of one batch with those in f32 for the same weights. The loss is the mean loss times
    /// 2^`log2_scale`, divided out again. Figures over the decoder's linear weights: `error`, the norm of the
    /// difference over the norm; `cos`, the cosine; `projection`, the product with the exact gradients over their
    /// square; and `zeros`, the share of gradients that are wrongly 0. `scale` is the total loss factor as a power of
    /// two, `loss` the difference of the losses.
    Gradients {
        /// Name.
        name: String,
        /// Arm whose weights it uses.
        from: String,
        /// Changes of the base settings.
        #[serde(default)]
        set: Vec<String>,
        /// Loss scale as a power of two.
        log2_scale: i32,
        /// True if PyTorch's dynamic loss scale is found first and applied too.
        #[serde(default)]
        dynamic: bool,
        /// Number of seeds of stochastic rounding whose gradients are averaged.
        #[serde(default = "draw")]
        draws: u64,
    },
    /// Loss scales of steps, some of which overflow. Figure: `wrong`, the number of unexpected scales.
    Scaler {
        /// Name.
        name: String,
        /// `pytorch` or `megatron`.
        rule: String,
        /// Initial scale.
        initial: f32,
        /// Good steps before it grows.
        interval: u32,
        /// Steps (from 1) that overflow.
        overflows: Vec<usize>,
        /// Expected scale of each step.
        expected: Vec<f32>,
    },
    /// Runs that are stopped, saved and resumed, for each policy, loss scaling rule and moment format.
    /// Figures: `combinations`, and `different`, the number of losses and weights that differ from the
    /// uninterrupted run's.
    Resume {
        /// Name.
        name: String,
        /// Changes of the base settings.
        set: Vec<String>,
        /// Policies; `fp16:megatron` includes a loss scaling rule.
        policies: Vec<String>,
        /// Values of `optimizer.moments`.
        moments: Vec<String>,
        /// Steps after which runs are stopped, one after the other.
        stops: Vec<usize>,
    },
    /// Sums of `k` products of E4M3, magnitudes of normal values. Figure: `error`, the mean relative error.
    Sum {
        /// Name.
        name: String,
        /// Accumulator, such as `14-bit-128`.
        accumulator: String,
        /// Products of a sum.
        k: usize,
    },
    /// Normal values with outliers, `[rows, cols]`, rounded. Figures: SQNR in dB of the values that are not outliers,
    /// `others`, and of `all`.
    Outliers {
        /// Name.
        name: String,
        /// Scheme of activations.
        scheme: String,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// One of so many values of a row is an outlier.
        every: usize,
        /// Factor of outliers.
        factor: f64,
        /// True if outliers are in the same columns of every row.
        channels: bool,
        /// Order of a Hadamard transform along the row before rounding.
        #[serde(default = "order")]
        hadamard: usize,
    },
}

impl Arm {
    /// Returns the name.
    pub fn name(&self) -> &str {
        match self {
            Arm::Train { name, .. }
            | Arm::Gradients { name, .. }
            | Arm::Scaler { name, .. }
            | Arm::Resume { name, .. }
            | Arm::Sum { name, .. }
            | Arm::Outliers { name, .. } => name,
        }
    }
}

/// Requires the mean over all seeds of `(of - minus) / over`, or of its magnitude with `abs`, to be between `min` and
/// `max`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Check {
    /// Statement of the check.
    pub says: String,
    /// Figure, as `arm.figure`.
    pub of: String,
    /// Figure to subtract.
    pub minus: Option<String>,
    /// Figure to divide by.
    pub over: Option<String>,
    /// True if the sign counts.
    #[serde(default)]
    pub abs: bool,
    /// Minimum value.
    pub min: Option<f64>,
    /// Maximum value.
    pub max: Option<f64>,
    /// Published value, or one measured by others.
    #[serde(default)]
    pub published: String,
}

impl Experiment {
    /// Reads `file`.
    ///
    /// # Errors
    /// A message with the file and its fault.
    pub fn read(file: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        toml::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
    }
}
