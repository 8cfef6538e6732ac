//! EXL2 weights: groups of columns, each with its own code width, decoded one code at a time.

use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::round::Rounding;

use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::{Rows, Weight};

/// Weight `[n, k]` stored as its transpose, with columns sorted by code width.
struct Segments {
    words: Vec<u32>,
    /// Rows, padded.
    across: usize,
    groups: Vec<Group>,
    /// Position of each column among the codes.
    places: Vec<usize>,
    /// Group of each position.
    of_place: Vec<usize>,
}

struct Group {
    bits: usize,
    /// First word and first position.
    starts: (usize, usize),
    /// By row.
    scales: Vec<f32>,
}

impl Rows for Segments {
    fn row(&self, row: usize, out: &mut [f32]) {
        for (v, &place) in out.iter_mut().zip(&self.places) {
            let Group { bits, starts, scales } = &self.groups[self.of_place[place]];
            let at = (place - starts.1) * bits;
            let word = |i: usize| {
                let at = (starts.0 + i) * self.across + row;
                u64::from(self.words.get(at).copied().unwrap_or(0))
            };
            let pair = word(at / 32) | word(at / 32 + 1) << 32;
            let code = (pair >> (at % 32) & ((1 << bits) - 1)) as i32;
            *v = (code - (1 << (bits - 1))) as f32 * scales[row];
        }
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// A weight of EXL2.
    pub(crate) fn exl2(&self) -> Result<Weight, T::Error> {
        let (rows, cols) = (self.rows, self.cols);
        let across = rows.div_ceil(32) * 32;
        let words = self.words("q_weight")?;
        let fields = self.words("q_scale")?;
        let largest = self.floats("q_scale_max")?;
        let table = self.bytes("q_groups")?;
        let table: Vec<usize> =
            table.as_chunks::<2>().0.iter().map(|b| usize::from(u16::from_le_bytes(*b))).collect();
        if fields.len() * 8 != largest.len() * across || table.len() != 2 * largest.len() {
            return Err(self.short("q_scale"));
        }
        let (mut groups, mut of_place) = (Vec::new(), Vec::with_capacity(cols));
        for (g, (pair, &largest)) in table.as_chunks::<2>().0.iter().zip(&largest).enumerate() {
            let &[bits, start] = pair;
            let end = table.get(2 * g + 3).copied().unwrap_or(words.len() / across.max(1));
            let places = if g + 1 == table.len() / 2 {
                cols.saturating_sub(of_place.len())
            } else {
                end.saturating_sub(start) * 32 / bits.max(1)
            };
            let scale = |row: usize| {
                let field = fields[(g * across + row) / 8] >> (row % 8 * 4) & 15;
                let square = ((field + 1) * (field + 1)) as f32;
                half(square * half(largest / 256.0))
            };
            let scales = (0..rows).map(scale).collect();
            groups.push(Group { bits, starts: (start, of_place.len()), scales });
            of_place.extend(std::iter::repeat_n(g, places));
        }
        let places: Vec<usize> = match self.has("q_invperm") {
            true => self.words("q_invperm")?.into_iter().map(|place| place as usize).collect(),
            false => (0..cols).collect(),
        };
        if of_place.len() != cols || places.len() != cols || places.iter().any(|&place| place >= cols) {
            return Err(self.short("q_groups"));
        }
        let segments = Segments { words, across, groups, places, of_place };
        Ok(Weight::of_rows(cols, segments))
    }
}

fn half(x: f32) -> f32 {
    F16.decode(F16.encode(x, Overflow::Special, Rounding::NearestEven, 0))
}
