//! compressed-tensors (llm-compressor, vLLM): `quantization_config` of `config.json` and the tensors it describes.
//!
//! Source: compressed-tensors 0.18-0.20, `config/base.py`, `compressors/*/base.py`, `quantization/quant_{config,args}.py`.

mod config;
mod read;
mod transform;
mod write;

pub use config::{Args, Config, Group, PackFormat};
pub use transform::rotated_inputs;
pub use write::{pack_format, quantization_config, specs, tensors};
