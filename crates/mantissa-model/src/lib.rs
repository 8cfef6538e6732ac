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

mod adapted;
pub mod architecture;
mod attention;
mod buffers;
mod cache;
mod carried;
pub mod chat;
pub mod config;
mod decoder;
mod embedding;
mod error;
mod experts;
mod factored;
pub mod flow;
pub mod generate;
pub mod graph;
mod hyper;
mod indexer;
mod input;
pub mod kv;
mod latent;
mod layer;
mod linear;
mod memory;
pub mod mixer;
mod mlp;
mod norm;
pub mod operands;
mod packed;
mod products;
pub mod rope;
mod sampler;
mod simulated;
mod source;
mod streams;
pub mod tokenizer;

pub use adapted::Adapted;
pub use architecture::Architecture;
pub use architecture::wrapper::{TextPlace, Wrapper};
pub use buffers::Buffers;
pub use cache::KvCache;
pub use carried::{Carried, LayerEmbeddings};
pub use chat::{ChatError, ChatTemplates, Message};
pub use config::{Activation, ConfigError, HeadNorms, ModelConfig, read_json};
pub use decoder::{Batch, Decoder, Hidden, load_config};
pub use embedding::{Embedding, Table, load_embedding};
pub use error::{ForwardError, LoadError};
pub use generate::{
    Decoding, GenerateError, GenerateOptions, Generated, PREFILL, Sampler, Sampling, StopReason, generate,
};
pub use graph::{FusedGroup, LinearInfo, LinearInput, LinearKind, Role, StoredAs, TensorInfo};
pub use input::InputQuantizer;
pub use kv::{
    CacheInF32, KvCalibrationError, KvParseError, KvPolicy, KvScheme, check_kv_levels, find_kv_levels,
};
pub use layer::{Layer, LayerParts, Observer, Passage, Place, linear_weight};
pub use linear::{LOW_RANK_TOKENS, Linear, add_extra, check_weight, forward_f32};
pub use memory::zeros;
pub use norm::Norm;
pub use operands::AttentionOperands;
pub use products::Products;
pub use rope::{Rope, RopeScaling};
pub use source::{MapSource, SourceView, WeightSource};
pub use tokenizer::{Bos, DecodeStream, TokenText, Tokenizer, TokenizerError};
