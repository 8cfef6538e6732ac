//! The coverage of a calibration, as reports hold it.

use serde::{Deserialize, Serialize};

/// What a calibration shows of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Windows of the calibration.
    pub windows: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Of these, tokens that were run to find this: fewer than all where they had shown every channel.
    pub tokens_run: u64,
    /// What linear layers read, in the order of the forward pass.
    pub inputs: Vec<InputCoverage>,
    /// How far it is from the text that stands for the traffic, where one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic: Option<Traffic>,
}

/// What a calibration shows of one input.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InputCoverage {
    /// The quantized layers that read it.
    pub modules: Vec<String>,
    /// What kind of input it is, the same in all layers: `q k v`, `o`, `gate up`, `down`, `expert down` …
    pub site: String,
    /// Tokens that reach it: of an expert those that are routed to it.
    pub tokens: u64,
    /// Its channels, the columns of those layers.
    pub channels: usize,
    /// Channels that were zero in every one of the tokens.
    pub silent: usize,
    /// What is done about what is missing; `None` where nothing is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// How far a calibration is from a text, by their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Tokens of the text.
    pub tokens: u64,
    /// Of its sequences of one, two and three tokens the share, by occurrence, that are nowhere in the calibration.
    pub unseen: [f64; 3],
    /// The Jensen-Shannon distance of the distributions of one and of two tokens: the root of the divergence in bits, 0 for equal ones,
    /// 1 for such as have nothing in common (Endres & Schindelin 2003).
    pub distance: [f64; 2],
}
