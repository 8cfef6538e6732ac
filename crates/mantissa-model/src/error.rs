//! What can go wrong with a model: loading it, and running it.

use mantissa_num::TensorError;
use mantissa_store::ErrorClass;

use crate::config::ConfigError;

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A field of a configuration file.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight file.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// There is no configuration to build from.
    #[error(
        "{location}: found no config.json, allowed a model folder with one; name the folder, not one file of it"
    )]
    NoConfig {
        /// Where it was looked for.
        location: String,
    },
    /// A tensor is not there.
    #[error(
        "{location}: tensor \"{tensor}\": found nothing, allowed a tensor of shape {shape:?}; the config asks for it"
    )]
    MissingTensor {
        /// Where it was looked for.
        location: String,
        /// Its name.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor does not have the shape that the configuration requires.
    #[error("{location}: tensor \"{tensor}\": found shape {found:?}, allowed {expected:?}")]
    Shape {
        /// Where it is.
        location: String,
        /// Its name.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape required.
        expected: Vec<usize>,
    },
    /// The parts of a quantized weight do not fit together.
    #[error("linear \"{module}\": {error}")]
    Weight {
        /// The linear layer.
        module: String,
        /// What does not fit.
        error: TensorError,
    },
    /// What stands around a weight does not fit it.
    #[error("linear \"{module}\": {error}")]
    Transform {
        /// The linear layer.
        module: String,
        /// What does not fit.
        error: mantissa_num::stored::MisfitError,
    },
    /// A linear layer's input is to be quantized in a way that one token at a time cannot be.
    #[error("linear \"{module}\": input quantization: found {scheme} with {given}, allowed {allowed}")]
    InputScheme {
        /// The linear layer.
        module: String,
        /// The scheme.
        scheme: String,
        /// The stored scale that came with it.
        given: String,
        /// What could be done.
        allowed: &'static str,
    },
    /// Operands of attention cannot be rounded so.
    #[error("attention operands: found {operands}, allowed {allowed}")]
    AttentionOperands {
        /// The operands.
        operands: String,
        /// What could be done.
        allowed: &'static str,
    },
    /// Keys or values cannot be cached so.
    #[error("KV cache: found {scheme}, allowed {allowed}")]
    KvScheme {
        /// The scheme or policy.
        scheme: String,
        /// What could be done.
        allowed: &'static str,
    },
    /// A planned size does not fit into memory.
    #[error(
        "{what}: found no memory for {bytes} bytes, allowed what is free; shorten the context or the batch"
    )]
    Memory {
        /// What was planned.
        what: &'static str,
        /// Its size.
        bytes: u64,
    },
    /// A context is longer than the model allows.
    #[error("context: found {needed} tokens, allowed {allowed} (max_position_embeddings)")]
    Context {
        /// Tokens asked for.
        needed: usize,
        /// Tokens that the model was made for.
        allowed: usize,
    },
}

impl LoadError {
    /// Who must act on it.
    pub fn class(&self) -> ErrorClass {
        match self {
            LoadError::Store(error) => error.class(),
            LoadError::Memory { .. } => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

/// Why a forward pass was refused. The input is at fault in every case.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// A token id is no row of the embedding.
    #[error("token {index}: found id {token}, allowed 0 to {}; the tokens were made with another tokenizer", .vocab_size - 1)]
    Vocabulary {
        /// Index in the batch.
        index: usize,
        /// The id.
        token: u32,
        /// Number of rows.
        vocab_size: usize,
    },
    /// The lengths of a batch's sequences do not add up to its tokens.
    #[error("batch: found lengths that add up to {sum}, allowed {tokens}, the number of tokens")]
    Lengths {
        /// Their sum.
        sum: usize,
        /// Tokens.
        tokens: usize,
    },
    /// More was asked for than was planned.
    #[error("{what}: found {needed}, allowed {planned}; plan more")]
    Plan {
        /// Which size.
        what: &'static str,
        /// What is needed.
        needed: usize,
        /// What was planned.
        planned: usize,
    },
    /// Buffers or a cache were planned for another model.
    #[error("{what}: found sizes planned for another model, allowed those of this one")]
    OtherModel {
        /// Buffers or cache.
        what: &'static str,
    },
    /// A linear layer's input could not be quantized.
    #[error("input of linear \"{module}\": {error}")]
    Input {
        /// The linear layer.
        module: String,
        /// What is wrong with it.
        error: TensorError,
    },
    /// Keys or values have no code in the cache.
    #[error("{what} of the KV cache: {error}")]
    Cache {
        /// Keys or values.
        what: &'static str,
        /// What is wrong with them.
        error: TensorError,
    },
    /// No logit is a number.
    #[error(
        "logits after token {position}: found only NaN, allowed numbers; the weights or an activation are broken"
    )]
    NoLogits {
        /// Position of the token they follow.
        position: usize,
    },
}
