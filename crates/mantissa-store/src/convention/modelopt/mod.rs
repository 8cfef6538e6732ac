//! ModelOpt's unified Hugging Face checkpoints (TensorRT-LLM, vLLM, SGLang): `quantization_config` of `config.json` with
//! `quant_method: "modelopt"`, and `hf_quant_config.json`.
//!
//! For a module with weight `[N, K]`:
//!
//! | algorithm | `weight` | scales | input |
//! |---|---|---|---|
//! | FP8 | F8_E4M3 `[N, K]` | `weight_scale` F32 `[]` | `input_scale` F32 `[]`, for all tokens |
//! | FP8_PER_CHANNEL_PER_TOKEN | F8_E4M3 `[N, K]` | `weight_scale` F32 `[N]` | FP8, a scale per token |
//! | W4A16_AWQ | U8 `[N/2, K]`: two's complement, row 2r in the low nibble | `weight_scale` `[N, K/g]` | times `pre_quant_scale` `[K]` |
//! | NVFP4, W4A16_NVFP4 | U8 `[N, K/2]` | `weight_scale` F8_E4M3 `[N, K/16]`, `weight_scale_2` F32 `[]`, both factors | `input_scale` F32 `[]`, or none |
//! | MXFP8 | F8_E4M3 `[N, K]` | `weight_scale` U8 `[N, K/32]` (E8M0) | MXFP8 |
//!
//! Source: NVIDIA Model-Optimizer 0.47, `export/quant_utils.py`, `export/convert_hf_config.py`, `qtensor/*.py`.

mod config;
mod read;
mod write;

pub use config::{Algo, Config, FILE_NAME, QUANT_METHOD};
pub use write::{as_stored, hf_quant_config, quantization_config, specs, store, tensors};
