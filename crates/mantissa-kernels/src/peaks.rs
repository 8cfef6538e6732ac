//! Peaks of this machine, measured: the limits that products and passes over memory are compared with.

use crate::buffer::Buffer;
use crate::parallel::for_each;
use crate::{Isa, Kernels};

/// Independent sums of a measured loop: more than the latency of a multiply-add times the units that start one.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 20;

/// Repetitions of the loop body in a call.
#[cfg(target_arch = "x86_64")]
const ROUNDS: usize = 1 << 16;

/// Operations of one call on one thread, in multiply-adds times two.
#[derive(Clone, Copy, Debug)]
pub struct PeakLoop {
    run: unsafe fn() -> u64,
    operations: f64,
}

impl PeakLoop {
    /// Loop of the processor's fastest 8-bit dot product that the products use, `None` without one.
    pub fn int8(kernels: &Kernels) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let level = crate::packed::PackedLevel::available(kernels.isa()).next()?;
            match level.name() {
                "amx" => Some(PeakLoop::of_tiles(x86::int8_tiles, 2.0 * 64.0)),
                "avx512-vnni" => Some(PeakLoop::of(x86::int8_512, 2.0 * 64.0)),
                "avx-vnni" => Some(PeakLoop::of(x86::int8_256, 2.0 * 32.0)),
                "avx2" => Some(PeakLoop::of(x86::int16_256, 2.0 * 16.0)),
                _ => None,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = kernels;
            None
        }
    }

    /// Loop of the f32 multiply-add of the level; `None` if it has no vector one.
    pub fn f32(kernels: &Kernels) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        return match kernels.isa() {
            Isa::Avx512 | Isa::Amx => Some(PeakLoop::of(x86::f32_512, 2.0 * 16.0)),
            Isa::Avx2 => Some(PeakLoop::of(x86::f32_256, 2.0 * 8.0)),
            _ => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (kernels, Isa::Scalar);
            None
        }
    }

    /// Loop of the bf16 dot product of AVX-512 BF16 or of AMX; `None` if products do not use it.
    pub fn bf16(kernels: &Kernels) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        return match kernels.isa() {
            Isa::Avx512 if kernels.bf16_dot() => Some(PeakLoop::of(x86::bf16_512, 2.0 * 32.0)),
            Isa::Amx if crate::packed::PackedLevel::available(Isa::Amx).next()?.name() == "amx" => {
                Some(PeakLoop::of_tiles(x86::bf16_tiles, 2.0 * 32.0))
            }
            _ => None,
        };
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = kernels;
            None
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn of(run: unsafe fn() -> u64, per_instruction: f64) -> Self {
        PeakLoop { run, operations: per_instruction * (SUMS * ROUNDS) as f64 }
    }

    /// Measures a loop of [`ROUNDS`] times four instructions on AMX tiles, `per_sum` operations for each of 256 sums.
    #[cfg(target_arch = "x86_64")]
    fn of_tiles(run: unsafe fn() -> u64, per_sum: f64) -> Self {
        PeakLoop { run, operations: per_sum * 256.0 * (4 * ROUNDS) as f64 }
    }

    /// Runs the loop once on each of `threads` threads; returns the operations of all.
    pub fn run(&self, threads: usize) -> f64 {
        let threads = threads.max(1);
        for_each(threads, 0..threads, |_| {
            // SAFETY: the constructors, the only sources of loops, have checked the loop's features: the level of a
            // `Kernels` is available on this processor, and so is what `PackedLevel::available` returns.
            std::hint::black_box(unsafe { (self.run)() });
        });
        self.operations * threads as f64
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{ROUNDS, SUMS};
    use std::arch::x86_64::*;

    /// Declares a loop of one instruction on [`SUMS`] independent sums.
    macro_rules! peak {
        ($name:ident, $features:literal, $start:expr, $sum:ident => $step:expr, $end:expr) => {
            #[target_feature(enable = $features)]
            pub(super) fn $name() -> u64 {
                // Sums that the compiler knew to be equal would become one.
                let mut sums = std::hint::black_box([$start; SUMS]);
                for _ in 0..ROUNDS {
                    for i in 0..SUMS {
                        let $sum = sums[i];
                        sums[i] = $step;
                    }
                }
                sums.into_iter().fold(0, |all, $sum| all ^ $end)
            }
        };
    }

    /// Declares a loop of one instruction on four tiles of sums. Only where AMX is.
    macro_rules! tile_peak {
        ($name:ident, $instruction:literal) => {
            pub(super) unsafe fn $name() -> u64 {
                // SAFETY: the caller's; the loop changes tile registers only, which the configuration has set to 0.
                unsafe {
                    let _tiles = crate::amx::Tiles::shaped(&[crate::amx::Shape::SQUARE; 8]);
                    std::arch::asm!(
                        "2:",
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        "dec {rounds}",
                        "jnz 2b",
                        rounds = inout(reg) ROUNDS => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        options(nostack, nomem),
                    );
                }
                0
            }
        };
    }

    tile_peak!(int8_tiles, "tdpbssd");
    tile_peak!(bf16_tiles, "tdpbf16ps");

    /// ORs all whole cache lines, from four places at a time: one place leaves some of the bandwidth unused.
    #[target_feature(enable = "avx512f")]
    pub(super) fn read_512(bytes: &[u8]) -> u64 {
        let lines = bytes.as_chunks::<64>().0;
        let quarter = lines.len() / 4;
        let (a, rest) = lines.split_at(quarter);
        let (b, rest) = rest.split_at(quarter);
        let (c, d) = rest.split_at(quarter);
        let mut all = [_mm512_setzero_si512(); 4];
        for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
            for (all, line) in all.iter_mut().zip([a, b, c, d]) {
                // SAFETY: reads the 64 bytes of the array; loadu needs no alignment.
                *all = _mm512_or_si512(*all, unsafe { _mm512_loadu_si512(line.as_ptr().cast()) });
            }
        }
        all.into_iter().fold(0, |sum, x| sum | _mm512_reduce_or_epi64(x) as u64)
    }

    peak!(int8_512, "avx512f,avx512vnni", _mm512_set1_epi32(3), sum => _mm512_dpbusd_epi32(sum, sum, sum),
        _mm512_reduce_add_epi32(sum) as u64);
    peak!(int8_256, "avx2,avxvnni", _mm256_set1_epi32(3), sum => _mm256_dpbusd_avx_epi32(sum, sum, sum),
        _mm256_extract_epi32::<0>(sum) as u64);
    peak!(int16_256, "avx2", _mm256_set1_epi16(3),
        sum => _mm256_add_epi32(sum, _mm256_madd_epi16(sum, sum)), _mm256_extract_epi32::<0>(sum) as u64);
    peak!(f32_512, "avx512f", _mm512_set1_ps(0.5), sum => _mm512_fmadd_ps(sum, sum, sum),
        u64::from(_mm512_cvtss_f32(sum).to_bits()));
    peak!(f32_256, "avx2,fma", _mm256_set1_ps(0.5), sum => _mm256_fmadd_ps(sum, sum, sum),
        u64::from(_mm256_cvtss_f32(sum).to_bits()));
    peak!(bf16_512, "avx512f,avx512bf16", _mm512_set1_ps(0.5), sum => {
        // SAFETY: registers of one size, in which all bit patterns are valid.
        let halves = unsafe { std::mem::transmute::<__m512, __m512bh>(sum) };
        _mm512_dpbf16_ps(sum, halves, halves)
    }, u64::from(_mm512_cvtss_f32(sum).to_bits()));
}

