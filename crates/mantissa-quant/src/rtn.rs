//! Round to nearest (RTN): every weight by itself, the scale from its block's range.
//!
//! No paper: the baseline that every method is measured against. With `W[N, K]`, blocks `B` and a scheme's functions of
//! [`mantissa_num::blockwise`]: `s_B = block(range of W over B)`, `code[n, k] = encode(W[n, k], s_B)`.
//!
//! Blocks are independent, so rows are cut into panels that hold whole blocks and run on several threads; the result does
//! not depend on how many. Integers go through the fast loops of `mantissa-kernels`, which give the reference's bits.

use std::ops::Range;

use mantissa_kernels::{kernels, map_reduce_fixed};
use mantissa_num::blockwise;
use mantissa_num::format::{Affine, Format};
use mantissa_num::scheme::Rule;
use mantissa_num::{Blocks, Code, Codes, Given, Quantized, Rounding, Scheme, TensorError, code_unit};

use crate::error_stats::ErrorStats;

/// Elements of a panel: enough to pay for a dispatch, little enough to stay in a core's cache.
const PANEL: usize = 1 << 16;

/// Quantizes `w` (`[rows, cols]`, row-major) and measures the error. `outer` is the tensor-wide scale where fused partners
/// share one; `None` takes it from `w`.
///
/// # Errors
/// [`TensorError::NonFinite`] with the index in `w`, and [`TensorError::Length`].
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    rows: usize,
    cols: usize,
    outer: Option<f32>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), TensorError> {
    if w.len() != rows * cols {
        return Err(TensorError::Length {
            what: "values",
            found: w.len(),
            expected: rows * cols,
            rows,
            cols,
        });
    }
    let outer = outer.or_else(|| scheme.outer_scale(kernels().amax(w)));
    let grain = panel_rows(scheme.format.blocks(), rows, cols);
    let panels = rows.div_ceil(grain);
    let panel = |range: Range<usize>| {
        let (first, last) = (range.start * grain, (range.end * grain).min(rows));
        quantize_panel(scheme, &w[first * cols..last * cols], first, cols, outer)
    };
    let start = Ok((nothing(scheme, rows, cols, outer), ErrorStats::default()));
    map_reduce_fixed(threads, panels, 1, panel, start, |all, part| {
        let (mut all, mut stats): (Quantized, ErrorStats) = all?;
        let (part, part_stats) = part?;
        append(&mut all.codes, part.codes);
        append(&mut all.scales, part.scales);
        all.zeros.extend(part.zeros);
        stats.merge(&part_stats);
        Ok((all, stats))
    })
}

/// A tensor to which panels are appended.
fn nothing(scheme: &Scheme, rows: usize, cols: usize, outer: Option<f32>) -> Quantized {
    let format = scheme.format.clone();
    let codes = match format.codec() {
        Some(_) => Codes::Packed(Vec::with_capacity((format.total_bits(rows, cols) / 8) as usize)),
        None => Codes::with_capacity(code_unit(&format), rows * cols),
    };
    let scale_unit = format.scale().map_or(1, |scale| scale.code.unit_bytes());
    let scales = Codes::with_capacity(scale_unit, format.blocks().count(rows, cols));
    Quantized { codes, scales, outer, ..Quantized::empty(format, rows, cols) }
}

