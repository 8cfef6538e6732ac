//! Moments stored as codes of an 8-bit map with any block size, as set by schemes such as `lin8` or
//! `dyn8-tensor`.
//!
//! The update is AdamW in f32 on the decoded moments of a whole parameter, which are then requantized to the
//! nearest level. bitsandbytes' own block-wise rules are in [`crate::blockwise`].

use mantissa_num::codebook::Book;
use mantissa_num::format::{Blocks, Format, Table};
use mantissa_num::scheme::{Rule, Scheme};

/// Signed map for first moments, unsigned map for second moments, and the blocks that share an absmax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateMap {
    first: Book,
    second: Book,
    blocks: Blocks,
}

impl StateMap {
    /// Makes the format with first moments stored as `scheme`; `None` unless that is a signed 8-bit map with
    /// nearest rounding and an unsigned counterpart.
    pub fn new(scheme: &Scheme) -> Option<Self> {
        match &scheme.format {
            Format::Table(Table { book, blocks, scale })
                if scheme.encoder.rule == Rule::Nearest && scale.nested().is_none() =>
            {
                Some(StateMap { first: *book, second: book.unsigned()?, blocks: *blocks })
            }
            _ => None,
        }
    }

    /// Number of blocks of a parameter with `n` elements.
    pub(crate) fn count(self, n: usize) -> usize {
        self.blocks.count(1, n)
    }

    fn block(self, n: usize) -> usize {
        self.blocks.len(1, n).max(1)
    }

    /// Returns the codes of zero for first and second moments.
    pub(crate) fn zeros(self) -> (u8, u8) {
        (self.first.encode(0.0) as u8, self.second.encode(0.0) as u8)
    }

    /// Decodes first (`second` false) or second moments of a parameter.
    pub(crate) fn decode(self, second: bool, codes: &[u8], absmax: &[f32], out: &mut [f32]) {
        let (levels, block) = (self.book(second).levels(), self.block(codes.len()));
        for ((out, codes), absmax) in out.chunks_mut(block).zip(codes.chunks(block)).zip(absmax) {
            out.iter_mut().zip(codes).for_each(|(out, code)| *out = levels[usize::from(*code)] * absmax);
        }
    }

    /// Encodes `values` and computes the absmax of each block. A block of zeros gets the code of zero.
    pub(crate) fn encode(self, second: bool, values: &[f32], codes: &mut [u8], absmax: &mut [f32]) {
        let (book, block) = (self.book(second), self.block(codes.len()));
        for ((values, codes), absmax) in values.chunks(block).zip(codes.chunks_mut(block)).zip(absmax) {
            *absmax = values.iter().fold(0.0f32, |max, v| max.max(v.abs()));
            let scale = if *absmax == 0.0 { 1.0 } else { *absmax };
            codes.iter_mut().zip(values).for_each(|(code, v)| *code = book.encode(v / scale) as u8);
        }
    }

    fn book(self, second: bool) -> Book {
        if second { self.second } else { self.first }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use mantissa_num::{Given, quantize};

    fn map(text: &str) -> Option<StateMap> {
        StateMap::new(&text.parse().unwrap())
    }

    fn codes(map: StateMap, second: bool, values: &[f32]) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
        let (mut codes, mut absmax) = (vec![9; values.len()], vec![9.0; map.count(values.len())]);
        let mut back = vec![9.0; values.len()];
        map.encode(second, values, &mut codes, &mut absmax);
        map.decode(second, &codes, &absmax, &mut back);
        (codes, absmax, back)
    }

    #[test]
    fn codes_match_the_scheme() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin() * 10f32.powi(i % 5 - 4)).collect();
        for text in ["dyn8", "lin8", "lin8-g100", "dyn8-tensor", "lin8-tensor"] {
            let scheme: Scheme = text.parse().unwrap();
            let (found, _, back) = codes(StateMap::new(&scheme).unwrap(), false, &values);
            let expected = quantize(&scheme, &values, 1, values.len(), Given::default()).unwrap();
            assert_eq!(found, expected.codes.to_le_bytes(), "{text}");
            assert_eq!(back, expected.dequantize().unwrap(), "{text}");
        }
    }

    #[test]
    fn other_schemes_are_no_state() {
        for text in ["nf4", "dyn8-unsigned", "dyn8:cpu", "int8-tensor", "dyn4"] {
            assert_eq!(map(text), None, "{text}");
        }
    }

    /// Experiment E9: small second moments vanish in the linear map but not in the dynamic one. Limit of the
    /// dynamic map: with one outlier of 10⁴ and a single absmax per tensor, they vanish there too.
    #[test]
    fn small_second_moments_vanish_in_the_linear_map() {
        let mut v: Vec<f32> = (0..4096).map(|i| 1e-7 * (1.0 + (i as f32).sin().abs())).collect();
        (0..4096).step_by(256).for_each(|i| v[i] = 1e-3);
        let lost = |text: &str, v: &[f32]| {
            let back = codes(map(text).unwrap(), true, v).2;
            back.iter().filter(|v| **v == 0.0).count() as f64 / back.len() as f64
        };
        assert!(lost("lin8", &v) > 0.99 && lost("lin8-tensor", &v) > 0.99);
        assert_eq!((lost("dyn8", &v), lost("dyn8-tensor", &v)), (0.0, 0.0));
        v[1000] = 1e4;
        assert!(lost("dyn8-tensor", &v) > 0.99);
        let blocks = lost("dyn8", &v);
        assert!((0.06..0.063).contains(&blocks), "one block of sixteen: {blocks}");
    }
}
