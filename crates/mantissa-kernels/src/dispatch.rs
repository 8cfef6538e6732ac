//! Process-wide choice of an instruction-set level, and the choice among the variants of a level.

#[macro_use]
mod declare;
mod table;

pub use table::Kernels;

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use crate::isa;
use crate::isa::{Isa, IsaError};
#[cfg(target_arch = "aarch64")]
use table::NEON;
use table::SCALAR;
#[cfg(target_arch = "x86_64")]
use table::{AVX2, AVX512};

/// Kernels of the level forced by `MANTISSA_ISA`, or else of the best one, resolved at first use.
///
/// A value of `MANTISSA_ISA` that [`init`] would refuse counts as unset here; programs call [`init`] at start-up to
/// report it.
pub fn kernels() -> &'static Kernels {
    static TABLE: OnceLock<Kernels> = OnceLock::new();
    TABLE.get_or_init(|| {
        let forced = Isa::from_env().ok().and_then(Kernels::new);
        forced.or_else(|| Kernels::new(Isa::detect())).unwrap_or(SCALAR)
    })
}

/// Resolves [`kernels`]; fails for a `MANTISSA_ISA` that cannot be used.
///
/// # Errors
/// [`IsaError`], which lists the levels of this processor.
pub fn init() -> Result<&'static Kernels, IsaError> {
    Isa::from_env()?;
    Ok(kernels())
}

impl Kernels {
    /// The kernels of level `isa`; `None` if this processor lacks it.
    pub fn new(isa: Isa) -> Option<Self> {
        if !isa.is_available() {
            return None;
        }
        let table = match isa {
            Isa::Scalar => SCALAR,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => AVX2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if isa::prefers_bf16_dot() => AVX512_BF16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => AVX512,
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => AMX,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => NEON,
            #[allow(unreachable_patterns)]
            _ => return None,
        };
        Some(table.with_best_codes())
    }

    /// The same kernels with the processor's best product of codes for their level; all have the same bits.
    fn with_best_codes(self) -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(gemm_codes) = crate::codes_x86::best(self.isa) {
            return Kernels { gemm_codes, ..self };
        }
        self
    }

    /// The level these kernels were compiled for.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// True if bf16 products use the processor's own dot product (`VDPBF16PS` of AVX-512 BF16, at level amx
    /// `TDPBF16PS`) instead of widening to f32. [`Self::new`] uses it if the processor has it and is faster with it.
    pub fn bf16_dot(&self) -> bool {
        self.bf16_dot
    }

    /// The same kernels with the standard order of bf16 products: without `VDPBF16PS`, which has another order.
    pub fn in_common_order(self) -> Self {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => AVX512.with_best_codes(),
            _ => self,
        }
    }

    /// These kernels with bf16 products on the processor's own dot product, or by widening to f32, as `wanted`.
    /// `None` if the dot product is wanted and the level or the processor lacks it.
    pub fn with_bf16_dot(self, wanted: bool) -> Option<Self> {
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if !wanted => Some(AVX512),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => isa::has_bf16_dot().then_some(AVX512_BF16),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(if wanted { AMX } else { Kernels { isa: Isa::Amx, ..AVX512 } }),
            _ => (!wanted).then_some(self),
        }
        .map(Self::with_best_codes)
    }
}

/// Level avx512 with bf16 products on `VDPBF16PS`. Only for processors on which [`isa::has_bf16_dot`] is true.
#[cfg(target_arch = "x86_64")]
const AVX512_BF16: Kernels = Kernels { bf16_dot: true, gemm_bf16: crate::x86::gemm_bf16_dot, ..AVX512 };

/// Level avx512 with bf16 products on tiles. Only for processes in which [`Isa::is_available`] returned true.
#[cfg(target_arch = "x86_64")]
const AMX: Kernels = Kernels { isa: Isa::Amx, bf16_dot: true, gemm_bf16: crate::amx::gemm_bf16, ..AVX512 };
