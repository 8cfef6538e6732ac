//! Targets: the modules that a group of the configuration names.

use std::path::Path;

use serde_json::Value;

use crate::convention::pattern::{Pattern, spellings};
use crate::{Error, Result};

/// A pattern that names modules.
#[derive(Clone, Debug)]
pub(super) enum Target {
    /// Every layer of class `Linear`, which excludes [`EMBEDDINGS`].
    Linear,
    /// One module.
    Module(String),
    /// `re:PATTERN`, matched from the start of the module's name.
    Pattern(Pattern),
}

/// Names of embedding tables in the supported architectures.
const EMBEDDINGS: [&str; 8] = [
    "embed_tokens",
    "embed_tokens_per_layer",
    "embed_in",
    "wte",
    "wpe",
    "word_embeddings",
    "embeddings",
    "embed",
];

impl Target {
    pub(super) fn matches(&self, module: &str) -> bool {
        match self {
            Target::Linear => !EMBEDDINGS.contains(&module.rsplit('.').next().unwrap_or(module)),
            Target::Module(name) => name == module,
            Target::Pattern(pattern) => pattern.is_match(module),
        }
    }

    /// True if it names `module` in another spelling.
    pub(super) fn matches_spelled(&self, module: &str) -> bool {
        !matches!(self, Target::Linear) && spellings(module).iter().any(|name| self.matches(name))
    }

    /// Returns a note on a pattern that is not followed.
    pub(super) fn note(&self) -> Option<String> {
        match self {
            Target::Pattern(pattern) => pattern.note(),
            _ => None,
        }
    }
}

pub(super) fn parse_targets(path: &Path, key: &str, value: Option<&Value>) -> Result<Vec<Target>> {
    let Some(value) = value.filter(|v| !v.is_null()) else { return Ok(Vec::new()) };
    let list = value.as_array().ok_or_else(|| fault(path, key, value.to_string(), "a list of names"))?;
    list.iter()
        .map(|item| match item.as_str() {
            None => Err(fault(path, key, item.to_string(), "names")),
            Some("Linear") => Ok(Target::Linear),
            Some(text) => match text.strip_prefix("re:") {
                None => Ok(Target::Module(text.to_owned())),
                Some(pattern) => Pattern::of_start(pattern)
                    .map(Target::Pattern)
                    .map_err(|e| fault(path, key, format!("\"{text}\" ({e})"), "a regular expression")),
            },
        })
        .collect()
}

pub(super) fn field(key: &str) -> String {
    format!("quantization_config.{key}")
}

pub(super) fn fault(path: &Path, key: &str, found: impl Into<String>, allowed: impl Into<String>) -> Error {
    Error::field(path, field(key), found, allowed, "")
}
