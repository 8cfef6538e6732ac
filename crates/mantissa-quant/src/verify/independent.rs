//! Adapter from a model's files to [`mantissa_verify`], and a model whose linear layers it decodes.

use std::path::Path;

use mantissa_model::{LoadError, WeightSource};
use mantissa_num::stored::{Extra, Map, Transforms};
use mantissa_store::Error;
use mantissa_store::convention::gptq::{Layout, ZeroVersion};
use mantissa_store::convention::{KvQuant, LinearWeight, ModelFiles, Stack, Weight};
use mantissa_verify::{Expert, Fault, Tensor, Tensors, WordOrder, Words};
use serde_json::Value;

/// Stored tensors of a model, for [`mantissa_verify`].
pub(super) struct CheckpointTensors<'a>(pub(super) &'a ModelFiles);

impl Tensors for CheckpointTensors<'_> {
    type Error = Error;

    fn convention(&self) -> &str {
        self.0.convention_name()
    }

    fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let meta = self.0.checkpoint().get(name)?;
        Some(Tensor { dtype: meta.dtype.name(), shape: &meta.shape, bytes: meta.len })
    }

    fn read(&self, name: &str, start: u64, out: &mut [u8]) -> Result<(), Error> {
        self.0.checkpoint().read_range(name, start, out)
    }

    fn metadata(&self, name: &str, key: &str) -> Option<&str> {
        let (file, _) = self.0.checkpoint().locate(name)?;
        file.metadata().get(key).map(String::as_str)
    }

    fn config(&self) -> Option<&Value> {
        self.0.config()
    }

    fn words(&self, module: &str) -> Option<Words> {
        let (layer, order, zeros_less_one) = match (self.0.awq(), self.0.gptq()) {
            (Some(config), _) => (config.layer(), WordOrder::Awq, false),
            (None, Some(config)) => {
                let planar = config.layout() == Layout::Planar;
                let order = if planar { WordOrder::Planes } else { WordOrder::Stream };
                (config.layer(module)?, order, config.version() == ZeroVersion::V1)
            }
            (None, None) => return None,
        };
        let group = layer.group.map(|group| group as usize);
        Some(Words { bits: layer.bits as usize, group, order, zeros_less_one })
    }

    fn error(&self, fault: Fault) -> Error {
        match fault {
            Fault::Missing { tensor } => Error::NoTensor { path: self.0.dir().to_owned(), tensor },
            Fault::Wrong { tensor, expected, got } => Error::field(self.0.dir(), tensor, got, expected, ""),
        }
    }
}

/// Decodes the weight of linear layer `module` (`[rows, cols]`) with the independent reader.
///
/// # Errors
/// A tensor is missing or too short.
pub fn decode(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Vec<f32>, Error> {
    Ok(mantissa_verify::open(&CheckpointTensors(files), module, rows, cols)?.whole(rows))
}

/// Converts one expert of a stack.
pub(super) fn expert(stack: &Stack) -> Expert<'_> {
    let Stack { tensor, experts, expert, turns, turn, .. } = stack;
    Expert { tensor, experts: *experts, expert: *expert, turns: *turns, turn: *turn }
}

/// Model whose linear layers are decoded independently.
pub(super) struct Independent<'a> {
    files: &'a ModelFiles,
}

impl<'a> Independent<'a> {
    /// Wraps an opened model.
    pub(super) fn new(files: &'a ModelFiles) -> Self {
        Independent { files }
    }
}

impl WeightSource for Independent<'_> {
    fn config(&self) -> Option<&Value> {
        self.files.config()
    }

    fn dir(&self) -> Option<&Path> {
        Some(self.files.dir())
    }

    fn location(&self) -> String {
        self.files.dir().display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.has(tensor)
    }

    fn stores_alike(&self, a: &str, b: &str) -> Result<bool, LoadError> {
        Ok(self.files.stores_alike(a, b)?)
    }

    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        Ok(self.files.integers(tensor, shape)?)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        Ok(self.files.tensor_f32(tensor, shape)?)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        // Only the weight is decoded twice; bias and input scheme are the ordinary reader's.
        let ordinary = self.files.linear(module, rows, cols, bias)?;
        if !matches!(ordinary.weight, Weight::Quantized(_)) && !ordinary.transforms.is_empty() {
            // Trellis: the rotations belong to the weight.
            return Ok(
                match mantissa_verify::trellis::open(&CheckpointTensors(self.files), module, rows, cols)? {
                    Some(trellis) => {
                        let weight = Weight::F32(trellis.whole());
                        LinearWeight { weight, transforms: Transforms::default(), ..ordinary }
                    }
                    None => ordinary,
                },
            );
        }
        let weight = Weight::F32(decode(self.files, module, rows, cols)?);
        // The decoded weight has its columns in their own order and includes outliers.
        let transforms = match column_order(&ordinary.transforms) {
            Ok(Some(_)) => Transforms::default(),
            Ok(None) => Transforms { extras: Vec::new(), ..ordinary.transforms },
            Err(_) => ordinary.transforms,
        };
        Ok(LinearWeight { weight, transforms, ..ordinary })
    }

    fn is_dense(&self, tensor: &str) -> bool {
        self.files.is_dense(tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.files.has_linear(module)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        if self.files.is_dense(&stack.tensor) {
            return Ok(self.files.expert(stack, rows, cols)?);
        }
        let stored =
            mantissa_verify::open_stacked(&CheckpointTensors(self.files), &expert(stack), rows, cols)?;
        Ok(Weight::F32(stored.whole(rows)))
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>, LoadError> {
        Ok(self.files.kv_quant(module, kv_heads)?)
    }
}

/// Returns the column of the weight at each column of its codes if they differ; an error if the independent reader does
/// not support the transforms.
pub(super) fn column_order(transforms: &Transforms) -> std::result::Result<Option<&[u32]>, &'static str> {
    match (transforms.before.as_slice(), transforms.after.as_slice(), transforms.extras.as_slice()) {
        ([], [], []) => Ok(None),
        ([Map::Perm(order)], [], []) => Ok(Some(order)),
        // Rotated input: codes and transformed source are both of the rotated weight.
        ([Map::Hadamard(_)], [], []) => Ok(None),
        // Outliers, which both readers add.
        ([], [], [Extra::Sparse { .. }]) => Ok(None),
        _ => Err("transforms and side tensors"),
    }
}
