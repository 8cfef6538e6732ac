//! Place and checkpoint format of an output model: what `--out`, `--format` and the recipe mean together.
//!
//! A path that ends in `.gguf` is a GGUF file. Any other path is a folder; GGUF output in a folder is named after model
//! and recipe, as llama.cpp's converter names it.

use std::path::{Path, PathBuf};

use mantissa_quant::Recipe;
use mantissa_store::Kind;
use mantissa_store::convention::{Container, gguf};

use crate::error::{BadInput, Result};
use crate::model::ModelPath;

/// Output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Folder, or GGUF file.
    pub path: PathBuf,
    /// Checkpoint format.
    pub container: Container,
}

impl Destination {
    /// Resolves the output of `recipe` on `model`. Without `format` a path that ends in `.gguf` selects GGUF, if it holds
    /// the recipe.
    ///
    /// # Errors
    /// A recipe that cannot be stored in a file named `.gguf`.
    pub fn of_recipe(
        model: &ModelPath,
        recipe: &Recipe,
        format: Option<Container>,
        out: &Path,
    ) -> Result<Self> {
        let named = is_gguf(out) && format.is_none() && recipe.fits(gguf::CONTAINER);
        let container = if named { gguf::CONTAINER } else { format.unwrap_or_else(|| recipe.container()) };
        if !container.is_one_file() && is_gguf(out) {
            let found = format!("a file name for {} in format {}", recipe.label(), container.name());
            let folder = out.with_extension("");
            let fix = format!("--out {}, or --recipe q4_k_m for a GGUF file", folder.display());
            return Err(BadInput::new("--out", found, "a folder").with_fix(fix).into());
        }
        let destination = Self::new(model, recipe.label(), container, out);
        destination.check_name()?;
        Ok(destination)
    }

    /// Resolves the output of a conversion of `model`; `label` stands for the recipe in a file name.
    ///
    /// # Errors
    /// A folder format for a file named `.gguf`.
    pub fn of_format(model: &ModelPath, label: &str, container: Container, out: &Path) -> Result<Self> {
        if !container.is_one_file() && is_gguf(out) {
            let found = format!("a file name for format {}", container.name());
            let fix = format!("--out {}, or --format gguf", out.with_extension("").display());
            return Err(BadInput::new("--out", found, "a folder").with_fix(fix).into());
        }
        let destination = Self::new(model, label, container, out);
        destination.check_name()?;
        Ok(destination)
    }

    /// Refuses a folder named like a file of weights.
    fn check_name(&self) -> Result<()> {
        const FILES: [&str; 4] = ["safetensors", "bin", "pt", "pth"];
        let extension = self.path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if self.container.is_one_file() || self.path.is_dir() || !FILES.contains(&extension) {
            return Ok(());
        }
        let found =
            format!("{}, the name of a file, for format {}", self.path.display(), self.container.name());
        let fix = format!(
            "--out {}, a folder with the weights and all other files",
            self.path.with_extension("").display()
        );
        Err(BadInput::new("--out", found, "a folder").with_fix(fix).into())
    }

    fn new(model: &ModelPath, label: &str, container: Container, out: &Path) -> Self {
        // An existing file is no folder; whether it may be replaced is checked as for every output.
        let path = match container.is_one_file() && !is_gguf(out) && !out.is_file() {
            true => out.join(container.output_name(&format!("{}-{}", name_of(model), stem(label)))),
            false => out.to_owned(),
        };
        Destination { path, container }
    }

    /// Format to plan with: `format`, or one that the file name selects instead of the recipe's.
    pub fn format(&self, recipe: &Recipe, format: Option<Container>) -> Option<Container> {
        format.or_else(|| Some(self.container).filter(|container| *container != recipe.container()))
    }

    /// Kind of the output.
    pub fn kind(&self) -> Kind {
        self.container.output_kind()
    }
}

/// True if `path` is named like a GGUF file and is no folder.
fn is_gguf(path: &Path) -> bool {
    let named = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    named && !path.is_dir()
}

/// Returns the output's name if `--out` is not given: the model's name and the recipe's, in the working folder.
pub fn default_out(model: &ModelPath, recipe: &Recipe, container: Container) -> PathBuf {
    let label = stem(recipe.label()).replace([':', '/', '%', ','], "-");
    let mut out = format!("{}-{label}", name_of(model));
    if container != recipe.container() {
        out += &format!("-{}", container.name());
    }
    PathBuf::from(container.output_name(&out))
}

/// Returns the name of a model for file names: that of its folder or link, or of its file without extension and dtype.
fn name_of(model: &ModelPath) -> String {
    let named = model.named();
    let absolute = std::fs::canonicalize(named).unwrap_or_else(|_| named.to_owned());
    let name = named.file_name().or(absolute.file_name()).unwrap_or_default().to_string_lossy().into_owned();
    let name = name.strip_suffix(".safetensors").map_or(name.clone(), str::to_owned);
    let Some(name) = name.strip_suffix(".gguf") else { return name };
    let dtype =
        ["-f32", "-f16", "-bf16"].into_iter().find(|dtype| name.to_ascii_lowercase().ends_with(dtype));
    name[..name.len() - dtype.map_or(0, str::len)].to_owned()
}

/// Returns the name of a recipe, or of its file without the extension.
fn stem(label: &str) -> &str {
    label.strip_suffix(".toml").unwrap_or(label)
}
