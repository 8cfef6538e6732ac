//! Findings and their places.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Place of a finding.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Location {
    /// Layer index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Module, input of modules, or config field.
    pub part: String,
    /// Channel of that input or of the states.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channel: Option<usize>,
    /// Token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<TokenAt>,
}

/// Prints layer, part and channel: `layer 3, mlp.down_proj, channel 7`.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(layer) = self.layer {
            write!(f, "layer {layer}, ")?;
        }
        f.write_str(&self.part)?;
        self.channel.map_or(Ok(()), |channel| write!(f, ", channel {channel}"))
    }
}

/// Token of the text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenAt {
    /// Window.
    pub window: usize,
    /// Position in the window.
    pub position: usize,
    /// Token id.
    pub id: u32,
    /// Its text, if there is a tokenizer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl TokenAt {
    /// Describes the token: `token 12 ("The") at position 3`.
    pub(super) fn described(&self) -> String {
        let text = self.text.as_ref().map_or_else(String::new, |text| format!(" ({text:?})"));
        format!("token {}{text} at position {}", self.id, self.position)
    }
}

/// Finding of an examination.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the examination.
    pub examination: &'static str,
    /// Where.
    pub place: Location,
    /// Observation, with figures.
    pub found: String,
    /// Figures.
    pub figures: BTreeMap<&'static str, f64>,
    /// Cure, in words.
    pub remedy: String,
    /// Command that applies the remedy, or measures it.
    pub command: String,
}
