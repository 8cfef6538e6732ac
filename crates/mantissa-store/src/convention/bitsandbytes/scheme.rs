//! Schemes that the kernels of bitsandbytes compute with.

use mantissa_num::codebook::Book;
use mantissa_num::{Blocks, Code, RowKind, Rule, Scheme};

/// Code books of 4 bits with their names here.
pub(super) const BOOKS: [(Book, &str); 2] = [(Book::Nf4, "nf4"), (Book::Fp4Bnb, "fp4")];

/// Block sizes of the package's kernels.
pub(super) const BLOCK_SIZES: [u32; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];

/// Scale codes that share one nested scale.
pub(super) const NESTED_BLOCK: u32 = 256;

/// Divisor of `SCB` that gives the scale.
pub(super) const INT8_LEVELS: f32 = 127.0;

/// Inputs of LLM.int8().
pub(super) fn int8_input() -> Scheme {
    let mut scheme = Scheme::int_symmetric(8, Blocks::Row);
    scheme.encoder.rule = Rule::Restricted;
    scheme.with_rows(RowKind::Token)
}

/// Weights of LLM.int8().
pub(super) fn int8_weight() -> Scheme {
    let mut scheme = Scheme::int_symmetric(8, Blocks::Row);
    scheme.encoder.rule = Rule::Restricted;
    debug_assert_eq!(scheme.format.scale().map(|s| s.code), Some(Code::F32));
    scheme
}
