//! Operations of an instruction-set level on 16 rows at a time: 64 bytes hold four columns of 16 rows, one 32-bit
//! lane per row.

use super::ROWS;

/// Bytes of four columns of 16 rows.
pub(crate) type Quad = [u8; 4 * ROWS];

/// Places of a minifloat's bits in an f16, whose exponent and mantissa are at least as wide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MiniBits {
    pub(crate) magnitude: u8,
    pub(crate) shift: u32,
    pub(crate) sign: u8,
    pub(crate) sign_shift: u32,
}

impl MiniBits {
    /// Bits of the f16 for code `x`.
    #[inline(always)]
    pub(crate) fn half(self, x: u8) -> u16 {
        u16::from(x & self.magnitude) << self.shift | u16::from(x & self.sign) << self.sign_shift
    }
}

/// Level of the packed products. A value proves that the level's instructions are available.
pub(crate) trait Dot: Copy {
    /// True if [`dot`](Self::dot) multiplies signed bytes. Codes and levels that may be 128 or more are then replaced
    /// by [`less_128`](Self::less_128), and the sums of a unit start with 128 times the sum of its activations.
    const SIGNED: bool = false;

    /// 16 i32 sums.
    type I: Copy;
    /// 64 bytes.
    type B: Copy;
    /// 16 f32 lanes.
    type F: Copy;

    /// Asks for the cache lines of `bytes` bytes from `start` on, which need not exist, for the second-level cache.
    #[inline(always)]
    fn prefetch(self, start: *const u8, bytes: usize) {
        let _ = (start, bytes);
    }

    fn splat_i(self, x: i32) -> Self::I;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn load(self, x: &Quad) -> Self::B;
    fn store(self, x: Self::B, out: &mut Quad);
    /// Shifts pairs of bytes left (`n < 0`) or right; bits may cross from one byte of a pair to the other.
    fn shift(self, x: Self::B, n: i32) -> Self::B;
    fn and(self, x: Self::B, mask: u8) -> Self::B;
    fn or(self, a: Self::B, b: Self::B) -> Self::B;
    /// Replaces every byte, at most 15, by its entry in the table.
    fn look_up(self, x: Self::B, table: &[u8; 16]) -> Self::B;
    /// Bytes less 128, as signed bytes; only where [`SIGNED`](Self::SIGNED) is true.
    #[inline(always)]
    fn less_128(self, x: Self::B) -> Self::B {
        x
    }
    /// Adds to every lane the products of its four bytes, unsigned unless [`SIGNED`](Self::SIGNED), and the four
    /// signed bytes of `x`.
    fn dot(self, sum: Self::I, w: Self::B, x: i32) -> Self::I;

    /// Divides 16 values, rounds them to nearest even and limits them to a range within -128 to 127. NaN becomes 0.
    #[inline(always)]
    fn codes(self, x: &[f32; ROWS], divisor: f32, range: (f32, f32), out: &mut [i8; ROWS]) {
        for (out, x) in out.iter_mut().zip(x) {
            *out = (x / divisor).round_ties_even().clamp(range.0, range.1) as i8;
        }
    }

    fn to_f32(self, x: Self::I) -> Self::F;
    fn splat(self, x: f32) -> Self::F;
    fn load_f32(self, x: &[f32; ROWS]) -> Self::F;
    fn store_f32(self, x: Self::F, out: &mut [f32; ROWS]);
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Widens 16 little-endian f16.
    fn wide_f16(self, x: &[u8; 2 * ROWS]) -> Self::F;
    /// Widens 16 little-endian bf16.
    fn wide_bf16(self, x: &[u8; 2 * ROWS]) -> Self::F;
    /// Widens 16 pairs of bf16: the first of each, and the second.
    #[inline(always)]
    fn wide_bf16_pairs(self, x: &Quad) -> [Self::F; 2] {
        let pairs = x.as_chunks::<4>().0;
        let wide = |i: usize, shift: u32| f32::from_bits(u32::from_le_bytes(pairs[i]) << shift & 0xffff_0000);
        [
            self.load_f32(&std::array::from_fn(|i| wide(i, 16))),
            self.load_f32(&std::array::from_fn(|i| wide(i, 0))),
        ]
    }
    /// Widens 16 signed bytes.
    fn wide_i8(self, x: &[u8; ROWS]) -> Self::F;
    /// Widens 16 unsigned bytes.
    fn wide_u8(self, x: &[u8; ROWS]) -> Self::F;
    /// Makes 16 powers of two from the exponents of f32.
    fn powers(self, x: &[u8; ROWS]) -> Self::F;
    /// Widens 2^-8 times 16 magnitudes of E4M3, whose bits equal an f16's without the last 7.
    fn wide_e4m3(self, x: &[u8; ROWS]) -> Self::F;
    /// Widens 16 f32 patterns in little-endian bytes.
    fn wide_f32(self, x: &[u8; 4 * ROWS]) -> Self::F;
    /// Widens 16 minifloats of at most 8 bits by way of f16, without the difference of the exponent biases.
    fn wide_mini(self, x: &[u8; ROWS], bits: MiniBits) -> Self::F;
}

