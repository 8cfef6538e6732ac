//! AdamW with 8-bit moments (Dettmers, Lewis, Shleifer & Zettlemoyer 2022, "8-bit Optimizers via Block-wise
//! Quantization", arXiv 2110.02861): blocks of 256 values of the flattened tensor, each with its absmax in
//! f32, and dynamic maps, signed for the first moment and unsigned for the second.
//!
//! bitsandbytes has two orders of operations; both are available by name. With `m = map1[code1] · absmax1`,
//! `v = map2[code2] · absmax2`, then `m ← β1 m + (1 - β1) g`, `v ← β2 v + (1 - β2) g²` in f32:
//!
//! ```text
//! cuda   p ← p - lr √(1 - β2ᵗ) / (1 - β1ᵗ) · m / (√v + ε √(1 - β2ᵗ)),  then  p ← p (1 - lr wd);
//!        codes are the nearest levels; a code that would flip the sign of m moves to the adjacent level
//! cpu    p ← p (1 - lr wd),  then  p ← p - lr / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε);
//!        codes come from a table of 65 536 points over [-1, 1]
//! ```
//!
//! The update uses the moments before they are requantized.

use std::sync::LazyLock;

use mantissa_kernels::{BlockwiseAdamW, CodeTable, kernels};
use mantissa_num::codebook::Book;

/// Block size in values.
pub const BLOCK: usize = 256;

/// Tensors with fewer elements keep f32 moments, as in bitsandbytes (`min_8bit_size`).
pub const MIN_ELEMENTS: usize = 4096;

/// Order of operations of an 8-bit AdamW step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockwiseRule {
    /// Order of bitsandbytes' CUDA kernel.
    #[default]
    Cuda,
    /// Order of bitsandbytes' CPU backend.
    Cpu,
}

/// Rules with their names.
pub const BLOCKWISE_RULES: [(&str, BlockwiseRule); 2] =
    [("cuda", BlockwiseRule::Cuda), ("cpu", BlockwiseRule::Cpu)];

/// Constants of one update step.
#[derive(Clone, Copy, Debug)]
pub struct BlockwiseStep(BlockwiseAdamW);

impl BlockwiseStep {
    /// Computes the constants of step `t` (from 1) at learning rate `lr`. `grad_scale` multiplies each
    /// gradient first.
    pub fn new(
        rule: BlockwiseRule,
        (beta1, beta2, eps): (f64, f64, f64),
        lr: f64,
        weight_decay: f64,
        t: u64,
        grad_scale: f64,
    ) -> Self {
        let t = t as f64;
        let (correction1, sqrt_correction2) = (1.0 - beta1.powf(t), (1.0 - beta2.powf(t)).sqrt());
        let (eps, step_size) = match rule {
            BlockwiseRule::Cuda => (eps * sqrt_correction2, lr * sqrt_correction2 / correction1),
            BlockwiseRule::Cpu => (eps, lr / correction1),
        };
        let (maps, zeros) = maps(rule);
        BlockwiseStep(BlockwiseAdamW {
            grad_scale: grad_scale as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            decay_last: rule == BlockwiseRule::Cuda,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            sqrt_correction2: sqrt_correction2 as f32,
            eps: eps as f32,
            step_size: step_size as f32,
            maps,
            zeros,
        })
    }

    /// Updates the parameters of one block, at most [`BLOCK`], and its moments. A non-finite gradient resets
    /// the moments of its element and leaves the parameter unchanged.
    ///
    /// # Panics
    /// If the slices have different lengths or more than [`BLOCK`] elements.
    pub fn block(&self, p: &mut [f32], g: &[f32], m: Moment<'_>, v: Moment<'_>) {
        self.codes(p, g, [m.codes, v.codes], [m.absmax, v.absmax]);
    }

    /// Updates a block given the codes and absmax of both moments.
    pub(crate) fn codes(&self, p: &mut [f32], g: &[f32], codes: [&mut [u8]; 2], absmax: [&mut f32; 2]) {
        kernels().adamw_blockwise(&self.0, p, g, codes, absmax);
    }
}

