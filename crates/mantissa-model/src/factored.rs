//! Matrices of 8-bit floats as elements and block factors.

use mantissa_num::{Affine, Blocks, Code, Format, Offset};

/// A matrix as elements and one factor per block: the form in which a matrix unit accumulates products.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Factored {
    pub(crate) cols: usize,
    /// `[rows, cols]`.
    pub(crate) elements: Vec<f32>,
    pub(crate) blocks: Blocks,
    /// Factor of each block.
    pub(crate) factors: Vec<f32>,
}

impl Factored {
    /// Number of columns within which the factor of a row is constant.
    pub(crate) fn group(&self) -> usize {
        match self.blocks {
            Blocks::Group(cols) | Blocks::Tile { cols, .. } => (cols as usize).clamp(1, self.cols.max(1)),
            _ => self.cols.max(1),
        }
    }

    pub(crate) fn factor(&self, row: usize, col: usize) -> f32 {
        self.factors[self.blocks.index(self.cols, row, col)]
    }

    pub(crate) fn row(&self, row: usize) -> &[f32] {
        &self.elements[row * self.cols..(row + 1) * self.cols]
    }
}

/// True for 8-bit floats with a scale per row, tensor or block of a row, and no offset.
pub(crate) fn is_float8(format: &Format) -> bool {
    matches!(
        format,
        Format::Affine(Affine {
            code: Code::Float(float),
            blocks: Blocks::Row | Blocks::Tensor | Blocks::Group(_) | Blocks::Tile { .. },
            scale: Some(_),
            offset: Offset::None,
        }) if float.bits() == 8
    )
}
