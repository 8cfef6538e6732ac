//! Recipes: method, schemes and container of a quantized model. A recipe is given by name
//! (`[TRANSFORM-][METHOD-]SCHEME[+ACTIVATION][+kv-SCHEME][+e2e]` with at least a transform or a method), by alias, as one of
//! llama.cpp's file types (`q4_k_m`), or as a TOML file. The keys of the file are in `docs/reference/recipes.md`; unknown ones are refused.

mod file_type;
mod glob;
mod keys;
mod kinds;
mod load;
pub(crate) mod methods;
mod name;
mod reader;
mod rules;
mod toml_file;

use std::path::Path;
use std::sync::Arc;

use mantissa_methods::e2e::EndToEnd;
use mantissa_methods::method::Feature;
use mantissa_model::KvPolicy;
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, LinearPlan};

pub use crate::error::RecipeError;
pub use file_type::{FILE_TYPES, FileType};
pub(crate) use file_type::{TensorRole, chosen, stored_type};
pub use glob::Glob;
pub use keys::{LayerRule, RecipeOptions, file_keys};
pub use mantissa_methods::{METHODS, Method, TRANSFORMS, Transform};
pub use name::{ALIASES, BUILT_IN, TYPED, spelled_out, unlike_preset};

/// Recipe: transform, method and schemes of a model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Name, as the user gave it.
    pub name: String,
    /// Transform of the dense model before the method; preserves its function.
    pub transform: Option<Arc<dyn Transform>>,
    /// Method with its options.
    pub method: Arc<dyn Method>,
    /// Training of scales and norms after the method.
    pub tuning: Option<EndToEnd>,
    /// Scheme of the decoder's linear layers.
    pub weights: Scheme,
    /// Scheme of their inputs.
    pub activations: Option<Scheme>,
    /// Scheme of the KV cache.
    pub kv: Option<Scheme>,
    /// KV cache policy whose levels are calibrated and stored with the model.
    pub kv_levels: Option<KvPolicy>,
    /// llama.cpp's file type, if the recipe is one: it sets the block type of every tensor.
    pub file_type: Option<FileType>,
    /// Container; `None` selects the first that holds the schemes.
    pub container: Option<Container>,
    /// Exceptions; the first that matches a module is used.
    pub layers: Vec<LayerRule>,
    /// Options that are used as the file states them.
    pub options: RecipeOptions,
    /// SHA-256 of the recipe file, or of the name, in hexadecimal.
    pub sha256: String,
}

impl Recipe {
    /// True if `text` is the path of a file.
    pub fn is_file(text: &str) -> bool {
        text.ends_with(".toml") || text.contains('/')
    }

    /// Returns the name for reports: the recipe's name, or the name of its file without the folder.
    pub fn label(&self) -> &str {
        Path::new(&self.name).file_name().and_then(|name| name.to_str()).unwrap_or(&self.name)
    }

    /// Returns the first rule that names `module`.
    pub fn rule_of(&self, module: &str) -> Option<&LayerRule> {
        self.layers.iter().find(|rule| rule.modules.iter().any(|glob| glob.matches(module)))
    }

    /// Returns the scheme of `module`'s weight without file types; `None` leaves it unquantized.
    pub fn weights_of(&self, module: &str) -> Option<&Scheme> {
        match self.rule_of(module) {
            Some(rule) => rule.weights.as_ref(),
            None => Some(&self.weights),
        }
    }

    /// Returns the scheme of the inputs of `module`.
    pub fn activations_of(&self, module: &str) -> Option<&Scheme> {
        let own = self.rule_of(module).and_then(|rule| rule.activations.as_ref());
        own.map_or(self.activations.as_ref(), Option::as_ref)
    }

    /// True if some layers have another scheme of inputs than the recipe.
    pub fn mixes_activations(&self) -> bool {
        self.layers.iter().any(|rule| rule.activations.is_some())
    }

    /// Lists the schemes of weights and of their inputs: the default first, then exceptions.
    pub fn pairs(&self) -> Vec<(&Scheme, Option<&Scheme>)> {
        let own = self.layers.iter().filter_map(|rule| {
            let input = rule.activations.as_ref().map(Option::as_ref);
            Some((rule.weights.as_ref()?, input.unwrap_or(self.activations.as_ref())))
        });
        std::iter::once((&self.weights, self.activations.as_ref())).chain(own).collect()
    }

    /// True if a folder in this format can rotate inputs at run time, or the recipe rotates none.
    fn rotates_in(&self, container: Container) -> bool {
        let online = self.transform.as_ref().and_then(|transform| transform.rotation());
        let facts = container.facts();
        facts.one_file || facts.rotations || online.is_none_or(|options| !options.online)
    }