/// The definition of every operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plain;

impl Dot for Plain {
    type I = [i32; ROWS];
    type B = Quad;
    type F = [f32; ROWS];

    #[inline(always)]
    fn splat_i(self, x: i32) -> Self::I {
        [x; ROWS]
    }

    #[inline(always)]
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn load(self, x: &Quad) -> Quad {
        *x
    }

    #[inline(always)]
    fn store(self, x: Quad, out: &mut Quad) {
        *out = x;
    }

    #[inline(always)]
    fn shift(self, x: Quad, n: i32) -> Quad {
        let mut out = x;
        for pair in out.as_chunks_mut::<2>().0 {
            let both = u16::from_le_bytes(*pair);
            *pair = (if n >= 0 { both >> n } else { both << -n }).to_le_bytes();
        }
        out
    }

    #[inline(always)]
    fn and(self, x: Quad, mask: u8) -> Quad {
        x.map(|x| x & mask)
    }

    #[inline(always)]
    fn or(self, a: Quad, b: Quad) -> Quad {
        std::array::from_fn(|i| a[i] | b[i])
    }

    #[inline(always)]
    fn look_up(self, x: Quad, table: &[u8; 16]) -> Quad {
        x.map(|x| table[usize::from(x & 15)])
    }

    #[inline(always)]
    fn dot(self, sum: Self::I, w: Quad, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|x| i32::from(x as i8));
        std::array::from_fn(|row| (0..4).fold(sum[row], |sum, i| sum + i32::from(w[4 * row + i]) * x[i]))
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; ROWS]
    }

    #[inline(always)]
    fn load_f32(self, x: &[f32; ROWS]) -> Self::F {
        *x
    }

    #[inline(always)]
    fn store_f32(self, x: Self::F, out: &mut [f32; ROWS]) {
        *out = x;
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn wide_f16(self, x: &[u8; 2 * ROWS]) -> Self::F {
        let mut out = [0.0; ROWS];
        crate::generic::f16_le_to_f32(x, &mut out);
        out
    }

    #[inline(always)]
    fn wide_bf16(self, x: &[u8; 2 * ROWS]) -> Self::F {
        let mut out = [0.0; ROWS];
        crate::generic::bf16_le_to_f32(x, &mut out);
        out
    }

    #[inline(always)]
    fn wide_i8(self, x: &[u8; ROWS]) -> Self::F {
        x.map(|x| f32::from(x as i8))
    }

    #[inline(always)]
    fn wide_u8(self, x: &[u8; ROWS]) -> Self::F {
        x.map(f32::from)
    }

    #[inline(always)]
    fn powers(self, x: &[u8; ROWS]) -> Self::F {
        x.map(|x| f32::from_bits(u32::from(x) << 23))
    }

    #[inline(always)]
    fn wide_e4m3(self, x: &[u8; ROWS]) -> Self::F {
        let mut out = [0.0; ROWS];
        crate::generic::f16_to_f32(&x.map(|x| u16::from(x) << 7), &mut out);
        out
    }

    #[inline(always)]
    fn wide_f32(self, x: &[u8; 4 * ROWS]) -> Self::F {
        let four = x.as_chunks::<4>().0;
        std::array::from_fn(|i| f32::from_le_bytes(four[i]))
    }

    #[inline(always)]
    fn wide_mini(self, x: &[u8; ROWS], bits: MiniBits) -> Self::F {
        let mut out = [0.0; ROWS];
        crate::generic::f16_to_f32(&x.map(|x| bits.half(x)), &mut out);
        out
    }
}
