//! Sixteen f32 side by side: the arithmetic of the searches in [`codec`](crate::codec).
//!
//! A search compares many candidates for one block; each lane is a candidate, or a part of the block. Every operation
//! is the IEEE operation of each lane, fused only where its name says so. So [`Portable`] and any faster
//! implementation agree bit for bit.

/// Number of lanes.
pub const LANES: usize = 16;

/// Operations on [`LANES`] values. A value of the type proves that its instruction set is available.
pub trait Lanes: Copy {
    /// The values.
    type V: Copy;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// One value per lane.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// The inverse of [`load`](Self::load).
    fn to_array(self, a: Self::V) -> [f32; LANES];
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once: fused at every level, in software if the processor has no FMA.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `c - a * b`, rounded once.
    fn sub_mul(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `|a|`.
    fn abs(self, a: Self::V) -> Self::V;
    /// `a` truncated to an integer.
    fn trunc(self, a: Self::V) -> Self::V;
    /// `if b > a { b } else { a }`.
    fn greater(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if b < a { b } else { a }`.
    fn lesser(self, a: Self::V, b: Self::V) -> Self::V;
    /// `if a < b { x } else { y }`.
    fn if_less(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The last eight lanes, then the first eight.
    fn swap_halves(self, a: Self::V) -> Self::V;
    /// First lane with the smallest value, and the value; no lane is NaN.
    fn least(self, a: Self::V) -> (usize, f32);
    /// The greatest value; no lane is NaN.
    fn greatest(self, a: Self::V) -> f32;
    /// Low byte of each lane [truncated](Self::trunc), in two's complement; magnitudes are below 2^22.
    fn bytes(self, a: Self::V) -> [u8; LANES];

    /// Runs `work` in a function of its own, compiled for the instruction set of these lanes. It keeps functions with
    /// many searches small: compile time grows faster than their size.
    fn call<W: Work>(self, work: W) -> W::Out;

    /// Bits of the f16 nearest to each lane, ties to even, infinite beyond its range; no lane is NaN.
    #[inline(always)]
    fn halves(self, a: Self::V) -> [u16; LANES] {
        self.to_array(a).map(crate::minifloat::f16_bits)
    }
}

/// Work on lanes for [`Lanes::call`]: a closure that is generic over the lanes. Implementations are `#[inline(always)]`.
pub trait Work {
    /// Result.
    type Out;

    /// Does the work.
    fn run<L: Lanes>(self, l: L) -> Self::Out;
}

/// Plain arrays, vectorized by the compiler.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Lanes for Portable {
    type V = [f32; LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> [f32; LANES] {
        *x
    }

    #[inline(always)]
    fn to_array(self, a: [f32; LANES]) -> [f32; LANES] {
        a
    }

    #[inline(always)]
    fn add(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] - b[i])
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
    fn sub_mul(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn div(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn abs(self, a: [f32; LANES]) -> [f32; LANES] {
        a.map(f32::abs)
    }

    #[inline(always)]
    fn trunc(self, a: [f32; LANES]) -> [f32; LANES] {
        a.map(f32::trunc)
    }

    #[inline(always)]
    fn greater(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if b[i] > a[i] { b[i] } else { a[i] })
    }

    #[inline(always)]
    fn lesser(self, a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if b[i] < a[i] { b[i] } else { a[i] })
    }

    #[inline(always)]
    fn if_less(self, a: [f32; LANES], b: [f32; LANES], x: [f32; LANES], y: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }

    #[inline(always)]
    fn swap_halves(self, a: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i ^ 8])
    }

    #[inline(always)]
    fn least(self, a: [f32; LANES]) -> (usize, f32) {
        let mut best = (0, a[0]);
        for (i, &v) in a.iter().enumerate() {
            if v < best.1 {
                best = (i, v);
            }
        }
        best
    }

    #[inline(always)]
    fn greatest(self, a: [f32; LANES]) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, |most, v| if v > most { v } else { most })
    }

    #[inline(never)]
    fn call<W: Work>(self, work: W) -> W::Out {
        work.run(self)
    }

    #[inline(always)]
    fn bytes(self, a: [f32; LANES]) -> [u8; LANES] {
        // Leaves an integer in the low bits, in two's complement. Compilers vectorize this conversion, but not a
        // saturating cast.
        const INTEGERS: f32 = 12_582_912.0; // 1.5 · 2^23
        a.map(|v| (v.trunc() + INTEGERS).to_bits() as u8)
    }
}
