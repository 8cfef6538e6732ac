//! Named values that the texts of topics state: numbers and words that are computed for a [`Subject`].

use std::cell::OnceCell;

use super::deployment::Deployment;
use crate::hardware::Device;
use crate::precision::{KVS, Kv, Precision};
use crate::recommend::{Answer, TrainAnswer, answer, train};
use crate::roofline::Setup;
use crate::training::{Recompute, Run, Zero};

/// A text names a value that cannot be computed, or is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// There is no value of this name.
    #[error("no value is called \"{0}\"")]
    Unknown(String),
    /// An argument is missing or of another kind.
    #[error("argument {index} of {name}: expected {expected}, got \"{found}\"")]
    Argument {
        /// Value.
        name: String,
        /// Position, from 1.
        index: usize,
        /// Kind that is expected.
        expected: &'static str,
        /// Text of the argument; empty if it is missing.
        found: String,
    },
    /// The text breaks the grammar of templates.
    #[error("\"{0}\": {1}")]
    Syntax(String, &'static str),
    /// The value is absent, and the text has nothing to say for that.
    #[error("\"{0}\" is absent")]
    Absent(String),
}

/// Value of a name.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Number.
    Number(f64),
    /// Words.
    Text(String),
    /// Yes or no.
    Flag(bool),
    /// Nothing: a rate that the device has not, a loss that was not measured.
    Absent,
}

impl Value {
    /// Returns a text.
    pub(super) fn text(text: impl Into<String>) -> Self {
        Value::Text(text.into())
    }

    /// Returns a number, or [`Value::Absent`].
    pub(super) fn number(number: Option<f64>) -> Self {
        number.map_or(Value::Absent, Value::Number)
    }

    /// Returns words, or [`Value::Absent`].
    pub(super) fn words(words: Option<impl Into<String>>) -> Self {
        words.map_or(Value::Absent, Value::text)
    }

    /// True if a condition on it holds: a number other than 0, words, yes.
    pub(super) fn holds(&self) -> bool {
        match self {
            Value::Number(x) => *x != 0.0,
            Value::Text(text) => !text.is_empty(),
            Value::Flag(flag) => *flag,
            Value::Absent => false,
        }
    }
}

/// Fields of one of several lines that a text makes.
pub(super) type Row = Vec<(&'static str, Value)>;

/// Arguments of a value: `(W4A16 INT4, batch)`.
#[derive(Debug)]
pub(super) struct Args<'a> {
    /// Name of the value.
    pub(super) name: &'a str,
    /// Texts, each with its number if it is an expression.
    pub(super) list: Vec<(String, Option<f64>)>,
}

impl Args<'_> {
    /// Returns the fault of an argument that should be something else.
    pub(super) fn fault(&self, index: usize, expected: &'static str) -> Fault {
        let found = self.list.get(index).map_or_else(String::new, |(text, _)| text.clone());
        Fault::Argument { name: self.name.to_owned(), index: index + 1, expected, found }
    }

    /// Returns the text of an argument.
    pub(super) fn text(&self, index: usize) -> Result<&str, Fault> {
        self.list
            .get(index)
            .map(|(text, _)| text.as_str())
            .ok_or_else(|| self.fault(index, "a further argument"))
    }

    /// Returns the number of an argument.
    pub(super) fn number(&self, index: usize) -> Result<f64, Fault> {
        self.list.get(index).and_then(|(_, number)| *number).ok_or_else(|| self.fault(index, "a number"))
    }

    /// Returns the whole number of an argument, at least 1.
    pub(super) fn count(&self, index: usize) -> Result<u64, Fault> {
        Ok(self.number(index)?.max(1.0) as u64)
    }

    /// Returns the precision that an argument names.
    pub(super) fn precision(&self, index: usize) -> Result<Precision, Fault> {
        Precision::named(self.text(index)?).ok_or_else(|| self.fault(index, "a precision"))
    }

    /// Returns the device that an argument names.
    pub(super) fn device(&self, index: usize) -> Result<Device, Fault> {
        Device::named(self.text(index)?).map_err(|_| self.fault(index, "a device"))
    }

    /// Returns the KV scheme that an argument names; `f16` if it is left out.
    pub(super) fn kv(&self, index: usize) -> Result<Kv, Fault> {
        match self.list.get(index) {
            None => Ok(KVS[0]),
            Some((name, _)) => Kv::named(name).map_err(|_| self.fault(index, "a KV scheme")),
        }
    }

    /// Returns the texts from an argument on.
    pub(super) fn texts_from(&self, index: usize) -> impl Iterator<Item = &str> {
        self.list.iter().skip(index).map(|(text, _)| text.as_str())
    }
}

/// Subject of values: model, device and load, with answers that several values share.
pub(super) struct Subject<'a> {
    /// Model, device and load.
    pub(super) deployment: &'a Deployment<'a>,
    plan: OnceCell<Answer>,
    training: [OnceCell<TrainAnswer>; 2],
}

impl<'a> Subject<'a> {
    /// Creates the subject of a deployment.
    pub(super) fn new(deployment: &'a Deployment<'a>) -> Self {
        Subject { deployment, plan: OnceCell::new(), training: [OnceCell::new(), OnceCell::new()] }
    }

    /// Returns the choice of a precision.
    pub(super) fn plan(&self) -> &Answer {
        let Deployment { shape, device, load } = *self.deployment;
        self.plan.get_or_init(|| answer(shape, device, load))
    }

    /// Returns the choice of a training recipe, for the context of the load.
    pub(super) fn train(&self) -> &TrainAnswer {
        let sequence = self.deployment.load.context.min(4096);
        self.training[0].get_or_init(|| self.trained(sequence, Recompute::Scores))
    }

    /// Returns the recipes for sequences of 2048 tokens with recomputed layers.
    pub(super) fn fine_tune(&self) -> &TrainAnswer {
        self.training[1].get_or_init(|| self.trained(2048, Recompute::Layers))
    }

    fn trained(&self, sequence: u64, recompute: Recompute) -> TrainAnswer {
        let Deployment { shape, device, load } = *self.deployment;
        let run = Run { sequence, batch: 1, devices: 1, zero: Zero::None, recompute };
        train(shape, device, &run, 16, None, load.memory)
    }

    /// Returns the model in a precision with a KV scheme on the device.
    pub(super) fn setup<'b>(&'b self, precision: &'b Precision, kv: &'b Kv) -> Setup<'b> {
        self.deployment.setup(precision, kv)
    }

    /// Returns the bytes that a model may use on the device.
    pub(super) fn memory(&self) -> f64 {
        let Deployment { device, load, .. } = self.deployment;
        load.memory.unwrap_or_else(|| device.available())
    }
}

/// Computes a value.
pub(super) type Compute = fn(&Subject<'_>, &Args<'_>) -> Result<Value, Fault>;

/// Computes the rows of a list.
pub(super) type List = fn(&Subject<'_>, &Args<'_>) -> Result<Vec<Row>, Fault>;
