//! `quality.json`: description and measured quality loss of an artifact, stored beside its weights.
//!
//! It holds hashes of inputs and outputs and the error of every tensor. With an evaluation text it also holds
//! perplexity, KL divergence and top-1 agreement with the source, with standard errors. All of it is reproducible: it
//! does not depend on time, machine, threads or file paths. [`mod@crate::verify`] compares it with the files.

mod coverage;
mod share;
mod task_score;
mod verification;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_eval::{ContextKl, Percentile, Sequence};
use mantissa_num::page_command;
use mantissa_store::{Dtype, Error, FileDigest, TensorMeta, companion_path, json, regular};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::error_stats::ErrorReport;
use crate::report::LayerReport;

pub use coverage::{Coverage, InputCoverage, Traffic};
pub use share::{Kept, QuantizedShare, SchemeShare};
pub use task_score::TaskScore;
pub use verification::Verification;

/// File name in a folder; suffix of the name for a single file.
pub const QUALITY_NAME: &str = "quality.json";

/// Size limit of `quality.json`, in bytes.
const MAX_BYTES: u64 = 64 << 20;

/// Ending of the scheme of an unquantized tensor that was trained with the scales.
pub(crate) const TRAINED: &str = ", trained";

/// Version of the layout; no other is read.
pub(crate) const VERSION: u32 = 1;

/// Digests by file name.
pub type Digests = BTreeMap<String, FileDigest>;

/// Contents of `quality.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quality {
    /// Version of this layout.
    pub version: u32,
    /// Name and version of the tool.
    pub tool: String,
    /// Name of the recipe, or of its file.
    pub recipe: String,
    /// Name of the method.
    pub method: String,
    /// Scheme of linear weights where no exception applies.
    pub weights: String,
    /// Scheme of inputs.
    pub activations: Option<String>,
    /// Scheme of keys and values in the cache, if quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// Container.
    pub container: String,
    /// Bits per weight of the quantized layers by their schemes, including scales and zero points (as wide as codes).
    pub linear_bits_per_weight: f64,
    /// Bits per weight of all stored tensors of these layers; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_stored_bits_per_weight: Option<f64>,
    /// Bits per parameter of all output tensors, including embeddings and head.
    pub bits_per_weight: f64,
    /// Bytes of these tensors in the written files.
    pub bytes: u64,
    /// Bytes that the plan expected before work; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_bytes: Option<u64>,
    /// Number of parameters of the model, towers and other parts included.
    pub parameters: u64,
    /// Share of the parameters that is quantized, with the expected bytes by scheme and what stays unquantized; `None`
    /// in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<QuantizedShare>,
    /// Format of the source, if it was quantized itself: its dequantized weights are the reference of all figures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_format: Option<String>,
    /// Hashes of source and output.
    pub hashes: Hashes,
    /// Calibration set.
    pub calibration: Option<TokenSet>,
    /// Matmul operand dtype of calibration, if not f32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calibration_dtype: Option<String>,
    /// True if every calibration token ran through every expert.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub route_all_experts: bool,
    /// Held-out windows, on which layers were compared with RTN.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_out: Option<TokenSet>,
    /// Coverage of the calibration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<Coverage>,
    /// Quality loss on a text.
    pub evaluation: Option<Figures>,
    /// Accuracy on tasks, compared with the source; empty without tasks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tasks: Vec<TaskScore>,
    /// Layers not stored or quantized as the recipe asks; the layer's report has the reason.
    pub fallbacks: Vec<String>,
    /// Layers left unquantized.
    pub kept: Vec<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Reports of the quantized layers.
    pub layers: Vec<LayerReport>,
    /// Reports of embedding and head, if they are quantized.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tables: Vec<LayerReport>,
    /// All other tensors.
    pub tensors: Vec<TensorReport>,
    /// Work that makes the same weights again; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rebuild: Option<Recorded>,
}

/// Work that makes the same weights again, without the places of source and output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Recorded {
    /// Command line, in files of earlier versions.
    Line(CommandLine),
    /// Serialized job with its name and version.
    Job(Map<String, Value>),
}

/// Command line that makes the same weights again, as earlier versions recorded it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandLine {
    /// Name of the command.
    pub command: String,
    /// Options that decide the bytes, each `--name` or `--name=value`; files by their names without folders.
    pub arguments: Vec<String>,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Text of the recipe file, if the recipe was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<String>,
}

/// Digests of source, recipe and output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hashes {
    /// Digests of the source's weight files and of its `config.json`.
    pub source: Digests,
    /// SHA-256 of the recipe: of its file, or of its name.
    pub recipe: String,
    /// Digests of the written weight files and of their index.
    pub weights: Digests,
}

/// A tensor that is not the weight of a quantized layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorReport {
    /// Name in the source.
    pub tensor: String,
    /// Name of the stored scheme.
    pub scheme: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Error figures; `None` if the tensor was copied or widened.
    pub error: Option<ErrorReport>,
}

