//! Values on the command line: checkpoint formats and schemes.

pub use mantissa_jobs::tables::scheme;
use mantissa_num::listed;
use mantissa_store::convention::Container;

/// Parses a checkpoint format.
///
/// # Errors
/// A message with the accepted names.
pub fn container(text: &str) -> Result<Container, String> {
    let found = Container::named(&text.to_lowercase());
    found.ok_or_else(|| {
        format!(
            "expected {}, got \"{text}\"",
            listed(text, Container::names(), "mantissa help reference/formats")
        )
    })
}
