//! Stacked experts: weights of all experts in one tensor, read one at a time.

use mantissa_model::LoadError;
use mantissa_num::{CodecId, Codes, Format, Quantized};
use mantissa_store::convention::{ModelFiles, Stack, Weight};
use mantissa_store::gguf::{GgufTensor, Storage};

use crate::error::Result;

/// Quantized experts, each `[rows, cols]`, with codes in one tensor.
#[derive(Clone)]
pub struct Experts {
    parts: ExpertTensors,
    /// Rows per expert.
    pub rows: usize,
    /// Columns per expert.
    pub cols: usize,
}

#[derive(Clone)]
enum ExpertTensors {
    /// MXFP4 in gpt-oss layout, with the place of each expert.
    Stacks(Vec<Stack>),
    /// GGUF blocks, one expert after the other.
    Blocks { tensor: String, codec: CodecId, experts: usize, bytes: u64 },
}

impl Experts {
    /// Starts with the first MXFP4 expert of a projection; [`push`](Self::push) adds the others.
    pub fn stacked(stack: &Stack, rows: usize, cols: usize) -> Self {
        Experts { parts: ExpertTensors::Stacks(vec![stack.clone()]), rows, cols }
    }

    /// Finds the experts of a GGUF tensor `[experts, rows, cols]`; `None` for other tensors.
    pub fn of_gguf(tensor: &GgufTensor) -> Option<Self> {
        let (&[experts, rows, cols], Storage::Blocks(codec)) = (&tensor.shape[..], tensor.ty.storage) else {
            return None;
        };
        let bytes = tensor.len / (experts as u64).max(1);
        let parts = ExpertTensors::Blocks { tensor: tensor.name.clone(), codec, experts, bytes };
        Some(Experts { parts, rows, cols })
    }

    /// Adds another MXFP4 expert.
    pub fn push(&mut self, stack: &Stack) {
        if let ExpertTensors::Stacks(stacks) = &mut self.parts {
            stacks.push(stack.clone());
        }
    }

    /// Number of experts.
    pub fn len(&self) -> usize {
        match &self.parts {
            ExpertTensors::Stacks(stacks) => stacks.len(),
            ExpertTensors::Blocks { experts, .. } => *experts,
        }
    }

    /// Returns the weight of expert `at`; `None` if it is not quantized.
    ///
    /// # Errors
    /// As [`ModelFiles::expert`].
    pub fn weight(&self, files: &ModelFiles, at: usize) -> Result<Option<Quantized>> {
        match &self.parts {
            ExpertTensors::Stacks(stacks) => match files.expert(&stacks[at], self.rows, self.cols)? {
                Weight::Quantized(q) => Ok(Some(q)),
                _ => Ok(None),
            },
            ExpertTensors::Blocks { tensor, codec, bytes, .. } => {
                let memory = |_| LoadError::Memory { what: "an expert", bytes: *bytes };
                let mut blocks = vec![0; usize::try_from(*bytes).map_err(memory)?];
                files.checkpoint().read_range(tensor, at as u64 * bytes, &mut blocks)?;
                let empty = Quantized::empty(Format::Codec(*codec), self.rows, self.cols);
                Ok(Some(Quantized { codes: Codes::Packed(blocks), ..empty }))
            }
        }
    }
}
