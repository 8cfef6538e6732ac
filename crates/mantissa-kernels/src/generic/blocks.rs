//! The closed block formats of [`mantissa_num::codec`]: their searches and decoders, compiled for each level.

use mantissa_num::CodecId;
use mantissa_num::codec::{Codec, encode_with};
use mantissa_num::lanes::Lanes;

use super::ErrorSums;
use super::error::Running;
use crate::simd::Simd;

/// Elements decoded between checks: whole blocks of every codec, small enough for the first-level cache.
const PIECE: usize = 512;

#[inline(always)]
pub(crate) fn encode_blocks<L: Lanes>(
    simd: L,
    codec: CodecId,
    x: &[f32],
    importance: Option<&[f32]>,
    blocks: &mut [u8],
) {
    let sizes = whole_rows(codec, x, importance, blocks);
    encode_with(simd, sizes, x, importance, blocks);
}

/// [`encode_blocks`] as `mantissa-num` has compiled it, so that the searches are compiled once for no level.
pub(crate) fn encode_blocks_scalar(codec: CodecId, x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) {
    whole_rows(codec, x, importance, blocks).encode(x, importance, blocks);
}

/// Returns the codec; panics unless `x` and `blocks` hold equally many whole blocks, and rows whole blocks.
fn whole_rows(codec: CodecId, x: &[f32], importance: Option<&[f32]>, blocks: &[u8]) -> &'static Codec {
    let sizes = codec.codec();
    require_whole(sizes, x.len(), blocks.len());
    if let Some(row) = importance {
        let whole =
            !row.is_empty() && row.len().is_multiple_of(sizes.elements) && x.len().is_multiple_of(row.len());
        assert!(whole, "encode_blocks: {} weights for {} elements", row.len(), x.len());
    }
    sizes
}

#[inline(always)]
pub(crate) fn decode_blocks(codec: CodecId, blocks: &[u8], out: &mut [f32]) {
    let sizes = codec.codec();
    require_whole(sizes, out.len(), blocks.len());
    sizes.decode(blocks, out);
}

#[inline(always)]
pub(crate) fn block_error_sums<S: Simd>(simd: S, codec: CodecId, blocks: &[u8], x: &[f32]) -> ErrorSums {
    let sizes = codec.codec();
    require_whole(sizes, x.len(), blocks.len());
    let mut values = [0.0; PIECE];
    let mut sums = Running::new(simd);
    let pieces = blocks.chunks(PIECE / sizes.elements * sizes.bytes);
    for (x, blocks) in x.chunks(PIECE).zip(pieces) {
        let values = &mut values[..x.len()];
        sizes.decode(blocks, values);
        sums.add(simd, x, values);
    }
    sums.finish(simd)
}

fn require_whole(codec: &Codec, elements: usize, bytes: usize) {
    let n = elements / codec.elements;
    assert!(
        elements.is_multiple_of(codec.elements) && bytes == n * codec.bytes,
        "{elements} elements and {bytes} bytes are not blocks of {}",
        codec.name,
    );
}
