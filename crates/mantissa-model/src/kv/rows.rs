//! Storage of a row of keys or values: codes of a format, or of a codebook.

use mantissa_num::TensorError;

use super::book::BookCodec;
use super::codec::RowCodec;

/// A codec of rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Rows {
    Grid(Box<RowCodec>),
    Book(BookCodec),
}

impl From<RowCodec> for Rows {
    fn from(codec: RowCodec) -> Self {
        Rows::Grid(Box::new(codec))
    }
}

impl From<BookCodec> for Rows {
    fn from(codec: BookCodec) -> Self {
        Rows::Book(codec)
    }
}

impl Rows {
    /// Values of a row.
    pub(crate) fn cols(&self) -> usize {
        match self {
            Rows::Grid(codec) => codec.cols(),
            Rows::Book(codec) => codec.cols(),
        }
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        match self {
            Rows::Grid(codec) => codec.row_bytes(),
            Rows::Book(codec) => codec.row_bytes(),
        }
    }

    /// Encodes row `row`.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub(crate) fn encode(&self, row: usize, x: &[f32], out: &mut [u8]) -> Result<(), TensorError> {
        match self {
            Rows::Grid(codec) => codec.encode(row, x, out),
            Rows::Book(codec) => codec.encode(x, out),
        }
    }

    /// Decodes row `row`.
    pub(crate) fn decode(&self, row: usize, bytes: &[u8], out: &mut [f32]) {
        match self {
            Rows::Grid(codec) => codec.decode(row, bytes, out),
            Rows::Book(codec) => codec.decode(bytes, out),
        }
    }

    /// Replaces rows of `cols` values, starting with row 0, by their stored values; a row without codes is unchanged.
    pub(crate) fn round_trip(&self, x: &mut [f32], cols: usize) {
        match self {
            Rows::Grid(codec) => codec.round_trip(x, cols),
            // Codebooks have rows of one length.
            Rows::Book(codec) => codec.round_trip(x),
        }
    }
}
