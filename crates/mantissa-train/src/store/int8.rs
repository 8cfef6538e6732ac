//! Values that are INT8 codes with a scale per row.

use std::ops::Range;

/// INT8 values of an arena: `codes[i]` has scale `scales[(i + skip) / cols]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Ref<'a> {
    pub(crate) codes: &'a [i8],
    pub(crate) scales: &'a [f32],
    pub(crate) cols: usize,
    /// Position of the first code in its row.
    pub(crate) skip: usize,
}

impl<'a> Int8Ref<'a> {
    pub(crate) fn len(self) -> usize {
        self.codes.len()
    }

    /// Returns a range of the values.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        let first = range.start + self.skip;
        Int8Ref {
            codes: &self.codes[range],
            scales: &self.scales[first / self.cols..],
            skip: first % self.cols,
            cols: self.cols,
        }
    }

    /// Writes the values as f32. Panics if `out` has another length.
    pub(crate) fn widen(self, out: &mut [f32]) {
        assert_eq!(out.len(), self.codes.len(), "INT8 values");
        let first = (self.cols - self.skip).min(out.len());
        let (head, rest) = out.split_at_mut(first);
        let (codes, others) = self.codes.split_at(first);
        let rows = rest.chunks_mut(self.cols).zip(others.chunks(self.cols));
        for ((out, codes), scale) in std::iter::once((head, codes)).chain(rows).zip(self.scales) {
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = f32::from(*code) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_rows_are_decoded() {
        let codes: Vec<i8> = (-6..6).collect();
        let all = Int8Ref { codes: &codes, scales: &[1.0, 10.0, 100.0], cols: 4, skip: 0 };
        let mut whole = [0.0; 12];
        all.widen(&mut whole);
        assert_eq!(whole, [-6., -5., -4., -3., -20., -10., 0., 10., 200., 300., 400., 500.]);
        for (first, end) in [(0, 12), (1, 3), (3, 9), (4, 8), (5, 12), (7, 7), (11, 12)] {
            for inner in first..=end {
                let part = all.slice(first..end).slice(inner - first..end - first);
                let mut out = vec![0.0; end - inner];
                part.widen(&mut out);
                assert_eq!(out, whole[inner..end]);
            }
        }
    }
}