/// Rows of a panel that holds whole blocks.
fn panel_rows(blocks: Blocks, rows: usize, cols: usize) -> usize {
    let unit = match blocks {
        Blocks::Row | Blocks::Group(_) => 1,
        Blocks::Tile { rows, .. } => rows as usize,
        Blocks::Flat(block) => block as usize / gcd(block as usize, cols.max(1)),
        _ => rows.max(1),
    };
    (PANEL / cols.max(1) / unit).max(1) * unit
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub(crate) fn append(all: &mut Codes, part: Codes) {
    match (all, part) {
        (Codes::U8(all), Codes::U8(part)) | (Codes::Packed(all), Codes::Packed(part)) => all.extend(part),
        (Codes::U16(all), Codes::U16(part)) => all.extend(part),
        (Codes::U32(all), Codes::U32(part)) => all.extend(part),
        (all, part) => (0..part.len()).for_each(|i| all.push(part.get(i))),
    }
}

fn quantize_panel(
    scheme: &Scheme,
    w: &[f32],
    first_row: usize,
    cols: usize,
    outer: Option<f32>,
) -> Result<(Quantized, ErrorStats), TensorError> {
    let rows = w.len() / cols.max(1);
    let q = match integers(scheme, w, rows, cols) {
        Some(q) => q,
        None => {
            let given = Given {
                outer: outer.filter(|_| scheme.has_outer_scale()),
                first_index: (first_row * cols) as u64,
            };
            mantissa_num::quantize(scheme, w, rows, cols, given).map_err(|e| shift(e, first_row * cols))?
        }
    };
    let stats = ErrorStats::of(w, &q);
    Ok((q, stats))
}

/// An error of a panel, with its index in the whole tensor.
fn shift(error: TensorError, first: usize) -> TensorError {
    match error {
        TensorError::NonFinite { count, index, value } => {
            TensorError::NonFinite { count, index: first + index, value }
        }
        other => other,
    }
}

/// The fast path: integers in groups or rows by the rules that need nothing but the range. `None` where it does not apply,
/// and for panels with values so extreme that the reference treats them apart.
fn integers(scheme: &Scheme, w: &[f32], rows: usize, cols: usize) -> Option<Quantized> {
    let Format::Affine(Affine { code: Code::Int(bits), blocks, scale: Some(scale), .. }) = &scheme.format
    else {
        return None;
    };
    let group = match blocks {
        Blocks::Row => cols,
        Blocks::Group(group) => *group as usize,
        _ => return None,
    };
    let (rule, asymmetric) = (scheme.encoder.rule, scheme.format.has_zero());
    let known =
        matches!((rule, asymmetric, scale.code), (Rule::Full, false, _) | (Rule::Ct, true, Code::F32));
    // NaN, too, is for the reference to report.
    let amax = kernels().amax(w);
    let extreme = amax.is_nan() || amax >= f32::MAX / 512.0;
    if !known || extreme || cols == 0 || scheme.encoder.rounding != Rounding::NearestEven {
        return None;
    }
    let per_row = cols.div_ceil(group);
    let mut codes = vec![0i8; w.len()];
    let mut scales = vec![0f32; rows * per_row];
    let mut zeros = vec![0i8; if asymmetric { rows * per_row } else { 0 }];
    let high = ((1i16 << (bits - 1)) - 1) as i8;
    for row in 0..rows {
        let x = &w[row * cols..][..cols];
        let codes = &mut codes[row * cols..][..cols];
        let scales = &mut scales[row * per_row..][..per_row];
        if asymmetric {
            let zeros = &mut zeros[row * per_row..][..per_row];
            kernels().quant_int_asym(x, group, *bits, scales, zeros, codes).ok()?;
        } else {
            let levels = f32::from(high) + 0.5;
            kernels().quant_int_sym(x, group, -high - 1, high, levels, scales, codes).ok()?;
            if scale.code != Code::F32 {
                scales.iter_mut().for_each(|s| *s = scale.code.decode(scheme.block_with_scale(*s).scale));
                kernels().int_codes_sym(x, group, -high - 1, high, scales, codes);
            }
        }
    }
    let mut stored = Codes::with_capacity(scale.code.unit_bytes(), scales.len());
    scales.iter().for_each(|&s| stored.push(scheme.block_with_scale(s).scale));
    // An all-zero group has zero point 0 by this rule, where the formula gives the lowest code.
    if asymmetric {
        zero_empty_groups(w, cols, group, &mut zeros, &mut codes);
    }
    Some(Quantized {
        format: scheme.format.clone(),
        rows,
        cols,
        codes: Codes::U8(codes.into_iter().map(|c| c as u8).collect()),
        scales: stored,
        outer: None,
        zeros: zeros.into_iter().map(i32::from).collect(),
        biases: Vec::new(),
        nested: None,
    })
}

fn zero_empty_groups(w: &[f32], cols: usize, group: usize, zeros: &mut [i8], codes: &mut [i8]) {
    let groups = w.chunks_exact(cols).zip(codes.chunks_exact_mut(cols));
    let groups = groups.flat_map(|(w, codes)| w.chunks(group).zip(codes.chunks_mut(group)));
    for ((w, codes), zero) in groups.zip(zeros) {
        if w.iter().all(|&v| v == 0.0) {
            *zero = 0;
            codes.fill(0);
        }
    }
}

/// The tensor-wide scale that fused partners share: of the largest amax among them.
pub fn shared_outer_scale(scheme: &Scheme, amaxes: impl IntoIterator<Item = f32>) -> Option<f32> {
    let range = amaxes.into_iter().fold(blockwise::Range::EMPTY, blockwise::Range::with);
    scheme.outer_scale(range.amax())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::grammar::catalogue;

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i) as f32 * 0.013).sin() * (1.0 + (i % 17) as f32)).collect()
    }

    fn schemes() -> Vec<Scheme> {
        let mut all = catalogue();
        for text in [
            "int4-g32",
            "int4-g32-asym",
            "int3-channel-asym",
            "int8-channel",
            "int2-g7",
            "int8-tensor",
            "int5-t4x8",
            "int4-g32:restricted",
            "int4-g32-asym:torchao",
            "fp8-e4m3-t128x128",
            "fp8-e4m3-tensor",
            "nf4-g128",
            "nvfp4:te",
        ] {
            all.push(text.parse().unwrap());
        }
        for text in ["int4-g32", "int8-channel-asym"] {
            let mut narrow: Scheme = text.parse().unwrap();
            narrow.format = narrow.format.with_scale_code(Code::Float(mantissa_num::minifloat::BF16));
            all.push(narrow);
        }
        let mut stochastic: Scheme = "int4-g32".parse().unwrap();
        stochastic.encoder.rounding = Rounding::Stochastic { seed: 9 };
        all.push(stochastic);
        all
    }

    #[test]
    fn panels_and_fast_paths_give_the_reference_at_any_thread_count() {
        for (rows, cols) in [(300, 264), (5, 1000), (1, 1), (64, 2048)] {
            let mut w = weights(rows * cols);
            w[..cols.min(40)].fill(0.0);
            for scheme in schemes() {
                let expected = mantissa_num::quantize(&scheme, &w, rows, cols, Given::default()).unwrap();
                for threads in [1, 2, 3] {
                    let (found, stats) = quantize(&scheme, &w, rows, cols, None, threads).unwrap();
                    assert_eq!(found, expected, "{scheme} [{rows}, {cols}] {threads} threads");
                    let single = quantize(&scheme, &w, rows, cols, None, 1).unwrap().1;
                    assert_eq!(stats, single, "{scheme}");
                }
            }
        }
    }

    #[test]
    fn extreme_and_non_finite_rows_fall_back_to_the_reference() {
        let mut w = weights(4 * 64);
        w[70] = f32::MAX;
        w[71] = -f32::MAX;
        for text in ["int4-g32", "int4-g32-asym"] {
            let scheme: Scheme = text.parse().unwrap();
            let expected = mantissa_num::quantize(&scheme, &w, 4, 64, Given::default()).unwrap();
            assert_eq!(quantize(&scheme, &w, 4, 64, None, 2).unwrap().0, expected);
        }
        w[130] = f32::NAN;
        let error = quantize(&"int4-g32".parse().unwrap(), &w, 4, 64, None, 2).unwrap_err();
        assert!(matches!(error, TensorError::NonFinite { index: 130, count: 1, .. }), "{error}");
    }
}
