//! Values on the command line: checkpoint formats and schemes.

use mantissa_num::{Scheme, nearest_list};
use mantissa_store::Kind;
use mantissa_store::convention::Container;

/// Parses a checkpoint format.
///
/// # Errors
/// A message with the accepted names.
pub fn container(text: &str) -> Result<Container, String> {
    let found = Container::named(&text.to_lowercase());
    found.ok_or_else(|| format!("expected {}, got \"{text}\"", nearest_list(text, Container::names())))
}

/// Returns whether a format is a file or a folder.
pub fn kind_of(container: Container) -> Kind {
    if container.facts().one_file { Kind::Gguf } else { Kind::Folder }
}

/// Parses a scheme.
///
/// # Errors
/// A message about what is wrong with it.
pub fn scheme(text: &str) -> Result<Scheme, String> {
    text.parse().map_err(|error: mantissa_num::ParseError| error.to_string())
}
