//! Values on the command line: checkpoint formats and schemes.

pub use mantissa_jobs::tables::scheme;
use mantissa_num::listed;
use mantissa_store::convention::Container;

/// Names that people give to unquantized folders.
const DENSE: [&str; 6] = ["safetensors", "hf", "huggingface", "transformers", "dense", "bf16"];

/// Parses a checkpoint format.
///
/// # Errors
/// A message with the accepted names.
pub fn container(text: &str) -> Result<Container, String> {
    let found = Container::named(&text.to_lowercase());
    found.ok_or_else(|| {
        if DENSE.contains(&&*text.to_lowercase()) {
            return format!(
                "expected the name of a quantized format, got \"{text}\"; a plain Hugging Face folder is written by \
                 mantissa quantize MODEL --recipe bf16 --out DIR"
            );
        }
        format!(
            "expected {}, got \"{text}\"",
            listed(text, Container::names(), "mantissa help reference/formats")
        )
    })
}
