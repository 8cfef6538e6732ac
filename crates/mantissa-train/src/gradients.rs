//! Gradient arena in f32, or in bf16 at half the memory.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::{LoadError, zeros};

use crate::param_table::{ParamTable, outside};
use crate::store::{Precision, Store, StoreRef};

/// Gradients to compute for a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Gradients of parameters and input.
    All,
    /// Gradients of linear weights only; `d_residual` is not used afterwards.
    Weights,
    /// Gradient of the input only.
    Input,
}

impl Wanted {
    /// True if gradients of linear weights are wanted.
    pub(crate) fn weights(self) -> bool {
        self != Wanted::Input
    }

    /// True if the gradient of the input is wanted.
    pub(crate) fn input(self) -> bool {
        self != Wanted::Weights
    }
}

/// Arena of gradients.
#[derive(Clone, Debug)]
pub struct Gradients {
    store: Store,
    /// Staging buffer: f32 sums of one parameter before rounding into a bf16 store. As long as the largest
    /// parameter.
    stage: Vec<f32>,
}

impl Gradients {
    /// Allocates zero gradients.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(table: &ParamTable, precision: Precision) -> Result<Self, LoadError> {
        let memory = || LoadError::Memory { what: "gradients", bytes: Self::bytes(table, precision) };
        let store = Store::zeros(precision, table.len()).ok_or_else(memory)?;
        Ok(Gradients { store, stage: zeros(staged(table, precision)).ok_or_else(memory)? })
    }

    /// Bytes of the arena and of the f32 staging buffer that bf16 needs.
    pub fn bytes(table: &ParamTable, precision: Precision) -> u64 {
        precision.bytes() * table.len() as u64 + 4 * staged(table, precision) as u64
    }

    /// Wraps gradients without a table.
    #[cfg(test)]
    pub(crate) fn bare(values: Vec<f32>) -> Self {
        Gradients { store: Store::F32(values), stage: Vec::new() }
    }

    /// Number of gradients.
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns all gradients as f32, in the order of the parameters.
    pub fn to_f32(&self) -> std::borrow::Cow<'_, [f32]> {
        self.store.get(0..self.len()).widened()
    }

    /// Sets all gradients to zero.
    pub fn zero(&mut self) {
        self.store.zero();
    }

    /// Sets all gradients to zero and gives their memory back, for passes that hold a few at a time.
    pub(crate) fn release(&mut self) {
        let all = 0..self.len();
        self.store.release(all);
    }

    /// Gives the memory of the gradients at `range` back that are not in `shard`.
    pub(crate) fn release_outside(&mut self, shard: &Range<usize>, range: &Range<usize>) {
        outside(range, shard).into_iter().for_each(|part| self.store.release(part));
    }

    /// Returns the arena.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the arena for writing.
    pub(crate) fn store_mut(&mut self) -> &mut Store {
        &mut self.store
    }

    /// True if the tensor at `range` is trained. Frozen tensors lie behind the arena and have no gradients.
    pub(crate) fn holds(&self, range: &Range<usize>) -> bool {
        !range.is_empty() && range.end <= self.len()
    }

    /// Passes the gradients at `range` to `add`, unless the tensor is frozen. A bf16 arena accumulates in f32 and
    /// rounds the sum once.
    pub(crate) fn add(&mut self, range: Range<usize>, add: impl FnOnce(&mut [f32])) {
        if !self.holds(&range) {
            return;
        }
        match &mut self.store {
            Store::F32(values) => add(&mut values[range]),
            store => {
                let stage = &mut self.stage[..range.len()];
                store.get(range.clone()).widen(stage);
                add(stage);
                store.set(range.start, stage);
            }
        }
    }

    /// Returns the gradients at `range`.
    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        self.store.get(range)
    }

    /// Returns the sum of squares at `range`, in f64.
    pub(crate) fn sum_squares(&self, range: Range<usize>) -> f64 {
        kernels().sum_squares_f64(&self.get(range).widened())
    }
}

/// Length of the staging buffer: the largest parameter, or 0 for f32.
fn staged(table: &ParamTable, precision: Precision) -> usize {
    let largest = table.iter().map(|param| param.range.len()).max().unwrap_or(0);
    if precision == Precision::F32 { 0 } else { largest }
}
