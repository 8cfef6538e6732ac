//! Operations that attention over tiles needs beyond [`crate::simd`]: conversions of stored elements and integer dot
//! products, on 16 lanes.
//!
//! Every operation gives the same bits at every level: integer sums are exact, and multiply-adds are fused everywhere.

#[cfg(target_arch = "aarch64")]
pub(super) mod neon;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;

/// Lanes of a register of f32 or i32.
pub(super) const LANES: usize = 16;

/// 1.5·2^23: adding it to `|x| <= 2^22` leaves the nearest integer in the low mantissa bits.
pub(super) const ROUND: f32 = 12_582_912.0;

/// Operations of a level. A value proves that the level is available.
pub(super) trait TileSimd: Copy {
    /// True if there are 32 vector registers of 16 lanes, so that 16 accumulators fit.
    const WIDE: bool;
    /// Offset of the codes in [`dot_codes`](Self::dot_codes): it sums `(code - 128 + CODE_OFFSET) * q`.
    const CODE_OFFSET: i32;

    /// 16 f32.
    type F32: Copy;
    /// 16 i32.
    type I32: Copy;
    /// 64 bytes.
    type Bytes: Copy;
    /// 32 i16.
    type Words: Copy;

    fn splat(self, x: f32) -> Self::F32;
    fn load(self, x: &[f32; LANES]) -> Self::F32;
    fn store(self, a: Self::F32, x: &mut [f32; LANES]);
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `if b > a { b } else { a }`.
    fn greater(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The greatest lane; unspecified if one is NaN.
    fn max_lane(self, a: Self::F32) -> f32;
    /// The sum of all lanes: lane `i` takes lane `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    fn sum_lanes(self, a: Self::F32) -> f32;
    /// Adds the low bits of `n` to the exponent of `a`: the bits of `a` plus the bits of `n` shifted left by 23.
    fn add_exponent(self, a: Self::F32, n: Self::F32) -> Self::F32;

    /// Little-endian f32.
    fn f32(self, x: &[u8; 64]) -> Self::F32;
    /// Little-endian f16.
    fn f16(self, x: &[u8; 32]) -> Self::F32;
    /// Little-endian bf16.
    fn bf16(self, x: &[u8; 32]) -> Self::F32;
    /// FP8 E4M3 (no NaN) times 2^-8.
    fn e4m3(self, x: &[u8; 16]) -> Self::F32;
    /// Unsigned bytes.
    fn unsigned(self, x: &[u8; 16]) -> Self::F32;

    fn zero(self) -> Self::I32;
    fn to_f32(self, a: Self::I32) -> Self::F32;
    /// `a[i] - x`.
    fn minus(self, a: Self::I32, x: i32) -> Self::I32;
    fn bytes(self, x: &[u8; 64]) -> Self::Bytes;
    fn low_nibbles(self, a: Self::Bytes) -> Self::Bytes;
    fn high_nibbles(self, a: Self::Bytes) -> Self::Bytes;
    /// Adds to lane `i` the products of bytes `4 i..` of `codes` and the four i8 in `q`, of at least -127; see
    /// [`CODE_OFFSET`](Self::CODE_OFFSET).
    fn dot_codes(self, sum: Self::I32, codes: Self::Bytes, q: i32) -> Self::I32;
    /// The same for codes below 16, which count as they are.
    fn dot_nibbles(self, sum: Self::I32, codes: Self::Bytes, q: i32) -> Self::I32;
    /// Signed bytes.
    fn words(self, x: &[u8; 32]) -> Self::Words;
    /// Bits `4 N..4 N + 4` of each 16-bit word.
    fn nibble_words<const N: u32>(self, a: Self::Bytes) -> Self::Words;
    /// Adds to lane `i` the products of words `2 i` and `2 i + 1` and the two i16 in `w`.
    fn dot_words(self, sum: Self::I32, a: Self::Words, w: i32) -> Self::I32;
    /// Requests the cache lines of `x`.
    fn prefetch(self, x: &[u8]);
}

/// The operations on arrays.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portable;

impl TileSimd for Portable {
    const WIDE: bool = false;
    const CODE_OFFSET: i32 = 128;

    type F32 = [f32; LANES];
    type I32 = [i32; LANES];
    type Bytes = [u8; 64];
    type Words = [i16; 32];

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }

    #[inline(always)]
    fn store(self, a: [f32; LANES], x: &mut [f32; LANES]) {
        *x = a;
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn greater(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if b[i] > a[i] { b[i] } else { a[i] })
    }

