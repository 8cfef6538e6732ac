//! Trellis codes in mantissa's own format: `n.packed` U8, the tiles in the order of [`mantissa_num::trellis`], and
//! signs and scales in one of two forms. Either `n.scale` F16 `[cols + rows]` holds signs times scales of inputs and
//! outputs. Or `n.signs` U8 has a bit per input and output (1 is negative, lowest bit first), and `n.scale` F16 one
//! scale per run of outputs that are rotated together; input scales are then 1.

use mantissa_num::trellis::{Trellis, order};
use mantissa_num::{Codes, Quantized};

use crate::convention::{LinearPlan, ModelFiles, NotStorable, Storable};
use crate::{Dtype, Result, TensorSpec};

/// The sign of an f16.
const SIGN: u16 = 0x8000;

/// 1 as an f16.
const ONE: u16 = 0x3c00;

/// Refuses a weight that is not a whole number of tiles.
///
/// # Errors
/// [`NotStorable`].
pub(super) fn check(plan: &LinearPlan<'_>) -> Storable<()> {
    if Trellis::fits(plan.rows, plan.cols) {
        return Ok(());
    }
    let why =
        format!("{}: [{}, {}] is not a whole number of 16 × 16 tiles", plan.module, plan.rows, plan.cols);
    Err(NotStorable { scheme: plan.scheme.to_string(), why })
}

/// Tensors of the weight `n` other than its codes.
pub(super) fn scale_specs(n: &str, trellis: &Trellis, rows: usize, cols: usize) -> Vec<TensorSpec> {
    let scale = |count| TensorSpec::new(format!("{n}.scale"), Dtype::F16, vec![count]);
    match trellis.channels {
        true => vec![scale(cols + rows)],
        false => {
            let bytes = (cols + rows).div_ceil(8);
            vec![
                TensorSpec::new(format!("{n}.signs"), Dtype::U8, vec![bytes]),
                scale(rows / order(rows).max(1)),
            ]
        }
    }
}

/// Bytes of the tensors that [`scale_specs`] declares.
pub(super) fn scale_tensors(n: &str, trellis: &Trellis, q: &Quantized) -> Vec<(String, Vec<u8>)> {
    let name = format!("{n}.scale");
    let Codes::U16(scales) = &q.scales.codes else { return Vec::new() };
    if trellis.channels {
        return vec![(name, q.scales.to_le_bytes())];
    }
    let mut signs = vec![0u8; scales.len().div_ceil(8)];
    for (i, _) in scales.iter().enumerate().filter(|(_, scale)| **scale & SIGN != 0) {
        signs[i / 8] |= 1 << (i % 8);
    }
    let shared = scales[q.cols..].iter().step_by(order(q.rows).max(1));
    let shared = shared.flat_map(|scale| (scale & !SIGN).to_le_bytes()).collect();
    vec![(format!("{n}.signs"), signs), (name, shared)]
}

/// Signs times scales, in the form of [`mantissa_num::trellis`].
pub(super) fn read_scales(
    files: &ModelFiles,
    n: &str,
    trellis: &Trellis,
    (rows, cols): (usize, usize),
) -> Result<Codes> {
    let mut read = Vec::new();
    for spec in scale_specs(n, trellis, rows, cols) {
        let bytes = files.read_exact(&spec.name, &[spec.dtype], &spec.shape)?;
        if spec.dtype == Dtype::F16 {
            files.expect_finite(&spec.name, spec.dtype, &bytes)?;
        }
        read.push(bytes);
    }
    let words =
        |bytes: &[u8]| bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect::<Vec<u16>>();
    let [signs, shared] = &read[..] else { return Ok(Codes::U16(words(&read.concat()))) };
    let negative = |i: usize| if signs[i / 8] >> (i % 8) & 1 == 1 { SIGN } else { 0 };
    let shared = words(shared);
    let output = |row: usize| shared[row / order(rows).max(1)];
    let scale = |i: usize| if i < cols { ONE } else { output(i - cols) };
    Ok(Codes::U16((0..cols + rows).map(|i| scale(i) ^ negative(i)).collect()))
}
