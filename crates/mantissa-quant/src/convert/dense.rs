//! Tensors that are not quantized, where names, order or type change.

use mantissa_model::{ModelConfig, Role, TensorInfo};
use mantissa_num::{Codes, Quantized, Scheme};
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::{Dtype, TensorSpec};

use crate::error::Result;
use crate::plan::PlannedLinear;

/// A dense tensor of a GGUF file under its name elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    /// Name and shape.
    pub(crate) info: TensorInfo,
    dtype: Dtype,
}

/// The dense tensors of a GGUF model. Each takes the narrowest dtype that holds its values exactly.
pub(super) fn of_gguf(
    source: &ModelFiles,
    config: &ModelConfig,
    linears: &[PlannedLinear],
    notes: &mut Vec<String>,
) -> Result<Vec<Dense>> {
    notes.push(
        "a tokenizer in GGUF metadata is not written as tokenizer.json: copy it from the source model"
            .to_owned(),
    );
    let mut all = Vec::new();
    for info in config.tensors() {
        let quantized = linears.iter().any(|linear| {
            linear.scheme.is_some() && info.name.strip_suffix(".weight") == Some(linear.info.module.as_str())
        });
        if quantized {
            continue;
        }
        let values = source.tensor_f32(&info.name, &info.shape)?;
        // Vectors stay f32, as in the file.
        let narrow = matches!(info.role, Role::Embedding | Role::Head | Role::Linear { .. });
        let dtype = if narrow { narrowest(&values) } else { Dtype::F32 };
        all.push(Dense { info, dtype });
    }
    Ok(all)
}

fn narrowest(values: &[f32]) -> Dtype {
    let bf16 = |v: &f32| v.to_bits() & 0xffff == 0;
    if values.iter().all(bf16) {
        return Dtype::BF16;
    }
    let words = crate::convert::recode::f16_words(values);
    if words.is_some() { Dtype::F16 } else { Dtype::F32 }
}

impl Dense {
    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec::new(&self.info.name, self.dtype, self.info.shape.clone())
    }

    /// Its bytes.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn bytes(&self, source: &ModelFiles) -> Result<Vec<u8>> {
        let values = source.tensor_f32(&self.info.name, &self.info.shape)?;
        Ok(match self.dtype {
            Dtype::BF16 => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
            Dtype::F16 => {
                let words = crate::convert::recode::f16_words(&values).unwrap_or_default();
                words.into_iter().flat_map(u16::to_le_bytes).collect()
            }
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        })
    }
}

/// A dense weight under a plain scheme of its own type.
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
