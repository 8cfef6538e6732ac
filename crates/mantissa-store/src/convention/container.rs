//! The conventions that can be written, behind one face.

use mantissa_num::{Quantized, Scheme};

use super::{awq, compressed_tensors, gguf, gptq, native};
use crate::TensorSpec;

/// A convention for a quantized model that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// compressed-tensors, read by vLLM, SGLang and transformers.
    CompressedTensors,
    /// One GGUF file, read by llama.cpp.
    Gguf,
    /// mantissa's own.
    Native,
    /// GPTQ, read by GPTQModel, vLLM, SGLang and transformers.
    Gptq,
    /// AWQ GEMM, read by vLLM, SGLang and transformers.
    Awq,
}

/// What is to be stored for a linear layer.
#[derive(Clone, Copy, Debug)]
pub struct LinearPlan<'a> {
    /// Name of the layer, without `.weight`.
    pub module: &'a str,
    /// Scheme of the weight, with the scale code that the container will hold.
    pub scheme: &'a Scheme,
    /// Scheme of the input, if it is to be quantized at run time.
    pub input: Option<&'a Scheme>,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// Why a container cannot hold a scheme.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("scheme {scheme}: {why}")]
pub struct NotStorable {
    /// The scheme.
    pub scheme: String,
    /// Why.
    pub why: String,
}

impl Container {
    /// Every container with its name on the command line.
    pub const NAMES: [(Container, &'static str); 5] = [
        (Container::CompressedTensors, "compressed-tensors"),
        (Container::Gguf, "gguf"),
        (Container::Native, "native"),
        (Container::Gptq, "gptq"),
        (Container::Awq, "awq"),
    ];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(container, _)| *container == self).map_or("", |(_, name)| name)
    }

    /// The tensors that `plan` becomes. For GGUF under the names there, blocks as rows of bytes.
    ///
    /// # Errors
    /// [`NotStorable`] where the container cannot hold the scheme, or not on this shape.
    pub fn specs(self, plan: &LinearPlan<'_>) -> Result<Vec<TensorSpec>, NotStorable> {
        match self {
            Container::CompressedTensors => compressed_tensors::specs(plan),
            Container::Gguf => gguf::specs(plan),
            Container::Native => native::specs(plan),
            Container::Gptq => gptq::specs(plan),
            Container::Awq => awq::specs(plan),
        }
    }

    /// The bytes of those tensors, by name. For GGUF the rows are still in Hugging Face order
    /// ([`gguf::to_gguf_order`]).
    ///
    /// # Errors
    /// As [`specs`](Self::specs).
    pub fn tensors(
        self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
    ) -> Result<Vec<(String, Vec<u8>)>, NotStorable> {
        match self {
            Container::CompressedTensors => {
                let format = compressed_tensors::pack_format(plan.scheme, plan.input)?;
                Ok(compressed_tensors::tensors(plan.module, format, q))
            }
            Container::Gguf => gguf::tensors(plan, q),
            Container::Native => Ok(native::tensors(plan.module, q)),
            Container::Gptq => gptq::tensors(plan, q, None, plan.scheme.format.has_zero()),
            Container::Awq => awq::tensors(plan, q),
        }
    }

    /// Whether it can say that groups are not of neighbouring columns.
    pub fn holds_group_order(self) -> bool {
        self == Container::Gptq
    }

    /// [`tensors`](Self::tensors) of a weight whose column `k` is of group `g_idx[k]`, codes in the order of the weight.
    ///
    /// # Errors
    /// As [`specs`](Self::specs), and where the container does not [hold](Self::holds_group_order) that.
    pub fn tensors_by_group(
        self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        g_idx: &[u32],
    ) -> Result<Vec<(String, Vec<u8>)>, NotStorable> {
        match self {
            Container::Gptq => gptq::tensors(plan, q, Some(g_idx), plan.scheme.format.has_zero()),
            _ => {
                let why = format!("{} holds no g_idx, the group of each column; use gptq", self.name());
                Err(NotStorable { scheme: plan.scheme.to_string(), why })
            }
        }
    }
}
