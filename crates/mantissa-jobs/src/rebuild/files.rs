//! Files of a recorded job: names without folders, and where the user has them.

use std::path::{Path, PathBuf};

use mantissa_quant::Recipe;
use mantissa_store::Shown;

use super::line::option_name;
use crate::default_text;
use crate::error::{BadInput, Result};

/// Option whose value is a text between documents, not a name.
pub(super) const SPLIT: &str = "split";

/// Refuses an option that could lead to a file that the user did not name: a value that is no plain name, and the name of
/// a recipe file whose text is not in the record. A text between documents is no name.
pub(super) fn require_plain(place: &str, argument: &str, has_recipe: bool) -> Result<()> {
    let Some((option, value)) = argument.split_once('=') else { return Ok(()) };
    let name = option_name(argument);
    let fault = |allowed: &str| {
        let what = format!("{place}: {}", Shown(option));
        Err(BadInput::new(what, Shown(value).to_string(), allowed).into())
    };
    let is_plain = Path::new(value).file_name().is_some_and(|name| name == value);
    if name != Some(SPLIT) && (!is_plain || value.contains(char::is_control)) {
        return fault("a plain name, without a folder or control characters");
    }
    if name == Some("recipe") && !has_recipe && Recipe::is_file(value) {
        return fault("the name of a built-in recipe, or the text of the file in rebuild.recipe");
    }
    Ok(())
}

/// Where recorded files are: given by name, in the folder of `quality.json`, or in the working folder.
pub(super) struct Files<'a> {
    /// Places by name.
    pub(super) given: &'a [(String, PathBuf)],
    /// Folder of `quality.json`.
    pub(super) folder: &'a Path,
}

impl Files<'_> {
    /// Returns the place of the file that the value of `option` names.
    ///
    /// # Errors
    /// No such file.
    pub(super) fn find(&self, option: &str, value: &str) -> Result<String> {
        if default_text::is(Path::new(value.split(':').next().unwrap_or(value))) {
            return Ok(value.to_owned());
        }
        // A name may end in a key.
        let names = [Some((value, "")), value.rsplit_once(':')];
        for (name, rest) in names.into_iter().flatten() {
            let given = self.given.iter().find(|(known, _)| known == name).map(|(_, path)| path.clone());
            let found = given
                .or_else(|| [self.folder.join(name), PathBuf::from(name)].into_iter().find(|p| p.is_file()));
            if let Some(path) = found {
                let colon = if rest.is_empty() { "" } else { ":" };
                return Ok(format!("{}{colon}{rest}", path.display()));
            }
        }
        let name = names[1].filter(|(name, _)| name.contains('.')).map_or(value, |(name, _)| name);
        let error =
            BadInput::new(option, format!("no file {}", Shown(name)), "the file that the command read");
        Err(error.with_fix(format!("--file {}=PATH", Shown(name))).into())
    }
}
