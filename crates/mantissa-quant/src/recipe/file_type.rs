//! llama.cpp's file types for the config of a model.

use mantissa_arch::gguf::DecoderSizes;
use mantissa_model::ModelConfig;
use mantissa_num::CodecId;

pub use mantissa_arch::gguf::{FILE_TYPES, FileType, TensorRole, stored_type};

/// Returns the type that a file type gives a tensor of a model; `importance` is true if there is an importance matrix.
pub fn chosen(ty: FileType, config: &ModelConfig, part: TensorRole, importance: bool) -> CodecId {
    let sizes = DecoderSizes {
        layers: config.num_hidden_layers,
        heads: config.num_attention_heads,
        kv_heads: config.num_key_value_heads,
    };
    ty.choose(sizes, part, importance)
}
