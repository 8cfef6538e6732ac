//! Error type of training.

use std::path::PathBuf;

use mantissa_model::{ForwardError, LoadError};
use mantissa_num::page_command;
use mantissa_store::{ErrorClass, Shown};

use crate::data::DataError;

/// Maximum characters of a quotation, of a value, and of a message.
const QUOTED: usize = 80;
const VALUE: usize = 600;
const MESSAGE: usize = 1000;

/// Cleans a message that quotes a file in backticks or double quotes: one line, control characters escaped,
/// quotations cut.
fn cut(message: &str) -> String {
    cut_at(MESSAGE, message)
}

/// [`cut`] with at most `most` characters.
fn cut_at(most: usize, message: &str) -> String {
    let (mut out, mut quote, mut since) = (String::new(), None, 0);
    for c in message.chars() {
        since += 1;
        match quote {
            None if matches!(c, '`' | '"') => (quote, since) = (Some(c), 0),
            Some(open) if c == open => quote = None,
            Some(_) if since == QUOTED + 1 => out.push('…'),
            _ => {}
        }
        match c {
            _ if quote.is_some() && since > QUOTED => {}
            '\n' => out.push(' '),
            c if c.is_control() => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    match out.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &out[..end]),
        None => out,
    }
}

/// Joins missing and unknown keys to one message.
fn keys(faults: &KeyFaults) -> String {
    let unknown = faults.unknown.iter().map(|key| format!("unknown key {key}"));
    let missing = match faults.missing.as_slice() {
        [] => None,
        missing => Some(format!("missing keys, such as {}", missing.join(", "))),
    };
    unknown.chain(missing).collect::<Vec<_>>().join("; ")
}

/// Missing and unknown keys of all tables of the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyFaults {
    /// Unknown keys with the accepted ones.
    pub unknown: Vec<String>,
    /// Missing keys with an example.
    pub missing: Vec<String>,
}

impl KeyFaults {
    /// True if no key is missing or unknown.
    pub fn is_empty(&self) -> bool {
        self.unknown.is_empty() && self.missing.is_empty()
    }
}

/// Error of a training run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A part of the model has no backward pass.
    #[error("config: {field}: expected {allowed} for training, got {found}; fix: train a model without it")]
    Unsupported {
        /// Field of the model configuration.
        field: &'static str,
        /// Value of the field.
        found: String,
        /// Values that can be trained.
        allowed: &'static str,
    },
    /// Another rank is lost, or sent something else.
    #[error(transparent)]
    Rank(#[from] mantissa_ranks::RankError),
    /// The settings differ from the run that wrote the checkpoint.
    #[error(
        "{}: settings: expected those of the run, got {}; fix: resume with the original settings, or rerun with --restart",
        .path.display(),
        if .differences.is_empty() { "others".to_owned() } else { .differences.join(", ") }
    )]
    Settings {
        /// Checkpoint.
        path: PathBuf,
        /// Keys with both values.
        differences: Vec<String>,
    },
    /// A policy names a scheme that cannot hold a matmul operand.
    #[error("linear \"{module}\": precision.{operand}: expected {allowed}, got {found}")]
    Policy {
        /// Module name of the linear layer.
        module: String,
        /// Product and operand, such as `fprop.x`.
        operand: String,
        /// Accepted schemes.
        allowed: String,
        /// Scheme of the operand.
        found: String,
    },
    /// A policy sets a precision that training does not support yet.
    #[error("policy.{field}: expected f32, got {found}")]
    PolicyField {
        /// Field of the policy.
        field: &'static str,
        /// Precision of the field.
        found: String,
    },
    /// A setting of fine-tuning does not fit the model.
    #[error("{field}: expected {allowed}, got {}", Shown(.found))]
    Tuning {
        /// Name of the setting.
        field: &'static str,
        /// Value found.
        found: String,
        /// Accepted values.
        allowed: String,
    },
    /// The model cannot be read, or memory is missing.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A batch is invalid.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The number of targets differs from the number of tokens.
    #[error("targets: expected {allowed}, one per token of the batch, got {found}")]
    Targets {
        /// Number of targets.
        found: usize,
        /// Number of tokens.
        allowed: usize,
    },
    /// A target is outside the vocabulary.
    #[error(
        "target {index}: expected an id from 0 to {}, or IGNORE_TARGET, got {target}; fix: use the model's tokenizer",
        .vocab_size - 1
    )]
    Target {
        /// Index in the batch.
        index: usize,
        /// Target id.
        target: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// The gradients hold NaN or infinity; the parameters are unchanged.
    #[error(
        "step {step}: expected a finite gradient norm, got {norm}; fix: lower the learning rate or skip the batch"
    )]
    NonFinite {
        /// Step number, from 1.
        step: u64,
        /// Gradient norm.
        norm: f64,
    },
    /// The optimizer state belongs to another model.
    #[error("optimizer: expected a state of {allowed} parameters (the model's), got {found}")]
    OtherModel {
        /// Parameters of the state.
        found: usize,
        /// Parameters of the model.
        allowed: usize,
    },
    /// Loss or gradients are not finite, and a smaller loss scale does not help.
    #[error(
        "step {step}: expected finite values, got loss {loss}, first non-finite tensor {tensor}; the weights are those of the previous step; \
         fix: lower the learning rate, clip gradients, or use another precision policy"
    )]
    Diverged {
        /// Step number, from 1.
        step: u64,
        /// Loss of the step.
        loss: f64,
        /// First non-finite tensor in step order: operator and product.
        tensor: String,
    },
    /// The caller requested a stop.
    #[error("stopped before the end of the step")]
    Stopped,
    /// A setting is invalid. Quoted file content is escaped and cut.
    #[error("{file}: {}: expected {allowed}, got {}", Shown(.key), cut_at(VALUE, .found))]
    Config {
        /// Settings file.
        file: String,
        /// Key of the setting.
        key: String,
        /// Value found.
        found: String,
        /// Accepted values.
        allowed: String,
    },
    /// The settings lack keys or have unknown ones.
    #[error(
        "{file}: settings: {}; fix: `mantissa train --init small` prints settings with all of them",
        cut(&keys(.faults))
    )]
    Keys {
        /// Settings file.
        file: String,
        /// Missing and unknown keys.
        faults: KeyFaults,
    },
    /// The settings are not valid TOML, or have a wrong type.
    #[error("{file}: {}: {}; fix: {} lists the keys", Shown(.place), cut(.error), page_command("docs/reference/training.md"))]
    Toml {
        /// Settings file.
        file: String,
        /// Line, after its table header.
        place: String,
        /// Message of the parser.
        error: String,
    },
    /// The data has a larger vocabulary than the model.
    #[error("tokens: expected a vocabulary of at most {allowed} (the model's), got {found}")]
    Tokens {
        /// Vocabulary size of the data.
        found: usize,
        /// Vocabulary size of the model.
        allowed: usize,
    },
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
}

impl TrainError {
    /// Returns the message without its fix, for a caller with a fix of its own.
    pub fn cause(&self) -> String {
        let message = self.to_string();
        message.split("; fix: ").next().unwrap_or_default().to_owned()
    }

    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            TrainError::Load(error) => error.class(),
            TrainError::Data(error) => error.class(),
            TrainError::Store(error) => error.class(),
            TrainError::Rank(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}
