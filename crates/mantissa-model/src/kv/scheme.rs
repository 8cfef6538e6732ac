//! The schemes under which a side of the cache is stored: those of mantissa's grammar, and two that only a cache has.
//!
//! `turbo4`, `turbo3` …: TurboQuant (Zandieh et al. 2025, arXiv 2504.19874, algorithm 1): each head is rotated at random, a
//! Hadamard matrix with random signs standing for the paper's rotation, and its coordinates, whose density is then known, take
//! the levels of least squared error for it; stored beside the codes is the head's length.
//!
//! `nuq4`, `nuq3-1%` …: KVQuant (Hooper et al. 2024, arXiv 2401.18079): levels found on a calibration text, one set for the keys
//! and one for the values of each layer. Keys are brought to [-1, 1] channel by channel, by ranges of the text; values token by
//! token, by their own range, which is stored. With `-N%` as many of each token's elements, those farthest outside, are kept
//! beside the codes as f16 with their places, and leave the ranges to the others.

use std::fmt;

use mantissa_num::{ParseError, Scheme, parse_activation};

/// How keys, or values, are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum KvScheme {
    /// Codes of a format and its scales.
    Grid(Scheme),
    /// TurboQuant in so many bits.
    Turbo {
        /// Bits of a code, 1 to 8.
        bits: u32,
    },
    /// KVQuant's non-uniform levels in so many bits.
    Nuq {
        /// Bits of a code, 1 to 8.
        bits: u32,
        /// Elements kept beside the codes, hundredths of a percent.
        outliers: u32,
    },
}

impl KvScheme {
    /// # Errors
    /// [`ParseError`] where the name is none of a cache's and none of the grammar's.
    pub(crate) fn parse(name: &str) -> Result<Self, ParseError> {
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

    /// Whether its levels are found on a text.
    pub(crate) fn is_calibrated(&self) -> bool {
        matches!(self, KvScheme::Nuq { .. })
    }
}

/// `1%`, `0.5%` … at most 50, in hundredths of a percent.
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
