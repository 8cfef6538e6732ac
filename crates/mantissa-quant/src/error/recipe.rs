//! Errors of recipes.

use std::error::Error;

use mantissa_store::Shown;

/// Error of a recipe. Quoted text is escaped, and cut if it is long.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// The name is neither an alias nor a valid composition.
    #[error("recipe \"{}\": expected {expected}, got {}; see `mantissa recipes`", Shown(.name), Shown(.got))]
    Name {
        /// Name of the recipe.
        name: String,
        /// Faulty part.
        got: String,
        /// Valid parts.
        expected: String,
    },
    /// A scheme in the recipe does not parse.
    #[error("recipe \"{}\": {field}: {error}", Shown(.name))]
    Scheme {
        /// Name or file of the recipe.
        name: String,
        /// Field.
        field: String,
        /// Cause.
        error: Box<dyn Error + Send + Sync>,
    },
    /// A key or value of the file is wrong.
    #[error("{file}: {}: expected {expected}, got {}", Shown(.field), Shown(.got))]
    File {
        /// File.
        file: String,
        /// Key.
        field: String,
        /// Value.
        got: String,
        /// Valid values, with the nearest one for a misspelt value.
        expected: String,
    },
    /// The file does not exist or cannot be read.
    #[error(transparent)]
    Read(mantissa_store::Error),
}
