//! Transforms around the codes of a layer, and the formats that keep them.

use mantissa_num::Hadamard;
use mantissa_num::stored::{Map, Transforms};
use mantissa_store::convention::{Container, Support};

/// Whether `container` says as well what stands around the codes of a layer: nothing, an order of groups, or a rotation of its input.
pub(super) fn keeps(container: Container, around: &Transforms) -> bool {
    around.is_empty()
        || group_order(around).is_some() && container.facts().group_order != Support::No
        || rotation(around).is_some() && container.facts().rotations
}

/// The order of columns that act-order leaves, where it is all that stands around the codes.
pub(super) fn group_order(around: &Transforms) -> Option<&[u32]> {
    match (around.before.as_slice(), around.after.is_empty() && around.extras.is_empty()) {
        ([Map::Perm(order)], true) => Some(order),
        _ => None,
    }
}

/// The order of Sylvester's matrix by which the input is rotated, where that is all that stands around the codes.
pub(super) fn rotation(around: &Transforms) -> Option<usize> {
    match (around.before.as_slice(), around.after.is_empty() && around.extras.is_empty()) {
        ([Map::Hadamard(matrix)], true) => {
            let order = matrix.order();
            (order.is_power_of_two() && Hadamard::new(order).as_ref() == Some(matrix)).then_some(order)
        }
        _ => None,
    }
}
