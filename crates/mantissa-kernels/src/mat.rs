//! Row-major matrix views: a slice, a shape and a row stride, checked once.

/// Read-only row-major view: element (r, c) is `data[r * stride + c]`. Elements are f32 unless the type states
/// otherwise: `MatRef<u16>` holds the bits of bf16 or f16.
#[derive(Clone, Copy, Debug)]
pub struct MatRef<'a, T = f32> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> MatRef<'a, T> {
    /// A contiguous `[rows, cols]` matrix.
    ///
    /// # Panics
    /// If `data` is shorter than the matrix.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// A `[rows, cols]` matrix whose rows begin every `stride` elements.
    ///
    /// # Panics
    /// If `stride < cols`, or if `data` is shorter than the matrix.
    pub fn with_stride(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        check("MatRef", data.len(), rows, cols, stride);
        Self { data, rows, cols, stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `r`, `cols` long.
    ///
    /// # Panics
    /// If `r >= rows`.
    #[inline]
    pub fn row(&self, r: usize) -> &'a [T] {
        assert!(r < self.rows, "MatRef: row {r} of {}", self.rows);
        if self.cols == 0 {
            return &[];
        }
        &self.data[r * self.stride..][..self.cols]
    }

    /// Columns `span` only.
    ///
    /// # Panics
    /// If `span` is out of range.
    pub fn columns(&self, span: std::ops::Range<usize>) -> Self {
        let (rows, cols) = (self.rows, self.cols);
        assert!(span.start <= span.end && span.end <= cols, "MatRef: columns {span:?} of {cols}");
        let start = if rows == 0 { 0 } else { span.start };
        Self::with_stride(&self.data[start..], rows, span.len(), self.stride)
    }

    pub(crate) fn as_slice(&self) -> &'a [T] {
        self.data
    }
}

/// A writable row-major view: element (r, c) is `data[r * stride + c]`.
#[derive(Debug)]
pub struct MatMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a> MatMut<'a> {
    /// A contiguous `[rows, cols]` matrix.
    ///
    /// # Panics
    /// If `data` is shorter than the matrix.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::with_stride(data, rows, cols, cols)
    }

    /// A `[rows, cols]` matrix whose rows begin every `stride` elements.
    ///
    /// # Panics
    /// If `stride < cols`, or if `data` is shorter than the matrix.
    pub fn with_stride(data: &'a mut [f32], rows: usize, cols: usize, stride: usize) -> Self {
        check("MatMut", data.len(), rows, cols, stride);
        Self { data, rows, cols, stride }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Row `r`, `cols` long.
    ///
    /// # Panics
    /// If `r >= rows`.
    #[inline]
    pub fn row_mut(&mut self, r: usize) -> &mut [f32] {
        assert!(r < self.rows, "MatMut: row {r} of {}", self.rows);
        if self.cols == 0 {
            return &mut [];
        }
        &mut self.data[r * self.stride..][..self.cols]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        self.data
    }
}

/// Checks that every element lies inside `len` elements, without overflow, and that no two rows overlap.
fn check(view: &str, len: usize, rows: usize, cols: usize, stride: usize) {
    assert!(stride >= cols, "{view}: row stride {stride} is less than {cols} columns");
    if rows == 0 || cols == 0 {
        return;
    }
    let needed = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(cols));
    assert!(
        needed.is_some_and(|needed| needed <= len),
        "{view}: {len} elements cannot hold {rows} rows of {cols} with row stride {stride}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_row_needs_no_padding() {
        let data: Vec<f32> = (0..8_u8).map(f32::from).collect();
        let m = MatRef::with_stride(&data, 2, 3, 5);
        assert_eq!(m.row(1), &[5.0, 6.0, 7.0]);
    }

    #[test]
    #[should_panic(expected = "cannot hold")]
    fn a_short_slice_is_refused() {
        MatRef::with_stride(&[0.0; 7], 2, 3, 5);
    }

    #[test]
    #[should_panic(expected = "cannot hold")]
    fn an_overflowing_shape_is_refused() {
        MatRef::with_stride(&[0.0; 7], usize::MAX, 3, 5);
    }

    #[test]
    #[should_panic(expected = "less than")]
    fn overlapping_rows_are_refused() {
        MatMut::with_stride(&mut [0.0; 16], 2, 3, 2);
    }

    #[test]
    fn empty_matrices_hold_nothing() {
        assert_eq!(MatRef::<f32>::new(&[], 4, 0).row(3), &[] as &[f32]);
        assert_eq!(MatRef::<f32>::new(&[], 0, 4).rows(), 0);
    }
}
