//! GPTQ and AWQ weights: words with codes of several columns or rows, decoded one code at a time.

use crate::reader::Reader;
use crate::tensors::{Tensors, WordOrder, Words};
use crate::weight::{Rows, Weight};

/// Position in its word of each of eight adjacent columns (AWQ).
const AWQ_PLACE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Weight `[n, k]` stored as its transpose.
struct Columns {
    words: Vec<u32>,
    bits: usize,
    order: WordOrder,
    /// Output features.
    rows: usize,
    /// Group of each column.
    groups: Vec<usize>,
    /// `[groups, rows]`.
    scales: Vec<f32>,
    /// `[groups, rows]`, unsigned like the codes.
    zeros: Vec<f32>,
}

impl Rows for Columns {
    fn row(&self, row: usize, out: &mut [f32]) {
        for (k, (v, group)) in out.iter_mut().zip(&self.groups).enumerate() {
            let code = match self.order {
                WordOrder::Awq => {
                    let line = &self.words[k * self.rows / 8..];
                    field(self.order, |word| line[word], row, self.bits)
                }
                order => {
                    let word = |word: usize| self.words.get(word * self.rows + row).copied().unwrap_or(0);
                    field(order, word, k, self.bits)
                }
            };
            let at = group * self.rows + row;
            *v = (code as f32 - self.zeros[at]) * self.scales[at];
        }
    }
}

/// Code `at` of a line of words.
fn field(order: WordOrder, word: impl Fn(usize) -> u32, at: usize, bits: usize) -> u32 {
    match order {
        WordOrder::Awq => word(at / 8) >> (4 * AWQ_PLACE[at % 8]) & 15,
        WordOrder::Stream => {
            let (first, shift) = (at * bits / 32, at * bits % 32);
            let next = if shift + bits > 32 { word(first + 1) } else { 0 };
            let pair = u64::from(word(first)) | u64::from(next) << 32;
            (pair >> shift & ((1 << bits) - 1)) as u32
        }
        WordOrder::Planes => {
            let (mut start, mut shift, mut code) = (at / 32 * bits, 0, 0);
            for width in [8, 4, 2, 1].into_iter().filter(|width| bits & width != 0) {
                let per_word = 32 / width;
                let plane = word(start + at % 32 / per_word) >> (at % per_word * width) & ((1 << width) - 1);
                code |= plane << shift;
                (start, shift) = (start + width, shift + width);
            }
            code
        }
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// A weight of GPTQ or AWQ.
    pub(crate) fn gptq(&self) -> Result<Weight, T::Error> {
        let (rows, cols) = (self.rows, self.cols);
        let words = self.tensors.words(self.module).ok_or_else(|| self.short("qweight"))?;
        let Words { bits, order, zeros_less_one: v1, .. } = words;
        let group = words.group.unwrap_or(cols).clamp(1, cols.max(1));
        let count = cols.div_ceil(group);
        let lines = |lines: usize, n: usize| lines * (n * bits).div_ceil(32);
        let expected = if matches!(order, WordOrder::Awq) { lines(cols, rows) } else { lines(rows, cols) };
        let words = self.exact_words("qweight", expected)?;
        let mut packed = self.exact_words("qzeros", lines(count, rows))?;
        // Each field of a whole word was lowered by one, except fields that straddle words.
        let whole = v1 && 32usize.is_multiple_of(bits);
        if whole {
            let ones = (0..32 / bits).map(|i| 1 << (i * bits)).sum::<u32>();
            packed.iter_mut().for_each(|word| *word = word.wrapping_add(ones));
        }
        let (line, mask) = (packed.len() / count.max(1), (1u32 << bits) - 1);
        let zero = |at: usize| {
            let words = &packed[at / rows * line..];
            let stored = field(order, |word| words[word], at % rows, bits);
            (if v1 && !whole { (stored + 1) & mask } else { stored }) as f32
        };
        let zeros: Vec<f32> = (0..count * rows).map(zero).collect();
        let scales = self.floats("scales")?;
        let groups = self.groups(cols, group)?;
        if scales.len() != zeros.len() || groups.iter().any(|&g| g >= count) {
            return Err(self.short("scales"));
        }
        let columns = Columns { words, bits, order, rows, groups, scales, zeros };
        Ok(Weight::of_rows(cols, columns))
    }

    fn exact_words(&self, suffix: &str, expected: usize) -> Result<Vec<u32>, T::Error> {
        let words = self.words(suffix)?;
        if words.len() == expected { Ok(words) } else { Err(self.short(suffix)) }
    }

    /// Group of each column.
    fn groups(&self, cols: usize, group: usize) -> Result<Vec<usize>, T::Error> {
        match self.dtype("g_idx") {
            None => Ok((0..cols).map(|k| k / group).collect()),
            Some("I32") => Ok(self.exact_words("g_idx", cols)?.into_iter().map(|g| g as usize).collect()),
            Some(other) => Err(self.wrong("g_idx", "I32", other)),
        }
    }
}
