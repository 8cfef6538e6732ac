//! Planned contents of a GGUF file.

use mantissa_model::TensorInfo;
use mantissa_num::Scheme;
use mantissa_store::TensorSpec;
use mantissa_store::convention::gguf::{Architecture, Joined, Place, RowOrder};
use mantissa_store::gguf::{GgufTensorSpec, Value};

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
    /// Tensors of a GGUF source that no parameter of the model is, copied byte for byte.
    pub(crate) carried: Vec<GgufTensorSpec>,
    /// True if the source's tokenizer is kept and cannot be read here.
    pub(crate) opaque_tokenizer: bool,
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
