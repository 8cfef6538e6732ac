//! Errors of loading a model and of running it.

use mantissa_num::TensorError;
use mantissa_store::ErrorClass;

use crate::fields::ConfigError;

/// Error of loading a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A field of a configuration file is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight file cannot be read.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// There is no configuration.
    #[error(
        "{location}: expected a model folder with a config.json, got none; fix: name the folder, not a file in it"
    )]
    NoConfig {
        /// Place that was searched.
        location: String,
    },
    /// A tensor is missing.
    #[error("{location}: tensor \"{tensor}\": expected shape {shape:?} as in the config, got no such tensor")]
    MissingTensor {
        /// Place that was searched.
        location: String,
        /// Its name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// There is no head: neither a tensor nor a configuration that ties it to the embedding.
    #[error(
        "{file}: tie_word_embeddings: expected true, or a tensor \"{tensor}\", got {found} and no such tensor; fix: set tie_word_embeddings to true in this file if the head is the embedding, or fetch the weights that are missing"
    )]
    NoHead {
        /// The configuration.
        file: String,
        /// Name of the missing tensor.
        tensor: String,
        /// Value of the field.
        found: String,
    },
    /// A tensor does not have the shape that the configuration requires.
    #[error("{location}: tensor \"{tensor}\": expected shape {expected:?}, got {found:?}")]
    Shape {
        /// Place of the tensor.
        location: String,
        /// Its name.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape required.
        expected: Vec<usize>,
    },
    /// A tensor of indices holds one that is too large, or negative.
    #[error("{location}: tensor \"{tensor}\": expected integers from 0 to less than {below}, got {found}")]
    Integer {
        /// Place of the tensor.
        location: String,
        /// Its name.
        tensor: String,
        /// The value.
        found: String,
        /// Number that all values are less than.
        below: u64,
    },
    /// The parts of a quantized weight do not fit together.
    #[error("linear \"{module}\": {error}")]
    Weight {
        /// The linear layer.
        module: String,
        /// Part that does not fit.
        error: TensorError,
    },
    /// A transform or side tensor does not fit its weight.
    #[error("linear \"{module}\": {error}")]
    Transform {
        /// The linear layer.
        module: String,
        /// Part that does not fit.
        error: mantissa_num::stored::MisfitError,
    },
    /// A linear layer's input quantization cannot be done token by token.
    #[error("linear \"{module}\": input quantization: expected {allowed}, got {scheme} with {given}")]
    InputScheme {
        /// The linear layer.
        module: String,
        /// The scheme.
        scheme: String,
        /// Stored scale that came with it.
        given: String,
        /// Values supported.
        allowed: &'static str,
    },
    /// An adapter does not fit the model.
    #[error("{adapter}: {what}: expected {allowed}, got {found}; fix: {fix}")]
    Adapter {
        /// The adapter's folder.
        adapter: String,
        /// Module or tensor of the adapter.
        what: String,
        /// Values that would fit.
        allowed: String,
        /// Value found.
        found: String,
        /// Way out.
        fix: &'static str,
    },
    /// Operands of attention cannot be rounded as requested.
    #[error("attention operands: expected {allowed}, got {operands}")]
    AttentionOperands {
        /// The operands.
        operands: String,
        /// Values supported.
        allowed: &'static str,
    },
    /// Keys or values cannot be cached as requested.
    #[error("KV cache: expected {allowed}, got {scheme}")]
    KvScheme {
        /// The scheme or policy.
        scheme: String,
        /// Values supported.
        allowed: &'static str,
    },
    /// Tokens cannot be proposed to a model, or by it.
    #[error(
        "draft model: expected models in which every layer has attention, got {mixer} layers, whose state cannot be cut back; fix: run without --draft"
    )]
    Speculation {
        /// Name of the recurrent mixer.
        mixer: &'static str,
    },
    /// A planned size does not fit into memory.
    #[error("{what}: expected {bytes} bytes of free memory, got less; fix: shorten the context or the batch")]
    Memory {
        /// Object that was planned.
        what: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// A context is longer than the model allows.
    #[error("context: expected at most {allowed} tokens (max_position_embeddings), got {needed} tokens")]
    Context {
        /// Tokens requested.
        needed: usize,
        /// Longest context of the model.
        allowed: usize,
    },
}

impl LoadError {
    /// Class of the error, for the exit code.
    pub fn class(&self) -> ErrorClass {
        match self {
            LoadError::Store(error) => error.class(),
            LoadError::Memory { .. } => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

/// Error of a forward pass. The input is at fault in every case.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// A token id is outside the vocabulary.
    #[error("token {index}: expected ids from 0 to {}, got {token}; the tokens are from another tokenizer", .vocab_size - 1)]
    Vocabulary {
        /// Index in the batch.
        index: usize,
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The lengths of a batch's sequences do not add up to its tokens.
    #[error("batch: expected lengths that add up to {tokens}, the number of tokens, got {sum}")]
    Lengths {
        /// Sum of the lengths.
        sum: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A pass is larger than planned.
    #[error("{what}: expected at most {planned} as planned, got {needed}")]
    Plan {
        /// Name of the size.
        what: &'static str,
        /// Size needed.
        needed: usize,
        /// Size planned.
        planned: usize,
    },
    /// Buffers or a cache were planned for another model.
    #[error("{what}: expected sizes planned for this model, got those of another")]
    OtherModel {
        /// Buffers or cache.
        what: &'static str,
    },
    /// A linear layer's input could not be quantized.
    #[error("input of linear \"{module}\": {error}")]
    Input {
        /// The linear layer.
        module: String,
        /// Underlying error.
        error: TensorError,
    },
    /// Keys or values have no code in the cache.
    #[error("{what} of the KV cache: {error}")]
    Cache {
        /// Keys or values.
        what: &'static str,
        /// Underlying error.
        error: TensorError,
    },
    /// All logits are NaN.
    #[error(
        "logits after token {position}: expected numbers, got only NaN; the weights or an activation are broken"
    )]
    NoLogits {
        /// Position of the token before them.
        position: usize,
    },
}
