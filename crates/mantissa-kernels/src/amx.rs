//! bf16 products on AMX tiles: eight registers of 16 rows of 64 bytes, and `TDPBF16PS`, which multiplies a tile of 16
//! x 32 bf16 by one of 32 x 16 and adds the product to a tile of 16 x 16 f32 (Intel SDM, volumes 1, chapter 18, and
//! 2). There are no stable intrinsics, so the tile instructions are written as assembly.
//!
//! Blocking follows `generic::gemm_packed`, but both operands are packed into tiles, and sums start at the old value
//! of C, so that the blocking of k does not affect the result. For each 32 elements of k, `TDPBF16PS` computes two
//! chains of fused multiply-adds that start at 0, one of the even and one of the odd elements, adds them to each
//! other and the result to C. Everything is rounded to nearest even, and subnormals are flushed to zero. So an
//! element depends only on its row, its column, k and its old value.

use crate::generic::{self, Operand};
use crate::{MatMut, MatRef};
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

/// Rows of a tile, 32-bit values of a row, and pairs of bf16 along k.
const SIDE: usize = 16;

/// Lines of a block of C (two tiles), and elements of k per tile.
const PAIR: usize = 2 * SIDE;

/// Longest block of k: two panels of A, two of B and their block of C fit the first-level cache.
const DEPTH: usize = 288;

/// Blocks of k processed for one block of C before the next. Each block of C is then read and written once for all of
/// them.
const DEPTHS: usize = 8;

/// Rows of A in a block: 144 KiB. Its block of C is 512 KiB.
const BLOCK_ROWS: usize = 256;

/// Columns of B in a block: 288 KiB, with A and C half of the second-level cache of processors with AMX. All its
/// blocks of k together are 2.25 MiB.
const BLOCK_COLS: usize = 512;

/// Prefetch distance in elements while packing: four cache lines.
const AHEAD: usize = 128;

/// One row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct TileRow([u32; SIDE]);

/// Packed operands, kept per thread: fresh memory would cost as much as the product.
#[derive(Default)]
struct PackedOperands {
    a: Vec<TileRow>,
    /// Packed tiles of each block of k.
    b: Vec<Vec<TileRow>>,
}

thread_local! {
    static PACKED: Cell<PackedOperands> = Cell::default();
}

/// Order of the rows of a packed tile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    /// A line's pairs along k: left operands.
    Lines,
    /// A pair of k of all lines: right operands.
    Steps,
}

/// [`generic::gemm_bf16`] on tiles.
///
/// # Safety
/// [`is_available`] must have returned true, and the processor must have the target features.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")]
pub(crate) fn gemm_bf16(a: Operand<'_, u16>, b: Operand<'_, u16>, mut c: MatMut<'_>, accumulate: bool) {
    let Some((m, n, k)) = generic::gemm_shape("gemm_bf16", a, b, &mut c, accumulate) else { return };
    let mut packed = PACKED.take();
    let _tiles = Tiles::configure();
    let most = k.div_ceil(k.div_ceil(DEPTH)).next_multiple_of(PAIR);
    for col in (0..n).step_by(BLOCK_COLS) {
        let cols = col..n.min(col + BLOCK_COLS);
        for first in (0..k).step_by(DEPTHS * most) {
            let whole = first..k.min(first + DEPTHS * most);
            let depths = || whole.clone().step_by(most).map(|first| first..whole.end.min(first + most));
            packed.b.resize_with(depths().len().max(packed.b.len()), Vec::new);
            for (depth, b_packed) in depths().zip(&mut packed.b) {
                pack(b, cols.clone(), depth, Order::Steps, b_packed);
            }
            for row in (0..m).step_by(BLOCK_ROWS) {
                let rows = row..m.min(row + BLOCK_ROWS);
                for (depth, b_packed) in depths().zip(&packed.b) {
                    let add = accumulate || depth.start > 0;
                    pack(a, rows.clone(), depth.clone(), Order::Lines, &mut packed.a);
                    let tiles = depth.len().div_ceil(PAIR);
                    block((&packed.a, b_packed), tiles, rows.clone(), cols.clone(), &mut c, add);
                }
            }
        }
    }
    PACKED.set(packed);
}

