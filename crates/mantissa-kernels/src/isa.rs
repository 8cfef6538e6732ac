//! Instruction-set levels: detection and the `MANTISSA_ISA` override.

use std::fmt;

/// Name of the environment variable that forces a level.
pub(crate) const ENV: &str = "MANTISSA_ISA";

/// An instruction-set level for which the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Instructions that the compilation target guarantees (SSE2 on x86-64).
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and DQ, AVX2 and FMA.
    Avx512,
    /// [`Self::Avx512`] with AVX-512 BF16 and AMX tiles (AMX-TILE, AMX-BF16), if the system permits them.
    Amx,
    /// AArch64 with NEON.
    Neon,
}

impl Isa {
    /// Every level, from the least to the most capable.
    pub const ALL: [Self; 5] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];

    /// The most capable level of this processor.
    pub fn detect() -> Self {
        let mut levels = Self::ALL.into_iter().rev();
        levels.find(|isa| isa.is_available()).unwrap_or(Self::Scalar)
    }

    /// The levels that this processor can run.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// True if this processor (and operating system) can run the level. Querying [`Self::Amx`] requests permission to
    /// use tiles for the process.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            Self::Avx2 => has_avx2(),
            Self::Avx512 => has_avx512(),
            Self::Amx => has_amx(),
            Self::Neon => has_neon(),
        }
    }

    /// The name that `MANTISSA_ISA` takes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Neon => "neon",
        }
    }

    /// Level forced by `MANTISSA_ISA`, or the detected one if it is unset or empty.
    ///
    /// # Errors
    /// [`IsaError`] for an unknown level, or one that this processor lacks.
    pub fn from_env() -> Result<Self, IsaError> {
        match std::env::var_os(ENV) {
            Some(value) if !value.is_empty() => Self::parse(&value.to_string_lossy()),
            _ => Ok(Self::detect()),
        }
    }

    /// Level called `name`, if this processor can run it.
    ///
    /// # Errors
    /// [`IsaError::Unknown`] for another name, [`IsaError::Unavailable`] for a level that this processor lacks.
    pub fn parse(name: &str) -> Result<Self, IsaError> {
        let found = Self::ALL.into_iter().find(|isa| isa.name() == name);
        match found {
            Some(isa) if isa.is_available() => Ok(isa),
            Some(isa) => Err(IsaError::Unavailable(isa)),
            None => Err(IsaError::Unknown(name.to_owned())),
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reason why a requested level cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IsaError {
    /// The level exists, but not on this processor.
    Unavailable(Isa),
    /// No level has this name.
    Unknown(String),
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(isa) => write!(f, "{ENV}={isa}: this processor lacks {isa}")?,
            Self::Unknown(name) => write!(f, "{ENV}={name:?}: no such instruction-set level")?,
        }
        f.write_str("; available here: ")?;
        for (i, isa) in Isa::available().enumerate() {
            write!(f, "{}{isa}", if i == 0 { "" } else { ", " })?;
        }
        write!(f, " (unset {ENV} to choose the best)")
    }
}

impl std::error::Error for IsaError {}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// True if the level avx512 may use AVX-512 BF16 (`VDPBF16PS`).
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_bf16_dot() -> bool {
    has_avx512() && is_x86_feature_detected!("avx512bf16")
}

/// True if `VDPBF16PS` is faster than widening to f32. On AMD it is: twice the f32 peak, measured on Zen 5. On
/// Emerald Rapids it is half of the f32 peak (one starts every other cycle, against two f32 multiply-adds in each),
/// and the fast bf16 unit is AMX. Those Intel processors are recognised by AVX-512 FP16, which came with it. This is
/// a rule, not a measurement, so that a given processor always takes the same path.
#[cfg(target_arch = "x86_64")]
pub(crate) fn prefers_bf16_dot() -> bool {
    has_bf16_dot() && !(is_intel() && is_x86_feature_detected!("avx512fp16"))
}

#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    static AMX: std::sync::LazyLock<bool> =
        std::sync::LazyLock::new(|| has_bf16_dot() && crate::amx::is_available());
    *AMX
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    // SAFETY: every x86-64 processor has leaf 0. (A safe function in newer toolchains than the oldest supported.)
    #[allow(unused_unsafe)]
    let id = unsafe { std::arch::x86_64::__cpuid(0) };
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
}

/// True if reading through weights is faster with software prefetch: on Intel's processors, not on AMD's (measured on
/// Sapphire Rapids and Zen 4).
#[cfg(target_arch = "x86_64")]
pub(crate) fn prefers_prefetch() -> bool {
    static INTEL: std::sync::LazyLock<bool> = std::sync::LazyLock::new(is_intel);
    *INTEL
}

/// Not measured elsewhere.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn prefers_prefetch() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn has_amx() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_neon() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_neon() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for isa in Isa::ALL {
            let expected = if isa.is_available() { Ok(isa) } else { Err(IsaError::Unavailable(isa)) };
            assert_eq!(Isa::parse(isa.name()), expected);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_available_levels() {
        let message = Isa::parse("sse9").map_err(|e| e.to_string());
        assert!(message.is_err_and(|m| m.contains("\"sse9\"") && m.contains("available here: scalar")));
    }

    #[test]
    fn the_detected_level_is_available() {
        assert!(Isa::detect().is_available());
        assert!(Isa::available().any(|isa| isa == Isa::Scalar));
    }
}
