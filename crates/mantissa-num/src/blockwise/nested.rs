//! Double quantization: block scales that are quantized themselves.
//!
//! QLoRA (Dettmers et al. 2023), section 3, as in bitsandbytes' `compress_statistics`: for scales `a[n]` with mean
//! `m`, `a - m` is stored in signed dynamic 8-bit codes over flat blocks of 256 with an f32 amax each.

use super::block::Range;
use crate::codes::Codes;
use crate::format::{Code, ScaleTree};
use crate::level::ScaleLevel;

/// Quantizes `scales` as the tree describes. `mean`, if not given, is computed from the scales (in f64, in order,
/// then rounded; torch's f32 sum may differ in the last place). `None` if the tree's scales are not
/// [nested](ScaleTree::nested).
pub fn nest(tree: &ScaleTree, scales: &[f32], mean: Option<f32>) -> Option<ScaleLevel> {
    let (blocks, _) = tree.nested()?;
    let Code::Book(book) = tree.code else { return None };
    let block = blocks.len(1, scales.len()).max(1);
    let sum: f64 = scales.iter().map(|&s| f64::from(s)).sum();
    let mean = mean.unwrap_or((sum / scales.len().max(1) as f64) as f32);
    let mut codes = Codes::with_capacity(tree.code.unit_bytes(), scales.len());
    let mut factors = Vec::with_capacity(scales.len().div_ceil(block));
    for run in scales.chunks(block) {
        let residuals: Vec<f32> = run.iter().map(|s| s - mean).collect();
        let amax = Range::of(&residuals).amax();
        // Code 0 for a run of equal scales, whose amax is 0.
        let code = |r: &f32| if amax == 0.0 { 0 } else { book.encode_by_table(r * (1.0 / amax.max(1e-38))) };
        residuals.iter().for_each(|r| codes.push(code(r)));
        factors.push(amax);
    }
    Some(ScaleLevel::from(codes).with_residual(ScaleLevel::residual(&factors, mean)))
}
