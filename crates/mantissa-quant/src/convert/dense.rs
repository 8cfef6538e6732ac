//! Dense tensors that a conversion renames, reorders, casts or decodes.

use mantissa_model::{LinearInfo, ModelConfig, Role, StoredAs, TensorInfo};
use mantissa_num::pack::transpose;
use mantissa_num::{Codes, Quantized, Scheme};
use mantissa_store::Dtype;
use mantissa_store::convention::{Container, ModelFiles, Weight};

use crate::error::{QuantError, Refused, Result};
use crate::gguf;
use crate::plan::{Dense, PlannedLinear};
use crate::stacks::stack_of;
use crate::values::{values_of, weight_of};

/// Plans the dense tensors of a GGUF model. Each takes the narrowest dtype that represents its values exactly.
pub(super) fn of_gguf(
    source: &ModelFiles,
    config: &ModelConfig,
    container: Container,
    linears: &[PlannedLinear],
) -> Result<Vec<Dense>> {
    let mut all = Vec::new();
    for info in config.tensors() {
        let quantized = linears.iter().any(|linear| {
            linear.scheme.is_some() && info.name.strip_suffix(".weight") == Some(linear.info.module.as_str())
        });
        let stacked = matches!(info.role, Role::Stacked { .. }) && !info.name.ends_with("_bias");
        let one_by_one = stacked && (container.is_one_file() || all_quantized(linears, &info.name));
        if quantized || one_by_one {
            continue;
        }
        if stacked {
            let why = format!("{}: expected all of its experts to be quantized or none, got some", info.name);
            return Err(QuantError::not_lossless(container, linears.len(), &Refused::whole(why)));
        }
        let values = values(source, config, &info)?;
        // Vectors stay f32, as in GGUF.
        let narrow = matches!(info.role, Role::Embedding | Role::Head | Role::Linear { .. });
        let dtype = if narrow { narrowest(&values) } else { Dtype::F32 };
        all.push(Dense { info, dtype });
    }
    Ok(all)
}

/// Plans the decoded layers other than experts of a quantized folder. Dtypes are chosen as in [`of_gguf`].
pub(super) fn decoded(
    source: &ModelFiles,
    config: &ModelConfig,
    linears: &[PlannedLinear],
) -> Result<Vec<Dense>> {
    let mut all = Vec::new();
    let others = linears.iter().map(|linear| &linear.info).filter(|info| stack_of(info).is_none());
    for LinearInfo { module, layer, kind, rows, cols, .. } in others {
        let name = format!("{module}.weight");
        if source.is_dense(&name) {
            continue;
        }
        let role = Role::Linear { layer: *layer, kind: *kind };
        let info = TensorInfo { name, shape: vec![*rows, *cols], role };
        let dtype = narrowest(&values(source, config, &info)?);
        all.push(Dense { info, dtype });
    }
    Ok(all)
}

/// True if every layer that dense checkpoints store in the stacked tensor `name` is quantized separately.
fn all_quantized(linears: &[PlannedLinear], name: &str) -> bool {
    let in_stack = |linear: &&PlannedLinear| linear.info.dense_tensor().0 == name;
    linears.iter().filter(in_stack).all(|linear| linear.scheme.is_some())
}

/// Returns the values of a tensor in the order of dense checkpoints. GGUF stores every layer as `[out, in]`. In a
/// folder it is a layer that is not dense there.
fn values(source: &ModelFiles, config: &ModelConfig, info: &TensorInfo) -> Result<Vec<f32>> {
    match gguf::linear_of(config, info) {
        Some(linear) if source.gguf().is_none() => values_of(&linear, weight_of(source, &linear)?),
        Some(LinearInfo { rows, cols, stored: StoredAs::Columns, .. }) => {
            Ok(transpose(&source.tensor_f32(&info.name, &[rows, cols])?, rows, cols))
        }
        _ => Ok(source.tensor_f32(&info.name, &info.shape)?),
    }
}

/// Returns the narrowest dtype that represents all values exactly.
fn narrowest(values: &[f32]) -> Dtype {
    let bf16 = |v: &f32| v.to_bits() & 0xffff == 0;
    if values.iter().all(bf16) {
        return Dtype::BF16;
    }
    let words = super::recode::f16_words(values);
    if words.is_some() { Dtype::F16 } else { Dtype::F32 }
}

impl Dense {
    /// Returns the bytes of the tensor.
    ///
    /// # Errors
    /// The source tensor cannot be read.
    pub(crate) fn bytes(&self, source: &ModelFiles, config: &ModelConfig) -> Result<Vec<u8>> {
        let values = values(source, config, &self.info)?;
        Ok(match self.dtype {
            Dtype::BF16 => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            Dtype::F16 => {
                let words = super::recode::f16_words(&values).unwrap_or_default();
                words.into_iter().flat_map(u16::to_le_bytes).collect()
            }
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    }
}

/// Converts a dense weight to a plain scheme of the same dtype.
pub(super) fn plain(
    weight: Weight,
    scheme: &Scheme,
    rows: usize,
    cols: usize,
) -> std::result::Result<Quantized, String> {
    let codes = match weight {
        Weight::F32(values) => Codes::U32(values.into_iter().map(f32::to_bits).collect()),
        Weight::Bf16(words) | Weight::F16(words) => Codes::U16(words),
        Weight::Quantized(_) => return Err("it is quantized".to_owned()),
    };
    Ok(Quantized { codes, ..Quantized::empty(scheme.format.clone(), rows, cols) })
}
