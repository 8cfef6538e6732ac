//! GPTQ's and AWQ's weights: words that hold codes of several columns or rows, decoded one code at a time.

use mantissa_store::convention::gptq::{Layout, ZeroVersion};
use mantissa_store::{Dtype, Error};

use super::{Reader, Result, Stored};

/// Place in its word of each of eight neighbouring columns (AWQ).
const AWQ_PLACE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// How the codes of a line lie in its words.
#[derive(Clone, Copy)]
enum Order {
    /// One bit stream.
    Stream,
    /// Bit planes of each 32 codes.
    Planes,
    /// Nibbles in the order of AWQ.
    Awq,
}

/// A weight `[n, k]` stored as its transpose.
pub(super) struct Columns {
    words: Vec<u32>,
    bits: usize,
    order: Order,
    /// Output features.
    rows: usize,
    /// Group of each column.
    groups: Vec<usize>,
    /// `[groups, rows]`.
    scales: Vec<f32>,
    /// `[groups, rows]`, unsigned as the codes are.
    zeros: Vec<f32>,
}

impl Columns {
    /// Decodes row `row` of the weight into `out`.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        for (k, (v, group)) in out.iter_mut().zip(&self.groups).enumerate() {
            let code = match self.order {
                Order::Awq => {
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
fn field(order: Order, word: impl Fn(usize) -> u32, at: usize, bits: usize) -> u32 {
    match order {
        Order::Awq => word(at / 8) >> (4 * AWQ_PLACE[at % 8]) & 15,
        Order::Stream => {
            let (first, shift) = (at * bits / 32, at * bits % 32);
            let next = if shift + bits > 32 { word(first + 1) } else { 0 };
            let pair = u64::from(word(first)) | u64::from(next) << 32;
            (pair >> shift & ((1 << bits) - 1)) as u32
        }
        Order::Planes => {
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

impl Reader<'_> {
    /// A weight of GPTQ or AWQ.
    pub(super) fn columns(&self) -> Result<Stored> {
        let (rows, cols) = (self.rows, self.cols);
        let (bits, group, order, v1) = self.settings()?;
        let group = group.unwrap_or(cols).clamp(1, cols.max(1));
        let count = cols.div_ceil(group);
        let lines = |lines: usize, n: usize| lines * (n * bits).div_ceil(32);
        let expected = if matches!(order, Order::Awq) { lines(cols, rows) } else { lines(rows, cols) };
        let words = self.words("qweight", expected)?;
        let mut packed = self.words("qzeros", lines(count, rows))?;
        // Whole words were lowered by one in each field, but for fields that straddle words.
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
        let scales = self.files.checkpoint().read_f32(&self.name("scales"))?;
        let groups = self.groups(cols, group)?;
        if scales.len() != zeros.len() || groups.iter().any(|&g| g >= count) {
            return Err(self.short("scales"));
        }
        let columns = Columns { words, bits, order, rows, groups, scales, zeros };
        Ok(Stored { columns: Some(columns), ..self.stored(Vec::new(), bits, 32, Vec::new()) })
    }

    /// Bits, columns of a group, order of codes, and whether zero points are stored less one.
    fn settings(&self) -> Result<(usize, Option<usize>, Order, bool)> {
        if let Some(config) = self.files.awq() {
            let layer = config.layer();
            return Ok((layer.bits as usize, layer.group.map(|g| g as usize), Order::Awq, false));
        }
        let config = self.files.gptq().ok_or_else(|| self.short("qweight"))?;
        let layer = config.layer(self.module).ok_or_else(|| self.short("qweight"))?;
        let order = if config.layout() == Layout::Planar { Order::Planes } else { Order::Stream };
        let v1 = config.version() == ZeroVersion::V1;
        Ok((layer.bits as usize, layer.group.map(|g| g as usize), order, v1))
    }

    fn words(&self, suffix: &str, expected: usize) -> Result<Vec<u32>> {
        let bytes = self.bytes(suffix)?;
        let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        if words.len() == expected { Ok(words) } else { Err(self.short(suffix)) }
    }

    fn groups(&self, cols: usize, group: usize) -> Result<Vec<usize>> {
        if !self.has("g_idx") {
            return Ok((0..cols).map(|k| k / group).collect());
        }
        let name = self.name("g_idx");
        let dtype = self.files.checkpoint().get(&name).map(|meta| meta.dtype);
        let groups: Vec<usize> = self.words("g_idx", cols)?.into_iter().map(|g| g as usize).collect();
        match dtype {
            Some(Dtype::I32) => Ok(groups),
            _ => Err(Error::field(self.files.dir(), name, "another dtype", "I32", "")),
        }
    }
}
