//! Attention to one tile, at the level of the processor.

use super::layout::{TILE_TOKENS, Tile};
use super::queries::Queries;
use super::simd::{Portable, TileSimd};
use super::softmax::{Softmax, Visible};
use super::{scores, simd, softmax, values};
use crate::{Isa, Kernels};

impl Kernels {
    /// Attends with `q` to the tokens of one tile of keys and of values, and adds them to `state`, begun for the same
    /// queries. `visible` states the tokens that each query sees; scores become `cap * tanh(score / cap)` under
    /// `softcap`. `next` are the keys and values of the tile that will be attended to next, which are prefetched; they
    /// may be empty.
    ///
    /// # Panics
    /// If a tile is shorter than its format needs, there are fewer `visible` than queries, or a range exceeds 64.
    pub fn attend_tile(
        &self,
        q: &Queries,
        keys: Tile<'_>,
        values: Tile<'_>,
        visible: &[Visible],
        softcap: Option<f32>,
        next: [&[u8]; 2],
        state: &mut Softmax,
    ) {
        for (tile, what) in [(keys, "keys"), (values, "values")] {
            let needed = tile.format.tile_bytes(q.head_dim);
            assert!(tile.bytes.len() >= needed, "paged: {what} of {} bytes, not {needed}", tile.bytes.len());
        }
        assert!(visible.len() >= q.rows, "paged: {} ranges for {} queries", visible.len(), q.rows);
        assert!(
            visible.iter().all(|range| usize::from(range.to) <= TILE_TOKENS),
            "paged: a range exceeds {TILE_TOKENS} tokens"
        );
        assert_eq!(
            (q.rows, q.dims),
            (state.rows, state.dims),
            "paged: the state was begun for other queries"
        );
        if q.rows == 0 || q.dims == 0 {
            return;
        }
        let args = Args { q, keys, values, visible: &visible[..q.rows], softcap, next };
        match self.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx if has_vnni() => {
                // SAFETY: a `Kernels` of this level exists only if the processor has AVX-512 F, BW, VL and DQ; VNNI and
                // F16C have just been detected.
                unsafe { attend_avx512(&args, state) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx if is_x86_feature_detected!("f16c") => {
                // SAFETY: a `Kernels` of these levels exists only if the processor has AVX2 and FMA; F16C has just been
                // detected.
                unsafe { attend_avx2(&args, state) }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                // SAFETY: a `Kernels` of this level exists only if the processor has NEON; the dot product has just
                // been detected.
                unsafe { attend_neon_dotprod(&args, state) }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                // SAFETY: a `Kernels` of this level exists only if the processor has NEON.
                unsafe { attend_neon(&args, state) }
            }
            _ => attend(Portable, &args, state),
        }
    }
}

/// Arguments of a tile.
struct Args<'a> {
    q: &'a Queries,
    keys: Tile<'a>,
    values: Tile<'a>,
    visible: &'a [Visible],
    softcap: Option<f32>,
    next: [&'a [u8]; 2],
}

#[inline(always)]
fn attend<S: TileSimd>(simd: S, args: &Args<'_>, state: &mut Softmax) {
    crate::simd::align_frame();
    let Args { q, keys, values, visible, softcap, next } = args;
    // Codes of the next tile are prefetched as this one's are read; what follows them, here.
    for (next, tile) in next.iter().zip([keys, values]) {
        simd.prefetch(next.get(tile.format.code_bytes(q.dims)..).unwrap_or(&[]));
    }
    let mut weights = std::mem::take(&mut state.weights);
    scores::scores(simd, q, *keys, next[0], &mut weights);
    state.weights = weights;
    softmax::weigh(simd, visible, *softcap, q.dims, state);
    values::sum(simd, *values, next[1], q.dims, visible, state);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn attend_avx2(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::x86::Avx2::new(), args, state);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn attend_avx512(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::x86::Avx512Vnni::new(), args, state);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn attend_neon(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::neon::Neon::new(), args, state);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
fn attend_neon_dotprod(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::neon::NeonDotprod::new(), args, state);
}

#[cfg(target_arch = "x86_64")]
fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("f16c")
}
