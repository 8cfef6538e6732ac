//! Source of a weight to verify, dense or in another format.

use std::path::{Path, PathBuf};

use mantissa_model::{LinearInfo, linear_weight};
use mantissa_num::stored::{Map, Transforms};

use crate::error::{QuantError, Result};
use crate::fold::Folded;
use crate::source::DenseTensor;
use crate::stacks::stack_of;
use crate::values::values_of;

/// Returns the source weight of a layer's codes; `transforms` are those around the codes in the model at `dir`.
pub(super) fn source_weight<'a>(
    dir: &Path,
    source: &Folded<'a>,
    info: &LinearInfo,
    transforms: &Transforms,
) -> Result<DenseTensor<'a>> {
    let ((name, _), files) = (info.tensor_in(source.files()), source.files());
    if files.is_quantized() && (info.is_by_rows(files) || stack_of(info).is_some()) {
        // After a conversion: the dequantized source. If both have the same rotated input, rotated weights are
        // compared.
        let mut weight = linear_weight(files, &LinearInfo { bias: false, ..info.clone() })?;
        if matches!(transforms.before.as_slice(), [Map::Hadamard(_)]) && weight.transforms == *transforms {
            weight.transforms = Transforms::default();
        }
        return Ok(values_of(info, weight)?.into());
    }
    if source.stored(&name).is_none() {
        return Err(reference_fault(dir, source.path(), format!("it has no dense tensor {name}")));
    }
    Ok(DenseTensor::of_linear(source, info)?)
}

pub(super) fn reference_fault(model: &Path, reference: &Path, what: String) -> QuantError {
    QuantError::Reference { model: PathBuf::from(model), reference: PathBuf::from(reference), what }
}
