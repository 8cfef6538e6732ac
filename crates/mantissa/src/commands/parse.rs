//! Values on the command line: checkpoint formats and schemes.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};
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

/// Extensions that promise something else than an HTML page.
const NOT_HTML: [&str; 7] = ["md", "markdown", "json", "jsonl", "txt", "csv", "pdf"];

/// Returns the parser of the path of an HTML page.
pub fn page_path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|text| page(text.into()))
}

/// Refuses a `path` that promises another kind of file, with the option that writes that.
fn page(path: PathBuf) -> Result<PathBuf, String> {
    let extension = path.extension().and_then(|extension| extension.to_str());
    let extension = extension.map(str::to_lowercase).unwrap_or_default();
    if !NOT_HTML.contains(&extension.as_str()) {
        return Ok(path);
    }
    let other = match extension.as_str() {
        "md" | "markdown" => "; for a model card: mantissa compare MODEL OUTPUT --markdown=FILE",
        "json" | "jsonl" => "; for the figures: --json=FILE",
        _ => "",
    };
    Err(format!("expected the name of an HTML page, such as page.html, got {}{other}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_not_named_as_another_kind_of_file() {
        for name in ["page.html", "a.b/page", "x.HTM", "README.md.html"] {
            assert_eq!(page(name.into()), Ok(PathBuf::from(name)));
        }
        let card = page("README.md".into()).err().unwrap_or_default();
        assert!(card.contains("--markdown=FILE"), "{card}");
        assert!(page("out.JSON".into()).is_err() && page("x.pdf".into()).is_err());
    }
}
