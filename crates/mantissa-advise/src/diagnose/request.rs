//! A model to examine, and what it is examined with.

use mantissa_eval::Sequence;
use mantissa_eval::tasks::Item;
use mantissa_model::{KvPolicy, Tokenizer};
use mantissa_store::convention::ModelFiles;

/// Model to examine, and what it is examined with.
pub struct Request<'a> {
    /// Files of the model.
    pub files: &'a ModelFiles,
    /// Text, tokenized.
    pub windows: &'a [Sequence],
    /// Calibration text, tokenized.
    pub calibration: Option<&'a [Sequence]>,
    /// Source of a quantized model.
    pub reference: Option<&'a ModelFiles>,
    /// Tokenizer, to show tokens.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Schemes of the KV cache to try.
    pub kv: &'a [KvPolicy],
    /// Items of the retrieval task, for schemes of the cache.
    pub retrieval: &'a [Item],
    /// Bound of the KL to the source, nats/token.
    pub max_kl: Option<f64>,
    /// Names for commands.
    pub names: Names,
    /// Threads.
    pub threads: usize,
}

/// Names of a request in commands, quoted for a shell.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Model.
    pub model: String,
    /// Model without its ending, for names of outputs.
    pub stem: String,
    /// Source; `SOURCE` if it is not known.
    pub source: String,
    /// Option that evaluates on the text, such as `--text T`.
    pub text: String,
    /// Option that calibrates on the text, such as `--calibration T`.
    pub calibrate: String,
    /// Scheme of the model's weights.
    pub weights: String,
    /// Command that makes the model again from its source; `None` without a source.
    pub again: Option<String>,
}
