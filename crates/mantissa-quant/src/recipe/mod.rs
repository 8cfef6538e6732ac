//! Recipes: which method, which scheme for what, which container. By name (`[TRANSFORM-][METHOD-]SCHEME[+ACTIVATION][+kv-SCHEME]`, transform or method at least), by alias, by the name
//! of one of llama.cpp's file types (`q4_k_m`), or as a
//! TOML file with exactly the keys below.
//!
//! ```toml
//! method = "rtn"                 # how codes are chosen: see docs/reference/recipes.md
//! weights = "int4-g128"          # scheme of the decoder's linear layers
//! activations = "int8-token"     # optional: scheme of their inputs at run time
//! transform = "smooth"           # optional, before the method: smooth, awq, rotate, spin
//! observer = "max"               # optional, of static inputs: max, percentile, mse, kl, moving-average
//! percentile = 99.99             # optional, only with observer = "percentile"; this is the default
//! kv = "int8-head"               # optional: scheme of keys and values in the cache
//! format = "compressed-tensors"  # optional: the container; by default the first that holds the schemes
//! keep = ["lm_head"]             # optional: modules left as they are, by name or glob
//!
//! [[layers]]                     # optional, the first that matches counts
//! modules = ["*.down_proj"]
//! weights = "int8-channel"
//!
//! [gptq]                         # optional, only with method = "gptq", "gptaq" or "spqr"; these are the defaults
//! damp = 0.01                    # of the mean of the Hessian's diagonal
//! block = 128                    # columns between two updates of the rest
//! act_order = true               # columns by decreasing diagonal
//! groups = "static"              # what a group's scale is taken from: static, original, current
//! range = "mse"                  # how much of its range it covers: mse, amax
//! asymmetric = 0.0               # the share of the input drift that is corrected (GPTAQ); 0.5 with method = "gptaq"
//!
//! [spqr]                         # optional, only with method = "spqr"; this is the default
//! outliers = 0.01                # share of the weights stored as outliers, in f16
//!
//! [smooth]                       # optional, only with transform = "smooth"
//! alpha = 0.5                    # 0.0 to 1.0, or "search"
//!
//! [rotate]                       # optional, only with transform = "rotate"; these are the defaults
//! residual = true                # the residual stream, where the architecture allows it
//! values = true                  # values within each head
//! online = true                  # inputs of down projections, as the model runs
//! seed = 0                       # of the random signs
//!
//! [spin]                         # optional, only with transform = "spin"; the keys of [rotate], and
//! iterations = 100               # steps
//! rate = 0.03                    # root mean square of the angles of the first, in radians
//! batch_tokens = 2048            # tokens of a step
//! gradient = "ranges"            # what a step follows: both, ranges, straight-through; the default depends on the scheme
//!
//! [autoround]                    # optional, only with method = "autoround"; these are the defaults
//! iterations = 200               # steps of each layer; 600 where scales are powers of two
//! rate = 0.005                   # first step of a weight's offset; by default 1 / iterations
//! clip_rate = 0.001              # first step of a group's range; by default a fifth of the rate
//! batch_tokens = 512             # tokens of a step; 256 where scales are powers of two
//! seed = 42                      # of the order of the windows
//! metric = "fisher"              # of errors of a layer's output: fisher, mse
//! ```

pub(crate) mod error;
mod file_type;
mod name;
mod toml_file;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use mantissa_methods::method::Work;
use mantissa_model::KvPolicy;
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, LinearPlan};

pub use error::RecipeError;
pub use file_type::{FILE_TYPES, FileType, Part, smaller};
pub use mantissa_methods::{METHODS, Method, TRANSFORMS, Transform};
pub use name::ALIASES;

use crate::input_scales::Observer;

/// A rule for some layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRule {
    /// Names or globs of modules.
    pub modules: Vec<Glob>,
    /// Their scheme; `None` leaves them as they are.
    pub weights: Option<Scheme>,
}

