//! Coverage as stored in reports.

use serde::{Deserialize, Serialize};

/// Coverage of a model by a calibration set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Coverage {
    /// Number of calibration windows.
    pub windows: usize,
    /// Number of their tokens.
    pub tokens: u64,
    /// Tokens that were run for the report; fewer than all if these reached every channel.
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
    /// Tokens that reach it; for an expert, those routed to it.
    pub tokens: u64,
    /// Number of channels.
    pub channels: usize,
    /// Channels that were zero in all these tokens.
    pub silent: usize,
    /// Behaviour of the recipe for the gap; `None` without a gap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// Distance of the calibration set from an in-domain sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Traffic {
    /// Tokens of the sample.
    pub tokens: u64,
    /// Share of the sample's sequences of one, two and three tokens, by occurrence, that the calibration set does not
    /// contain.
    pub unseen: [f64; 3],
    /// Jensen-Shannon distance between the distributions of one and of two tokens: the root of the divergence in bits.
    /// 0 for equal distributions, 1 for disjoint ones (Endres & Schindelin 2003).
    pub distance: [f64; 2],
}
