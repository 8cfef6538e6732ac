//! Access to the bytes of a checkpoint; the only one in this crate.

use serde_json::Value;

/// A stored tensor, as the header of its file describes it.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Name of the dtype in a safetensors header: `F16`, `F8_E4M3`, `U8`.
    pub dtype: &'a str,
    /// Dimensions, slowest first.
    pub shape: &'a [usize],
    /// Size in bytes.
    pub bytes: u64,
}

impl Tensor<'_> {
    /// Number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Missing or unexpected tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The tensor is missing.
    Missing {
        /// Name of the tensor.
        tensor: String,
    },
    /// The tensor has another form.
    Wrong {
        /// Name of the tensor.
        tensor: String,
        /// Expected value.
        expected: String,
        /// Value in the file.
        got: String,
    },
}

/// Order of the codes of a line in its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOrder {
    /// One bit stream.
    Stream,
    /// Bit planes of each 32 codes (`gptq_p`).
    Planes,
    /// Nibbles in the order of AWQ.
    Awq,
}

/// Packing of a layer's words, as stated by its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// Bits of a code.
    pub bits: usize,
    /// Group size; `None` if a row is one group.
    pub group: Option<usize>,
    /// Order of the codes in their words.
    pub order: WordOrder,
    /// True if zero points are stored minus one (`gptq` version 1).
    pub zeros_less_one: bool,
}

/// The tensors of a checkpoint, by name, and its configuration.
pub trait Tensors {
    /// Error of a read.
    type Error;

    /// Name of the checkpoint format: `compressed-tensors`, `gptq`, `mlx`.
    fn convention(&self) -> &str;

    /// The tensor `name`, if the checkpoint has it.
    fn tensor(&self, name: &str) -> Option<Tensor<'_>>;

    /// Fills `out` with bytes of the tensor `name`, from byte `start` on.
    ///
    /// # Errors
    /// A read beyond the tensor, or an I/O error.
    fn read(&self, name: &str, start: u64, out: &mut [u8]) -> Result<(), Self::Error>;

    /// Value of `key` in the metadata of the file that holds the tensor `name`.
    fn metadata(&self, name: &str, key: &str) -> Option<&str>;

    /// `config.json`, if the checkpoint has one.
    fn config(&self) -> Option<&Value>;

    /// Packing of the GPTQ or AWQ words of `module`: `None` if it has none.
    fn words(&self, module: &str) -> Option<Words>;

    /// Turns a fault into the error of a read.
    fn error(&self, fault: Fault) -> Self::Error;
}