/// A recipe: transform, method and schemes of a model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Name, as the user gave it.
    pub name: String,
    /// Transform of the dense model before the method; its outputs stay the same.
    pub transform: Option<Arc<dyn Transform>>,
    /// Method, with its options.
    pub method: Arc<dyn Method>,
    /// Scheme of the decoder's linear layers.
    pub weights: Scheme,
    /// Scheme of their inputs at run time.
    pub activations: Option<Scheme>,
    /// Observer that static scales of inputs are taken from.
    pub observer: Observer,
    /// Scheme of keys and values in the cache.
    pub kv: Option<Scheme>,
    /// Policy of keys and values under levels that are found on the calibration text and stored with the model.
    pub kv_levels: Option<KvPolicy>,
    /// llama.cpp's mixture of block types, where the recipe is one: it says what becomes of every tensor.
    pub file_type: Option<FileType>,
    /// Container; `None` takes the first that holds the schemes.
    pub container: Option<Container>,
    /// Exceptions; the first that matches a module counts.
    pub layers: Vec<LayerRule>,
    /// SHA-256, in hexadecimal, of what says all this: the bytes of its file, or its name.
    pub sha256: String,
}

/// A module name in which `*` stands for any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(String);

impl Glob {
    /// True if `module` matches.
    pub fn matches(&self, module: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| module.strip_prefix(first)) else { return false };
        let mut open = false; // whether a `*` precedes what is left
        for part in parts {
            open = true;
            match rest.find(part) {
                // The last part must reach the end: prefer its last occurrence.
                Some(_) if rest.ends_with(part) && !self.0.ends_with('*') && self.0.ends_with(part) => {
                    let at = rest.rfind(part).unwrap_or(0);
                    rest = &rest[at + part.len()..];
                }
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.is_empty() || (open && self.0.ends_with('*'))
    }
}

impl Recipe {
    /// A recipe by name, alias or path of a `.toml` file.
    ///
    /// # Errors
    /// [`RecipeError`] names the part at fault and what may stand there.
    pub fn load(text: &str) -> Result<Self, RecipeError> {
        if Self::is_file(text) {
            return Self::from_toml(text, &read_capped(text)?);
        }
        name::parse(text)
    }

    /// True if `text` names a file, not a recipe by its parts.
    pub fn is_file(text: &str) -> bool {
        text.ends_with(".toml") || text.contains('/')
    }

    /// Name in reports: the recipe's name, or that of its file without the folder.
    pub fn label(&self) -> &str {
        Path::new(&self.name).file_name().and_then(|name| name.to_str()).unwrap_or(&self.name)
    }

    /// True if it needs calibration text.
    pub fn needs_calibration(&self) -> bool {
        self.method.needs().text || self.transform.as_ref().is_some_and(|transform| transform.needs_text())
    }

    /// True if weights are rounded to nearest and nothing else is done to them.
    pub fn rounds_to_nearest(&self) -> bool {
        matches!(self.method.work(), Work::Nearest)
    }

    /// Transform and method, as reports call them: `awq-rtn`.
    pub fn method_name(&self) -> String {
        let transform =
            self.transform.as_ref().map_or(String::new(), |transform| format!("{}-", transform.name()));
        transform + self.method.name()
    }

    /// A recipe by the text of a `.toml` file; `file` is its name in errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_toml(file: &str, text: &str) -> Result<Self, RecipeError> {
        toml_file::parse(file, text)
    }

    /// Single weights of a layer `[rows, cols]` that stand beside its codes.
    pub fn outliers(&self, rows: usize, cols: usize) -> usize {
        self.method.outliers(rows, cols)
    }

    /// The first rule that names `module`.
    pub fn rule_of(&self, module: &str) -> Option<&LayerRule> {
        self.layers.iter().find(|rule| rule.modules.iter().any(|glob| glob.matches(module)))
    }

    /// The scheme of `module`'s weight, file types aside; `None` leaves it as it is.
    pub fn weights_of(&self, module: &str) -> Option<&Scheme> {
        match self.rule_of(module) {
            Some(rule) => rule.weights.as_ref(),
            None => Some(&self.weights),
        }
    }

    /// The container to write: the one asked for, or the first that holds every scheme of the recipe.
    pub fn container(&self) -> Container {
        self.container.unwrap_or_else(|| {
            let of_rules = self.layers.iter().filter_map(|rule| rule.weights.as_ref());
            let schemes: Vec<&Scheme> = std::iter::once(&self.weights).chain(of_rules).collect();
            // A shape that every block divides: only the scheme is in question here.
            let side = 1 << 24;
            let holds = |container: Container, scheme: &&Scheme| {
                let input = self.activations.as_ref();
                let shape = (side, block_multiple(scheme, side));
                let outliers = self.method.outliers(shape.0, shape.1).min(1);
                let plan = LinearPlan { outliers, ..LinearPlan::new("", scheme, input, shape) };
                let levels = self.kv_levels.is_none() || container.facts().kv_levels;
                let cached = levels && self.kv.as_ref().is_none_or(|kv| container.check_kv(kv).is_ok());
                cached && container.specs(&plan).is_ok()
            };
            Container::default_for(&schemes, |container| {
                schemes.iter().all(|scheme| holds(container, scheme))
            })
        })
    }
}

