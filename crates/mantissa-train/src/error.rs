//! What can go wrong in training.

use mantissa_model::{ForwardError, LoadError};
use mantissa_store::{ErrorClass, Shown};

use crate::data::DataError;

/// Characters of a quotation, and of a message, that are shown.
const QUOTED: usize = 80;
const MESSAGE: usize = 600;

/// A message that quotes a file between backticks or double quotes: on one line, control characters escaped, quotations cut.
fn cut(message: &str) -> String {
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
    match out.char_indices().nth(MESSAGE) {
        Some((end, _)) => format!("{}…", &out[..end]),
        None => out,
    }
}

/// Why training was refused or stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// The model has a part whose backward is not there.
    #[error("config: {field}: found {found}, allowed {allowed} in training; train a model without it")]
    Unsupported {
        /// Field of the configuration.
        field: &'static str,
        /// Its value.
        found: String,
        /// What can be trained.
        allowed: &'static str,
    },
    /// A linear layer's policy asks for an operand that its products cannot have.
    #[error("linear \"{module}\": policy.{operand}: found {found}, allowed f32, bf16 or f16")]
    Policy {
        /// The linear layer.
        module: String,
        /// Which product and operand.
        operand: String,
        /// The scheme.
        found: String,
    },
    /// A policy asks for a precision that training does not have yet.
    #[error("policy.{field}: found {found}, allowed f32")]
    PolicyField {
        /// Field of the policy.
        field: &'static str,
        /// The precision.
        found: String,
    },
    /// A model could not be read, or there is not enough memory.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A batch was refused.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The targets are not one for each token.
    #[error("targets: found {found}, allowed {allowed}, one for each token of the batch")]
    Targets {
        /// Their number.
        found: usize,
        /// Number of tokens.
        allowed: usize,
    },
    /// A target is no row of the head.
    #[error(
        "target {index}: found id {target}, allowed 0 to {}, or IGNORE_TARGET; the tokens were made with another tokenizer",
        .vocab_size - 1
    )]
    Target {
        /// Index in the batch.
        index: usize,
        /// The id.
        target: u32,
        /// Number of rows.
        vocab_size: usize,
    },
    /// The gradients hold NaN or infinities; the parameters were left as they are.
    #[error(
        "step {step}: gradient norm: found {norm}, allowed finite; lower the learning rate or skip the batch"
    )]
    NonFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The norm.
        norm: f64,
    },
    /// An optimizer's state belongs to another model.
    #[error("optimizer: found a state of {found} parameters, allowed {allowed}, those of the model")]
    OtherModel {
        /// Of the state.
        found: usize,
        /// Of the model.
        allowed: usize,
    },
    /// Loss or gradients are not finite, and no smaller loss scale helps.
    #[error(
        "step {step}: found loss {loss} and values that are not finite, first in {tensor}, allowed finite; the weights are those of the step before: \
         lower the learning rate, clip gradients, or take another policy"
    )]
    Diverged {
        /// Number of the step, from 1.
        step: u64,
        /// Its loss.
        loss: f64,
        /// The first tensor, in the order of the step: operator and product.
        tensor: String,
    },
    /// Somebody asked for a stop.
    #[error("found a request to stop, allowed to run to the end of the step")]
    Stopped,
    /// A setting. What is quoted of the file is escaped, and cut where it is long.
    #[error("{file}: {}: found {}, allowed {allowed}", Shown(.key), cut(.found))]
    Config {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What it holds.
        found: String,
        /// What it may hold.
        allowed: String,
    },
    /// The data was made for a larger vocabulary.
    #[error("tokens: found a vocabulary of {found}, allowed at most the model's {allowed}")]
    Tokens {
        /// Of the data.
        found: usize,
        /// Of the model.
        allowed: usize,
    },
    /// The data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
}

impl TrainError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            TrainError::Load(error) => error.class(),
            TrainError::Data(error) => error.class(),
            TrainError::Store(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}
