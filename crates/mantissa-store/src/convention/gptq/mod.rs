//! GPTQ (AutoGPTQ, GPTQModel, vLLM, transformers) and AutoRound's naming of the same tensors.
//!
//! For a module with weight `[N, K]`, codes of `b` bits and groups of `g` columns, `G = ceil(K/g)`: `qweight` I32 `[K·b/32, N]`
//! packed along K, `qzeros` I32 `[G, N·b/32]` packed along N, `scales` F16 `[G, N]`, and `g_idx` I32 `[K]`, the group of each
//! column (absent in AutoRound's files). `w[n, k] = scales[g_idx[k], n] · (q[n, k] - z[g_idx[k], n])`; `qzeros` holds `z - 1` in
//! `gptq` files (v1) and `z` in `gptq_v2`.
//!
//! Source: GPTQModel 7, `nn_modules/qlinear/__init__.py`, `utils/model.py`, `docs/gptq_planar.md`.

mod config;
mod read;
mod version;
mod write;

pub use config::{AUTO_ROUND, Config, Layer, Layout, QUANT_METHOD, packing_format};
pub use version::ZeroVersion;
pub use write::{FILE_NAME, Settings, in_own_order, quantization_config, specs, tensors};

pub(in crate::convention) use read::{centred, group_int, read_order, read_scales};
pub(in crate::convention) use write::int_groups;
