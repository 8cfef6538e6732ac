//! The product of some panels of floating-point codes with a tile of tokens, generic over the level and the numbers of
//! panels and tokens.

use super::dot::{Dot, MiniBits, Quad};
use super::float_code::{FloatCode, PairTable};
use super::{BLOCK, ROWS};

/// Panels of one product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strip<'a> {
    pub(super) code: FloatCode,
    pub(super) mini: MiniBits,
    pub(super) table: &'a PairTable,
    /// Bytes of the panels, `panel` bytes each.
    pub(super) bytes: &'a [u8],
    pub(super) panel: usize,
    /// `[panels, groups]`.
    pub(super) scales: &'a [[f32; ROWS]],
    pub(super) groups: usize,
    pub(super) blocks: usize,
    pub(super) group: usize,
}

impl<'a> Strip<'a> {
    /// The same weight as panels of bf16.
    pub(super) fn expanded<'b>(&self, bytes: &'b [u8]) -> Strip<'b>
    where
        'a: 'b,
    {
        Strip { code: FloatCode::Bf16, bytes, panel: 2 * self.panel, ..*self }
    }
}

/// Signature of a product: the panels, a tile of activations, and the results `[panels, tokens]`.
pub(crate) type FloatProduct = unsafe fn(&Strip<'_>, &[u32], &mut [[f32; ROWS]]);

/// Functions of a level, for several panels and for one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatTile {
    pub(crate) tokens: usize,
    pub(crate) panels: usize,
    pub(crate) several: FloatProduct,
    pub(crate) one: FloatProduct,
}

/// Columns of 16 rows, widened.
type Columns = [[f32; ROWS]; BLOCK];

/// Multiplies `P` panels with `T` tokens in f32.
#[inline(always)]
pub(crate) fn by_f32<D: Dot, const T: usize, const P: usize>(
    d: D,
    w: &Strip<'_>,
    x: &[u32],
    out: &mut [[f32; ROWS]],
) {
    let x = x.as_chunks::<T>().0.as_chunks::<BLOCK>().0;
    assert!(x.len() == w.blocks && out.len() == P * T, "FloatPanels: sizes differ");
    let mut sums = [[d.splat(0.0); T]; P];
    let mut wide: [Columns; P] = [[[0.0; ROWS]; BLOCK]; P];
    for (g, x) in x.chunks(w.group).enumerate() {
        let mut part = [[d.splat(0.0); T]; P];
        for (b, x) in x.iter().enumerate() {
            for (p, wide) in wide.iter_mut().enumerate() {
                widen(d, w, p, g * w.group + b, wide);
            }
            for (c, x) in x.iter().enumerate() {
                // Token by token: only one of them takes a register beside the sums.
                each!(T, TOKEN => {
                    let x = d.splat(f32::from_bits(x[TOKEN]));
                    each!(panels P, PANEL => {
                        let column = d.load_f32(&wide[PANEL][c]);
                        part[PANEL][TOKEN] = d.mul_add(column, x, part[PANEL][TOKEN]);
                    });
                });
            }
        }
        each!(panels P, PANEL => {
            let scale = d.load_f32(&w.scales[PANEL * w.groups + g]);
            each!(T, TOKEN => sums[PANEL][TOKEN] = d.mul_add(part[PANEL][TOKEN], scale, sums[PANEL][TOKEN]));
        });
    }
    each!(panels P, PANEL => each!(T, TOKEN => d.store_f32(sums[PANEL][TOKEN], &mut out[PANEL * T + TOKEN])));
}

