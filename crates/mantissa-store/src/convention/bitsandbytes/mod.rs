//! bitsandbytes (QLoRA, transformers, vLLM): NF4 and FP4 weights, and LLM.int8().
//!
//! 4 bits, for a module with weight `[N, K]`, flattened and cut into blocks of `B`: `weight` U8 `[ceil(N·K/2), 1]`, the first
//! code in the high nibble; `weight.absmax` F32 `[ceil(N·K/B)]`; `weight.quant_map` F32 `[16]`; and
//! `weight.quant_state.bitsandbytes__nf4` (or `__fp4`) U8, a JSON object as text. With double quantization `weight.absmax` holds
//! U8 codes of the signed dynamic map, `weight.nested_absmax` F32 one amax to 256 of them, `weight.nested_quant_map` F32 `[256]`
//! the map, and the JSON their mean. `w = map[code] · absmax`.
//!
//! LLM.int8(): `weight` I8 `[N, K]`, `SCB` F32 `[N]`, the amax of each row, `weight_format` U8 `[]` = 0. `w = code · SCB / 127`;
//! inputs are int8 per token, but for values of at least `llm_int8_threshold`.
//!
//! Source: bitsandbytes 0.50.2, `functional.py` (`QuantState`), `nn/modules.py`, `backends/default/ops.py`; Dettmers et al. 2022
//! (arXiv 2208.07339), 2023 (arXiv 2305.14314).

mod config;
mod read;
mod write;

pub use config::{Config, Kind, QUANT_METHOD};
pub(in crate::convention) use read::shape;
pub use write::{quantization_config, specs, store, tensors};

use mantissa_num::codebook::Book;
use mantissa_num::{Blocks, Code, RowName, Rule, Scheme};

/// Code books of 4 bits with their names here.
const BOOKS: [(Book, &str); 2] = [(Book::Nf4, "nf4"), (Book::Fp4Bnb, "fp4")];

/// Block sizes that the package's kernels have.
const BLOCK_SIZES: [u32; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Codes of the scales that share one of the level above.
const NESTED_BLOCK: u32 = 256;

/// What `SCB` is divided by to give the scale.
const INT8_LEVELS: f32 = 127.0;

/// The inputs of LLM.int8().
fn int8_input() -> Scheme {
    let mut scheme = Scheme::int_symmetric(8, Blocks::Row);
    scheme.encoder.rule = Rule::Restricted;
    Scheme { row: RowName::Token, ..scheme }
}

/// The weights of LLM.int8().
fn int8_weight() -> Scheme {
    let mut scheme = Scheme::int_symmetric(8, Blocks::Row);
    scheme.encoder.rule = Rule::Restricted;
    debug_assert_eq!(scheme.format.scale().map(|s| s.code), Some(Code::F32));
    scheme
}
