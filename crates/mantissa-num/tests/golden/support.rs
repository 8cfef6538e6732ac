//! Reads golden files and compares.

use std::path::Path;

use safetensors::{Dtype, SafeTensors};

/// One golden file in memory.
pub struct Golden {
    bytes: Vec<u8>,
}

/// `name.safetensors` of the committed subset and, if present, of the whole set.
pub fn open(name: &str) -> Vec<Golden> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let committed = root.join("tests/data/golden").join(name);
    let shared = root.join("../shared/golden").join(name);
    let mut all = vec![Golden { bytes: std::fs::read(&committed).expect("committed subset") }];
    match std::fs::read(&shared) {
        Ok(bytes) => all.push(Golden { bytes }),
        Err(_) => println!("skipped: {} is not there", shared.display()),
    }
    all
}

impl Golden {
    pub fn tensors(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).unwrap()
    }
}

/// Typed access by name; `None` if this file (a subset) lacks the tensor.
pub trait Get {
    fn f32(&self, name: &str) -> Option<Vec<f32>>;
    fn f64(&self, name: &str) -> Option<Vec<f64>>;
    fn u8(&self, name: &str) -> Option<Vec<u8>>;
    fn ints(&self, name: &str) -> Option<Vec<i64>>;
    fn shape2(&self, name: &str) -> (usize, usize);
}

impl Get for SafeTensors<'_> {
    fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let t = self.tensor(name).ok()?;
        assert_eq!(t.dtype(), Dtype::F32, "{name}");
        Some(t.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }

    fn f64(&self, name: &str) -> Option<Vec<f64>> {
        let t = self.tensor(name).ok()?;
        assert_eq!(t.dtype(), Dtype::F64, "{name}");
        Some(t.data().chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect())
    }

    fn u8(&self, name: &str) -> Option<Vec<u8>> {
        self.tensor(name).ok().map(|t| t.data().to_vec())
    }

    fn ints(&self, name: &str) -> Option<Vec<i64>> {
        let t = self.tensor(name).ok()?;
        let data = t.data();
        Some(match t.dtype() {
            Dtype::U8 => data.iter().map(|&b| b.into()).collect(),
            Dtype::I8 => data.iter().map(|&b| (b as i8).into()).collect(),
            Dtype::U16 => {
                data.chunks_exact(2).map(|b| u16::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            Dtype::I32 => {
                data.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            Dtype::U32 => {
                data.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()).into()).collect()
            }
            other => panic!("{name}: {other:?}"),
        })
    }

    fn shape2(&self, name: &str) -> (usize, usize) {
        let shape = self.tensor(name).unwrap().shape().to_vec();
        (shape[..shape.len() - 1].iter().product(), *shape.last().unwrap())
    }
}

/// Equal bit patterns; any NaN equals any NaN and, unless `zeros` is true, the sign of zero is ignored.
pub fn same(a: f32, b: f32, zeros: bool) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()) || (!zeros && a == 0.0 && b == 0.0)
}

/// Asserts that two lists of values agree.
pub fn assert_same(what: &str, found: &[f32], expected: &[f32], zeros: bool) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert!(
            same(f, e, zeros),
            "{what}[{i}]: found {f:e} ({:#x}), expected {e:e} ({:#x})",
            f.to_bits(),
            e.to_bits()
        );
    }
}

/// Asserts that two lists of codes agree.
pub fn assert_codes(what: &str, found: &[i64], expected: &[i64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let bad = found.iter().zip(expected).position(|(f, e)| f != e);
    if let Some(i) = bad {
        panic!("{what}[{i}]: found {}, expected {}", found[i], expected[i]);
    }
}

/// Nibbles, low first.
pub fn nibbles(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|b| [b & 15, b >> 4]).collect()
}

/// Asserts that two lists of bytes agree.
pub fn assert_bytes(what: &str, found: &[u8], expected: &[u8]) {
    let wide = |bytes: &[u8]| bytes.iter().map(|&b| b.into()).collect::<Vec<i64>>();
    assert_codes(what, &wide(found), &wide(expected));
}