    #[inline(always)]
    fn max_lane(self, a: [f32; LANES]) -> f32 {
        a.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max })
    }

    #[inline(always)]
    fn sum_lanes(self, a: [f32; LANES]) -> f32 {
        let eight: [f32; 8] = std::array::from_fn(|i| a[i] + a[i + 8]);
        let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
        (four[0] + four[2]) + (four[1] + four[3])
    }

    #[inline(always)]
    fn add_exponent(self, a: [f32; LANES], n: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| f32::from_bits(a[i].to_bits().wrapping_add(n[i].to_bits() << 23)))
    }

    #[inline(always)]
    fn f32(self, x: &[u8; 64]) -> [f32; LANES] {
        std::array::from_fn(|i| f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]))
    }

    #[inline(always)]
    fn f16(self, x: &[u8; 32]) -> [f32; LANES] {
        let bits: [u16; LANES] = std::array::from_fn(|i| u16::from_le_bytes([x[2 * i], x[2 * i + 1]]));
        let mut values = [0.0; LANES];
        crate::generic::f16_to_f32(&bits, &mut values);
        values
    }

    #[inline(always)]
    fn bf16(self, x: &[u8; 32]) -> [f32; LANES] {
        std::array::from_fn(|i| f32::from_bits(u32::from_le_bytes([0, 0, x[2 * i], x[2 * i + 1]])))
    }

    #[inline(always)]
    fn e4m3(self, x: &[u8; 16]) -> [f32; LANES] {
        // Exponent and mantissa bits of E4M3 lie three places further left than f16's; the bias differs by 8.
        let mut half = [0; 32];
        for (half, &x) in half.chunks_exact_mut(2).zip(x) {
            half.copy_from_slice(&((u16::from(x & 0x80) << 8) | (u16::from(x & 0x7f) << 7)).to_le_bytes());
        }
        self.f16(&half)
    }

    #[inline(always)]
    fn unsigned(self, x: &[u8; 16]) -> [f32; LANES] {
        x.map(f32::from)
    }

    #[inline(always)]
    fn zero(self) -> [i32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn to_f32(self, a: [i32; LANES]) -> [f32; LANES] {
        a.map(|a| a as f32)
    }

    #[inline(always)]
    fn minus(self, a: [i32; LANES], x: i32) -> [i32; LANES] {
        a.map(|a| a.wrapping_sub(x))
    }

    #[inline(always)]
    fn bytes(self, x: &[u8; 64]) -> [u8; 64] {
        *x
    }

    #[inline(always)]
    fn low_nibbles(self, a: [u8; 64]) -> [u8; 64] {
        a.map(|a| a & 15)
    }

    #[inline(always)]
    fn high_nibbles(self, a: [u8; 64]) -> [u8; 64] {
        a.map(|a| a >> 4)
    }

    #[inline(always)]
    fn dot_codes(self, sum: [i32; LANES], codes: [u8; 64], q: i32) -> [i32; LANES] {
        let q = q.to_le_bytes();
        std::array::from_fn(|i| {
            (0..4).fold(sum[i], |s, j| s + i32::from(codes[4 * i + j]) * i32::from(q[j] as i8))
        })
    }

    #[inline(always)]
    fn dot_nibbles(self, sum: [i32; LANES], codes: [u8; 64], q: i32) -> [i32; LANES] {
        self.dot_codes(sum, codes, q)
    }

    #[inline(always)]
    fn words(self, x: &[u8; 32]) -> [i16; 32] {
        x.map(|x| i16::from(x as i8))
    }

    #[inline(always)]
    fn nibble_words<const N: u32>(self, a: [u8; 64]) -> [i16; 32] {
        std::array::from_fn(|i| (u16::from_le_bytes([a[2 * i], a[2 * i + 1]]) >> (4 * N) & 15) as i16)
    }

    #[inline(always)]
    fn dot_words(self, sum: [i32; LANES], a: [i16; 32], w: i32) -> [i32; LANES] {
        let (low, high) = (w as i16, (w >> 16) as i16);
        std::array::from_fn(|i| {
            let products = [(a[2 * i], low), (a[2 * i + 1], high)];
            products.iter().fold(sum[i], |s, (a, w)| s.wrapping_add(i32::from(*a) * i32::from(*w)))
        })
    }

    #[inline(always)]
    fn prefetch(self, _: &[u8]) {}
}