/// Memory that is read to measure its bandwidth: larger than any cache, in huge pages like prepared weights.
#[derive(Debug)]
pub struct ReadProbe(Buffer);

/// Bytes that a thread reads at a time.
const PIECE: usize = 1 << 20;

impl ReadProbe {
    /// Allocates 256 MB and touches them; `None` if there is not enough memory.
    pub fn new() -> Option<Self> {
        let mut buffer = Buffer::zeroed(256 << 20)?;
        buffer.bytes_mut().fill(1);
        Some(ReadProbe(buffer))
    }

    /// Reads all of it once, on up to `threads` threads; returns the number of bytes.
    pub fn run(&self, threads: usize) -> f64 {
        let bytes = self.0.bytes();
        for_each(threads, bytes.chunks(PIECE), |piece| {
            std::hint::black_box(read(piece));
        });
        bytes.len() as f64
    }
}

/// Combines all bytes with an operation that costs nothing beside the loads.
fn read(bytes: &[u8]) -> u64 {
    let level = crate::kernels();
    #[cfg(target_arch = "x86_64")]
    if matches!(level.isa(), Isa::Avx512 | Isa::Amx) {
        // SAFETY: the level of the kernels is available.
        return unsafe { x86::read_512(bytes) };
    }
    let _ = level;
    let lines = bytes.as_chunks::<64>().0;
    let mut all = [0u64; 8];
    for line in lines {
        for (all, word) in all.iter_mut().zip(line.as_chunks::<8>().0) {
            *all |= u64::from_le_bytes(*word);
        }
    }
    all.into_iter().fold(0, |all, word| all | word)
}