/// Shape of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Rows, at most 16.
    pub(crate) rows: usize,
    /// Bytes of a row, at most 64.
    pub(crate) bytes: usize,
}

impl Shape {
    /// 16 rows of 64 bytes.
    pub(crate) const SQUARE: Self = Shape { rows: SIDE, bytes: 64 };
}

/// Tiles of this thread, configured until dropped.
pub(crate) struct Tiles;

impl Tiles {
    /// Eight tiles of 16 rows of 64 bytes. Only if [`is_available`] has returned true.
    fn configure() -> Self {
        // SAFETY: the caller's.
        unsafe { Self::shaped(&[Shape::SQUARE; 8]) }
    }

    /// Eight tiles of some shapes.
    ///
    /// # Safety
    /// [`is_available`] must have returned true.
    pub(crate) unsafe fn shaped(shapes: &[Shape; 8]) -> Self {
        /// Palette 1, no start row, 14 reserved bytes, bytes of a row of each tile, rows of each tile.
        #[repr(C, align(64))]
        struct Config {
            head: [u8; 16],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config = Config { head: [0; 16], row_bytes: [0; 16], rows: [0; 16] };
        config.head[0] = 1;
        for ((shape, row_bytes), rows) in shapes.iter().zip(&mut config.row_bytes).zip(&mut config.rows) {
            (*row_bytes, *rows) = (shape.bytes as u16, shape.rows as u8);
        }
        // SAFETY: reads the 64 bytes of a configuration allowed by palette 1. Nobody else uses the tile registers on
        // this thread: the compiler never does, and the modules that configure tiles leave none configured.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            );
        }
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: only resets the tiles of this thread to unused, which also saves the system their 8 KiB at thread
        // switches.
        unsafe {
            asm!(
                "tilerelease", options(nostack, preserves_flags, nomem),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            );
        }
    }
}

/// `C = A B`, or `C += A B` if `add`, for packed operands of `tiles` tiles along k.
#[inline]
#[target_feature(enable = "avx512f")]
fn block(
    (a, b): (&[TileRow], &[TileRow]),
    tiles: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    c: &mut MatMut<'_>,
    add: bool,
) {
    for (row, a) in rows.clone().step_by(PAIR).zip(a.chunks_exact(PAIR * tiles)) {
        let rows = row..rows.end.min(row + PAIR);
        for (col, b) in cols.clone().step_by(PAIR).zip(b.chunks_exact(PAIR * tiles)) {
            let stride = c.stride();
            if col + PAIR < cols.end {
                // Prefetch the next block's part of C while this one's sums are computed.
                let next = &c.as_mut_slice()[row * stride + col + PAIR..];
                for line in next.chunks(stride).take(rows.len()) {
                    prefetch(line.as_ptr());
                    prefetch(line.as_ptr().wrapping_add(SIDE));
                }
            }
            let cols = col..cols.end.min(col + PAIR);
            if (rows.len(), cols.len()) == (PAIR, PAIR) {
                let c = &mut c.as_mut_slice()[row * stride + col..][..(PAIR - 1) * stride + PAIR];
                multiply(a, b, c, stride, add);
                continue;
            }
            let mut staged = [0.0_f32; PAIR * PAIR];
            if add {
                for (row, staged) in rows.clone().zip(staged.chunks_exact_mut(PAIR)) {
                    staged[..cols.len()].copy_from_slice(&c.row_mut(row)[cols.clone()]);
                }
            }
            multiply(a, b, &mut staged, PAIR, add);
            for (row, staged) in rows.clone().zip(staged.chunks_exact(PAIR)) {
                c.row_mut(row)[cols.clone()].copy_from_slice(&staged[..cols.len()]);
            }
        }
    }
}

/// Prefetches the cache line at `place`.
#[inline]
#[target_feature(enable = "sse")]
fn prefetch(place: *const f32) {
    // SAFETY: a prefetch reads nothing and accepts any address. (Safe in newer toolchains than the oldest supported.)
    #[allow(unused_unsafe)]
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
}

