//! Products of prepared weights with 8-bit activations: the fast engine's linear layers.
//!
//! A weight is repacked once into *panels* of 16 rows. In a panel the codes of 16 rows × 32 columns lie together
//! (`codes.rs`), four columns of a row in one 32-bit lane, so that one instruction multiplies four unsigned codes with
//! four signed activations in each of 16 rows (`VPDPBUSD`) and no sum runs across lanes. Scales come first, then
//! minima, then codes, all in the order in which a product reads them.
//!
//! The value of a weight is `scale · (level(code) - zero) + min`, with one `scale` and `min` per row and group of
//! columns. Activations are `x = xs · q` with one `xs` per unit of columns ([`Activations`]). The product sums, for
//! each unit, `i = Σ level(code) · q - zero · Σ q` in i32, which is exact, and adds `scale · xs · i + min · xs · Σ q`
//! in f32, unit by unit. All levels and any number of threads give the same bits: the operations and their order are
//! the same.
//!
//! Few tokens read the codes directly; many expand a panel to bytes once per block of tokens, and one kernel for
//! bytes multiplies it. So each width has one kernel for decoding, and all share one for prefill.

/// Repeats a statement for `$t` from 0 to `$n`, at most 12 (`quads`: from `$from`, at most 8; `panels`: at most 8). The compiler does not unroll loops of this size at
/// optimization level 2, and accumulators that are indexed in a loop stay in memory: a tenth of the speed.
macro_rules! each {
    ($n:ident, $t:ident => $body:expr) => {
        each!(@ $n, $t => $body; 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (quads $from:ident $to:ident, $q:ident => $body:expr) => {
        each!(@ $to, $q => if $q >= $from { $body }; 0 1 2 3 4 5 6 7)
    };
    (panels $n:ident, $q:ident => $body:expr) => {
        each!(@ $n, $q => $body; 0 1 2 3 4 5 6 7)
    };
    (@ $n:ident, $t:ident => $body:expr; $($i:literal)*) => {
        $(if $i < $n {
            const $t: usize = $i;
            $body;
        })*
    };
}

mod activations;
#[cfg(target_arch = "x86_64")]
mod by_tiles;
mod codes;
mod dot;
mod float_activations;
mod float_code;
mod float_multiply;
mod float_product;
#[cfg(target_arch = "x86_64")]
mod float_tiles;
mod floats;
mod level;
mod multiply;
#[cfg(target_arch = "aarch64")]
mod neon;
mod panel_format;
mod panels;
mod product;
mod quantize;
mod scales;
mod share;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use activations::Activations;
pub use float_activations::FloatActivations;
pub use float_code::FloatCode;
pub use float_multiply::FloatJob;
pub use floats::FloatPanels;
pub use level::PackedLevel;
pub use multiply::{PanelJob, multiply};
pub use panel_format::PanelFormat;
pub use panels::{Panels, Row};
pub use quantize::Grid;
pub use scales::{SUPER, ScaleCode};

/// Rows of a panel.
pub const ROWS: usize = 16;

/// Columns of a block of codes.
pub const BLOCK: usize = 32;

/// Values that are brought into another form faster than another thread starts.
pub(crate) const LEAST_TO_SPLIT: usize = 1 << 14;

/// Quads of a block.
pub(crate) const QUADS: usize = BLOCK / 4;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
