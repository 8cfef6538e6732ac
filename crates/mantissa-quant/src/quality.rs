//! `quality.json`: what an artifact is and what it lost, beside the weights.
//!
//! Everything in it can be found again: hashes of what went in and came out, the error of every tensor, and, where a text
//! was given, perplexity, KL and top-1 against the source with standard errors. Nothing in it depends on time, machine,
//! threads or places of files. [`mod@crate::verify`] holds it against what is there.

pub(crate) mod check;
mod figures;
mod hashes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_eval::Sequence;
use mantissa_model::Products;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Dtype, Error, FileDigest, TensorMeta, companion_path, json};
use serde::{Deserialize, Serialize};

pub use figures::{Evaluation, Figures};
pub(crate) use hashes::SourceHashes;

use crate::calibrate::CalibrationSet;
use crate::coverage::Coverage;
use crate::error::Result;
use crate::error_stats::ErrorReport;
use crate::fold::Folded;
use crate::plan::{Plan, Use};
use crate::report::LayerReport;

/// Name of the file in a folder; what follows the name of a single file in the name of its own.
pub const QUALITY_NAME: &str = "quality.json";

/// Largest `quality.json` read, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Version of the layout, and the only one that is read.
const VERSION: u32 = 1;

/// Digests by file name.
pub type Digests = BTreeMap<String, FileDigest>;

/// The contents of `quality.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Version of this layout.
    pub version: u32,
    /// Tool and version.
    pub tool: String,
    /// The recipe: its name, or the name of its file.
    pub recipe: String,
    /// Its method.
    pub method: String,
    /// Scheme of linear weights where no exception applies.
    pub weights: String,
    /// Scheme of their inputs.
    pub activations: Option<String>,
    /// Scheme of keys and values in the cache, where they are not stored as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// The container.
    pub container: String,
    /// Bits per weight of the quantized layers by their schemes, scales and zero points counted, these as wide as codes.
    pub linear_bits_per_weight: f64,
    /// Bits per weight of all tensors of these layers as the container stores them; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_stored_bits_per_weight: Option<f64>,
    /// Bits per parameter of all tensors of the output, embeddings and head included.
    pub bits_per_weight: f64,
    /// Bytes of those tensors.
    pub bytes: u64,
    /// Parameters of the model.
    pub parameters: u64,
    /// What went in and what came out.
    pub hashes: Hashes,
    /// What the method calibrated on.
    pub calibration: Option<TokenSet>,
    /// What the factors of products were rounded to while windows went through the model to be solved on, where not f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration_dtype: Option<String>,
    /// What methods did not see of it, and layers were held against rounding to nearest on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<TokenSet>,
    /// What it shows of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// What the artifact lost on a text.
    pub evaluation: Option<Figures>,
    /// Layers that are not stored or not quantized as the recipe asks; the layer says why.
    pub fallbacks: Vec<String>,
    /// Layers left as they are.
    pub kept: Vec<String>,
    /// What the user was told.
    pub notes: Vec<String>,
    /// The quantized layers.
    pub layers: Vec<LayerReport>,
    /// All other tensors.
    pub tensors: Vec<TensorReport>,
}

/// Digests of what went in and what came out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes {
    /// Of each weight file of the source, and of its `config.json`.
    pub source: Digests,
    /// SHA-256 of the recipe: of the bytes of its file, or of its name.
    pub recipe: String,
    /// Of each weight file written, and of their index.
    pub weights: Digests,
}

/// A tensor that is not the weight of a quantized layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// Its name in the source.
    pub tensor: String,
    /// How it is stored.
    pub scheme: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Error figures; absent where it was taken over byte for byte, or widened.
    pub error: Option<ErrorReport>,
}

impl TensorReport {
    /// Of a tensor that is copied, or changed by a transform and stored in its dtype.
    pub(crate) fn kept(meta: &TensorMeta, folded: &Folded<'_>) -> Self {
        let copied = Self::copied(meta);
        match folded.changes(&meta.name) {
            true => TensorReport { scheme: format!("{}, folded", copied.scheme), ..copied },
            false => copied,
        }
    }

    /// Of a tensor that is copied.
    pub(crate) fn copied(meta: &TensorMeta) -> Self {
        let scheme = match meta.dtype {
            Dtype::BF16 => "bf16".to_owned(),
            Dtype::F16 => "f16".to_owned(),
            Dtype::F32 => "f32".to_owned(),
            other => other.name().to_lowercase(),
        };
        TensorReport { tensor: meta.name.clone(), scheme, shape: meta.shape.clone(), error: None }
    }
}

/// Windows of tokens, identified by their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSet {
    /// What the user called it: a file name, and a key. Not part of the hash.
    pub name: String,
    /// SHA-256 over all windows: of each the number of ids, the index of the first id that is predicted, and the ids, all
    /// as little-endian u32.
    pub sha256: String,
    /// Number of windows.
    pub windows: usize,
    /// Number of ids in them.
    pub tokens: u64,
}

impl TokenSet {
    /// Of `sequences`.
    pub fn new(name: &str, sequences: &[Sequence]) -> Self {
        let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let window = |s: &Sequence| {
            let words = [word(s.tokens.len()), word(s.from)].into_iter().chain(s.tokens.iter().copied());
            words.flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
        };
        TokenSet {
            name: name.to_owned(),
            sha256: FileDigest::of_pieces(sequences.iter().map(window)).hex(),
            windows: sequences.len(),
            tokens: sequences.iter().map(|s| s.tokens.len() as u64).sum(),
        }
    }
}

