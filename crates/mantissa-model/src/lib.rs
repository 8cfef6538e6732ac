//! One decoder for all supported decoder-only language models, built from their `config.json`.
//!
//! An [`Architecture`] is a row of features, [`ModelConfig`] the checked configuration, and [`graph`] the list of
//! parameters (name, shape and role). [`Linear`] is a linear layer in any storage. [`Decoder`] is the model: a
//! forward pass over packed sequences for evaluation, and one through a [`KvCache`] for generation. Weights come
//! through [`WeightSource`], so checkpoints in any format and models in memory are read alike.
//!
//! Activations are f32. Memory is planned: [`Buffers::plan`] and [`KvCache::plan`] allocate, forward passes do not.
//! [`flow`] defines the computation of a layer once, for all owners of weights: a [`Layer`] here, an arena in
//! training. A decoder is `Sync`; callers run one [`Buffers`] per thread.
#![forbid(unsafe_code)]

// Layer: fields of a configuration, and sizes of blocks.
mod fields;
pub mod rope;
mod sizes;

// Layer: stored weights.
mod absorbed;
mod error;
mod factored;
mod input;
mod linear;
mod packed;
mod products;
mod simulated;
mod source;

// Layer: operators and operations of a layer, and the mixers that lower to them.
pub mod mixer;
mod operators;
mod program;

// Layer: description of a model.
pub mod config;

// Layer: formats of norms, keys, values and operands.
pub mod kv;
mod memory;
mod norm;
pub mod operands;

// Layer: blocks of a layer.
mod attention;
mod experts;
mod frame;
mod hyper;
mod indexer;
mod latent;
mod mlp;
mod streams;

// Layer: parameters and computation of a layer.
pub mod flow;
pub mod graph;

// Layer: whole models.
mod adapted;
mod buffers;
mod cache;
mod calibrate;
mod carried;
mod decoder;
mod embedding;
pub mod end_tokens;
mod layer;
mod model_config;

// Layer: text.
pub mod chat;
pub mod generate;
mod sampler;
mod sampling;
mod sampling_defaults;
pub mod tokenizer;

pub use adapted::Adapted;
pub use buffers::Buffers;
pub use cache::KvCache;
pub use calibrate::{KvCalibrationError, find_kv_levels};
pub use carried::Carried;
pub use chat::{ChatError, ChatTemplates, Message};
pub use config::{Activation, ConfigError, HeadNorms, ModelConfig, read_json};
pub use decoder::{Batch, Decoder, Hidden};
pub use embedding::{Embedding, LayerEmbeddings, Table, load_embedding};
pub use error::{ForwardError, LoadError};
pub use generate::{
    Decoding, GenerateError, GenerateOptions, Generated, PREFILL, Sampler, Sampling, StopReason, generate,
};
pub use graph::{FusedGroup, Half, LinearInfo, LinearInput, LinearKind, Role, StoredAs, TensorInfo};
pub use input::InputQuantizer;
pub use kv::{CacheInF32, KvParseError, KvPolicy, KvScheme, check_kv_levels};
pub use layer::{Layer, LayerParts, Observer, Passage, Place, linear_weight};
pub use linear::{LOW_RANK_TOKENS, Linear, add_extra, check_weight, forward_f32};
pub use mantissa_arch::Architecture;
pub use mantissa_arch::names::Names;
pub use mantissa_arch::wrapper::{TextPlace, Wrapper};
pub use memory::zeros;
pub use model_config::{
    Unlisted, config_notes, find_head, load_config, require_head, unlisted_layers, untie,
};
pub use norm::Norm;
pub use operands::AttentionOperands;
pub use products::Products;
pub use rope::{Rope, RopeScaling};
pub use sampling_defaults::{Recommended, SamplingDefaults};
pub use source::{MapSource, SourceView, WeightSource};
pub use tokenizer::{Bos, DecodeStream, TokenText, TokenTexts, Tokenizer, TokenizerError};
