//! Serving engine: one row for each, in a file of [`engines`](super::engines).

use std::fmt;

use serde::Serialize;

#[cfg(test)]
use super::case::Case;
use super::rule::Rule;
use crate::hardware::Maker;

/// Prompt of the commands that take one.
const PROMPT: &str = "\"Once upon a time\"";

/// Checkpoint formats that only the engines whose row names them keep models in. Engines read other formats too, such
/// as vLLM and transformers GGUF, but slowly or by way of dense weights.
const KEPT_BY_SOME: [&str; 6] = ["gguf", "mlx", "exl2", "modelopt", "native", "compressed-tensors"];

/// Engines that round inputs and decode weights, but multiply in wider types: transformers (compressed-tensors 0.20.0,
/// `compressed_linear.py`, decompresses a weight for each product), and mantissa's own on MX and FP4 inputs.
const EMULATING: [&str; 2] = ["transformers", "mantissa"];

/// Serving engine.
pub struct Engine {
    /// Command-line name.
    pub name: &'static str,
    /// Name in tables.
    pub title: &'static str,
    /// Other names that people type, programs built on the engine among them.
    pub typed: &'static [&'static str],
    /// Makers of the devices that it runs on; the rules of vLLM, SGLang, LMDeploy and TensorRT-LLM hold for NVIDIA
    /// GPUs.
    pub makers: &'static [Maker],
    /// Shell command that runs a model, with `{model}`, `{prompt}`, and `{chat}` before the prompt where a flag makes that a
    /// message of a chat; `None` if it is called from Python.
    pub(super) command: Option<&'static str>,
    /// Flag of tensor parallelism; `None` if it splits no layers over GPUs.
    pub(super) split: Option<&'static str>,
    /// Formats of [`KEPT_BY_SOME`] that its users keep quantized models in.
    pub(super) keeps: &'static [&'static str],
    /// Formats that it decodes to dense weights as it loads them, so that they save no memory.
    pub(super) widens: &'static [&'static str],
    /// Identifiers of the rules in `rules/` that it shares with others.
    pub(super) shared: &'static [&'static str],
    /// Rules of its own; the first one's source is cited for what it loads.
    pub(super) rules: &'static [Rule],
    /// Configurations that it accepts and refuses.
    #[cfg(test)]
    pub(super) cases: &'static [Case],
}

impl Engine {
    /// True if the engine splits layers over GPUs (tensor parallelism, `tp=N`).
    pub fn splits_tensors(&self) -> bool {
        self.split.is_some()
    }

    /// Returns the shell command that runs the model at `path`, which is quoted, split over `tp` GPUs, as a chat if the
    /// model has a chat template; `None` for an engine that is called from Python.
    pub fn command(&self, path: &str, tp: usize, chats: bool) -> Option<String> {
        let split = self.split.filter(|_| tp > 1).map_or(String::new(), |flag| format!(" {flag} {tp}"));
        let chat = if chats { " --chat" } else { "" };
        // The path last: its own braces stay.
        let filled = |command: &str| command.replace("{chat}", chat).replace("{prompt}", PROMPT);
        self.command.map(|command| filled(command).replace("{model}", path) + &split)
    }

    /// True if the engine decodes weights of `format` to dense ones as it loads them.
    pub fn widens(&self, format: &str) -> bool {
        self.widens.contains(&format)
    }

    /// True if the engine multiplies quantized inputs in wider types than they are stored in.
    pub fn emulates(&self) -> bool {
        EMULATING.contains(&self.name)
    }

    /// Says why a candidate in `format` is not offered to the engine before its rules are asked: its users keep models in
    /// other formats, or it emulates what others multiply natively.
    pub fn passes_over(&self, format: &str, native: bool) -> Option<String> {
        if !self.is_usual_reader(format) {
            return Some(format!("{}: expected {}, got {format}", self.title, self.keeps.join(" or ")));
        }
        let emulated = native && self.emulates();
        emulated.then(|| format!("{}: multiplies the inputs in wider types", self.title))
    }

    /// True if users of the engine keep quantized models in `format`.
    pub fn is_usual_reader(&self, format: &str) -> bool {
        !KEPT_BY_SOME.contains(&format) || self.keeps.contains(&format)
    }
}

impl PartialEq for Engine {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Serialize for Engine {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}
