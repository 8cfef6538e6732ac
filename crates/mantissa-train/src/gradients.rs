//! The arena of gradients, in f32 or, with half the memory, in bf16.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::{LoadError, zeros};

use crate::arena::ParamTable;
use crate::store::{Precision, Store, Stored};

/// An arena of gradients.
#[derive(Clone, Debug)]
pub struct Gradients {
    store: Store,
    /// Sums in f32 that are not in the store yet: of one parameter, the largest of which it holds.
    stage: Vec<f32>,
}

impl Gradients {
    /// Zeros.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(table: &ParamTable, precision: Precision) -> Result<Self, LoadError> {
        let memory = || LoadError::Memory { what: "gradients", bytes: Self::bytes(table, precision) };
        let store = Store::zeros(precision, table.len()).ok_or_else(memory)?;
        Ok(Gradients { store, stage: zeros(staged(table, precision)).ok_or_else(memory)? })
    }

    /// Bytes of the arena, and of the f32 sums that one in bf16 needs.
    pub fn bytes(table: &ParamTable, precision: Precision) -> u64 {
        precision.bytes() * table.len() as u64 + 4 * staged(table, precision) as u64
    }

    /// Gradients without names.
    #[cfg(test)]
    pub(crate) fn bare(values: Vec<f32>) -> Self {
        Gradients { store: Store::F32(values), stage: Vec::new() }
    }

    /// Number of gradients.
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All gradients, placed as the parameters are.
    pub fn to_f32(&self) -> std::borrow::Cow<'_, [f32]> {
        self.store.get(0..self.len()).widened()
    }

    /// Forgets them.
    pub fn zero(&mut self) {
        match &mut self.store {
            Store::F32(values) => values.fill(0.0),
            Store::Bf16(bits) | Store::F16(bits) => bits.fill(0),
        }
    }

    /// Lets `add` add to the gradients at `range`. Those in bf16 take the sum of what was added, rounded once.
    pub(crate) fn add<T>(&mut self, range: Range<usize>, add: impl FnOnce(&mut [f32]) -> T) -> T {
        match &mut self.store {
            Store::F32(values) => add(&mut values[range]),
            store => {
                let stage = &mut self.stage[..range.len()];
                store.get(range.clone()).widen(stage);
                let result = add(stage);
                store.set(range.start, stage);
                result
            }
        }
    }

    /// The gradients at `range`.
    pub(crate) fn get(&self, range: Range<usize>) -> Stored<'_> {
        self.store.get(range)
    }

    /// Sum of the squares of those at `range`, in f64.
    pub(crate) fn sum_squares(&self, range: Range<usize>) -> f64 {
        kernels().sum_squares_f64(&self.get(range).widened())
    }
}

/// The largest parameter, where sums are not made in place.
fn staged(table: &ParamTable, precision: Precision) -> usize {
    let largest = table.iter().map(|param| param.range.len()).max().unwrap_or(0);
    if precision == Precision::F32 { 0 } else { largest }
}
