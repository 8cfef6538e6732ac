//! Tensors of one number that a file has as elements of keys: read as tensors of each layer.

use crate::error::Result;
use crate::gguf::{GgmlType, GgufHeader, GgufTensor};
use crate::safetensors::SafeTensors;
use mantissa_arch::gguf::Architecture;

/// Adds a tensor of each layer for every key that lists numbers of layers. A missing key is found when a tensor of it is read.
///
/// # Errors
/// [`crate::Error::Field`] for a list of another length than the number of layers, or a tensor of such a name.
pub(super) fn add(
    architecture: &Architecture,
    header: &mut GgufHeader,
    files: &mut Vec<SafeTensors>,
) -> Result<()> {
    /// Largest number of layers.
    const MOST: u64 = 10_000;
    let layers = header.metadata.uint(&format!("{}.block_count", architecture.name))?.unwrap_or(0);
    let mut tensors = Vec::new();
    for key in architecture.listed {
        let Some((start, count)) = header.metadata.floats(key) else { continue };
        if count as u64 != layers || layers > MOST {
            let allowed = format!("{}, one for each layer", layers.min(MOST));
            return Err(header.metadata.fault(key, format!("{count} numbers"), allowed));
        }
        tensors.extend((0..count).map(|layer| GgufTensor {
            name: format!("blk.{layer}.{key}"),
            ty: GgmlType::F32,
            shape: vec![1],
            offset: start + 4 * layer as u64,
            len: 4,
        }));
    }
    if tensors.is_empty() || files.is_empty() {
        return Ok(());
    }
    let stored = tensors.iter().map(GgufTensor::as_stored);
    let first = files.remove(0);
    let all = first.tensors().iter().cloned().chain(stored).collect();
    files.insert(0, first.with_tensors(all));
    let added = header.extend(tensors);
    added.map_err(|name| header.metadata.fault(&name, "a tensor", "a key alone"))
}
