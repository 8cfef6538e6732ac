//! Schemes for keys or values: those of mantissa's grammar, and two for caches alone.
//!
//! `turbo4`, `turbo3` …: TurboQuant (Zandieh et al. 2025, arXiv 2504.19874, algorithm 1): each head is rotated by a
//! Hadamard matrix with random signs (the paper's random rotation). The density of its coordinates is then known, and
//! they take the levels of least squared error for it. The length of the head is stored with the codes.
//!
//! `nuq4`, `nuq3-1%` …: KVQuant (Hooper et al. 2024, arXiv 2401.18079): levels found on a calibration text, one set
//! for the keys and one for the values of each layer. Keys are scaled to [-1, 1] per channel, by calibrated ranges;
//! values per token, by their own range, which is stored. With `-N%`, that share of each token's elements, the largest
//! outliers, is stored as f16 with their indices and excluded from the ranges.

use std::fmt;

use mantissa_num::{ParseError, Scheme, parse_activation};

/// Storage of keys, or of values.
#[derive(Clone, Debug, PartialEq)]
pub enum KvScheme {
    /// Codes of a format and its scales.
    Grid(Scheme),
    /// TurboQuant.
    Turbo {
        /// Bits of a code, 1 to 8.
        bits: u32,
    },
    /// KVQuant's non-uniform levels.
    Nuq {
        /// Bits of a code, 1 to 8.
        bits: u32,
        /// Outliers stored in f16, in hundredths of a percent.
        outliers: u32,
    },
}

/// Short names with the schemes they stand for. One scale per token and head: the granularity with the least loss among
/// those that attention kernels read (docs/results/kv-cache.md).
const SHORT: [(&str, &str); 3] =
    [("int8", "int8-head"), ("int4", "int4-head-asym"), ("fp8", "fp8-e4m3-head")];

impl KvScheme {
    /// Returns the full name of a short one, in any case: `fp8-e4m3-head` of `fp8`; other names are their own.
    pub fn spelled_out(name: &str) -> &str {
        SHORT.iter().find(|(short, _)| short.eq_ignore_ascii_case(name)).map_or(name, |(_, full)| full)
    }

    /// Parses a name, in any case; `int8`, `int4` and `fp8` stand for one scale per token and head.
    ///
    /// # Errors
    /// [`ParseError`] if neither the cache nor the grammar has a scheme of this name.
    pub(crate) fn parse(name: &str) -> Result<Self, ParseError> {
        let lower = name.to_ascii_lowercase();
        let name = KvScheme::spelled_out(&lower);
        let bits = |digits: &str| digits.parse().ok().filter(|bits| (1..=8).contains(bits));
        if let Some(bits) = name.strip_prefix("turbo").and_then(bits) {
            return Ok(KvScheme::Turbo { bits });
        }
        if let Some(rest) = name.strip_prefix("nuq") {
            let (digits, share) = rest.split_once('-').unwrap_or((rest, "0%"));
            if let (Some(bits), Some(outliers)) = (bits(digits), hundredths(share)) {
                return Ok(KvScheme::Nuq { bits, outliers });
            }
        }
        parse_activation(name).map(KvScheme::Grid)
    }

    /// True if its levels are found on a calibration text.
    pub(crate) fn is_calibrated(&self) -> bool {
        matches!(self, KvScheme::Nuq { .. })
    }
}

/// Parses `1%`, `0.5%` … (at most 50) to hundredths of a percent.
fn hundredths(share: &str) -> Option<u32> {
    let percent: f64 = share.strip_suffix('%')?.parse().ok()?;
    let hundredths = percent * 100.0;
    ((0.0..=5000.0).contains(&hundredths) && hundredths.fract() == 0.0).then_some(hundredths as u32)
}

impl fmt::Display for KvScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KvScheme::Grid(scheme) => scheme.fmt(f),
            KvScheme::Turbo { bits } => write!(f, "turbo{bits}"),
            KvScheme::Nuq { bits, outliers: 0 } => write!(f, "nuq{bits}"),
            KvScheme::Nuq { bits, outliers } => write!(f, "nuq{bits}-{}%", f64::from(*outliers) / 100.0),
        }
    }
}
