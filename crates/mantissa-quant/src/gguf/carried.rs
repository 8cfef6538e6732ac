//! What a GGUF file takes from a GGUF source as it is: keys that the job does not decide, and tensors of no layer, such as
//! those of layers that predict further tokens.

use std::collections::BTreeSet;

use mantissa_model::{ModelConfig, Tokenizer};
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, Model};
use mantissa_store::gguf::{GgufTensorSpec, Value};

use super::parameters::parameters;
use crate::load::dropped;
use crate::plan::WeightJob;

/// Keys that only the writer of a file decides.
const DECIDED: [&str; 3] = ["general.alignment", "general.file_type", "general.quantization_version"];

/// Adds the keys of `source` to `metadata`: all of them if it has the same `architecture`, whose keys then keep their
/// values, else those of tokenizer and model.
pub(super) fn keys(
    metadata: &mut Vec<(String, Value)>,
    source: &Model,
    architecture: &'static Architecture,
    job: &WeightJob,
) {
    let same = is_same(source, architecture);
    // How weights were rounded before tells nothing of weights that are rounded again.
    let rounded = |key: &str| key.starts_with("quantize.") && !matches!(job, WeightJob::Convert { .. });
    let decided = |key: &str| DECIDED.contains(&key) || key.starts_with("split.") || rounded(key);
    let of_model = |key: &str| key.starts_with("tokenizer.") || key.starts_with("general.");
    for (key, value) in source.metadata().iter().filter(|(key, _)| !decided(key)) {
        let own = key.strip_prefix(architecture.name).is_some_and(|rest| rest.starts_with('.'));
        match metadata.iter_mut().find(|(known, _)| known == key) {
            Some((_, known)) if same && own => *known = value.clone(),
            Some(_) => {}
            None if same || of_model(key) => metadata.push((key.to_owned(), value.clone())),
            None => {}
        }
    }
}

fn is_same(source: &Model, architecture: &Architecture) -> bool {
    source.architecture().is_some_and(|found| found.name == architecture.name)
}

/// Lists the tensors of `source` that no parameter of the model is and that are not `declared` yet.
pub(super) fn tensors(
    source: &Model,
    architecture: &'static Architecture,
    config: &ModelConfig,
    declared: &[GgufTensorSpec],
) -> Vec<GgufTensorSpec> {
    if !is_same(source, architecture) {
        return Vec::new();
    }
    let names = parameters(config).into_iter().map(|info| info.name).collect::<Vec<_>>();
    let mut known: BTreeSet<String> =
        names.iter().filter_map(|name| source.place(name).map(|place| place.tensor)).collect();
    known.extend(
        names.iter().filter_map(|name| source.joined(name)).flat_map(|joined| joined.names().to_vec()),
    );
    known.extend(declared.iter().map(|spec| spec.name.clone()));
    let used = |name: &str| {
        let weight = name.strip_suffix(".scale").or(name.strip_suffix(".input_scale"));
        known.contains(name) || weight.is_some_and(|module| known.contains(&format!("{module}.weight")))
    };
    let others = source.tensors().iter().filter(|tensor| !used(&tensor.name));
    others.map(|tensor| GgufTensorSpec::new(tensor.name.clone(), tensor.ty, tensor.shape.clone())).collect()
}

/// Returns a note on a tokenizer that is kept although this program cannot read it.
pub(super) fn note_on_kept_tokenizer(source: &ModelFiles) -> Option<String> {
    let named = source.gguf()?.metadata().get("tokenizer.ggml.tokens").is_some();
    let error = dropped(Tokenizer::load(source.dir())).err().filter(|_| named)?;
    Some(format!("the tokenizer is kept as it is and not checked: {error}; the file runs on token ids here"))
}
