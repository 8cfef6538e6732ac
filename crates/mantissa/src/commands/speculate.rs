//! Option `--speculate`: where proposed tokens come from.

use mantissa_runtime::Speculation;

/// Source of proposed tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Speculate {
    /// Earlier places of the text
    Lookup,
    /// No proposals
    Off,
}

impl From<Speculate> for Speculation {
    fn from(source: Speculate) -> Self {
        match source {
            Speculate::Lookup => Self::Lookup,
            Speculate::Off => Self::Off,
        }
    }
}
