//! Loading of recipes by name or from a file.

use std::path::Path;

use mantissa_store::regular;

use super::{Recipe, name, toml_file};
use crate::error::RecipeError;

impl Recipe {
    /// Loads a recipe by name, alias or path of a `.toml` file.
    ///
    /// # Errors
    /// [`RecipeError`] names the faulty part and the valid ones.
    pub fn load(text: &str) -> Result<Self, RecipeError> {
        if Self::is_file(text) {
            return Self::from_toml(text, &read_capped(text)?);
        }
        match name::built_in(text) {
            Some((name, file)) => Self::from_toml(name, file),
            None => name::parse(text),
        }
    }

    /// Parses the text of a `.toml` file; `file` is its name in errors.
    ///
    /// # Errors
    /// Errors of [`load`](Self::load).
    pub fn from_toml(file: &str, text: &str) -> Result<Self, RecipeError> {
        toml_file::parse(file, text)
    }
}

/// Reads a file up to the size limit of recipes.
fn read_capped(file: &str) -> Result<String, RecipeError> {
    const MOST: u64 = 4 << 20;
    let path = Path::new(file);
    let expected = "a recipe in TOML, or a name of `mantissa recipes`";
    let bytes = regular::read(path, MOST, expected).map_err(RecipeError::Read)?;
    String::from_utf8(bytes).map_err(|error| RecipeError::File {
        file: file.to_owned(),
        field: "recipe".to_owned(),
        got: format!("invalid UTF-8 at byte {}", error.utf8_error().valid_up_to()),
        expected: "UTF-8 text".to_owned(),
    })
}
