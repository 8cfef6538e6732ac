//! Panels of weights whose codes are floats.

use std::borrow::Cow;

use mantissa_kernels::packed::{FloatCode, FloatPanels};
use mantissa_num::{Affine, Blocks, Code, Codes, Format, Offset, Quantized};
use mantissa_store::convention::Weight;
use zerocopy::{Immutable, IntoBytes};

/// Makes panels of a dense weight; `None` if memory does not hold it.
pub(super) fn dense(weight: &Weight, rows: usize, cols: usize, threads: usize) -> Option<FloatPanels> {
    let (code, bytes) = match weight {
        Weight::F32(values) => (FloatCode::F32, bytes(values, f32::to_le_bytes)),
        Weight::Bf16(bits) => (FloatCode::Bf16, bytes(bits, u16::to_le_bytes)),
        Weight::F16(bits) => (FloatCode::F16, bytes(bits, u16::to_le_bytes)),
        Weight::Quantized(_) => return None,
    };
    let scales = vec![1.0; if cols == 0 { 0 } else { rows }];
    FloatPanels::new(code, (rows, cols), &bytes, usize::MAX, &scales, threads)
}

/// Returns the little-endian bytes of values, which are those in memory but for other machines.
fn bytes<T: Copy + IntoBytes + Immutable, const N: usize>(
    values: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
) -> Cow<'_, [u8]> {
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(values.as_bytes()),
        false => values.iter().flat_map(|value| to_bytes(*value)).collect::<Vec<_>>().into(),
    }
}

/// Makes panels of 8-bit or narrower floats; `None` for other codes, and inside if memory does not hold them.
pub(super) fn minifloats(q: &Quantized, threads: usize) -> Option<Option<FloatPanels>> {
    let Format::Affine(Affine { code: Code::Float(float), offset: Offset::None, .. }) = &q.format else {
        return None;
    };
    let Codes::U8(codes) = &q.codes else { return None };
    if float.bits() > 8 || float.exponent_bits > 5 {
        return None;
    }
    // Codes that the way through f16 would read as numbers.
    let is_special: [bool; 256] = std::array::from_fn(|code| !float.decode(code as u32).is_finite());
    if codes.iter().fold(false, |any, code| any | is_special[usize::from(*code)]) {
        return None;
    }
    let (rows, cols) = (q.rows, q.cols);
    let blocks = q.format.blocks().simplest(rows, cols);
    let group = match blocks {
        Blocks::Tensor | Blocks::Row => usize::MAX,
        Blocks::Group(g) | Blocks::Tile { cols: g, .. } if g.is_multiple_of(32) => g as usize,
        _ => return None,
    };
    let groups = if group >= cols { 1 } else { cols.div_ceil(group) };
    let scale = |row: usize, g: usize| match q.format.scale() {
        None => 1.0,
        Some(_) => q.block_decoder(blocks.index(cols, row, g.saturating_mul(group).min(cols - 1))).scale(),
    };
    let scales: Vec<f32> =
        (0..rows).flat_map(|row| (0..groups).map(move |g| (row, g))).map(|(row, g)| scale(row, g)).collect();
    let code = FloatCode::Mini { bits: float.bits(), mantissa_bits: float.mantissa_bits, bias: float.bias };
    Some(FloatPanels::new(code, (rows, cols), codes, group, &scales, threads))
}
