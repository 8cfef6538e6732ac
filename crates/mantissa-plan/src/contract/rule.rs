//! A requirement of an engine as data.

use mantissa_num::CodecId;
use serde::Serialize;

use super::schemes::Accepted;
use super::subject::{FormatClass, Observed};

/// Consequence of a broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// Works, but on a slower path or with slightly different results.
    Warning,
    /// Loads, but computes wrong results.
    Wrong,
    /// Does not load.
    Refused,
}

impl Severity {
    /// True if the model must not be served this way.
    pub fn fails(self) -> bool {
        self > Severity::Warning
    }

    /// Returns the text for reports.
    pub fn text(self) -> &'static str {
        match self {
            Severity::Warning => "warning",
            Severity::Wrong => "wrong results",
            Severity::Refused => "does not load",
        }
    }
}

/// Property that a rule checks. Numbers are the engine's limits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Check {
    /// The checkpoint format is one of these.
    Convention(&'static [&'static str]),
    /// All quantized weights are of these kinds.
    Kinds(&'static [FormatClass]),
    /// Activations of layers with weights of these kinds are quantized, or are not.
    Activations {
        /// Kinds of weights.
        kinds: &'static [FormatClass],
        /// True if activations must be quantized, false if they must not.
        quantized: bool,
    },
    /// Weights, scales and inputs of every layer are one of these combinations.
    Schemes(&'static [Accepted]),
    /// No weight is in one of these block types.
    NoCodecs(&'static [CodecId]),
    /// Weights of these kinds have no zero points.
    NoZeroPoints(&'static [FormatClass]),
    /// Integer weights have one of these bit widths.
    Bits {
        /// Widths allowed without zero points.
        symmetric: &'static [u32],
        /// Widths allowed with zero points.
        asymmetric: &'static [u32],
    },
    /// Integer weights have one of these group sizes.
    Groups {
        /// Group sizes.
        sizes: &'static [u32],
        /// True if one scale per output row is accepted.
        channel: bool,
        /// True if another kernel runs other sizes in f16.
        other_in_f16: bool,
    },
    /// `tp` divides the query heads, and divides or is a multiple of the key/value heads.
    Heads,
    /// `tp` divides the split dimension: rows of row-split layers, columns of column-split layers.
    Widths,
    /// Columns per GPU are whole groups.
    WholeGroups,
    /// Rows and columns per GPU are whole tiles; in fused unsplit layers the last layer may end within a
    /// tile.
    WholeTiles,
    /// With act-order, rows and columns per GPU are multiples of these.
    ActOrderTiles {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// No layer uses act-order.
    NoActOrder,
    /// Weights of these kinds are in experts only.
    ExpertsOnly(&'static [FormatClass]),
    /// Layers that are not fused with another multiply their input per column (`pre_quant_scale`) if their weights
    /// are of these kinds.
    Multiplied(&'static [FormatClass]),
    /// Fused layers share one format.
    FusedAlike,
    /// Fused layers of this kind share one per-tensor scale.
    FusedScale(FormatClass),
    /// Fused layers share one stored input scale.
    FusedInputScale,
    /// The GPU has the compute capability that weights of these kinds need.
    Capability {
        /// Kinds of weights.
        kinds: &'static [FormatClass],
        /// Minimum compute capability times ten.
        least: u32,
        /// Compute capability times ten from which support ends.
        end: Option<u32>,
    },
    /// This package is installed. Always reported, because the files do not show it.
    Package(&'static str),
    /// The checkpoint was examined and this problem was not observed.
    Seen(Observed),
}

impl Check {
    /// True if the schemes, formats and shapes of the layers decide it, and not how one file was written.
    pub(super) fn is_of_schemes(&self) -> bool {
        match self {
            Check::Seen(what) => *what == Observed::ZeroPointVersion,
            Check::Package(_) => false,
            _ => true,
        }
    }
}

/// Requirement of an engine, or of those whose rows name it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Identifier.
    pub id: &'static str,
    /// Checkpoint formats it applies to; all if empty.
    pub conventions: &'static [&'static str],
    /// Consequence of breaking it.
    pub severity: Severity,
    /// Requirement, as printed.
    pub requires: &'static str,
    /// Check that decides it.
    pub check: Check,
    /// Source of the requirement: project, file and commit, or a documentation page.
    pub source: &'static str,
    /// Fix, as printed.
    pub fix: &'static str,
}
