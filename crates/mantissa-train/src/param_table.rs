//! Table of a model's parameters: the place of each in a flat arena. Parameters, gradients and optimizer states are
//! arenas with the same table.

use std::ops::Range;

use mantissa_model::{ModelConfig, Role, StoredAs, TensorInfo};

use crate::learned;
use crate::policy::Policy;

/// Alignment of tensors in f32 values (64 bytes, one cache line). Padding is 0 and stays 0.
pub(crate) const ALIGN: usize = 16;

/// Parameter with its place in the arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamInfo {
    /// Name, shape and role.
    pub tensor: TensorInfo,
    /// Range of the parameter in every arena.
    pub range: Range<usize>,
    /// True if checkpoints store this matrix transposed, `[in, out]` (GPT-2); arenas hold it like any other.
    pub transposed: bool,
}

impl ParamInfo {
    /// True if it holds the learned scales of a weight, which are no tensor of the model.
    pub fn is_scales(&self) -> bool {
        learned::is_scales(&self.tensor.name)
    }

    /// Returns its shape in a checkpoint.
    pub fn stored_shape(&self) -> Vec<usize> {
        let mut shape = self.tensor.shape.clone();
        if self.transposed {
            shape.reverse();
        }
        shape
    }
}

/// Table of the parameters of a model and their ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParamTable {
    params: Vec<ParamInfo>,
    len: usize,
}

impl ParamTable {
    /// Makes the table of a model.
    pub fn new(config: &ModelConfig) -> Self {
        Self::of_model(config, config.tensors())
    }

    /// Makes the table of a model with the learned scales that `policy` asks for.
    pub fn with_scales(config: &ModelConfig, policy: &Policy) -> Self {
        Self::of_model(config, learned::tensors(config, policy))
    }

    fn of_model(config: &ModelConfig, tensors: Vec<TensorInfo>) -> Self {
        let mut table = Self::of(tensors, 0);
        for param in &mut table.params {
            if let Role::Linear { layer, kind } = param.tensor.role
                && config.linear(layer, kind).stored == StoredAs::Columns
            {
                param.tensor.shape.reverse();
                param.transposed = true;
            }
        }
        table
    }

    /// Makes a table of `tensors`, whose ranges begin at `first`.
    pub(crate) fn of(tensors: Vec<TensorInfo>, first: usize) -> Self {
        let mut len = first;
        let place = |tensor: TensorInfo| {
            let start = aligned(len);
            len = tensor.shape.iter().product::<usize>().saturating_add(start);
            ParamInfo { tensor, range: start..len, transposed: false }
        };
        let params = tensors.into_iter().map(place).collect();
        ParamTable { params, len: aligned(len) }
    }

    /// Makes a table of `len` values without parameters.
    #[cfg(test)]
    pub(crate) fn bare(len: usize) -> Self {
        ParamTable { params: Vec::new(), len }
    }

    /// Number of f32 values in an arena, padding included.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the model has no parameters.
    pub fn is_empty(&self) -> bool {
        self.params.is_empty()
    }

    /// Returns all parameters in forward order, which is arena order.
    pub fn iter(&self) -> impl Iterator<Item = &ParamInfo> + Clone {
        self.params.iter()
    }

    /// Returns the ranges of all parameters, in order.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<usize>> + Clone {
        self.params.iter().map(|param| param.range.clone())
    }

    /// Finds the parameter called `name`.
    pub fn by_name(&self, name: &str) -> Option<&ParamInfo> {
        self.params.iter().find(|param| param.tensor.name == name)
    }

    /// Returns the range of the parameter called `name`.
    pub(crate) fn place(&self, name: &str) -> Option<Range<usize>> {
        self.by_name(name).map(|param| param.range.clone())
    }
}

/// Returns the next aligned offset. A config may describe more values than there are addresses; its table
/// saturates, and allocation fails later.
fn aligned(len: usize) -> usize {
    len.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX)
}

/// Returns the transpose of a matrix with rows of `cols`.
pub(crate) fn transposed<T: Copy>(values: &[T], cols: usize) -> Vec<T> {
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols).copied()).collect()
}

/// Returns the part of `range` that lies in `shard`; empty if none does.
pub(crate) fn within(range: &Range<usize>, shard: &Range<usize>) -> Range<usize> {
    let start = range.start.clamp(shard.start, shard.end);
    start..range.end.clamp(start, shard.end.max(start))
}

/// Returns the parts of `range` before and after `shard`; empty where there are none.
pub(crate) fn outside(range: &Range<usize>, shard: &Range<usize>) -> [Range<usize>; 2] {
    let before = range.start..range.end.min(shard.start).max(range.start);
    let after = range.start.max(shard.end).min(range.end)..range.end;
    if shard.is_empty() { [range.clone(), range.end..range.end] } else { [before, after] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_its_part_in_a_shard_and_those_outside() {
        for (start, end) in [(10, 20), (15, 18), (0, 100), (20, 30), (0, 10), (12, 12), (5, 15), (15, 40)] {
            let (range, shard) = (10..20, start..end);
            let [before, after] = outside(&range, &shard);
            let all: Vec<usize> = before.chain(within(&range, &shard)).chain(after).collect();
            assert_eq!(all, range.collect::<Vec<_>>(), "{shard:?}");
        }
    }

    #[test]
    fn parts_of_a_shard_are_within_it() {
        assert_eq!(within(&(10..20), &(0..100)), 10..20);
        assert_eq!(within(&(10..20), &(15..18)), 15..18);
        assert!(within(&(10..20), &(20..30)).is_empty() && within(&(10..20), &(0..10)).is_empty());
    }
}
