//! Tensors of a checkpoint that llama.cpp's converter splits, read element by element: biases of gpt-oss' experts,
//! and DeepSeek's projection from the latent of keys and values.

use std::ops::Range;

use super::file::Tensor;
use super::{Error, Model};

/// Tensors of the file that hold one tensor of the checkpoint.
#[derive(Clone, Debug)]
pub enum Parts {
    /// Biases of experts: the elements of several tensors are interleaved.
    Turns(Vec<String>),
    /// Per head, the rows of keys (transposed in the first tensor), then those of values.
    KeysAndValues([String; 2]),
}

impl Parts {
    /// Names of the tensors in the file.
    pub fn names(&self) -> &[String] {
        match self {
            Parts::Turns(names) => names,
            Parts::KeysAndValues(names) => names,
        }
    }

    /// Part, row and column of element `[row, col]` of `rows`, by the dimensions of the first part.
    pub fn at(&self, row: usize, col: usize, rows: usize, first: &Tensor) -> (usize, usize, usize) {
        match self {
            Parts::Turns(names) => (col % names.len(), row, col / names.len()),
            Parts::KeysAndValues(_) => {
                // [heads, rank, unrotated] and [heads, value, rank], as matrices of rows.
                let dim = |i: usize| first.dims.get(i).map_or(1, |&n| usize::try_from(n).unwrap_or(1).max(1));
                let (unrotated, rank, heads) = (dim(0), dim(1), dim(2));
                let each = (rows / heads).max(1);
                let (head, within) = (row / each, row % each);
                match within.checked_sub(unrotated) {
                    None => (0, head * rank + col, within),
                    Some(value) => (1, head * each.saturating_sub(unrotated) + value, col),
                }
            }
        }
    }
}

impl Model<'_> {
    /// Tensors of the file that hold the parts of this Hugging Face tensor, if it is split.
    pub fn parts(&self, name: &str) -> Option<Parts> {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let stored = |part: &str| format!("blk.{layer}.{part}");
        let parts = match (self.architecture.as_str(), rest) {
            ("gpt-oss", "mlp.experts.gate_up_proj_bias") => {
                Parts::Turns(vec![stored("ffn_gate_exps.bias"), stored("ffn_up_exps.bias")])
            }
            ("gpt-oss", "mlp.experts.down_proj_bias") => Parts::Turns(vec![stored("ffn_down_exps.bias")]),
            ("deepseek2", "self_attn.kv_b_proj.weight") => {
                Parts::KeysAndValues([stored("attn_k_b.weight"), stored("attn_v_b.weight")])
            }
            _ => return None,
        };
        parts.names().iter().all(|part| self.file.tensors.contains_key(part)).then_some(parts)
    }

    /// Decodes rows `range` of such a tensor (`[rows, cols]`) into `out`.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn rows_of_parts(
        &self,
        parts: &Parts,
        (rows, cols): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let decoded = self.decoded(parts.names())?;
        for (row, out) in range.zip(out.chunks_exact_mut(cols.max(1))) {
            for (col, out) in out.iter_mut().enumerate() {
                let (part, row, col) = parts.at(row, col, rows, &decoded[0].0);
                let (tensor, values) = &decoded[part.min(decoded.len() - 1)];
                let width = usize::try_from(tensor.dims[0]).unwrap_or(0);
                *out = values.get(row * width + col).copied().unwrap_or(f32::NAN);
            }
        }
        Ok(())
    }
}
