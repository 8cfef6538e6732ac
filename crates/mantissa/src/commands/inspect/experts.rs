//! Experts that stand in one tensor for all of them, one at a time.

use anyhow::Result;
use mantissa_num::{CodecId, Codes, Format, Quantized};
use mantissa_store::convention::{ModelFiles, Stack, Weight};
use mantissa_store::gguf::{GgufTensor, Storage};

/// Quantized experts, each `[rows, cols]`, whose codes one tensor holds.
#[derive(Clone)]
pub struct Experts {
    parts: Parts,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
}

#[derive(Clone)]
enum Parts {
    /// In MXFP4 as gpt-oss has them: where each stands.
    Stacks(Vec<Stack>),
    /// In blocks of a GGUF file, one after the other.
    Blocks { tensor: String, codec: CodecId, experts: usize, bytes: u64 },
}

impl Experts {
    /// The first of the experts of a projection in MXFP4; [`push`](Self::push) adds the others.
    pub fn stacked(stack: &Stack, rows: usize, cols: usize) -> Self {
        Experts { parts: Parts::Stacks(vec![stack.clone()]), rows, cols }
    }

    /// Those of a tensor `[experts, rows, cols]` of a GGUF file; `None` of a tensor of another kind.
    pub fn of_gguf(tensor: &GgufTensor) -> Option<Self> {
        let (&[experts, rows, cols], Storage::Blocks(codec)) = (&tensor.shape[..], tensor.ty.storage) else {
            return None;
        };
        let bytes = tensor.len / (experts as u64).max(1);
        let parts = Parts::Blocks { tensor: tensor.name.clone(), codec, experts, bytes };
        Some(Experts { parts, rows, cols })
    }

    /// Another of the experts in MXFP4.
    pub fn push(&mut self, stack: &Stack) {
        if let Parts::Stacks(stacks) = &mut self.parts {
            stacks.push(stack.clone());
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match &self.parts {
            Parts::Stacks(stacks) => stacks.len(),
            Parts::Blocks { experts, .. } => *experts,
        }
    }

    /// The weight of expert `at`; `None` where it is not quantized.
    ///
    /// # Errors
    /// As [`ModelFiles::expert`].
    pub fn weight(&self, files: &ModelFiles, at: usize) -> Result<Option<Quantized>> {
        match &self.parts {
            Parts::Stacks(stacks) => match files.expert(&stacks[at], self.rows, self.cols)? {
                Weight::Quantized(q) => Ok(Some(q)),
                _ => Ok(None),
            },
            Parts::Blocks { tensor, codec, bytes, .. } => {
                let mut blocks = vec![0; usize::try_from(*bytes)?];
                files.checkpoint().read_range(tensor, at as u64 * bytes, &mut blocks)?;
                let empty = Quantized::empty(Format::Codec(*codec), self.rows, self.cols);
                Ok(Some(Quantized { codes: Codes::Packed(blocks), ..empty }))
            }
        }
    }
}