impl TensorReport {
    /// Describes a copied tensor.
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

/// Quality loss of an artifact on a text. Means are over predicted tokens, standard errors over windows
/// ([`mantissa_eval`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figures {
    /// Text.
    pub text: TokenSet,
    /// Number of predicted tokens.
    pub predicted: u64,
    /// Mean loss in nats per token.
    pub nll: f64,
    /// Standard error of `nll`.
    #[serde(deserialize_with = "null_is_nan")]
    pub nll_se: f64,
    /// Perplexity, `exp(nll)`.
    pub ppl: f64,
    /// Mean KL(source ‖ artifact) in nats per token.
    pub kl: f64,
    /// Standard error of `kl`.
    #[serde(deserialize_with = "null_is_nan")]
    pub kl_se: f64,
    /// 99th percentile of KL over positions.
    pub kl_p99: f32,
    /// Percentiles of KL over positions; empty in files of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kl_percentiles: Vec<Percentile>,
    /// Mean KL by the length of the context; empty in files of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kl_by_context: Vec<ContextKl>,
    /// Size of the loss in one word ([`mantissa_eval::verdict`]); `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Top-1 agreement: share of positions at which both predict the same token.
    pub top1: f64,
    /// Standard error of `top1`.
    #[serde(deserialize_with = "null_is_nan")]
    pub top1_se: f64,
    /// Δ loss: loss minus the source's.
    pub delta_nll: f64,
    /// Paired standard error of `delta_nll`.
    #[serde(deserialize_with = "null_is_nan")]
    pub delta_nll_se: f64,
    /// KL(source ‖ source with weights rounded to bf16), nats per token: the loss of storing the model in bf16. 0 for a
    /// bf16 source.
    pub noise_floor_kl: f64,
    /// Standard error of `noise_floor_kl`.
    #[serde(deserialize_with = "null_is_nan")]
    pub noise_floor_kl_se: f64,
    /// `kl` with the embedding and head of the source, if the recipe quantizes one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_without_tables: Option<f64>,
    /// Note on the errors, if they are no standard errors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Deserializes null as NaN: the standard error of a single position is NaN, which JSON cannot express.
fn null_is_nan<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Windows of tokens, identified by their ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenSet {
    /// Name that the user gave: a file name and a key. Not part of the hash.
    pub name: String,
    /// SHA-256 over all windows: number of ids, index of the first predicted id, and the ids, all as little-endian u32.
    pub sha256: String,
    /// Number of windows.
    pub windows: usize,
    /// Number of ids.
    pub tokens: u64,
    /// SHA-256 of the text itself, if it is part of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text_sha256: Option<String>,
}

impl TokenSet {
    /// Describes `sequences` under `name`.
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
            text_sha256: None,
        }
    }
}

impl Quality {
    /// Reads the file of the model folder or single file `artifact`; `None` if there is none.
    ///
    /// # Errors
    /// [`mantissa_store::Error`] if the file cannot be read, is malformed or has another version.
    pub fn read(artifact: &Path) -> Result<Option<Self>, Error> {
        regular::present(Self::read_file(&quality_path(artifact)))
    }

    /// Reads `path`, or the file of the artifact `path`.
    ///
    /// # Errors
    /// As [`read`](Self::read), and if there is none.
    pub fn read_at(path: &Path) -> Result<Self, Error> {
        let itself = !path.is_dir() && path.extension().is_some_and(|extension| extension == "json");
        if itself { Self::read_file(path) } else { Self::read_file(&quality_path(path)) }
    }

    fn read_file(path: &Path) -> Result<Self, Error> {
        let value = json::read_strict(path, MAX_BYTES, QUALITY_NAME)?;
        let version = value.get("version").and_then(serde_json::Value::as_u64);
        if version != Some(VERSION.into()) {
            let got = version.map_or_else(|| "no number".to_owned(), |v| v.to_string());
            let hint = "it was written by another version of mantissa";
            return Err(Error::field(path, "version", got, VERSION.to_string(), hint));
        }
        serde_json::from_value(value).map_err(|e| {
            let fields = format!("the fields of quality.json ({})", page_command("docs/reference/json.md"));
            Error::field(path, "layout", e.to_string(), fields, "")
        })
    }

    /// Returns the contents of the file.
    pub(crate) fn to_json(&self) -> Result<String, Error> {
        let fault = |error: serde_json::Error| Error::Io {
            path: QUALITY_NAME.into(),
            operation: "serialize as JSON",
            error: error.into(),
        };
        Ok(serde_json::to_string_pretty(self).map_err(fault)? + "\n")
    }
}

/// Ending that a signature adds to the name of the signed file, as minisign does.
pub const SIGNATURE_ENDING: &str = ".minisig";

/// Returns the path of the signature of the `quality.json` of the model folder or single file `artifact`.
pub fn signature_path(artifact: &Path) -> PathBuf {
    let mut path = quality_path(artifact).into_os_string();
    path.push(SIGNATURE_ENDING);
    path.into()
}

/// Returns the path of the `quality.json` of the model folder or single file `artifact`.
pub fn quality_path(artifact: &Path) -> PathBuf {
    companion_path(artifact, QUALITY_NAME)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_covers_windows_and_predicted_positions() {
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
