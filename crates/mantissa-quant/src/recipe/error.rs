//! Errors of recipes.

use mantissa_store::Shown;

/// Error of a recipe. Quoted text is escaped, and cut if it is long.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// The name is neither an alias nor composed as names are.
    #[error("recipe \"{}\": expected {allowed}, got {}; see `mantissa recipes`", Shown(.name), Shown(.found))]
    Name {
        /// The recipe's name.
        name: String,
        /// The part at fault.
        found: String,
        /// The parts allowed there.
        allowed: String,
    },
    /// A scheme in the recipe is not one.
    #[error("recipe \"{}\": {field}: {error}", Shown(.name))]
    Scheme {
        /// The recipe's name or file.
        name: String,
        /// The field.
        field: String,
        /// The fault.
        error: mantissa_num::ParseError,
    },
    /// A key, or a value, of the file.
    #[error("{file}: {}: expected {allowed}, got {}", Shown(.field), Shown(.found))]
    File {
        /// The file.
        file: String,
        /// The key.
        field: String,
        /// Its value.
        found: String,
        /// The values allowed, with the nearest one for a misspelt value.
        allowed: String,
    },
    /// The file is not there or cannot be read.
    #[error(transparent)]
    Read(mantissa_store::Error),
}
