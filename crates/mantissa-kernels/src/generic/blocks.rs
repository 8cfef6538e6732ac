//! The closed block formats of [`mantissa_num::codec`]: their searches, compiled for each level.

use mantissa_num::CodecId;
use mantissa_num::codec::encode_with;
use mantissa_num::lanes::Lanes;

#[inline(always)]
pub(crate) fn encode_blocks<L: Lanes>(
    simd: L,
    codec: CodecId,
    x: &[f32],
    importance: Option<&[f32]>,
    blocks: &mut [u8],
) {
    let sizes = codec.codec();
    let n = x.len() / sizes.elements;
    assert!(
        x.len().is_multiple_of(sizes.elements) && blocks.len() == n * sizes.bytes,
        "encode_blocks: {} elements and {} bytes are not blocks of {}",
        x.len(),
        blocks.len(),
        sizes.name,
    );
    if let Some(row) = importance {
        let whole =
            !row.is_empty() && row.len().is_multiple_of(sizes.elements) && x.len().is_multiple_of(row.len());
        assert!(whole, "encode_blocks: {} weights for {} elements", row.len(), x.len());
    }
    encode_with(simd, sizes, x, importance, blocks);
}
