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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockwiseStep {
    rule: BlockwiseRule,
    grad_scale: f32,
    decay: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    sqrt_correction2: f32,
    /// Term added to √v (cuda) or to the bias-corrected √v (cpu).
    eps: f32,
    step_size: f32,
}

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
        BlockwiseStep {
            rule,
            grad_scale: grad_scale as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            sqrt_correction2: sqrt_correction2 as f32,
            eps: eps as f32,
            step_size: step_size as f32,
        }
    }

    /// Updates the parameters of one block, at most [`BLOCK`], and its moments. A non-finite gradient resets
    /// the moments of its element and leaves the parameter unchanged.
    ///
    /// # Panics
    /// If the slices have different lengths or more than [`BLOCK`] elements.
    pub fn block(&self, p: &mut [f32], g: &[f32], m: Moment<'_>, v: Moment<'_>) {
        let n = p.len();
        assert!(
            n <= BLOCK && g.len() == n && m.codes.len() == n && v.codes.len() == n,
            "BlockwiseStep::block: {n} parameters, {} gradients, {} and {} codes",
            g.len(),
            m.codes.len(),
            v.codes.len()
        );
        let (mut first, mut second) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
        let (first, second) = (&mut first[..n], &mut second[..n]);
        let (map1, map2) = (Book::Dyn8.levels(), Book::Dyn8Unsigned.levels());
        for i in 0..n {
            let g = g[i] * self.grad_scale;
            if g.is_finite() {
                let m = map1[usize::from(m.codes[i])] * *m.absmax;
                let v = map2[usize::from(v.codes[i])] * *v.absmax;
                first[i] = self.one_minus_beta1.mul_add(g, self.beta1 * m);
                second[i] = (self.one_minus_beta2 * g).mul_add(g, self.beta2 * v);
                p[i] = self.updated(p[i], first[i], second[i]);
            }
        }
        quantize(self.rule, &SIGNED, first, m);
        quantize(self.rule, &UNSIGNED, second, v);
    }

    fn updated(&self, p: f32, m: f32, v: f32) -> f32 {
        match self.rule {
            BlockwiseRule::Cuda => (p - self.step_size * (m / (v.sqrt() + self.eps))) * self.decay,
            BlockwiseRule::Cpu => {
                p * self.decay - self.step_size * m / (v.sqrt() / self.sqrt_correction2 + self.eps)
            }
        }
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

fn quantize(rule: BlockwiseRule, points: &Points, values: &[f32], to: Moment<'_>) {
    let absmax = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
    *to.absmax = absmax;
    if absmax == 0.0 {
        to.codes.fill(if rule == BlockwiseRule::Cpu { 0 } else { points.zero });
        return;
    }
    for (code, &value) in to.codes.iter_mut().zip(values) {
        let v = value / absmax;
        *code = match rule {
            BlockwiseRule::Cpu => points.at[point(v)],
            BlockwiseRule::Cuda => points.with_sign(points.nearest(v), value),
        };
    }
}

/// Map with the code of each of 65 536 points over [-1, 1].
struct Points {
    levels: &'static [f32],
    at: Vec<u8>,
    zero: u8,
}

static SIGNED: LazyLock<Points> = LazyLock::new(|| Points::new(Book::Dyn8, ZERO_CODES.0));
static UNSIGNED: LazyLock<Points> = LazyLock::new(|| Points::new(Book::Dyn8Unsigned, ZERO_CODES.1));

impl Points {
    fn new(book: Book, zero: u8) -> Self {
        let at = |i: u32| book.encode(-1.0 + 2.0 * i as f32 / 65535.0) as u8;
        Points { levels: book.levels(), at: (0..65_536).map(at).collect(), zero }
    }

    /// Returns the nearest code, as [`Book::encode`], starting at the nearest point.
    fn nearest(&self, v: f32) -> u8 {
        let middle = |code: usize| (self.levels[code] + self.levels[code + 1]) / 2.0;
        let mut code = usize::from(self.at[point(v)]);
        while code + 1 < self.levels.len() && middle(code) < v {
            code += 1;
        }
        while code > 0 && v <= middle(code - 1) {
            code -= 1;
        }
        code as u8
    }

    /// Returns `code`, or the adjacent level if the level's sign differs from the value's.
    fn with_sign(&self, code: u8, value: f32) -> u8 {
        let level = self.levels[usize::from(code)];
        match level.is_sign_negative() == value.is_sign_negative() {
            true => code,
            false if value > 0.0 => code.saturating_add(1),
            false => code.saturating_sub(1),
        }
    }
}

/// Returns the index of the nearest of the 65 536 points; see [`Book::encode_by_table`].
fn point(v: f32) -> usize {
    ((v.clamp(-1.0, 1.0) + 1.0) * 0.5 * 65535.0 + 0.5) as usize
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn nearest_codes_match_the_book() {
        for (book, points) in [(Book::Dyn8, &*SIGNED), (Book::Dyn8Unsigned, &*UNSIGNED)] {
            for i in 0..200_000u32 {
                let v = (i as f32 * 0.61).sin() * 10f32.powi(-(i as i32 % 8));
                let v = if book == Book::Dyn8 { v } else { v.abs() };
                assert_eq!(u32::from(points.nearest(v)), book.encode(v), "{book:?} {v:e}");
                assert_eq!(u32::from(points.at[point(v)]), book.encode_by_table(v), "{book:?} {v:e}");
            }
            let levels = book.levels().windows(2).flat_map(|w| [w[0], (w[0] + w[1]) / 2.0]);
            assert!(levels.into_iter().all(|v| u32::from(points.nearest(v)) == book.encode(v)));
        }
    }

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

    #[test]
    fn a_code_keeps_the_sign_of_its_value() {
        let points = &*SIGNED;
        assert_eq!(points.with_sign(points.nearest(1e-9), 1e-9), ZERO_CODES.0);
        assert_eq!(points.with_sign(points.nearest(-1e-9), -1e-9), ZERO_CODES.0 - 1);
    }
}
