//! Counts non-finite values while a tensor's bytes are read.
//!
//! A NaN among the weights makes every logit NaN, and an infinity makes every other weight of its block 0. Both are
//! refused by name when a weight is read, before anything is computed from them.

use std::path::Path;

use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Elements per check for non-finite values; keeps the inner loop free of branches.
const STRIDE: usize = 1024;

/// Counts NaN and infinities of one tensor. Integers and dtypes without such codes never have any.
#[derive(Clone, Debug)]
pub struct FiniteScan {
    dtype: Dtype,
    seen: u64,
    count: u64,
    first: Option<(u64, f32)>,
}

impl FiniteScan {
    /// Starts the count for a tensor of this dtype.
    pub fn new(dtype: Dtype) -> Self {
        FiniteScan { dtype, seen: 0, count: 0, first: None }
    }

    /// Counts the next bytes of the tensor, whole little-endian elements.
    pub fn update(&mut self, bytes: &[u8]) {
        match self.dtype {
            Dtype::F32 => self.scan(bytes, |b| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000),
            Dtype::F64 => {
                self.scan(bytes, |b: [u8; 8]| u64::from_le_bytes(b) >> 52 & 0x7ff == 0x7ff);
            }
            Dtype::BF16 => self.scan(bytes, |b| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            Dtype::F16 => self.scan(bytes, |b| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
            Dtype::F8E4M3 => self.scan(bytes, |[b]| b & 0x7f == 0x7f),
            Dtype::F8E5M2 => self.scan(bytes, |[b]| b & 0x7c == 0x7c),
            _ => {}
        }
    }

    /// Returns [`Error::NonFinite`] if any were counted. `path` and `tensor` are for the message.
    ///
    /// # Errors
    /// [`Error::NonFinite`].
    pub fn finish(&self, path: &Path, tensor: &str) -> Result<()> {
        let Some((index, value)) = self.first else { return Ok(()) };
        let (path, tensor) = (path.to_owned(), tensor.to_owned());
        Err(Error::NonFinite { path, tensor, count: self.count, index, value })
    }

    fn scan<const N: usize>(&mut self, bytes: &[u8], is_none: impl Fn([u8; N]) -> bool) {
        for part in bytes.as_chunks::<N>().0.chunks(STRIDE) {
            if part.iter().fold(false, |any, element| any | is_none(*element)) {
                for (i, element) in part.iter().enumerate().filter(|(_, element)| is_none(**element)) {
                    self.count += 1;
                    self.first.get_or_insert((self.seen + i as u64, value(self.dtype, element)));
                }
            }
            self.seen += part.len() as u64;
        }
    }
}

/// Decodes a non-finite element as NaN or a signed infinity. The mantissa tells them apart, except in E4M3, which has
/// no infinity.
fn value(dtype: Dtype, element: &[u8]) -> f32 {
    let wide = match element {
        [a] => u64::from(*a),
        bytes => bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    };
    let (bits, mantissa) = match dtype {
        Dtype::F32 => (32, 23),
        Dtype::F64 => (64, 52),
        Dtype::BF16 => (16, 7),
        Dtype::F16 => (16, 10),
        Dtype::F8E5M2 => (8, 2),
        _ => return f32::NAN,
    };
    match (wide & ((1 << mantissa) - 1), wide >> (bits - 1) & 1) {
        (0, 0) => f32::INFINITY,
        (0, _) => f32::NEG_INFINITY,
        _ => f32::NAN,
    }
}

/// [`Error::NonFinite`] if one of `values` is not finite.
pub(crate) fn require_finite(values: &[f32], path: &Path, tensor: &str) -> Result<()> {
    let finite = |part: &[f32]| part.iter().fold(true, |all, v| all & v.is_finite());
    if values.chunks(STRIDE).all(finite) {
        return Ok(());
    }
    let mut found = values.iter().enumerate().filter(|(_, v)| !v.is_finite());
    let Some((index, &value)) = found.next() else { return Ok(()) };
    let (path, tensor, count) = (path.to_owned(), tensor.to_owned(), 1 + found.count() as u64);
    Err(Error::NonFinite { path, tensor, count, index: index as u64, value })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn scan(dtype: Dtype, parts: &[&[u8]]) -> Option<(u64, u64, f32)> {
        let mut scan = FiniteScan::new(dtype);
        parts.iter().for_each(|part| scan.update(part));
        match scan.finish(Path::new("m"), "t") {
            Ok(()) => None,
            Err(Error::NonFinite { count, index, value, .. }) => Some((count, index, value)),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn counts_and_the_first_index_run_through_all_parts() {
        let bytes = |x: &[f32]| x.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        let mut x = vec![1.0; 3000];
        (x[2500], x[2900]) = (f32::NEG_INFINITY, f32::NAN);
        assert_eq!(
            scan(Dtype::F32, &[&bytes(&x[..700]), &bytes(&x[700..])]),
            Some((2, 2500, f32::NEG_INFINITY))
        );
        assert_eq!(scan(Dtype::F32, &[&bytes(&x[..2500])]), None);
        let error = require_finite(&x, Path::new("m"), "t").unwrap_err().to_string();
        assert!(
            error.contains("m: tensor \"t\": expected finite values, got 2 non-finite values, the first (-inf) at element 2500"),
            "{error}"
        );
    }

    /// Tests every code of every narrow float: numbers are not counted, and no non-finite code is missed.
    #[test]
    fn every_code_is_classified() {
        for word in 0..=u16::MAX {
            let bytes = word.to_le_bytes();
            for (dtype, value) in [
                (Dtype::F16, half::f16::from_bits(word).to_f32()),
                (Dtype::BF16, half::bf16::from_bits(word).to_f32()),
            ] {
                let found = scan(dtype, &[&bytes]);
                assert_eq!(found.is_none(), value.is_finite(), "{dtype} {word:#x}");
                assert!(found.is_none_or(|(_, _, v)| v.to_bits() & 0xff80_0000
                    == value.to_bits() & 0xff80_0000
                    || v.is_nan()));
            }
        }
        let e4m3 = |code: u8| mantissa_num::minifloat::E4M3.decode(code.into()).is_finite();
        let e5m2 = |code: u8| mantissa_num::minifloat::E5M2.decode(code.into()).is_finite();
        for code in 0..=u8::MAX {
            assert_eq!(scan(Dtype::F8E4M3, &[&[code]]).is_none(), e4m3(code), "{code:#x}");
            assert_eq!(scan(Dtype::F8E5M2, &[&[code]]).is_none(), e5m2(code), "{code:#x}");
        }
        assert_eq!(scan(Dtype::I8, &[&[0x7f, 0xff]]), None);
        assert_eq!(scan(Dtype::F64, &[&f64::INFINITY.to_le_bytes()]), Some((1, 0, f32::INFINITY)));
    }
}
