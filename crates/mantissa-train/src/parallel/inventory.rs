//! What a rank keeps of the optimizer's state.

use mantissa_ranks::{Reader, Writer};
use mantissa_store::Dtype;

use crate::array::Array;
use crate::optim::Optimizer;

/// One array that a rank keeps: its name, dtype, and number of elements.
pub(super) type Kept = (String, Dtype, usize);

/// What a rank keeps of the optimizer's state, by parameter; the last entry has the master weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Inventory(pub(super) Vec<Vec<Kept>>);

/// Dtypes of arrays, in the order of their numbers in messages.
const DTYPES: [Dtype; 6] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::U16, Dtype::U8, Dtype::I8];

impl Inventory {
    pub(super) fn of(optimizer: &Optimizer) -> Self {
        let kept = |(name, array): (String, Array<'_>)| (name, array.dtype(), array.len());
        let parts = optimizer.parts().into_iter();
        Inventory(parts.map(|arrays| arrays.into_iter().map(kept).collect()).collect())
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.len(self.0.len());
        for arrays in &self.0 {
            out.len(arrays.len());
            for (name, dtype, len) in arrays {
                out.text(name);
                out.byte(DTYPES.iter().position(|known| known == dtype).unwrap_or(DTYPES.len()) as u8);
                out.len(*len);
            }
        }
        out.0
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let kept = |from: &mut Reader<'_>| {
            let (name, dtype) = (from.text()?, *DTYPES.get(usize::from(from.byte()?))?);
            Some((name, dtype, usize::try_from(from.u64()?).ok()?))
        };
        let arrays =
            |from: &mut Reader<'_>| (0..from.len(1)?).map(|_| kept(from)).collect::<Option<Vec<_>>>();
        let all = (0..from.len(8)?).map(|_| arrays(&mut from)).collect::<Option<_>>()?;
        from.0.is_empty().then_some(Inventory(all))
    }
}

/// Array of a checkpoint that ranks keep in parts: its name, dtype, and the number of elements of each rank that has a part, in
/// order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SharedArray {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) parts: Vec<Option<usize>>,
}

impl SharedArray {
    /// Lists the arrays of the state of an optimizer that keeps all of it.
    pub(crate) fn of(optimizer: &Optimizer, tensors: &[String]) -> Vec<Self> {
        Self::list(&[Inventory::of(optimizer)], tensors)
    }

    /// Lists the arrays whose parts the ranks with these inventories keep; `tensors` are the names of the parameters.
    pub(super) fn list(inventories: &[Inventory], tensors: &[String]) -> Vec<Self> {
        let mut all = Vec::new();
        for i in 0..=tensors.len() {
            let of = |inventory: &'_ Inventory| inventory.0.get(i).cloned().unwrap_or_default();
            let kept: Vec<_> = inventories.iter().map(of).collect();
            let Some(first) = kept.iter().find(|arrays| !arrays.is_empty()) else { continue };
            for (j, (what, dtype, _)) in first.iter().enumerate() {
                let name = tensors.get(i).map_or_else(|| what.clone(), |tensor| format!("{what}.{tensor}"));
                let parts = kept.iter().map(|arrays| arrays.get(j).map(|kept| kept.2)).collect();
                all.push(SharedArray { name, dtype: *dtype, parts });
            }
        }
        all
    }

    /// Number of elements of the whole.
    pub(crate) fn len(&self) -> usize {
        self.parts.iter().flatten().sum()
    }

    /// Bytes of the part of `rank`, and the bytes of those before it.
    pub(crate) fn place(&self, rank: usize) -> Option<(usize, usize)> {
        let bytes = |n: usize| n * self.dtype.bits() as usize / 8;
        let before = self.parts[..rank].iter().flatten().sum();
        Some((bytes(*self.parts.get(rank)?.as_ref()?), bytes(before)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn kept(name: &str, n: usize) -> Kept {
        (name.to_owned(), Dtype::U16, n)
    }

    #[test]
    fn inventories_are_read_back() {
        let found = Inventory(vec![vec![kept("m", 300), kept("v", 300)], Vec::new()]);
        let bytes = found.to_bytes();
        assert_eq!(Inventory::read(&bytes), Some(found));
        assert!((0..bytes.len()).all(|cut| Inventory::read(&bytes[..cut]).is_none()));
    }

    #[test]
    fn parts_follow_each_other() {
        let first = Inventory(vec![vec![kept("m", 10)], vec![kept("m", 4)], vec![kept("master", 14)]]);
        let second = Inventory(vec![Vec::new(), vec![kept("m", 6)], vec![kept("master", 6)]]);
        let all = SharedArray::list(&[first, second], &["a".to_owned(), "b".to_owned()]);
        let names: Vec<_> = all.iter().map(|array| (array.name.as_str(), array.len())).collect();
        assert_eq!(names, [("m.a", 10), ("m.b", 10), ("master", 20)]);
        assert_eq!((all[0].place(1), all[1].place(1), all[1].place(0)), (None, Some((12, 8)), Some((8, 0))));
    }
}
