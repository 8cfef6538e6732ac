//! Optimizer state in codes of 8 bits: nearest codes by table, and AdamW on a block of codes.

use mantissa_num::codebook::Book;

/// Elements of a block of [`crate::Kernels::adamw_blockwise`] at most.
pub const STATE_BLOCK: usize = 256;

/// Values that share sign, exponent and the first seven mantissa bits share a cell.
const CELLS: usize = 1 << 16;

/// Levels of a map with at most 256 codes, and the code of every f32 by one table lookup and one comparison.
///
/// An entry belongs to the values whose upper 16 bits are its index. It holds the code of those with lower bits
/// below a split (bits 0 to 7), the code of the others (8 to 15), and the split (16 to 31).
#[derive(Debug)]
pub struct CodeTable {
    levels: [f32; 256],
    cells: Box<[u32; CELLS]>,
    zero: u8,
}

impl CodeTable {
    /// Makes the table of `levels` (missing ones are 0) with the codes that `encode` gives. Within a cell, codes
    /// change at most once; all NaN have the code of NaN.
    ///
    /// # Panics
    /// If there are more than 256 levels.
    pub fn new(levels: &[f32], encode: impl Fn(f32) -> u8) -> Self {
        let mut all = [0.0; 256];
        all[..levels.len()].copy_from_slice(levels);
        let cell = |index: u32| {
            let (first, last) = (index << 16, (index << 16) | 0xffff);
            if f32::from_bits(last).is_nan() && f32::from_bits(first).is_nan() {
                return u32::from(encode(f32::NAN)) * 0x101;
            }
            // The cell of infinity holds NaN too, none of which is the result of an operation.
            let last = if f32::from_bits(last).is_nan() { first } else { last };
            let (before, after) = (encode(f32::from_bits(first)), encode(f32::from_bits(last)));
            let (mut low, mut high) = (first, last);
            while before != after && high - low > 1 {
                let middle = low.midpoint(high);
                if encode(f32::from_bits(middle)) == before { low = middle } else { high = middle }
            }
            u32::from(before) | u32::from(after) << 8 | (high & 0xffff) << 16
        };
        let mut cells = Box::new([0; CELLS]);
        cells.iter_mut().zip(0..).for_each(|(to, index)| *to = cell(index));
        CodeTable { levels: all, cells, zero: encode(0.0) }
    }

    /// Makes the table of a code book with its nearest codes ([`Book::encode`]).
    pub fn nearest(book: Book) -> Self {
        CodeTable::new(book.levels(), |v| book.encode(v) as u8)
    }

    /// Value of every code, relative to the scale of its block.
    pub fn levels(&self) -> &[f32; 256] {
        &self.levels
    }

    /// Code of 0.
    pub fn zero(&self) -> u8 {
        self.zero
    }

    /// Returns the code of `v`.
    #[inline(always)]
    pub fn encode(&self, v: f32) -> u8 {
        self.by_bits(v.to_bits())
    }

    #[inline(always)]
    fn by_bits(&self, bits: u32) -> u8 {
        let cell = self.cells[(bits >> 16) as usize];
        let shift = if bits & 0xffff >= cell >> 16 { 8 } else { 0 };
        (cell >> shift) as u8
    }
}

