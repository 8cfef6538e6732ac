//! `quality.json`: what an artifact is and what it lost, beside the weights.
//!
//! Everything in it can be found again: hashes of what went in and came out, the error of every tensor, and, where a text
//! was given, perplexity, KL and top-1 against the source with standard errors. Nothing in it depends on time, machine,
//! threads or places of files. [`mod@crate::verify`] holds it against what is there.

pub(crate) mod check;
pub(crate) mod figures;
pub(crate) mod hashes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_eval::Sequence;
use mantissa_store::{Dtype, Error, FileDigest, TensorMeta, companion_path, json};
use serde::{Deserialize, Deserializer, Serialize};

use crate::coverage::report::Coverage;
use crate::error_stats::ErrorReport;
use crate::report::LayerReport;

/// Name of the file in a folder; what follows the name of a single file in the name of its own.
pub const QUALITY_NAME: &str = "quality.json";

/// Largest `quality.json` read, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Version of the layout, and the only one that is read.
pub(crate) const VERSION: u32 = 1;

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
    /// Hashes of source and output.
    pub hashes: Hashes,
    /// Calibration set.
    pub calibration: Option<TokenSet>,
    /// Matmul operand dtype of calibration, if not f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration_dtype: Option<String>,
    /// Held-out part of it, on which layers were compared with RTN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<TokenSet>,
    /// Coverage of the calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// Quality loss on a text.
    pub evaluation: Option<Figures>,
    /// Layers that are not stored or not quantized as the recipe asks; the layer says why.
    pub fallbacks: Vec<String>,
    /// Layers left as they are.
    pub kept: Vec<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// The quantized layers.
    pub layers: Vec<LayerReport>,
    /// All other tensors.
    pub tensors: Vec<TensorReport>,
}

/// Digests of what went in and what came out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes {
    /// Digest of each weight file of the source, and of its `config.json`.
    pub source: Digests,
    /// SHA-256 of the recipe: of the bytes of its file, or of its name.
    pub recipe: String,
    /// Digest of each weight file written, and of their index.
    pub weights: Digests,
}

/// A tensor that is not the weight of a quantized layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// Its name in the source.
    pub tensor: String,
    /// Scheme in which it is stored.
    pub scheme: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Error figures; absent where it was taken over byte for byte, or widened.
    pub error: Option<ErrorReport>,
}

impl TensorReport {
    /// Describes a tensor that is copied.
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

/// Quality loss of an artifact on a text. Means are over predicted tokens, standard errors over windows ([`mantissa_eval`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// The text.
    pub text: TokenSet,
    /// Predicted tokens.
    pub predicted: u64,
    /// Mean loss, nats.
    pub nll: f64,
    /// Its standard error.
    #[serde(deserialize_with = "null_is_nan")]
    pub nll_se: f64,
    /// `exp(nll)`.
    pub ppl: f64,
    /// Mean KL(source ‖ artifact), nats.
    pub kl: f64,
    /// Its standard error.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_se: f64,
    /// 99th percentile over positions.
    pub kl_p99: f32,
    /// Share of positions at which both have the same most probable token.
    pub top1: f64,
    /// Its standard error.
    #[serde(deserialize_with = "null_is_nan")]
    pub top1_se: f64,
    /// Loss minus the source's.
    pub delta_nll: f64,
    /// Its paired standard error.
    #[serde(deserialize_with = "null_is_nan")]
    pub delta_nll_se: f64,
    /// KL(source ‖ source with its weights rounded to bf16), nats: what storing the model unquantized would lose. 0 for a
    /// bf16 source.
    pub noise_floor_kl: f64,
    /// Its standard error.
    #[serde(deserialize_with = "null_is_nan")]
    pub noise_floor_kl_se: f64,
}

/// A standard error that one position does not give is NaN, which JSON spells null.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Windows of tokens, identified by their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSet {
    /// Name that the user gave it: a file name, and a key. Not part of the hash.
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
    /// Identifies `sequences`.
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

impl Quality {
    /// Reads the file of the model folder or single file `artifact`; `None` where there is none.
    ///
    /// # Errors
    /// [`mantissa_store::Error`] where it cannot be read, is malformed or of another version.
    pub fn read(artifact: &Path) -> Result<Option<Self>, Error> {
        let path = quality_path(artifact);
        if !path.exists() {
            return Ok(None);
        }
        let value = json::read_strict(&path, MAX_BYTES, QUALITY_NAME)?;
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        if version != Some(VERSION.into()) {
            let found = version.map_or_else(|| "no number".to_owned(), |v| v.to_string());
            let hint = "it was written by another version of mantissa";
            return Err(Error::field(&path, "version", found, VERSION.to_string(), hint));
        }
        let quality = serde_json::from_value(value);
        Ok(Some(quality.map_err(|e| {
            Error::field(&path, "layout", e.to_string(), "the fields of docs/reference/json.md", "")
        })?))
    }

    /// The text of the file.
    pub(crate) fn to_json(&self) -> Result<String, Error> {
        let spell = |error: serde_json::Error| Error::Io {
            path: QUALITY_NAME.into(),
            operation: "spell as JSON",
            error: error.into(),
        };
        Ok(serde_json::to_string_pretty(self).map_err(spell)? + "\n")
    }
}

/// Path of the `quality.json` of the model folder or single file `artifact`.
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
