//! Dense models whose weights are computed when they are read: a quantized model, dequantized tensor by tensor, or one whose
//! weights are multiplied by constant factors.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;

use super::files::{ModelFiles, Opened};
use super::gguf;
use super::weight::StoredLinear;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::reader::Tail;
use crate::safetensors::TensorMeta;

/// Tensors that are held after they were computed. A tensor is read in pieces, by several threads.
const HELD: usize = 2;

/// A tensor in F32 that is computed when it is read.
pub struct ComputedTensor {
    /// Name.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Computes the values, row-major.
    pub values: Box<dyn Fn() -> Result<Vec<f32>> + Send + Sync>,
}

impl fmt::Debug for ComputedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ComputedTensor({} {:?})", self.name, self.shape)
    }
}

impl ComputedTensor {
    fn bytes(&self) -> u64 {
        self.shape.iter().fold(4, |bytes: u64, &dim| bytes.saturating_mul(dim as u64))
    }
}

/// Computed tensors one after another, with the last ones read.
#[derive(Debug)]
struct Computed {
    /// With the offset of each.
    tensors: Vec<(u64, ComputedTensor)>,
    len: u64,
    held: Mutex<Vec<(usize, Arc<Vec<u8>>)>>,
}

impl Computed {
    fn of(&self, number: usize) -> Result<Arc<Vec<u8>>> {
        let held = || self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, bytes)) = held().iter().find(|(known, _)| *known == number) {
            return Ok(Arc::clone(bytes));
        }
        let values = (self.tensors[number].1.values)()?;
        let bytes: Arc<Vec<u8>> = Arc::new(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        let mut held = held();
        if held.len() >= HELD {
            held.remove(0);
        }
        held.push((number, Arc::clone(&bytes)));
        Ok(bytes)
    }
}

impl Tail for Computed {
    fn len(&self) -> u64 {
        self.len
    }

    fn read(&self, at: u64, buf: &mut [u8]) -> Result<()> {
        let number = self.tensors.partition_point(|(begin, _)| *begin <= at).saturating_sub(1);
        let Some((begin, _)) = self.tensors.get(number) else { return Ok(()) };
        let start = usize::try_from(at - begin).unwrap_or(usize::MAX);
        // Ranges were checked against the tensor's length, which `with_computed` takes from its shape.
        buf.copy_from_slice(&self.of(number)?[start..][..buf.len()]);
        Ok(())
    }
}

/// Dense weights, some of which are computed.
#[derive(Debug)]
struct Dequantized {
    /// Format of the weights that are dequantized; `None` if they were dense.
    from: Option<&'static str>,
    /// Metadata and names of a GGUF file.
    gguf: Option<gguf::Model>,
    notes: Vec<String>,
}

impl Opened for Dequantized {
    fn name(&self) -> &'static str {
        if self.from.is_some() { "dequantized" } else { "dense" }
    }

    fn is_quantized(&self) -> bool {
        false
    }

    fn dequantized_from(&self) -> Option<&'static str> {
        self.from
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn gguf(&self) -> Option<&gguf::Model> {
        self.gguf.as_ref()
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(files.dense(module, rows, cols)?.into())
    }
}

impl ModelFiles {
    /// Presents the model as a dense checkpoint with the stored tensors for which `keep` is true and the tensors
    /// `computed`, under the configuration `config`. `notes` are for the user.
    ///
    /// Every function of `computed` must return as many values as its shape holds.
    pub fn with_computed(
        self,
        keep: impl Fn(&str) -> bool,
        computed: Vec<ComputedTensor>,
        config: Value,
        notes: Vec<String>,
    ) -> ModelFiles {
        let (mut tensors, mut metas, mut at) = (Vec::new(), Vec::new(), 0_u64);
        for tensor in computed {
            let (name, shape, len) = (tensor.name.clone(), tensor.shape.clone(), tensor.bytes());
            metas.push(TensorMeta { name, dtype: Dtype::F32, shape, offset: at, len });
            tensors.push((at, tensor));
            at = at.saturating_add(len);
        }
        let from = self.is_quantized().then(|| self.convention_name());
        let gguf = self.gguf().cloned();
        let tail = Box::new(Computed { tensors, len: at, held: Mutex::default() });
        let checkpoint = self.into_checkpoint().with_tail(keep, metas, tail, config);
        ModelFiles::new(checkpoint, Box::new(Dequantized { from, gguf, notes }))
    }
}
