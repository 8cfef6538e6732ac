//! Planned contents of a GGUF file.

use mantissa_model::{LinearInfo, LinearInput, TensorInfo};
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::{Architecture, Joined, Moved, Place, RowOrder};
use mantissa_store::gguf::{GgufTensorSpec, Value};
use mantissa_store::{Error, TensorSpec};

use crate::error::QuantError;
use crate::plan::Plan;

/// Contents of the file besides the plan of linear layers.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) metadata: Vec<(String, Value)>,
    pub(crate) tensors: Vec<GgufTensorSpec>,
    pub(crate) casts: Vec<Cast>,
    pub(crate) joined: Vec<JoinedCast>,
    /// Tables of integers, with the names of their tensors.
    pub(crate) integers: Vec<(TensorInfo, String)>,
    pub(crate) architecture: &'static Architecture,
    pub(crate) order: RowOrder,
    /// Rotary factors by the name of their tensor.
    pub(crate) rope_factors: Vec<(&'static str, Vec<f32>)>,
    /// Tensors that nothing reads, filled with zeros.
    pub(crate) unread: Vec<GgufTensorSpec>,
    pub(crate) notes: Vec<String>,
}

/// A tensor that is not a quantized linear layer.
#[derive(Clone, Debug)]
pub(crate) struct Cast {
    pub(crate) info: TensorInfo,
    pub(crate) place: Place,
    pub(crate) scheme: Scheme,
}

/// A checkpoint tensor that GGUF splits into several, each with a scheme.
#[derive(Clone, Debug)]
pub(crate) struct JoinedCast {
    pub(crate) info: TensorInfo,
    pub(crate) joined: Joined,
    pub(crate) schemes: Vec<Scheme>,
}

impl Plan {
    /// Returns the order of a layer's columns in a GGUF file, if they move. The method then sees weight and inputs in that
    /// order, so that blocks hold columns that are stored together.
    pub(crate) fn columns_of(&self, info: &LinearInfo) -> Option<Moved> {
        self.gguf.as_ref()?.order.columns(&format!("{}.weight", info.module))
    }

    /// Returns the order of the columns of the weights that read `input` of layer `layer`, if they move.
    pub(crate) fn columns_of_input(&self, layer: usize, input: LinearInput) -> Option<Moved> {
        self.gguf.as_ref()?;
        let linears = self.config.layer_linears(layer);
        linears.iter().filter(|info| info.kind.input() == input).find_map(|info| self.columns_of(info))
    }
}

impl Layout {
    /// Returns the specs of the file's tensors as stored; blocks are rows of bytes.
    pub(crate) fn specs(&self) -> Vec<TensorSpec> {
        self.tensors.iter().map(GgufTensorSpec::as_stored).collect()
    }

    /// Returns the elements of the largest split tensor.
    pub(crate) fn largest_joined(&self) -> u64 {
        let elements = |cast: &JoinedCast| cast.info.shape.iter().map(|&n| n as u64).product();
        self.joined.iter().map(elements).max().unwrap_or(0)
    }
}

/// Returns the error of a part of the model that GGUF or llama.cpp cannot express.
pub(crate) fn fault(source: &ModelFiles, field: &str, got: impl Into<String>, expected: &str) -> QuantError {
    Error::field(&source.config_path(), field, got, expected, "fix: write another format").into()
}