/// Computes `C[32, 32] = A B`, or `C += A B` if `add`, for two panels of A, two of B and rows of C every `stride`
/// values. Tiles must be configured.
#[inline(always)]
fn multiply(a: &[TileRow], b: &[TileRow], c: &mut [f32], stride: usize, add: bool) {
    let tiles = a.len() / PAIR;
    assert!(tiles > 0 && a.len() == b.len() && a.len() == PAIR * tiles && stride >= PAIR);
    assert!(c.len() >= (PAIR - 1) * stride + PAIR);
    let (a_next, b_next) = (&a[tiles * SIDE..], &b[tiles * SIDE..]);
    let (c, stride) = (c.as_mut_ptr(), stride * size_of::<f32>());
    // SAFETY: the loop reads `tiles` tiles of 1024 bytes from each of the four panels, which have that length. Tiles
    // of C are 16 rows of 64 bytes, every `stride` bytes from `c`, 16 values later, 16 rows later and both: within C
    // by the assertions. The stores go to a slice that we borrow exclusively.
    unsafe {
        asm!(
            "lea {c2}, [{c} + {below}]",
            "test {add:e}, {add:e}",
            "jnz 2f",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "jmp 3f",
            "2:",
            "tileloadd tmm0, [{c} + {stride}]",
            "tileloadd tmm1, [{c} + {stride} + 64]",
            "tileloadd tmm2, [{c2} + {stride}]",
            "tileloadd tmm3, [{c2} + {stride} + 64]",
            "3:",
            "tileloadd tmm6, [{b} + {sixty_four}]",
            "tileloadd tmm4, [{a} + {sixty_four}]",
            "tileloadd tmm7, [{b2} + {sixty_four}]",
            "tileloadd tmm5, [{a2} + {sixty_four}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 1024",
            "add {a2}, 1024",
            "add {b}, 1024",
            "add {b2}, 1024",
            "dec {tiles}",
            "jnz 3b",
            "tilestored [{c} + {stride}], tmm0",
            "tilestored [{c} + {stride} + 64], tmm1",
            "tilestored [{c2} + {stride}], tmm2",
            "tilestored [{c2} + {stride} + 64], tmm3",
            a = inout(reg) a.as_ptr() => _,
            a2 = inout(reg) a_next.as_ptr() => _,
            b = inout(reg) b.as_ptr() => _,
            b2 = inout(reg) b_next.as_ptr() => _,
            c = in(reg) c,
            c2 = out(reg) _,
            stride = in(reg) stride,
            below = in(reg) SIDE * stride,
            add = in(reg) u32::from(add),
            tiles = inout(reg) tiles => _,
            sixty_four = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Packs `lines` of `operand` for the block `depth` of k: panels of 16 lines, each with tiles of 32 elements along k,
/// padded with zeros to an even number of panels.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn pack(
    operand: Operand<'_, u16>,
    lines: Range<usize>,
    depth: Range<usize>,
    order: Order,
    packed: &mut Vec<TileRow>,
) {
    let tiles = depth.len().div_ceil(PAIR);
    packed.resize(lines.len().div_ceil(PAIR) * PAIR * tiles, TileRow([0; SIDE]));
    let (m, by_line) = match operand {
        Operand::Rows(m) => (m, true),
        Operand::Columns(m) => (m, false),
    };
    let transpose = by_line != (order == Order::Lines);
    // Along the rows of the operand as stored.
    let (outer, inner) =
        if by_line { (lines.clone(), depth.clone()) } else { (depth.clone(), lines.clone()) };
    let mut read = [[_mm512_setzero_si512(); SIDE]; 2];
    for row in outer.clone().step_by(PAIR) {
        let rows = row..outer.end.min(row + PAIR);
        for col in inner.clone().step_by(PAIR) {
            let cols = col..inner.end.min(col + PAIR);
            if (rows.len(), cols.len()) != (PAIR, PAIR) {
                read = [[_mm512_setzero_si512(); SIDE]; 2];
            }
            let (line, k) = if by_line { (row, col) } else { (col, row) };
            match by_line {
                true => read_lines(m, rows.clone(), cols, &mut read),
                false => read_steps(m, rows.clone(), cols, &mut read),
            }
            let panels = &mut packed[(line - lines.start) * tiles..][..PAIR * tiles];
            let tile = (k - depth.start) / 2;
            for (vectors, panel) in read.iter().zip(panels.chunks_exact_mut(SIDE * tiles)) {
                let Some(out) = panel[tile..].first_chunk_mut() else { continue };
                if transpose {
                    store_transposed(vectors, out);
                } else {
                    vectors.iter().zip(out).for_each(|(vector, out)| store(*vector, out));
                }
            }
        }
    }
}

/// Packs two tiles of [`Order::Lines`] from up to 32 rows and columns of a matrix whose rows are lines; leaves the
/// rest unchanged.
#[inline]
#[target_feature(enable = "avx512f")]
fn read_lines(m: MatRef<'_, u16>, rows: Range<usize>, cols: Range<usize>, tiles: &mut [[__m512i; SIDE]; 2]) {
    for (row, vector) in rows.zip(tiles.as_flattened_mut()) {
        *vector = load(&m.row(row)[cols.clone()]);
    }
}

/// Packs two tiles of [`Order::Steps`] from up to 32 rows and columns of a matrix whose columns are lines; leaves the
/// rest unchanged.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn read_steps(m: MatRef<'_, u16>, rows: Range<usize>, cols: Range<usize>, tiles: &mut [[__m512i; SIDE]; 2]) {
    // Quarters of both interleaved halves, in line order.
    let first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    let second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    let [left, right] = tiles;
    for ((even, left), right) in rows.clone().step_by(2).zip(left).zip(right) {
        let low = load(&m.row(even)[cols.clone()]);
        let high = match even + 1 < rows.end {
            true => load(&m.row(even + 1)[cols.clone()]),
            false => _mm512_setzero_si512(),
        };
        let (evens, odds) = (_mm512_unpacklo_epi16(low, high), _mm512_unpackhi_epi16(low, high));
        *left = _mm512_permutex2var_epi64(evens, first, odds);
        *right = _mm512_permutex2var_epi64(evens, second, odds);
    }
}

/// Up to 32 values, padded with zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[u16]) -> __m512i {
    prefetch(values.as_ptr().wrapping_add(AHEAD).cast());
    let mut staged = [0; PAIR];
    let all = match values.first_chunk::<PAIR>() {
        Some(all) => all,
        None => {
            staged[..values.len()].copy_from_slice(values);
            &staged
        }
    };
    // SAFETY: reads the 64 bytes of the array; loadu needs no alignment.
    unsafe { _mm512_loadu_si512(all.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(vector: __m512i, out: &mut TileRow) {
    // SAFETY: writes the 64 bytes of the row; storeu needs no alignment.
    unsafe { _mm512_storeu_si512(out.0.as_mut_ptr().cast(), vector) };
}

/// Stores the transpose of 16 x 16 values of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_transposed(rows: &[__m512i; SIDE], out: &mut [TileRow; SIDE]) {
    let mut quads = [_mm512_setzero_si512(); SIDE];
    // Quarter q of `quads[4 g + c]` holds column 4 q + c of rows 4 g to 4 g + 3.
    for (from, to) in rows.as_chunks::<4>().0.iter().zip(quads.as_chunks_mut::<4>().0) {
        let [a, b, c, d] = *from;
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        *to = [
            _mm512_unpacklo_epi64(ab, cd),
            _mm512_unpackhi_epi64(ab, cd),
            _mm512_unpacklo_epi64(ab_high, cd_high),
            _mm512_unpackhi_epi64(ab_high, cd_high),
        ];
    }
    for c in 0..4 {
        let [a, b, d, e] = [quads[c], quads[4 + c], quads[8 + c], quads[12 + c]];
        // Quarters 0 and 1, and 2 and 3, of two.
        let (low, low_next) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(d, e));
        let (high, high_next) = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(d, e));
        store(_mm512_shuffle_i32x4::<0x88>(low, low_next), &mut out[c]);
        store(_mm512_shuffle_i32x4::<0xdd>(low, low_next), &mut out[4 + c]);
        store(_mm512_shuffle_i32x4::<0x88>(high, high_next), &mut out[8 + c]);
        store(_mm512_shuffle_i32x4::<0xdd>(high, high_next), &mut out[12 + c]);
    }
}