/// Widens block `block` of panel `panel`. By loops: instructions of a level are not inlined into closures that pass
/// through an iterator.
#[inline(always)]
fn widen<D: Dot>(d: D, w: &Strip<'_>, panel: usize, block: usize, out: &mut Columns) {
    let bytes = &w.bytes[panel * w.panel..][block * BLOCK * ROWS * w.code.bytes()..];
    match w.code {
        FloatCode::F32 => {
            let columns = bytes.as_chunks::<{ 4 * ROWS }>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_f32(column), out);
            }
        }
        FloatCode::F16 => {
            let columns = bytes.as_chunks::<{ 2 * ROWS }>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_f16(column), out);
            }
        }
        FloatCode::Bf16 => {
            let columns = out.as_chunks_mut::<2>().0;
            for ([low, high], column) in columns.iter_mut().zip(bytes.as_chunks::<{ 4 * ROWS }>().0) {
                let [first, second] = d.wide_bf16_pairs(column);
                d.store_f32(first, low);
                d.store_f32(second, high);
            }
        }
        FloatCode::Mini { .. } => {
            let columns = bytes.as_chunks::<ROWS>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_mini(column, w.mini), out);
            }
        }
    }
}

/// Multiplies pairs of bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) trait PairDot: Dot {
    /// `sum + w[1] x[1] + w[0] x[0]` in every lane, by `VDPBF16PS`.
    fn dot_pairs(self, sum: Self::F, w: Self::B, x: u32) -> Self::F;
    /// Widens four columns of 16 rows to pairs of bf16: pairs of the first two columns, and pairs of the last two. The
    /// codes lie so that 16 bytes hold four rows, first their first two columns, then the others.
    fn wide_pairs(self, x: &Quad, table: &PairTable) -> [Self::B; 2];
}

/// Expands 8-bit floats to pairs of bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
pub(crate) fn expand_pairs<D: PairDot>(d: D, codes: &[Quad], table: &PairTable, out: &mut [Quad]) {
    for (codes, [first, second]) in codes.iter().zip(out.as_chunks_mut().0) {
        let wide = d.wide_pairs(codes, table);
        d.store(wide[0], first);
        d.store(wide[1], second);
    }
}

/// Multiplies `P` panels with `T` tokens in bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
pub(crate) fn by_bf16<D: PairDot, const T: usize, const P: usize>(
    d: D,
    w: &Strip<'_>,
    x: &[u32],
    out: &mut [[f32; ROWS]],
) {
    const PAIRS: usize = BLOCK / 2;
    let x = x.as_chunks::<T>().0.as_chunks::<PAIRS>().0;
    assert!(x.len() == w.blocks && out.len() == P * T, "FloatPanels: sizes differ");
    let panels: [&[Quad]; P] = std::array::from_fn(|p| w.bytes[p * w.panel..][..w.panel].as_chunks().0);
    let mut sums = [[d.splat(0.0); T]; P];
    for (g, x) in x.chunks(w.group).enumerate() {
        let mut part = [[d.splat(0.0); T]; P];
        let x = x.as_flattened();
        if w.code == FloatCode::Bf16 {
            let panels = panels.map(|panel| &panel[g * w.group * PAIRS..][..x.len()]);
            for (c, x) in x.iter().enumerate() {
                // Token by token: only one of them takes a register beside the sums.
                each!(T, TOKEN => {
                    each!(panels P, PANEL => {
                        let column = d.load(&panels[PANEL][c]);
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], column, x[TOKEN]);
                    });
                });
            }
        } else {
            let x = x.as_chunks::<2>().0;
            let panels = panels.map(|panel| &panel[g * w.group * PAIRS / 2..][..x.len()]);
            for (c, x) in x.iter().enumerate() {
                each!(panels P, PANEL => {
                    let [first, second] = d.wide_pairs(&panels[PANEL][c], w.table);
                    each!(T, TOKEN => {
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], first, x[0][TOKEN]);
                    });
                    each!(T, TOKEN => {
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], second, x[1][TOKEN]);
                    });
                });
            }
        }
        each!(panels P, PANEL => {
            let scale = d.load_f32(&w.scales[PANEL * w.groups + g]);
            each!(T, TOKEN => sums[PANEL][TOKEN] = d.mul_add(part[PANEL][TOKEN], scale, sums[PANEL][TOKEN]));
        });
    }
    each!(panels P, PANEL => each!(T, TOKEN => d.store_f32(sums[PANEL][TOKEN], &mut out[PANEL * T + TOKEN])));
}
