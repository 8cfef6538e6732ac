//! Diagnosis of a checkpoint with garbled output.
//!
//! With the source model ([`against`]), each tensor is compared with the source's under the error bound of
//! its scheme, and the [alternatives](ALTERNATIVES) are tried on tensors beyond the bound. Each layer is run
//! on the same input in both models; this finds faults outside the weights, and tells methods that move
//! scales between layers from damage.
//!
//! Without the source ([`examine`]), alternatives are tried on the whole model, then on single layers and
//! tensors, and judged by the loss on a text; fields of the config likewise; gate and up also by their signs, zero points by
//! the mean of the weights. Both run the model one layer at a time.
//!
//! A sound model must never be called faulty. Without a source, an alternative counts only if it improves the
//! loss beyond doubt (see [`Trial::decisive`]); everything else is reported as undecided.

mod alternative;
mod change;
mod compare;
mod config;
mod means;
mod pair;
pub(crate) mod score;
pub(crate) mod settings;
mod signs;
mod tensors;
mod tokenizer;
mod trial;

use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gptq::ZeroVersion;
use serde::Serialize;

pub use alternative::{ALTERNATIVES, Alternative, Entry};
pub use compare::{LayerRow, Whole, against, bytes_against};
pub(crate) use compare::{check_same_shape, divergence};
pub use means::Mean;
pub use score::Gain;
pub use signs::Lean;
pub use tensors::TensorRow;
pub(crate) use trial::examine_tensors;
pub use trial::{Trial, examine, steps};

/// Result of a diagnosis.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diagnosis {
    /// Fault, if one was found.
    pub fault: Option<Fault>,
    /// Reason why no verdict was reached, if so.
    pub undecided: Option<&'static str>,
    /// Unchanged model on the text.
    pub baseline: Option<Baseline>,
    /// Trials on the text.
    pub trials: Vec<Trial>,
    /// Signs of gate and up in every layer, if trials on its parts ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub signs: Vec<Lean>,
    /// Means of the weights of tensors with zero points, if trials on parts ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub means: Vec<Mean>,
    /// Alternatives that do not apply to this model.
    pub not_applicable: Vec<&'static str>,
    /// End-to-end comparison with the source.
    pub whole: Option<Whole>,
    /// Layers compared with the source.
    pub layers: Vec<LayerRow>,
    /// Tensors compared with the source, in forward order, with the alternatives tried on them.
    pub tensors: Vec<TensorRow>,
}

/// Verdict of a diagnosis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No trial improves on the unchanged model.
    Sound,
    /// A fault was found.
    Faulty,
    /// No verdict is possible.
    Undecided,
}

impl Diagnosis {
    /// Returns the verdict.
    pub fn verdict(&self) -> Verdict {
        match (&self.fault, self.undecided) {
            (Some(_), _) => Verdict::Faulty,
            (None, Some(_)) => Verdict::Undecided,
            (None, None) => Verdict::Sound,
        }
    }
}

/// Fault of a model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fault {
    /// First affected tensor in forward order, or a config field, or the tokenizer.
    pub tensor: String,
    /// Affected layers, if known.
    pub layers: Vec<usize>,
    /// Name of the alternative that repairs the fault; `None` if none does.
    pub alternative: Option<&'static str>,
    /// Likely cause.
    pub cause: &'static str,
    /// Fix, as printed.
    #[serde(rename = "cure")]
    pub fix: &'static str,
}

/// Unchanged model on the text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Baseline {
    /// Mean NLL, nats/token.
    pub nll: f64,
    /// Perplexity, `exp(nll)`.
    pub ppl: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Mean NLL at the best temperature, nats/token.
    pub calibrated_nll: f64,
    /// Entropy of the token frequencies, nats: the NLL of a unigram model fitted to this text.
    pub token_entropy: f64,
    /// Share of tokens that were the argmax (top-1 accuracy).
    pub hits: f64,
}

/// Finds a GPTQ `checkpoint_format` that the zero points contradict. This reader follows the data, so no trial shows it;
/// readers that follow the label compute with zero points off by one.
fn wrong_label(files: &ModelFiles) -> Option<Fault> {
    let found = files.gptq().filter(|config| config.contradicts_label())?.version();
    let alternative = match found {
        ZeroVersion::V1 => Alternative::ZeroPointUp,
        ZeroVersion::V2 => Alternative::ZeroPointDown,
    };
    let Fault { tensor, layers, cause, fix, .. } =
        Fault::of(alternative, "quantization_config.checkpoint_format".to_owned(), Vec::new());
    Some(Fault { tensor, layers, alternative: None, cause, fix })
}

impl Fault {
    fn of(alternative: Alternative, tensor: String, layers: Vec<usize>) -> Self {
        let entry = alternative.entry();
        Fault { tensor, layers, alternative: Some(entry.name), cause: entry.cause, fix: entry.fix }
    }

    fn unknown(tensor: String, layers: Vec<usize>, cause: &'static str, fix: &'static str) -> Self {
        Fault { tensor, layers, alternative: None, cause, fix }
    }
}
