//! Options that quantize embedding and output head.

use mantissa_model::load_config;
use mantissa_num::Scheme;
use mantissa_quant::Recipe;
use mantissa_store::convention::{Container, ModelFiles};
use serde::{Deserialize, Serialize};

use crate::error::{BadInput, Result};

/// Short names of schemes: that of a folder, and that of a GGUF file.
const SHORT: [(&str, &str, &str); 4] = [
    ("int8", "int8-channel", "q8_0"),
    ("int4", "int4-g128", "q4_0"),
    ("fp8", "fp8-e4m3-channel", "q8_0"),
    ("fp8-e4m3", "fp8-e4m3-channel", "q8_0"),
];

/// Quantization of embedding and head by RTN.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tables {
    /// Scheme of the output head, or a short name such as `int8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<String>,
    /// Scheme of the token embedding, and of a tied head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embeddings: Option<String>,
    /// True if a tied head becomes a tensor of its own.
    #[serde(default)]
    pub untie: bool,
}

/// Parses the name of a scheme, or a short name.
///
/// # Errors
/// A message about what is wrong with it.
pub fn short_or_scheme(text: &str) -> std::result::Result<String, String> {
    let text = text.to_ascii_lowercase();
    if !SHORT.iter().any(|(short, ..)| *short == text) {
        scheme(&text)?;
    }
    Ok(text)
}

/// Parses a scheme.
///
/// # Errors
/// A message about what is wrong with it.
pub fn scheme(text: &str) -> std::result::Result<Scheme, String> {
    text.parse().map_err(|error: mantissa_num::ParseError| error.to_string())
}

/// Returns the scheme of a name in `container`.
fn resolved(text: &str, container: Container) -> Result<Scheme> {
    let short = SHORT.iter().find(|(short, ..)| *short == text);
    let name = short.map_or(text, |(_, folder, file)| if container.is_one_file() { file } else { folder });
    scheme(name).map_err(|error| BadInput::new("--head, --embeddings", text, error).into())
}

impl Tables {
    /// Adds the options to `recipe`, which is written in `container`.
    ///
    /// # Errors
    /// The source's configuration is invalid.
    pub fn apply(&self, recipe: &mut Recipe, source: &ModelFiles, container: Container) -> Result<()> {
        recipe.options.untie |= self.untie;
        if self.head.is_none() && self.embeddings.is_none() {
            return Ok(());
        }
        let config = load_config(source)?;
        // The schemes must not change the format that the recipe chooses by itself.
        recipe.container = recipe.container.or(Some(container));
        for (text, module) in
            [(&self.embeddings, config.embedding_module()), (&self.head, config.head_module().to_owned())]
        {
            if let Some(text) = text {
                recipe.set_table(&module, resolved(text, container)?);
            }
        }
        Ok(())
    }
}