/// Quantized moment of one block: a code per element and the block's absmax.
#[derive(Debug)]
pub struct Moment<'a> {
    /// Indices into the map.
    pub codes: &'a mut [u8],
    /// Largest magnitude.
    pub absmax: &'a mut f32,
}

/// Codes of zero in the signed and the unsigned map. With an absmax of 0 every code decodes to zero; these
/// are the ones written.
pub const ZERO_CODES: (u8, u8) = (127, 0);

/// Returns the maps of both moments, and the codes written for a block of zeros.
pub(crate) fn maps(rule: BlockwiseRule) -> ([&'static CodeTable; 2], [u8; 2]) {
    match rule {
        BlockwiseRule::Cuda => ([&*SIGNED, &*UNSIGNED], [ZERO_CODES.0, ZERO_CODES.1]),
        BlockwiseRule::Cpu => ([&*SIGNED_POINTS, &*UNSIGNED_POINTS], [0, 0]),
    }
}

static SIGNED: LazyLock<CodeTable> = LazyLock::new(|| {
    let book = Book::Dyn8;
    CodeTable::new(book.levels(), |v| with_sign(book.encode(v) as u8, v))
});
static UNSIGNED: LazyLock<CodeTable> = LazyLock::new(|| CodeTable::nearest(Book::Dyn8Unsigned));
static SIGNED_POINTS: LazyLock<CodeTable> = LazyLock::new(|| by_points(Book::Dyn8));
static UNSIGNED_POINTS: LazyLock<CodeTable> = LazyLock::new(|| by_points(Book::Dyn8Unsigned));

/// Table of [`Book::encode_by_table`].
fn by_points(book: Book) -> CodeTable {
    CodeTable::new(book.levels(), |v| book.encode_by_table(v) as u8)
}

/// Returns `code` of the signed map, or the adjacent level if the level's sign differs from the value's.
fn with_sign(code: u8, value: f32) -> u8 {
    let level = Book::Dyn8.level(u32::from(code));
    match level.is_sign_negative() == value.is_sign_negative() {
        true => code,
        false if value > 0.0 => code.saturating_add(1),
        false => code.saturating_sub(1),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// From zero moments, one step of either rule equals AdamW's first: the sign of the gradient times the
    /// learning rate, and decay.
    #[test]
    fn the_first_step_moves_by_the_rate() {
        for rule in [BlockwiseRule::Cuda, BlockwiseRule::Cpu] {
            let step = BlockwiseStep::new(rule, (0.9, 0.999, 1e-8), 1e-2, 0.1, 1, 1.0);
            let (mut p, g) = ([1.0f32; 5], [2.0, -3.0, 0.5, 0.0, f32::NAN]);
            let (mut codes1, mut codes2) = ([ZERO_CODES.0; 5], [ZERO_CODES.1; 5]);
            let (mut max1, mut max2) = (0.0, 0.0);
            let (m, v) = (
                Moment { codes: &mut codes1, absmax: &mut max1 },
                Moment { codes: &mut codes2, absmax: &mut max2 },
            );
            step.block(&mut p, &g, m, v);
            for (found, expected) in p.iter().zip([0.989, 1.009, 0.989, 0.999, 1.0]) {
                assert!((found - expected).abs() < 2e-5, "{rule:?}: {p:?}");
            }
            assert!((max1 - 0.3).abs() < 1e-6 && (max2 - 0.009).abs() < 1e-8);
            assert_eq!(codes1[1], 0);
            assert!(rule == BlockwiseRule::Cpu || codes1[3] == ZERO_CODES.0);
        }
    }

    /// The table of the signed map has the nearest code with the sign of its value, everywhere.
    #[test]
    fn a_code_keeps_the_sign_of_its_value() {
        for i in 0..400_000u32 {
            let v = (i as f32 * 0.61).sin() * 10f32.powi(-(i as i32 % 10));
            assert_eq!(SIGNED.encode(v), with_sign(Book::Dyn8.encode(v) as u8, v), "{v:e}");
        }
        assert_eq!(SIGNED.encode(1e-9), ZERO_CODES.0);
        assert_eq!(SIGNED.encode(-1e-9), ZERO_CODES.0 - 1);
    }
}
