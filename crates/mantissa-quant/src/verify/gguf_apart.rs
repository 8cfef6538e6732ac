//! Tensors of a checkpoint that llama.cpp's converter takes apart, read element by element from where its description puts
//! them: biases of gpt-oss' experts, and DeepSeek's projection from the latent of keys and values.

use std::ops::Range;

use mantissa_store::Error;
use mantissa_store::convention::gguf::Architecture;

use super::gguf::{Independent, TensorCheck, worst_of_row};
use super::gguf_blocks::Blocks;
use super::gguf_file::Tensor;
use super::{Verification, Worst};
use crate::error::Result;
use crate::gguf::heads;
use crate::source::{Scratch, Source as _};

/// A tensor that is several in the file.
#[derive(Clone, Debug)]
pub(super) enum Apart {
    /// Biases of experts: of several tensors elements take turns.
    Turns(Vec<String>),
    /// Of each head the rows of keys, transposed in the first tensor, then those of values.
    KeysAndValues(String, String),
}

/// One element of such a tensor: which part, which row of it, which column.
type At = (usize, usize, usize);

impl Apart {
    pub(super) fn names(self) -> Vec<String> {
        match self {
            Apart::Turns(names) => names,
            Apart::KeysAndValues(keys, values) => vec![keys, values],
        }
    }

    /// Where element `[row, col]` of `rows` lies.
    fn at(&self, row: usize, col: usize, rows: usize, keys: &Tensor) -> At {
        match self {
            Apart::Turns(names) => (col % names.len(), row, col / names.len()),
            Apart::KeysAndValues(..) => {
                // [heads, rank, unrotated] and [heads, value, rank], as matrices of rows.
                let dim = |i: usize| keys.dims.get(i).map_or(1, |&n| usize::try_from(n).unwrap_or(1).max(1));
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

impl Independent<'_> {
    /// How the file holds the tensor of this Hugging Face name, where it is several there.
    pub(super) fn taken_apart(&self, name: &str) -> Option<Apart> {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let stored = |part: &str| format!("blk.{layer}.{part}");
        let apart = match (self.architecture?, rest) {
            (Architecture::GptOss, "mlp.experts.gate_up_proj_bias") => {
                Apart::Turns(vec![stored("ffn_gate_exps.bias"), stored("ffn_up_exps.bias")])
            }
            (Architecture::GptOss, "mlp.experts.down_proj_bias") => {
                Apart::Turns(vec![stored("ffn_down_exps.bias")])
            }
            (Architecture::Deepseek2, "self_attn.kv_b_proj.weight") => {
                Apart::KeysAndValues(stored("attn_k_b.weight"), stored("attn_v_b.weight"))
            }
            _ => return None,
        };
        apart.clone().names().iter().all(|part| self.file.tensors.contains_key(part)).then_some(apart)
    }

    /// Rows `range` of such a tensor.
    pub(super) fn rows_of_parts(
        &self,
        apart: &Apart,
        (rows, cols): (usize, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> std::result::Result<(), Error> {
        let parts = self.parts(apart)?;
        for (row, out) in range.zip(out.chunks_exact_mut(cols.max(1))) {
            for (col, out) in out.iter_mut().enumerate() {
                let (part, row, col) = apart.at(row, col, rows, &parts[0].0);
                let (tensor, values) = &parts[part.min(parts.len() - 1)];
                let width = usize::try_from(tensor.dims[0]).unwrap_or(0);
                *out = values.get(row * width + col).copied().unwrap_or(f32::NAN);
            }
        }
        Ok(())
    }

    /// The parts, decoded.
    fn parts(&self, apart: &Apart) -> std::result::Result<Vec<(Tensor, Vec<f32>)>, Error> {
        let mut parts = Vec::new();
        for name in apart.clone().names() {
            let missing = || Error::NoTensor { path: self.path().to_owned(), tensor: name.clone() };
            let tensor = self.file.tensors.get(&name).ok_or_else(missing)?.clone();
            let rows = usize::try_from(tensor.rows()).unwrap_or(usize::MAX);
            let bytes = self.file.rows(&tensor, 0, rows)?;
            let count: u64 = tensor.dims.iter().product();
            let mut values = vec![0.0; usize::try_from(count).unwrap_or(0)];
            self.blocks.decode(tensor.ty, &bytes, None, &mut values);
            parts.push((tensor, values));
        }
        Ok(parts)
    }
}

impl TensorCheck<'_> {
    /// Compares such a tensor as a whole with the ordinary reader's, and each part, row by row as it is stored, with the source.
    pub(super) fn run_apart(&self, apart: &Apart, found: &mut Verification) -> Result<()> {
        let name = &self.info.name;
        let [rows, cols] = *self.info.shape.as_slice() else { return Ok(()) };
        let parts = self.independent.parts(apart)?;
        if parts.iter().any(|(tensor, _)| !Blocks::decodes(tensor.ty)) {
            return Ok(());
        }
        let total: usize = parts.iter().map(|(_, values)| values.len()).sum();
        let (heads, unrotated) = heads(self.config);
        let dims = &parts[0].0.dims;
        let keys = [unrotated, cols, heads].map(|n| n as u64);
        if total != rows * cols || (matches!(apart, Apart::KeysAndValues(..)) && dims[..] != keys) {
            found
                .faults
                .push(format!("{name}: its parts have dimensions {dims:?} and together {total} elements"));
            return Ok(());
        }
        let mut ours = vec![0.0; rows * cols];
        self.independent.rows_of_parts(apart, (rows, cols), 0..rows, &mut ours)?;
        let theirs = self.files.tensor_f32(name, &self.info.shape)?;
        if let Some(i) = ours.iter().zip(&theirs).position(|(a, b)| a != b && !(a.is_nan() && b.is_nan())) {
            let (a, b) = (ours[i], theirs[i]);
            let at = format!("[{}, {}]", i / cols, i % cols);
            found
                .faults
                .push(format!("{name}: element {at}: independent reader {a:e}, ordinary reader {b:e}"));
        }
        found.weights += 1;
        let Some(source) = self.source else { return Ok(()) };
        let (dense, mut scratch) = (self.dense(source)?, Scratch::default());
        let w = dense.elements(0..rows * cols, &mut scratch).map_err(|error| self.error(error))?;
        let mut expected: Vec<Vec<f32>> = parts.iter().map(|(_, values)| vec![0.0; values.len()]).collect();
        for (i, w) in w.iter().enumerate() {
            let (part, row, col) = apart.at(i / cols, i % cols, rows, &parts[0].0);
            let width = usize::try_from(parts[part].0.dims[0]).unwrap_or(0);
            if let Some(place) = expected[part].get_mut(row * width + col) {
                *place = *w;
            }
        }
        let mut worst = Worst::default();
        for ((tensor, decoded), w) in parts.iter().zip(&expected) {
            let width = usize::try_from(tensor.dims[0]).unwrap_or(1).max(1);
            for (row, (w, decoded)) in w.chunks(width).zip(decoded.chunks(width)).enumerate() {
                worst_of_row((tensor.ty, 1.0, self.weighed), row, w, decoded, &mut worst);
            }
        }
        found.compared += 1;
        found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(worst.ratio));
        if self.bounded && worst.ratio > 1.0 {
            found.faults.push(worst.text(name));
        }
        Ok(())
    }
}
