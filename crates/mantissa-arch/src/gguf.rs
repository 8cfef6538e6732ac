//! Architectures of GGUF files: what llama.cpp's converter changes and its loaders require, names of tensors, order of rows;
//! its file types.

mod architecture;
mod base;
mod file_type;
mod joined;
mod names;
mod order;
mod recurrence;

pub use architecture::{
    Architecture, Bias, Experts, Fixed, FixedStreams, Indexers, LocalTheta, Presence, Rows, Split, Stored,
    Unrotated, Windows, Yarn,
};
pub use base::{ATTENTION_BIAS, MLP_BIAS, PLAIN, QKV};
pub use file_type::{DecoderSizes, FILE_TYPES, FileType, TensorRole, stored_type};
pub use joined::{Joined, JoinedPart};
pub use names::{Place, hf_name, layer, place, stored_name, text_name};
pub use order::{DeltaHeads, Moved, RowOrder, to_gguf_order, to_hf_order};
pub use recurrence::{LayerTypes, MixerLayers, Recurrence, Stated};
