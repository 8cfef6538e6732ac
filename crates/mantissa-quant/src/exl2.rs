//! Rounding to the scales of EXL2: within a group of columns all rows share an f16, and each has the square of 1 to 16 times it.
//!
//! Row by row the scale is the smallest of these under which no code is cut: at least that of [`Rule::Full`](mantissa_num::Rule::Full), and for
//! small rows of a group up to four times it (root 2 for root 1). exllamav2 searches sizes of groups and widths as well, by
//! calibration (`conversion/adaptivegptq.py`); here all groups of a layer have those of its scheme.

use mantissa_num::format::{Affine, Format};
use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rounding, Scheme};
use mantissa_store::convention::exl2::square_scale;

/// The largest root of a scale.
const MAX_ROOT: u8 = 16;

/// A weight `w` (`[rows, cols]`) as codes and scales; `None` of other schemes than symmetric integers in groups, of values that are no
/// numbers, and of scales beyond f16.
pub(crate) fn quantize(scheme: &Scheme, w: &[f32], rows: usize, cols: usize) -> Option<Quantized> {
    let Format::Affine(Affine { code: Code::Int(bits), blocks: Blocks::Group(group), .. }) = scheme.format
    else {
        return None;
    };
    let group = group as usize;
    let groups = cols.div_ceil(group);
    let (top, half) = ((1i32 << (bits - 1)) - 1, ((1u32 << bits) - 1) as f32 / 2.0);
    let (mut codes, mut scales) = (vec![0u8; rows * cols], vec![0u16; rows * groups]);
    for g in 0..groups {
        let span = g * group..cols.min((g + 1) * group);
        let amax = |row: usize| w[row * cols..][span.clone()].iter().fold(0f32, |amax, v| amax.max(v.abs()));
        let wanted: Vec<f32> = (0..rows).map(|row| amax(row) / half).collect();
        let unit = unit(wanted.iter().fold(0f32, |all, &scale| all.max(scale)))?;
        let table: Vec<u16> = (1..=MAX_ROOT).map(|root| square_scale(root, unit)).collect();
        for (row, wanted) in wanted.into_iter().enumerate() {
            let enough = |&&scale: &&u16| F16.decode(scale.into()) >= wanted;
            let scale = *table.iter().find(enough)?;
            scales[row * groups + g] = scale;
            let step = F16.decode(scale.into());
            for column in span.clone() {
                let code = (w[row * cols + column] / step).round_ties_even() as i32;
                codes[row * cols + column] = code.clamp(-top - 1, top) as u8;
            }
        }
    }
    let format = scheme.format.clone().with_scale_code(Code::Float(F16));
    let empty = Quantized::empty(format, rows, cols);
    Some(Quantized { codes: Codes::U8(codes), scales: Codes::U16(scales), ..empty })
}

/// The f16 pattern of the smallest unit whose 256-fold, as it is decoded, is at least `largest`; at least the smallest f16.
fn unit(largest: f32) -> Option<u16> {
    let near = F16.encode(largest / 256.0, Overflow::Special, Rounding::NearestEven, 0) as u16;
    let reaches = |unit: u16| F16.decode(square_scale(MAX_ROOT, unit).into()) >= largest;
    let unit = [near, near.saturating_add(1)].into_iter().find(|&unit| unit > 0 && reaches(unit))?;
    F16.decode(square_scale(MAX_ROOT, unit).into()).is_finite().then_some(unit)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_store::convention::exl2::squares;

    use super::*;

    #[test]
    fn scales_are_squares_and_errors_at_most_half_a_step() {
        let (rows, cols) = (40, 96);
        // Rows of very different sizes, one of zeros.
        let value = |i: usize| ((i * i % 997) as f32 * 0.37).sin() * 0.1 / ((i / cols) as f32 + 1.0);
        let w: Vec<f32> = (0..rows * cols).map(|i| if i / cols == 7 { 0.0 } else { value(i) }).collect();
        for text in ["int2-g32", "int3-g32", "int4-g96", "int5-g32", "int6-g32", "int8-g32"] {
            let scheme: Scheme = text.parse().unwrap();
            let q = quantize(&scheme, &w, rows, cols).unwrap();
            let groups = q.format.blocks().count(1, cols);
            let Codes::U16(scales) = &q.scales else { unreachable!() };
            for g in 0..groups {
                let column: Vec<u16> = scales.iter().skip(g).step_by(groups).copied().collect();
                assert!(squares(&column).is_some(), "{text} {g}");
            }
            for (i, (found, w)) in q.dequantize().unwrap().iter().zip(&w).enumerate() {
                let step = F16.decode(scales[q.format.blocks().index(cols, i / cols, i % cols)].into());
                assert!((found - w).abs() <= 0.5001 * step, "{text} {i}: {found} for {w}");
            }
        }
    }
}
