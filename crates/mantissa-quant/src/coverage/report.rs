//! The coverage of a calibration, as reports hold it.

use serde::{Deserialize, Serialize};

/// Coverage of a model by a calibration set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Windows of the calibration.
    pub windows: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that were run to find this; fewer than all if they reached every channel.
    pub tokens_run: u64,
    /// Inputs of linear layers, in the order of the forward pass.
    pub inputs: Vec<InputCoverage>,
    /// Distance from an in-domain sample, if one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// Coverage of one input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputCoverage {
    /// The quantized layers that read it.
    pub modules: Vec<String>,
    /// Kind of the input, the same in all layers: `q k v`, `o`, `gate up`, `down`, `expert down` …
    pub site: String,
    /// Tokens that reach it: of an expert those that are routed to it.
    pub tokens: u64,
    /// Its channels, the columns of those layers.
    pub channels: usize,
    /// Channels that were zero in every one of the tokens.
    pub silent: usize,
    /// Behaviour of the recipe for the gap; `None` without a gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// Distance of a calibration from an in-domain sample, by their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Tokens of the text.
    pub tokens: u64,
    /// Share of its sequences of one, two and three tokens, by occurrence, that are not in the calibration.
    pub unseen: [f64; 3],
    /// The Jensen-Shannon distance of the distributions of one and of two tokens: the root of the divergence in bits, 0 for equal ones,
    /// 1 for such as have nothing in common (Endres & Schindelin 2003).
    pub distance: [f64; 2],
}