    /// Returns the scheme of the embedding or head `module`, which only a rule with its full name quantizes.
    pub fn table_scheme(&self, module: &str) -> Option<&Scheme> {
        let named = |rule: &&LayerRule| rule.modules.iter().any(|glob| glob.is(module));
        self.layers.iter().find(named).and_then(|rule| rule.weights.as_ref())
    }

    /// Sets the scheme of the embedding or head `module`, before all other rules.
    pub fn set_table(&mut self, module: &str, scheme: Scheme) {
        let modules = vec![Glob(module.to_owned())];
        self.layers.insert(0, LayerRule { modules, weights: Some(scheme), ..LayerRule::default() });
    }

    /// Leaves the modules that match `patterns` unquantized, before all other rules.
    pub fn keep(&mut self, patterns: Vec<Glob>) {
        if !patterns.is_empty() {
            self.layers.insert(0, LayerRule { modules: patterns, ..LayerRule::default() });
        }
    }

    /// Returns the container to write: the requested one, or the first that holds every scheme of the recipe.
    pub fn container(&self) -> Container {
        self.container
            .unwrap_or_else(|| Container::default_for(&self.schemes(), |container| self.fits(container)))
    }

    /// True if `container` holds every scheme of the recipe, on shapes that blocks divide.
    pub fn fits(&self, container: Container) -> bool {
        // A shape that every block divides, because only the scheme matters here.
        let side = 1 << 24;
        let holds = |((scheme, input), method): ((&Scheme, Option<&Scheme>), &dyn Method)| {
            let shape = (side, block_multiple(scheme, side));
            let outliers = method.outliers(shape.0, shape.1).min(1);
            let plan = LinearPlan { outliers, ..LinearPlan::new("", scheme, input, shape) };
            let levels = self.kv_levels.is_none() || container.facts().kv_levels;
            let cached = levels && self.kv.as_ref().is_none_or(|kv| container.check_kv(kv).is_ok());
            cached && self.rotates_in(container) && container.specs(&plan).is_ok()
        };
        let quantizing = self.layers.iter().filter(|rule| rule.weights.is_some());
        let methods = quantizing.map(|rule| rule.own_method.as_deref().unwrap_or(&*self.method));
        self.pairs().into_iter().zip(std::iter::once(&*self.method).chain(methods)).all(holds)
    }

    /// Returns the schemes of weights: the default first, then exceptions.
    fn schemes(&self) -> Vec<&Scheme> {
        let rule_schemes = self.layers.iter().filter_map(|rule| rule.weights.as_ref());
        std::iter::once(&self.weights).chain(rule_schemes).collect()
    }
}

/// Leaves out rotations at run time where the method cannot rotate inputs. A recipe file can still ask for them.
pub(crate) fn for_method(mut transform: Box<dyn Transform>, method: &dyn Method) -> Box<dyn Transform> {
    if method.refuses(Feature::RotatedInputs).is_some() {
        transform.fold_only();
    }
    transform
}

fn block_multiple(scheme: &Scheme, side: usize) -> usize {
    match scheme.format.blocks() {
        mantissa_num::Blocks::Group(g) | mantissa_num::Blocks::Tile { cols: g, .. } => g as usize,
        _ => side,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_store::convention::{bitsandbytes, compressed_tensors, native};

    #[test]
    fn the_hash_is_of_the_name_or_the_file() {
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
            "rtn-mxfp6-e2m3",
            "rtn-int8-channel+int8-token",
            "rtn-int8-channel+int8-tensor-asym@static",
            "rtn-int3-g32-asym",
            // With a global scale of inputs, calibrated and stored.
            "rtn-nvfp4+nvfp4",
        ] {
            assert_eq!(container(name), compressed_tensors::CONTAINER, "{name}");
        }
        for name in ["nf4", "rtn-nf4-dq", "rtn-fp4-bnb", "rtn-nf4-g128", "awq-nf4"] {
            assert_eq!(container(name), bitsandbytes::CONTAINER, "{name}");
        }
        for name in ["rtn-nf4-g100", "spqr-nf4", "rotate-nf4", "rtn-nf4+int8-token", "rtn-nf4+kv-int8-head"] {
            assert_eq!(container(name), native::CONTAINER, "{name}");
        }
        for name in ["rtn-mxint8", "rtn-nvfp4:te", "rtn-mxfp6-e3m2", "rtn-fp8-e5m2-channel", "rtn-dyn8"] {
            assert_eq!(container(name), native::CONTAINER, "{name}");
        }
    }
}