/// Constants of an AdamW update of 8-bit blocks, in one of bitsandbytes' two orders of operations. With the moments
/// `m` and `v` after their updates:
///
/// ```text
/// decay_last   p = (p - step_size · (m / (√v + eps))) · decay
/// otherwise    p = p · decay - step_size · m / (√v / sqrt_correction2 + eps)
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BlockwiseAdamW {
    /// Factor of the gradient, for clipping and unscaling.
    pub grad_scale: f32,
    /// Factor of the parameter, `1 - lr wd`.
    pub decay: f32,
    /// True if the parameter decays after its update.
    pub decay_last: bool,
    /// `beta1`.
    pub beta1: f32,
    /// `1 - beta1`.
    pub one_minus_beta1: f32,
    /// `beta2`.
    pub beta2: f32,
    /// `1 - beta2`.
    pub one_minus_beta2: f32,
    /// `sqrt(1 - beta2^t)`, used unless `decay_last`.
    pub sqrt_correction2: f32,
    /// Term added to the root.
    pub eps: f32,
    /// Factor of the update.
    pub step_size: f32,
    /// Maps of both moments.
    pub maps: [&'static CodeTable; 2],
    /// Codes written for a block whose moments are all 0.
    pub zeros: [u8; 2],
}

#[inline(always)]
pub(crate) fn adamw_blockwise(
    step: &BlockwiseAdamW,
    param: &mut [f32],
    grad: &[f32],
    codes: [&mut [u8]; 2],
    absmax: [&mut f32; 2],
) {
    let n = param.len();
    assert!(
        n <= STATE_BLOCK && grad.len() == n && codes.iter().all(|codes| codes.len() == n),
        "adamw_blockwise: {n} parameters, {} gradients, {} and {} codes",
        grad.len(),
        codes[0].len(),
        codes[1].len()
    );
    let ([m_codes, v_codes], [m_max, v_max]) = (codes, absmax);
    let (mut m, mut v) = ([0.0f32; STATE_BLOCK], [0.0f32; STATE_BLOCK]);
    let (m, v) = (&mut m[..n], &mut v[..n]);
    decode(step.maps[0], *m_max, m_codes, m);
    decode(step.maps[1], *v_max, v_codes, v);
    moments(step, grad, m, v);
    if step.decay_last {
        update(param, grad, step.grad_scale, m, v, |p, m, v| {
            (p - step.step_size * (m / (v.sqrt() + step.eps))) * step.decay
        });
    } else {
        update(param, grad, step.grad_scale, m, v, |p, m, v| {
            p * step.decay - step.step_size * m / (v.sqrt() / step.sqrt_correction2 + step.eps)
        });
    }
    *m_max = encode(step.maps[0], m, m_codes, step.zeros[0]);
    *v_max = encode(step.maps[1], v, v_codes, step.zeros[1]);
}

/// Updates both moments; moments of a non-finite gradient become 0.
#[inline(always)]
fn moments(step: &BlockwiseAdamW, grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    for ((g, m), v) in grad.iter().zip(m).zip(v) {
        let g = g * step.grad_scale;
        let finite = g.abs() < f32::INFINITY;
        let first = step.one_minus_beta1.mul_add(g, step.beta1 * *m);
        let second = (step.one_minus_beta2 * g).mul_add(g, step.beta2 * *v);
        *m = if finite { first } else { 0.0 };
        *v = if finite { second } else { 0.0 };
    }
}

/// Updates the parameters with finite gradients.
#[inline(always)]
fn update(
    param: &mut [f32],
    grad: &[f32],
    grad_scale: f32,
    m: &[f32],
    v: &[f32],
    new: impl Fn(f32, f32, f32) -> f32,
) {
    for (((p, g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
        let new = new(*p, *m, *v);
        *p = if (g * grad_scale).abs() < f32::INFINITY { new } else { *p };
    }
}

#[inline(always)]
fn decode(table: &CodeTable, absmax: f32, codes: &[u8], out: &mut [f32]) {
    for (out, code) in out.iter_mut().zip(codes) {
        *out = table.levels[usize::from(*code)] * absmax;
    }
}

/// Encodes a block relative to its absmax, which it returns.
#[inline(always)]
fn encode(table: &CodeTable, values: &[f32], codes: &mut [u8], zero: u8) -> f32 {
    // As integers, magnitudes have a maximum in any order, and NaN is the largest.
    let bits = values.iter().fold(0, |max: u32, v| max.max(v.to_bits() & 0x7fff_ffff));
    let absmax = f32::from_bits(bits);
    if absmax == 0.0 {
        codes.fill(zero);
        return 0.0;
    }
    table_codes(table, values, absmax, codes);
    absmax
}

#[inline(always)]
pub(crate) fn table_codes(table: &CodeTable, values: &[f32], scale: f32, codes: &mut [u8]) {
    assert_eq!(values.len(), codes.len(), "table_codes: values and codes differ in length");
    let mut bits = [0; STATE_BLOCK];
    for (values, codes) in values.chunks(STATE_BLOCK).zip(codes.chunks_mut(STATE_BLOCK)) {
        let bits = &mut bits[..values.len()];
        bits.iter_mut().zip(values).for_each(|(bits, v)| *bits = (v / scale).to_bits());
        codes.iter_mut().zip(bits).for_each(|(code, bits)| *code = table.by_bits(*bits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_the_codes_of_their_rule() {
        for book in [Book::Dyn8, Book::Dyn8Unsigned, Book::Lin8, Book::Lin8Unsigned, Book::Dyn4] {
            let by_points = CodeTable::new(book.levels(), |v| book.encode_by_table(v) as u8);
            let nearest = CodeTable::nearest(book);
            let levels = book.levels();
            let middles = levels.windows(2).flat_map(|w| {
                let middle = (w[0] + w[1]) / 2.0;
                [middle.next_down(), middle, middle.next_up(), w[1]]
            });
            let any = (0..300_000u32).map(|i| (i as f32 * 0.61).sin() * 10f32.powi(-(i as i32 % 9)));
            for v in middles.chain(any).chain([0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY]) {
                assert_eq!(u32::from(nearest.encode(v)), book.encode(v), "{book:?} {v:e}");
                assert_eq!(u32::from(by_points.encode(v)), book.encode_by_table(v), "{book:?} {v:e}");
            }
            assert_eq!(nearest.encode(-f32::NAN), nearest.encode(f32::NAN));
            assert_eq!(nearest.zero(), book.encode(0.0) as u8);
        }
    }
}
