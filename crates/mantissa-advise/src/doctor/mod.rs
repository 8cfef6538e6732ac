//! What is wrong with a checkpoint that speaks nonsense.
//!
//! Two ways, by what is at hand. With the model that it was made from ([`against`]), each tensor is compared with the source's
//! under the bound of its scheme and the [alternatives](ALTERNATIVES) are tried on those beyond it; each layer is run on the same
//! states in both models, which finds faults outside the weights, and tells methods that move scales between layers from damage.
//! Without ([`examine`]), alternatives are tried on the whole model, then on the layers and tensors by themselves, and judged by
//! the loss on a text. Both go through the model a layer at a time.
//!
//! A sound model is never to be accused: without a source an alternative counts only where it makes the model predict the text
//! better beyond doubt (see [`Trial::decisive`]), and what is not known is said to be undecided.

mod alternative;
mod change;
mod compare;
mod config;
mod score;
mod tensors;
mod tokenizer;
mod trial;

use serde::Serialize;

pub use alternative::{ALTERNATIVES, Alternative, Entry};
pub use compare::{LayerRow, Whole, against, bytes_against};
pub use score::Gain;
pub use tensors::TensorRow;
pub use trial::{Trial, examine, steps};

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The fault, where one was found.
    pub fault: Option<Fault>,
    /// Why nothing was decided, where that is so.
    pub undecided: Option<&'static str>,
    /// The model as it is, on the text.
    pub baseline: Option<Baseline>,
    /// What was tried on the text.
    pub trials: Vec<Trial>,
    /// Alternatives that say nothing about this model.
    pub not_applicable: Vec<&'static str>,
    /// Both models from end to end.
    pub whole: Option<Whole>,
    /// Layers compared with the reference.
    pub layers: Vec<LayerRow>,
    /// Tensors compared with the reference, in the order of the forward pass, with what was tried on them.
    pub tensors: Vec<TensorRow>,
}

/// What a diagnosis comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing that was tried is better than the model as it is.
    Sound,
    /// There is a fault.
    Faulty,
    /// It cannot be told.
    Undecided,
}

impl Diagnosis {
    /// What it comes to.
    pub fn verdict(&self) -> Verdict {
        match (&self.fault, self.undecided) {
            (Some(_), _) => Verdict::Faulty,
            (None, Some(_)) => Verdict::Undecided,
            (None, None) => Verdict::Sound,
        }
    }
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fault {
    /// The first tensor that it is in, in the order of the forward pass; a field of the config, or the tokenizer.
    pub tensor: String,
    /// Layers that it is in, where that is known.
    pub layers: Vec<usize>,
    /// The alternative that repairs it; `None` where none of them does.
    pub alternative: Option<&'static str>,
    /// The likely cause.
    pub cause: &'static str,
    /// What helps.
    pub cure: &'static str,
}

/// The model as it is, on the text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// Mean loss, nats.
    pub nll: f64,
    /// `exp(nll)`.
    pub ppl: f64,
    /// Predicted tokens.
    pub tokens: u64,
    /// Mean loss at the temperature that suits it best, nats.
    pub calibrated_nll: f64,
    /// Entropy of the text's tokens, nats: the loss of knowing how often each occurs.
    pub token_entropy: f64,
    /// Share of tokens that were the most likely ones.
    pub hits: f64,
}

impl Fault {
    fn of(alternative: Alternative, tensor: String, layers: Vec<usize>) -> Self {
        let entry = alternative.entry();
        Fault { tensor, layers, alternative: Some(entry.name), cause: entry.cause, cure: entry.cure }
    }

    fn unknown(tensor: String, layers: Vec<usize>, cause: &'static str, cure: &'static str) -> Self {
        Fault { tensor, layers, alternative: None, cause, cure }
    }
}
