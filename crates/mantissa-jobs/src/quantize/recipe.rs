//! Recipe of a job: a name, or the text of a file.

use mantissa_quant::Recipe;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::settings::read_settings;

/// Recipe by its name, with the text of its file if it is one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecipeText {
    /// Name, or path of the file.
    pub name: String,
    /// Text of the file; `None` for a built-in recipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl RecipeText {
    /// Reads the file of a recipe, if `name` is one.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read(name: &str) -> Result<Self> {
        let text = Recipe::is_file(name).then(|| read_settings(name.as_ref())).transpose()?;
        Ok(RecipeText { name: name.to_owned(), text })
    }

    /// Parses the recipe.
    ///
    /// # Errors
    /// An unknown name; a faulty file.
    pub fn load(&self) -> Result<Recipe> {
        Ok(match &self.text {
            Some(text) => Recipe::from_toml(&self.name, text)?,
            None => Recipe::load(&self.name)?,
        })
    }

    /// Returns the recipe under the name of its file, without the folder; names of built-in recipes in small letters, as
    /// every spelling of one makes the same bytes.
    #[must_use]
    pub fn without_place(&self) -> Self {
        if self.text.is_none() {
            return RecipeText { name: self.name.to_lowercase(), text: None };
        }
        let name = std::path::Path::new(&self.name).file_name().and_then(|name| name.to_str());
        RecipeText { name: name.unwrap_or(&self.name).to_owned(), text: self.text.clone() }
    }
}
