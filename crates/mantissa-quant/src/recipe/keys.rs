//! Keys of recipe files, each declared once: name, type, default, accepted values and meaning.

use std::sync::Arc;

use mantissa_methods::registry::{Registered, RegisteredTransform};
use mantissa_methods::{Method, e2e};
use mantissa_num::Scheme;
use mantissa_options::{Declared, Flag, Key, ListOf, Note, OneOf, Subtable, Unset, options};
use mantissa_store::convention::Container;

use super::file_type::FileType;
use super::glob::Glob;
use super::kinds::{
    ACTIVATION, FILE_TYPE, FIRST_METHOD, FORMAT, Globs, Kv, KvText, MAX_RULES, METHOD, Percent, SchemeOr,
    TransformName, WEIGHT,
};
use crate::input_scales::{OBSERVERS, Observer, Percentile};

/// Training after the method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tune {
    /// End-to-end training of scales.
    EndToEnd,
}

/// Trainings by name.
const TUNES: [(&str, Tune); 1] = [(e2e::NAME, Tune::EndToEnd)];

options! {
    /// Options of a recipe that are used as its file states them. An option that decides nothing else is declared here,
    /// and read from [`Recipe::options`](super::Recipe::options).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct RecipeOptions {
        /// Observer of the static scales of inputs.
        observer: Observer = Observer::Max, OneOf(&OBSERVERS);
        /// With observer = "percentile": the share of values that is not clipped; 99.99 unless set.
        percentile: Option<Percentile>, Unset(Percent), Note::example("99.99");
        /// Store a head that is tied to the embedding as a tensor of its own.
        untie: bool = false, Flag;
    }
}

impl RecipeOptions {
    /// Returns the observer with its percentile.
    pub fn observer(&self) -> Observer {
        match (self.observer, self.percentile) {
            (Observer::Percentile(_), Some(percentile)) => Observer::Percentile(percentile),
            (observer, _) => observer,
        }
    }
}

options! {
    /// Keys of a recipe file, beside the tables of transforms and methods.
    pub(super) struct FileKeys {
        ..options: RecipeOptions, "Options that are used as the file states them.";
        /// Change of the model before the method, which keeps its function.
        transform: Option<RegisteredTransform>, Unset(TransformName), Note::example("\"smooth\"");
        /// Training after the method.
        tune: Option<Tune>, Unset(OneOf(&TUNES)), Note::example("\"e2e\"");
        /// Method that chooses the codes.
        method: &'static Registered = FIRST_METHOD, METHOD;
        /// Scheme of the decoder's linear layers.
        weights: Option<Scheme>, Unset(WEIGHT), Note::needed("\"int4-g128\"").or(&["file_type"]);
        /// In place of weights: the llama.cpp file type, which sets the type of every tensor.
        file_type: Option<FileType>, Unset(FILE_TYPE), Note::example("\"q4_k_m\"");
        /// Scheme of their inputs.
        activations: Option<Scheme>, Unset(ACTIVATION), Note::example("\"int8-token\"");
        /// Scheme of the KV cache.
        kv: Option<Kv>, Unset(KvText), Note::example("\"int8-head\"");
        /// Checkpoint format; the first that holds the schemes unless set.
        format: Option<Container>, Unset(FORMAT), Note::example("\"compressed-tensors\"");
        /// Layers that stay unquantized; comes before all rules.
        keep: Vec<Glob>, Globs, Note::example("[\"model.layers.0.*\"]");
        /// Exceptions for some layers; the first that matches counts.
        layers: Vec<LayerRule>, ListOf { item: Subtable(""), most: MAX_RULES, allowed: "[[layers]] tables" };
    }
}

options! {
    /// Exception for some layers.
    #[derive(Clone, Debug)]
    pub struct LayerRule {
        /// Names of modules, or globs in which `*` stands for any characters. Embedding and head need their full name.
        modules: Vec<Glob>, Globs, Note::needed("[\"*.down_proj\"]");
        /// Scheme of their weights; "keep" leaves them unquantized.
        weights: Option<Scheme>, SchemeOr("keep", WEIGHT), Note::needed("\"int8-channel\"");
        /// Method of these layers, in place of the recipe's.
        method: Option<&'static Registered>, Unset(METHOD), Note::example("\"gptq\"");
        /// Scheme of their inputs, with method rtn; "none" leaves them unquantized.
        activations: Option<Option<Scheme>>, Unset(SchemeOr("none", ACTIVATION)), Note::example("\"int8-token\"");
        /// Method with its options; `None` for the recipe's.
        own_method: Option<Arc<dyn Method>>;
    }
}

/// Lists the keys of recipe files in the order of pages, beside the tables of transforms and methods.
pub fn file_keys() -> Vec<Key> {
    let mut keys = FileKeys::default().keys();
    keys.rotate_left(RecipeOptions::default().keys().len());
    keys
}

#[cfg(test)]
mod tests {
    use mantissa_methods::rtn;

    use super::*;

    #[test]
    fn the_default_method_rounds_to_nearest() {
        assert_eq!(FileKeys::default().method.name, rtn::NAME);
        let method = file_keys().into_iter().find(|key| key.name == "method");
        assert_eq!(method.map(|key| key.default), Some(format!("\"{}\"", rtn::NAME)));
    }
}
