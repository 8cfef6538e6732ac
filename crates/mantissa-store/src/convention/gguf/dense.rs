//! Unquantized GGUF model as a dense checkpoint: tensors under Hugging Face names, in Hugging Face order.
//!
//! Nothing is copied. A tensor is a range of the file's bytes, read with a [`View`] where the file has other rows
//! first, a transposed matrix, or norms plus one.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{Model, NAME, Stored};
use crate::convention::files::{ModelFiles, Opened};
use crate::convention::weight::StoredLinear;
use crate::error::Result;
use crate::gguf::Storage;
use crate::view::{View, Viewed};
use crate::{Dtype, TensorMeta};

fn less_one(stored: f32) -> f32 {
    Stored::PlusOne.to_hf(stored)
}

fn logarithm(stored: f32) -> f32 {
    Stored::Decay.to_hf(stored)
}

/// A tensor of a dense checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DenseTensor {
    /// Hugging Face name.
    pub name: String,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// True if the checkpoint stores a linear layer as `[in, out]`; GGUF stores `[out, in]`.
    pub transposed: bool,
}

/// Unquantized GGUF model, presented as a dense checkpoint.
#[derive(Debug)]
struct DenseGguf(Model);

impl Opened for DenseGguf {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_quantized(&self) -> bool {
        false
    }

    fn notes(&self) -> Vec<String> {
        self.0.notes.clone()
    }

    fn gguf(&self) -> Option<&Model> {
        Some(&self.0)
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(files.dense(module, rows, cols)?.into())
    }
}

impl ModelFiles {
    /// Presents an unquantized GGUF model as a dense checkpoint of these tensors. Other models are returned unchanged.
    ///
    /// # Errors
    /// [`Error::NoTensor`](crate::Error::NoTensor); [`Error::Field`](crate::Error::Field) for a tensor of another
    /// shape, or one that GGUF stores in parts.
    pub fn into_dense(self, tensors: &[DenseTensor]) -> Result<ModelFiles> {
        let Some(model) = self.gguf().filter(|_| !self.is_quantized()).cloned() else { return Ok(self) };
        let placed: Vec<_> =
            tensors.iter().map(|tensor| model.placed(&self, tensor)).collect::<Result<_>>()?;
        let bytes_of = |dtype| {
            let same_dtype = placed.iter().map(|viewed| &viewed.meta).filter(|meta| meta.dtype == dtype);
            same_dtype.map(|meta| meta.len).sum::<u64>()
        };
        let name = [("float16", Dtype::F16), ("bfloat16", Dtype::BF16), ("float32", Dtype::F32)]
            .into_iter()
            .max_by_key(|(_, dtype)| bytes_of(*dtype))
            .map(|(name, _)| name);
        let mut config = self.config().cloned();
        if let Some(Value::Object(fields)) = &mut config {
            fields.insert("torch_dtype".to_owned(), json!(name));
        }
        let checkpoint = self.into_checkpoint().viewed(placed, config);
        Ok(ModelFiles::new(checkpoint, Box::new(DenseGguf(model))))
    }
}

impl Model {
    /// Finds a tensor of the checkpoint in the file.
    fn placed(&self, files: &ModelFiles, wanted: &DenseTensor) -> Result<Viewed> {
        let DenseTensor { name, shape, transposed } = wanted;
        let in_file = if *transposed { shape.iter().rev().copied().collect() } else { shape.clone() };
        if !self.is_whole(name) {
            let hint = "fix: give the Hugging Face folder that the file was made from";
            return Err(files.fault(name, "parts of it, or other columns", "a whole tensor", hint));
        }
        let found = self.expect(files, name, &in_file)?;
        if let Some(scale) = self.beside(found) {
            return Err(files.fault(&scale.name, "a scale", "none beside an unquantized weight", ""));
        }
        let Storage::Plain(dtype) = found.tensor.ty.storage else {
            return Err(files.fault(&found.tensor.name, found.tensor.ty.name, "an unquantized type", ""));
        };
        let (which, of) = found.part;
        let len = found.tensor.len / of.max(1) as u64;
        let offset = found.tensor.offset + which as u64 * len;
        let meta = TensorMeta { name: name.clone(), dtype, shape: shape.clone(), offset, len };
        let stored = self.stored_as(name);
        if stored != Stored::Same && dtype != Dtype::F32 {
            return Err(files.fault(&found.tensor.name, format!("dtype {dtype}"), "F32", ""));
        }
        let rows: Option<Arc<[u32]>> = self.order.of(name).map(|moved| {
            let rows: Vec<u32> = (0..shape.first().copied().unwrap_or(0) as u32).collect();
            moved.to_hf(&rows, 1).into()
        });
        let view = match (shape.as_slice(), rows) {
            (_, rows) if stored != Stored::Same => Some(View::Values {
                rows,
                value: if stored == Stored::PlusOne { less_one } else { logarithm },
            }),
            (&[rows, cols], None) if *transposed => Some(View::Transposed { rows, cols }),
            (_, rows) => rows.map(View::Rows),
        };
        Ok(Viewed { stored: found.tensor.name.clone(), meta, view })
    }
}
