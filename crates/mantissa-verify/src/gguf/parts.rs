//! Tensors of a checkpoint that llama.cpp's converter splits, read element by element: biases of gpt-oss' experts,
//! DeepSeek's projection from the latent of keys and values, gate and up of Granite 4, projections of Qwen3-Next's
//! gated DeltaNet; and the output projection of Qwen3.5's, whose columns it reorders.

use std::ops::Range;

use super::file::Tensor;
use super::{Error, Model};

/// Tensors of the file that hold one tensor of the checkpoint.
#[derive(Clone, Debug)]
pub enum SplitTensor {
    /// Biases of experts: the elements of several tensors are interleaved.
    Turns(Vec<String>),
    /// Per head, the rows of keys (transposed in the first tensor), then the rows of values.
    KeysAndValues([String; 2]),
    /// Whole rows: part and row of each row of the checkpoint.
    Rows([String; 2], Vec<(usize, usize)>),
    /// One tensor: column of each column of the checkpoint.
    Columns([String; 1], Vec<usize>),
}

impl SplitTensor {
    /// Names of the tensors in the file.
    pub fn names(&self) -> &[String] {
        match self {
            SplitTensor::Turns(names) => names,
            SplitTensor::KeysAndValues(names) | SplitTensor::Rows(names, _) => names,
            SplitTensor::Columns(names, _) => names,
        }
    }

    /// Part, row and column of element `[row, col]` of `rows`, by the dimensions of the first part.
    pub fn at(&self, row: usize, col: usize, rows: usize, first: &Tensor) -> (usize, usize, usize) {
        match self {
            SplitTensor::Turns(names) => (col % names.len(), row, col / names.len()),
            SplitTensor::Rows(_, places) => {
                let (part, row) = places.get(row).copied().unwrap_or((0, usize::MAX));
                (part, row, col)
            }
            SplitTensor::Columns(_, places) => (0, row, places.get(col).copied().unwrap_or(usize::MAX)),
            SplitTensor::KeysAndValues(_) => {
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
    pub fn parts(&self, name: &str) -> Option<SplitTensor> {
        // The text model of a multimodal one has other names.
        const LAYERS: [&str; 3] =
            ["model.layers.", "model.language_model.layers.", "language_model.model.layers."];
        let name = LAYERS.iter().find_map(|prefix| name.strip_prefix(prefix))?;
        let (layer, rest) = name.split_once('.')?;
        let stored = |part: &str| format!("blk.{layer}.{part}");
        let parts = match (self.architecture.as_str(), rest) {
            ("gpt-oss", "mlp.experts.gate_up_proj_bias") => {
                SplitTensor::Turns(vec![stored("ffn_gate_exps.bias"), stored("ffn_up_exps.bias")])
            }
            ("gpt-oss", "mlp.experts.down_proj_bias") => {
                SplitTensor::Turns(vec![stored("ffn_down_exps.bias")])
            }
            ("deepseek2" | "deepseek32" | "glm-dsa" | "kimi-linear", "self_attn.kv_b_proj.weight") => {
                SplitTensor::KeysAndValues([stored("attn_k_b.weight"), stored("attn_v_b.weight")])
            }
            ("granitehybrid", "shared_mlp.input_linear.weight") => {
                let shared = [stored("ffn_gate_shexp.weight"), stored("ffn_up_shexp.weight")];
                let names = match self.file.tensors.contains_key(&shared[0]) {
                    true => shared,
                    false => [stored("ffn_gate.weight"), stored("ffn_up.weight")],
                };
                let rows = self.file.tensors.get(&names[0])?.rows();
                let rows = usize::try_from(rows).ok()?;
                SplitTensor::Rows(names, (0..2 * rows).map(|row| (row / rows, row % rows)).collect())
            }
            ("qwen3next", "linear_attn.in_proj_qkvz.weight") => {
                SplitTensor::Rows([stored("attn_qkv.weight"), stored("attn_gate.weight")], self.key_groups()?)
            }
            ("qwen35" | "qwen35moe", "linear_attn.out_proj.weight") => {
                let delta = self.delta.filter(|delta| delta.each > 1 && delta.keys > 1)?;
                let cols = delta.keys * delta.each * delta.value_dim;
                let places = (0..cols).map(|col| delta.place(col, delta.value_dim)).collect();
                SplitTensor::Columns([stored("ssm_out.weight")], places)
            }
            _ => return None,
        };
        parts.names().iter().all(|part| self.file.tensors.contains_key(part)).then_some(parts)
    }

    /// Places of the rows of a projection that has, for each head of keys, its q, its k, and v and z of its heads of
    /// values: z in the second part, the others in the first, all q before all k before all v.
    fn key_groups(&self) -> Option<Vec<(usize, usize)>> {
        let delta = self.delta?;
        let (key, value) = (delta.key_dim, delta.each * delta.value_dim);
        let group = 2 * (key + value);
        let place = |row: usize| {
            let (head, within) = (row / group, row % group);
            match within {
                q if q < key => (0, head * key + q),
                k if k < 2 * key => (0, (delta.keys + head) * key + k - key),
                v if v < 2 * key + value => (0, 2 * delta.keys * key + head * value + v - 2 * key),
                z => (1, head * value + z - 2 * key - value),
            }
        };
        Some((0..delta.keys * group).map(place).collect())
    }

    /// Decodes rows `range` of such a tensor (`[rows, cols]`) into `out`.
    ///
    /// # Errors
    /// As [`rows`](Self::rows).
    pub fn rows_of_parts(
        &self,
        parts: &SplitTensor,
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
                let at = row.checked_mul(width).and_then(|first| first.checked_add(col));
                *out = at.and_then(|at| values.get(at)).copied().unwrap_or(f32::NAN);
            }
        }
        Ok(())
    }
}
