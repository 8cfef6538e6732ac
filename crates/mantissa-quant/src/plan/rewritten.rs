//! Dense tensors of an output that its source does not have in this form.

use mantissa_model::TensorInfo;
use mantissa_store::{Dtype, TensorSpec};

/// A dense tensor of the output that is not copied from the source.
#[derive(Clone, Debug)]
pub(crate) struct Dense {
    /// Name and shape.
    pub(crate) info: TensorInfo,
    pub(crate) dtype: Dtype,
}

impl Dense {
    pub(crate) fn spec(&self) -> TensorSpec {
        TensorSpec::new(&self.info.name, self.dtype, self.info.shape.clone())
    }

    /// Returns the module whose weight it is.
    pub(crate) fn module(&self) -> Option<&str> {
        self.info.name.strip_suffix(".weight")
    }
}