/// True if this process may use bf16 tiles and the processor has the supported ones. Requests permission from the
/// system, which applies to all threads of the process, including running ones (Linux,
/// Documentation/arch/x86/xstate.rst).
pub(crate) fn is_available() -> bool {
    // SAFETY: `_xgetbv` requires that the system enabled XSAVE, which AVX implies.
    let enabled = || is_x86_feature_detected!("avx") && unsafe { xcr0() } & TILE_STATES == TILE_STATES;
    processor_has_tiles() && enabled() && permitted()
}

/// True if the tiles, where they are [available](is_available), multiply 8-bit integers (CPUID leaf 7, AMX-INT8: EDX bit
/// 25).
pub(crate) fn has_int8() -> bool {
    // SAFETY: as in `processor_has_tiles`, which is true only if leaf 7 exists. (Safe in newer toolchains than the
    // oldest supported.)
    #[allow(unused_unsafe)]
    unsafe {
        is_available() && __cpuid_count(7, 0).edx >> 25 & 1 == 1
    }
}

/// XTILECFG and XTILEDATA (Intel SDM, volume 1, 13.3).
const TILE_STATES: u64 = 1 << 17 | 1 << XTILEDATA;

/// The state component that Linux grants on demand.
const XTILEDATA: u64 = 18;

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: register 0 exists if XSAVE is enabled, which the caller has checked.
    unsafe { _xgetbv(0) }
}

