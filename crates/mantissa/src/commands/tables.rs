//! Options that quantize embedding and output head, and their sizes before and after.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_num::Scheme;
use mantissa_quant::{Recipe, TableSize, model_config};
use mantissa_store::convention::{Container, ModelFiles};

use super::parse::scheme;
use crate::error::BadInput;
use crate::output::{bytes, labelled};

/// Short names of schemes: that of a folder, and that of a GGUF file.
const SHORT: [(&str, &str, &str); 4] = [
    ("int8", "int8-channel", "q8_0"),
    ("int4", "int4-g128", "q4_0"),
    ("fp8", "fp8-e4m3-channel", "q8_0"),
    ("fp8-e4m3", "fp8-e4m3-channel", "q8_0"),
];

/// Options that quantize embedding and head. Flattened into a command.
#[derive(clap::Args)]
pub struct TableArgs {
    /// Quantize the output head by RTN, such as int8
    ///
    /// int8, int4, fp8 or a scheme such as int8-channel, q6_k. Only its weights are quantized. A head that is tied to the embedding needs --untie, or --embeddings in
    /// formats whose readers take a quantized embedding (mlx, native, gguf).
    #[arg(long, value_name = "SCHEME", value_parser = short_or_scheme, help_heading = "Recipe")]
    head: Option<String>,
    /// Quantize the token embedding (and a tied head) by RTN
    #[arg(long, value_name = "SCHEME", value_parser = short_or_scheme, help_heading = "Recipe")]
    embeddings: Option<String>,
    /// Store a tied head as a tensor of its own
    #[arg(long, help_heading = "Recipe")]
    untie: bool,
}

/// Checks the name of a scheme.
fn short_or_scheme(text: &str) -> Result<String, String> {
    let text = text.to_ascii_lowercase();
    if !SHORT.iter().any(|(short, ..)| *short == text) {
        scheme(&text)?;
    }
    Ok(text)
}

/// Returns the scheme of a name in `container`.
fn resolved(text: &str, container: Container) -> Result<Scheme> {
    let short = SHORT.iter().find(|(short, ..)| *short == text);
    let name = short.map_or(text, |(_, folder, file)| if container.facts().one_file { file } else { folder });
    scheme(name).map_err(|error| BadInput::new("--head, --embeddings", text, error).into())
}

impl TableArgs {
    /// Adds the options to `recipe`, which is written in `container`.
    ///
    /// # Errors
    /// The source's configuration is invalid.
    pub fn apply(&self, recipe: &mut Recipe, source: &ModelFiles, container: Container) -> Result<()> {
        recipe.untie |= self.untie;
        if self.head.is_none() && self.embeddings.is_none() {
            return Ok(());
        }
        let config = model_config(source)?;
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

/// Prints the sizes of quantized embedding and head.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, sizes: &[TableSize]) -> io::Result<()> {
    for size in sizes {
        let bits = |n: u64| 8.0 * n as f64 / size.weights.max(1) as f64;
        let before = match size.before {
            0 => "tied to the embedding before".to_owned(),
            n => format!("{} at {:.2} bits before", bytes(n), bits(n)),
        };
        let TableSize { module, scheme, after, .. } = size;
        let after = format!("{} at {:.2} bits per weight", bytes(*after), bits(*after));
        labelled(out, "table", &format!("{module}: {scheme}, {after}; {before}"))?;
    }
    Ok(())
}
