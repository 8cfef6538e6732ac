//! Rows of weights whose codes are floats.

use mantissa_kernels::packed::{FloatCode, FloatRows};
use mantissa_num::{Affine, Blocks, Code, Codes, Format, Offset, Quantized};
use mantissa_store::convention::Weight;

/// Makes rows of a dense weight; `None` if memory does not hold it.
pub(super) fn dense(weight: &Weight, rows: usize, cols: usize) -> Option<FloatRows> {
    let (code, bytes): (_, Vec<u8>) = match weight {
        Weight::F32(values) => (FloatCode::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Weight::Bf16(bits) => (FloatCode::Bf16, bits.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Weight::F16(bits) => (FloatCode::F16, bits.iter().flat_map(|x| x.to_le_bytes()).collect()),
        Weight::Quantized(_) => return None,
    };
    FloatRows::new(code, (rows, cols), &bytes, usize::MAX, vec![1.0; if cols == 0 { 0 } else { rows }])
}

/// Makes rows of 8-bit or narrower floats; `None` for other codes, and inside if memory does not hold them.
pub(super) fn minifloats(q: &Quantized) -> Option<Option<FloatRows>> {
    let Format::Affine(Affine { code: Code::Float(float), offset: Offset::None, .. }) = &q.format else {
        return None;
    };
    let Codes::U8(codes) = &q.codes else { return None };
    // Codes that the way through f16 would read as numbers.
    let is_special = |code: u8| !float.decode(code.into()).is_finite();
    if float.bits() > 8 || float.exponent_bits > 5 || codes.iter().any(|code| is_special(*code)) {
        return None;
    }
    let (rows, cols) = (q.rows, q.cols);
    let blocks = q.format.blocks().simplest(rows, cols);
    let group = match blocks {
        Blocks::Tensor | Blocks::Row => usize::MAX,
        Blocks::Group(g) | Blocks::Tile { cols: g, .. } if g.is_multiple_of(16) => g as usize,
        _ => return None,
    };
    let groups = cols.div_ceil(group.min(cols.next_multiple_of(16)).max(1));
    let scale = |row: usize, g: usize| match q.format.scale() {
        None => 1.0,
        Some(_) => q.block_decoder(blocks.index(cols, row, g.saturating_mul(group).min(cols - 1))).scale(),
    };
    let scales = (0..rows).flat_map(|row| (0..groups).map(move |g| scale(row, g))).collect();
    let code = FloatCode::Mini { bits: float.bits(), mantissa_bits: float.mantissa_bits, bias: float.bias };
    Some(FloatRows::new(code, (rows, cols), codes, group, scales))
}
