//! Attention of few queries over a paged, packed KV cache, one tile at a time: the keys and values of 64 tokens of one
//! key/value head are read once for all queries of its group, dequantized in registers.
//!
//! Floats are multiplied in f32. Integer codes are multiplied as integers: a query is rounded to two 8-bit digits for
//! 8-bit keys (an error of at most 2^-15 of its largest element) and to one for 4-bit keys (2^-8, a sixteenth of the
//! keys' own error); weights are rounded to 15 bits of the largest in the tile. The softmax is online, its sums f32.
//!
//! A query's result depends on its own values and on the tiles alone, not on the other queries, so it has the same
//! bits in any batch. Results have the same bits at every level.
//!
//! Levels: scalar, AVX2 (with F16C), AVX-512 with VNNI; AVX-512 without VNNI takes the AVX2 code. NEON, without and with
//! the dot product.

mod attend;
mod layout;
mod partial;
mod queries;
mod scores;
mod simd;
mod softmax;
#[cfg(test)]
mod tests;
mod values;

pub use layout::{TILE_TOKENS, Tile, TileFormat, TileRow};
pub use partial::combine_partials;
pub use queries::Queries;
pub use softmax::{Softmax, Visible};