/// The text of a file that is no larger than any recipe.
fn read_capped(file: &str) -> Result<String, RecipeError> {
    const MOST: u64 = 4 << 20;
    let path = Path::new(file);
    let io = |error| {
        let expected = "a recipe in TOML, or a name of `mantissa recipes`";
        RecipeError::Read(mantissa_store::Error::opening(path, expected, "read recipe", error))
    };
    let fault = |found: String| RecipeError::File {
        file: file.to_owned(),
        field: "recipe".to_owned(),
        found,
        allowed: format!("UTF-8 text of at most {MOST} bytes"),
    };
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(MOST + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() as u64 > MOST {
        return Err(fault("more".to_owned()));
    }
    String::from_utf8(bytes)
        .map_err(|e| fault(format!("invalid UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

fn block_multiple(scheme: &Scheme, side: usize) -> usize {
    match scheme.format.blocks() {
        mantissa_num::Blocks::Group(g) | mantissa_num::Blocks::Tile { cols: g, .. } => g as usize,
        _ => side,
    }
}

/// `; did you mean "x"?` where `found` is close to one of `names`.
pub(crate) fn suggestion<'a>(found: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    let close = names
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(found, name), name))
        .filter(|(distance, name)| *distance <= name.len().max(3) / 3)
        .min();
    close.map_or_else(String::new, |(_, name)| format!("; did you mean \"{name}\"?"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_store::convention::{compressed_tensors, native};

    #[test]
    fn globs_match_whole_names() {
        let matches = |glob: &str, name: &str| Glob(glob.into()).matches(name);
        let down = "model.layers.10.mlp.down_proj";
        assert!(matches("*.down_proj", down) && matches("model.layers.10.*", down) && matches("*", down));
        assert!(matches("model.layers.*.mlp.*", down) && matches(down, down) && matches("*mlp*", down));
        assert!(
            !matches("model.layers.1.*", down) && !matches("down_proj", down) && !matches("*.down", down)
        );
        assert!(!matches("*.up_proj", down) && !matches("", down));
        // The last part is matched at the end, not at its first occurrence.
        assert!(matches("*a", "banana") && !matches("*an", "banana"));
    }

    #[test]
    fn a_recipe_is_known_by_its_text() {
        let named = Recipe::load("nf4").unwrap();
        // printf nf4 | sha256sum
        assert_eq!(named.sha256, "017fde3d7e68f5ad24453e66bf2d76a6485584672bded01eca7b44be5a6a6a84");
        assert_eq!(named.label(), "nf4");
        let path = std::env::temp_dir().join(format!("mantissa-recipe-{}.toml", std::process::id()));
        std::fs::write(&path, "weights = \"nf4\"\n").unwrap();
        let read = Recipe::load(path.to_str().unwrap());
        std::fs::remove_file(&path).unwrap();
        let read = read.unwrap();
        assert_eq!(read.label(), path.file_name().unwrap().to_str().unwrap());
        assert_ne!(read.sha256, named.sha256);
    }

    #[test]
    fn the_container_follows_from_the_schemes() {
        let container = |name: &str| Recipe::load(name).unwrap().container();
        for name in [
            "rtn-int4-g128",
            "rtn-nvfp4",
            "rtn-mxfp4:ct",
            "rtn-mxfp8-e4m3",
            "rtn-int8-channel+int8-token",
            "rtn-int3-g32-asym",
            // Whose scale of all inputs is found on a text, and stored.
            "rtn-nvfp4+nvfp4",
        ] {
            assert_eq!(container(name), compressed_tensors::CONTAINER, "{name}");
        }
        for name in ["rtn-nf4", "rtn-mxint8", "rtn-nvfp4:te", "rtn-mxfp6-e2m3", "rtn-fp8-e5m2-channel"] {
            assert_eq!(container(name), native::CONTAINER, "{name}");
        }
    }
}
