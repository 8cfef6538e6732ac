//! Outliers in mantissa's own format: number per row, columns, values.

use crate::elements::float_values;
use crate::reader::Reader;
use crate::tensors::Tensors;

/// As stored.
pub(crate) struct Outliers {
    /// Start of each row's outliers, and the end of the last row.
    starts: Vec<usize>,
    columns: Vec<usize>,
    values: Vec<f32>,
}

impl Outliers {
    /// Adds the outliers of `row`.
    pub(crate) fn add(&self, row: usize, out: &mut [f32]) {
        for i in self.starts[row]..self.starts[row + 1] {
            let column = self.columns.get(i).copied().unwrap_or(usize::MAX);
            if let (Some(v), Some(value)) = (out.get_mut(column), self.values.get(i)) {
                *v += value;
            }
        }
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads the outliers of a weight in the native format, if any.
    pub(crate) fn outliers(&self) -> Result<Option<Outliers>, T::Error> {
        if !self.has("weight.outlier_counts") {
            return Ok(None);
        }
        let integers = |suffix: &str| -> Result<Vec<usize>, T::Error> {
            let bytes = self.bytes(suffix)?;
            let width = if self.cols < 1 << 16 { 2 } else { 4 };
            let word = |word: &[u8]| word.iter().rev().fold(0, |value, byte| value << 8 | usize::from(*byte));
            Ok(bytes.chunks_exact(width).map(word).collect())
        };
        let counts = integers("weight.outlier_counts")?;
        if counts.len() != self.rows {
            return Err(self.short("weight.outlier_counts"));
        }
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end: &mut usize, count| {
            *end = end.saturating_add(*count);
            Some(*end)
        }));
        let f16 = float_values(5, 10, 15);
        let codes = self.bytes("weight.outlier_values")?;
        let value = |code: &[u8; 2]| f16[usize::from(u16::from_le_bytes(*code))];
        let values = codes.as_chunks::<2>().0.iter().map(value).collect();
        Ok(Some(Outliers { starts, columns: integers("weight.outlier_columns")?, values }))
    }
}