/// What a run has found out beside its plan.
pub(crate) struct Found {
    pub(crate) layers: Vec<LayerReport>,
    pub(crate) tensors: Vec<TensorReport>,
    pub(crate) source: Digests,
    pub(crate) weights: Digests,
}

impl Quality {
    /// Of an output that `plan` made of `source`, not evaluated.
    pub(crate) fn new(plan: &Plan, source: &ModelFiles, found: Found) -> Self {
        let Found { layers, tensors, source: source_hashes, weights } = found;
        let (bytes, parameters) = (plan.output_bytes(), plan.config.parameters());
        // Notes may name files of the source by their place on this machine.
        let place = format!("{}/", source.dir().display());
        let fallbacks = layers.iter().filter(|layer| layer.fallback.is_some());
        Quality {
            version: VERSION,
            tool: concat!("mantissa ", env!("CARGO_PKG_VERSION")).to_owned(),
            recipe: plan.job.label(),
            method: plan.job.method_name(),
            weights: plan.weights.to_string(),
            activations: plan.activations.as_ref().map(ToString::to_string),
            kv: plan.cache(),
            container: plan.container.name().to_owned(),
            linear_bits_per_weight: plan.linear_bits_per_weight(),
            linear_stored_bits_per_weight: Some(plan.linear_stored_bits_per_weight()),
            bits_per_weight: bytes as f64 * 8.0 / parameters.max(1) as f64,
            bytes,
            parameters,
            hashes: Hashes { source: source_hashes, recipe: plan.job.sha256(), weights },
            calibration: plan.text().or(plan.text_for(Use::Cache)).map(CalibrationSet::identity),
            calibration_dtype: match plan.options.products {
                Products::F32 => None,
                rounded => Some(rounded.name().to_owned()),
            },
            coverage: plan.coverage.clone(),
            held_out: plan.held_out().map(|set| set.identity()),
            evaluation: None,
            fallbacks: fallbacks.map(|layer| layer.module.clone()).collect(),
            kept: plan.linears.iter().filter(|l| l.scheme.is_none()).map(|l| l.info.module.clone()).collect(),
            notes: plan.notes.iter().map(|note| note.replace(&place, "")).collect(),
            layers,
            tensors,
        }
    }

    /// Reads the file of the model folder or single file `artifact`; `None` where there is none.
    ///
    /// # Errors
    /// [`mantissa_store::Error`] where it cannot be read, is malformed or of another version.
    pub fn read(artifact: &Path) -> Result<Option<Self>> {
        let path = quality_path(artifact);
        if !path.exists() {
            return Ok(None);
        }
        let value = json::read_strict(&path, MAX_BYTES, QUALITY_NAME)?;
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        if version != Some(VERSION.into()) {
            let found = version.map_or_else(|| "no number".to_owned(), |v| v.to_string());
            let hint = "it was written by another version of mantissa";
            return Err(Error::field(&path, "version", found, VERSION.to_string(), hint).into());
        }
        let quality = serde_json::from_value(value);
        Ok(Some(quality.map_err(|e| {
            Error::field(&path, "layout", e.to_string(), "the fields of docs/reference/json.md", "")
        })?))
    }

    /// The text of the file.
    pub(crate) fn to_json(&self) -> Result<String> {
        let spell = |error: serde_json::Error| Error::Io {
            path: QUALITY_NAME.into(),
            operation: "spell as JSON",
            error: error.into(),
        };
        Ok(serde_json::to_string_pretty(self).map_err(spell)? + "\n")
    }
}

/// Where the `quality.json` of the model folder or single file `artifact` lies.
pub fn quality_path(artifact: &Path) -> PathBuf {
    companion_path(artifact, QUALITY_NAME)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_token_set_is_what_is_predicted_from_what() {
        let sequence = |tokens: &[u32], from| Sequence { tokens: tokens.to_vec(), from };
        let set = TokenSet::new("a.json:k", &[sequence(&[1, 2, 3], 1), sequence(&[4], 1)]);
        let words = [3u32, 1, 1, 2, 3, 1, 1, 4];
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        assert_eq!(set.sha256, FileDigest::of(&bytes).hex());
        assert_eq!((set.windows, set.tokens), (2, 4));
        let hash = |sequences: &[Sequence]| TokenSet::new("b", sequences).sha256;
        assert_eq!(
            hash(&[sequence(&[1, 2, 3], 1), sequence(&[4], 1)]),
            set.sha256,
            "the name does not matter"
        );
        assert_ne!(hash(&[sequence(&[1, 2, 3], 2), sequence(&[4], 1)]), set.sha256, "nor is only the text");
        assert_ne!(hash(&[sequence(&[1, 2], 1), sequence(&[3, 4], 1)]), set.sha256, "windows are");
    }

    #[test]
    fn paths_follow_from_the_artifact() {
        let path = |text: &str| quality_path(Path::new(text)).display().to_string();
        assert_eq!(path("nowhere/out"), "nowhere/out/quality.json");
        assert_eq!(path("nowhere/out.v2"), "nowhere/out.v2/quality.json");
        assert_eq!(path("nowhere/m.gguf"), "nowhere/m.gguf.quality.json");
    }
}
