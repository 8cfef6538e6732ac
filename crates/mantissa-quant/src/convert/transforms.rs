//! Transforms of quantized layers, and the formats that hold them.

use mantissa_num::Hadamard;
use mantissa_num::stored::{Map, Transforms};
use mantissa_store::convention::{Container, Support};

/// True if `container` holds the transforms of a layer: none, a group order (act-order), or a rotation of the input.
pub(super) fn holds(container: Container, transforms: &Transforms) -> bool {
    transforms.is_empty()
        || group_order(transforms).is_some() && container.facts().group_order != Support::No
        || rotation(transforms).is_some() && container.facts().rotations
}

/// Returns the column order of act-order, if it is the only transform.
pub(super) fn group_order(transforms: &Transforms) -> Option<&[u32]> {
    match (transforms.before.as_slice(), transforms.after.is_empty() && transforms.extras.is_empty()) {
        ([Map::Perm(order)], true) => Some(order),
        _ => None,
    }
}

/// Returns the order of Sylvester's matrix that rotates the input, if it is the only transform.
pub(super) fn rotation(transforms: &Transforms) -> Option<usize> {
    match (transforms.before.as_slice(), transforms.after.is_empty() && transforms.extras.is_empty()) {
        ([Map::Hadamard(matrix)], true) => {
            let order = matrix.order();
            (order.is_power_of_two() && Hadamard::new(order).as_ref() == Some(matrix)).then_some(order)
        }
        _ => None,
    }
}