/// CPUID leaf 7: AMX-BF16 (EDX bit 22) and AMX-TILE (bit 24); leaf 1D, palette 1: tiles of 1024 bytes in rows of 64, eight
/// of them, of 16 rows (Intel SDM, volume 2, CPUID).
fn processor_has_tiles() -> bool {
    // SAFETY: every x86-64 processor has CPUID, and leaves are queried up to the highest one reported. (Safe
    // functions in newer toolchains than the oldest supported.)
    #[allow(unused_unsafe)]
    unsafe {
        if __cpuid(0).eax < 0x1d {
            return false;
        }
        let features = __cpuid_count(7, 0).edx;
        let palette = __cpuid_count(0x1d, 1);
        features >> 22 & 1 == 1
            && features >> 24 & 1 == 1
            && __cpuid_count(0x1d, 0).eax >= 1
            && palette.eax >> 16 == 1024
            && palette.ebx & 0xffff == 64
            && palette.ebx >> 16 >= 8
            && palette.ecx & 0xffff >= SIDE as u32
    }
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    let result: i64;
    // SAFETY: a system call with two integers that touches none of our memory; it clobbers RCX and R11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack, nomem),
        );
    }
    result == 0
}

/// Only Linux is supported.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_by_sixteen_is_transposed() {
        if !crate::Isa::Avx512.is_available() {
            eprintln!("not tested: this processor lacks AVX-512");
            return;
        }
        let rows: [[u32; SIDE]; SIDE] =
            std::array::from_fn(|r| std::array::from_fn(|c| (100 * r + c) as u32));
        let mut columns = [TileRow([0; SIDE]); SIDE];
        // SAFETY: arrays of register size; all bit patterns are valid; AVX-512 was detected.
        unsafe {
            let registers = std::mem::transmute::<[[u32; SIDE]; SIDE], [__m512i; SIDE]>(rows);
            store_transposed(&registers, &mut columns);
        }
        for (r, c) in (0..SIDE * SIDE).map(|i| (i / SIDE, i % SIDE)) {
            assert_eq!(columns[c].0[r], rows[r][c], "({r}, {c})");
        }
    }
}
