//! What is wrong with a checkpoint that speaks nonsense.
//!
//! Two ways, by what is at hand. With the model that it was made from, each layer is run on the same states in both
//! ([`against`]): the first that deviates by more than its scheme explains is named, the tensors in it are compared, and the
//! [alternatives](ALTERNATIVES) tried on them. Without, alternatives are tried on the whole model, then on each layer, then on
//! each tensor, and judged by the loss on a text ([`examine`]): an alternative counts when it improves the loss by more than
//! three standard errors.

mod altered;
mod alternative;
mod compare;
mod trial;

use serde::Serialize;

pub use alternative::{ALTERNATIVES, Alternative, Entry};
pub use compare::{LayerRow, TensorRow, against};
pub use trial::{Trial, examine, steps};

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diagnosis {
    /// The fault, where one was found.
    pub fault: Option<Fault>,
    /// The model as it is, on the text.
    pub baseline: Option<Baseline>,
    /// What was tried on the text.
    pub trials: Vec<Trial>,
    /// Alternatives that say nothing about this model.
    pub not_applicable: Vec<&'static str>,
    /// Layers compared with the reference.
    pub layers: Vec<LayerRow>,
    /// Tensors of the first layer that deviates, with what was tried on them.
    pub tensors: Vec<TensorRow>,
}

/// What is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fault {
    /// The first tensor that it is in, in the order of the forward pass.
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

/// The loss of the model as it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// Mean loss, nats.
    pub nll: f64,
    /// `exp(nll)`.
    pub ppl: f64,
    /// Predicted tokens.
    pub tokens: u64,
}

impl Fault {
    fn of(alternative: Alternative, tensor: String, layers: Vec<usize>) -> Self {
        let entry = alternative.entry();
        Fault { tensor, layers, alternative: Some(entry.name), cause: entry.cause, cure: entry.cure }
    }
}
