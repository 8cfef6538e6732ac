//! Errors of quantizing and reading tensors.

/// Error of quantizing a tensor or of reading a quantized one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// NaN or infinity where the format has no code for it.
    #[error("expected finite values, got {count} non-finite values, the first ({value}) at element {index}")]
    NonFinite {
        /// Number of such values or blocks.
        count: usize,
        /// Flat index of the first.
        index: usize,
        /// The first.
        value: f32,
    },
    /// List whose length does not match the shape.
    #[error("{what}: expected {expected} for shape [{rows}, {cols}], got {found}")]
    Length {
        /// List by name.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
        /// Rows of the tensor.
        rows: usize,
        /// Columns of the tensor.
        cols: usize,
    },
    /// Shape that the tiles of a trellis do not divide.
    #[error("expected multiples of 16 for tiles of a trellis, got [{rows}, {cols}]")]
    Tiles {
        /// Rows of the tensor.
        rows: usize,
        /// Columns of the tensor.
        cols: usize,
    },
    /// Scheme whose values are coded together, by a search.
    #[error(
        "expected a scheme of elements or blocks, got {scheme}, whose values are coded together; fix: use the method qtip"
    )]
    Searched {
        /// The scheme.
        scheme: String,
    },
    /// Rows that a codec's blocks do not divide.
    #[error("expected rows of multiples of {block} elements for {codec}, got {cols}")]
    Ragged {
        /// Columns of the tensor.
        cols: usize,
        /// Elements of a block.
        block: usize,
        /// The codec.
        codec: &'static str,
    },
    /// Codec blocks with an infinite scale.
    #[error(
        "expected block scales of at most 65504, the largest f16, got {count} blocks beyond it in {codec}, the first at element {index} of magnitude {amax:e}; fix: keep this tensor or store it as bf16 or f32"
    )]
    ScaleOverflow {
        /// Number of such values or blocks.
        count: usize,
        /// Flat index of the first element of the first.
        index: usize,
        /// Its largest magnitude.
        amax: f32,
        /// The codec.
        codec: &'static str,
    },
    /// Finite values that a plain cast would turn into infinity, where infinity is not allowed.
    #[error(
        "expected magnitudes up to {allowed} in {element}, got {amax:e}; fix: keep this tensor or store it as bf16 or f32"
    )]
    ValueOverflow {
        /// The largest magnitude.
        amax: f32,
        /// The largest magnitude that the element holds.
        allowed: f32,
        /// The element.
        element: &'static str,
    },
    /// Finite values beyond the largest scale or element.
    #[error(
        "expected magnitudes within reach of {scheme}, got up to {amax:e}: its largest scale or element is smaller; fix: keep this tensor or store it as bf16 or f32"
    )]
    OutOfReach {
        /// The largest magnitude.
        amax: f32,
        /// The scheme.
        scheme: String,
    },
    /// Values below the smallest scale or element, of which rounding leaves nothing.
    #[error(
        "expected magnitudes within reach of {scheme}, got at most {amax:e}: its smallest scale or element is larger, and the tensor would be lost (SQNR {sqnr_db:.1} dB); fix: keep this tensor or store it as bf16 or f32"
    )]
    Underflow {
        /// The largest magnitude.
        amax: f32,
        /// The scheme.
        scheme: String,
        /// SQNR in dB of what rounding leaves.
        sqnr_db: f64,
    },
}

impl TensorError {
    /// Shifts the index of an error in a part that begins at element `first` to the whole tensor.
    pub fn shifted(self, first: usize) -> Self {
        match self {
            TensorError::NonFinite { count, index, value } => {
                TensorError::NonFinite { count, index: first + index, value }
            }
            TensorError::ScaleOverflow { count, index, amax, codec } => {
                TensorError::ScaleOverflow { count, index: first + index, amax, codec }
            }
            other => other,
        }
    }
}
