//! Tensors that other libraries read without a copy, and the quantization of one.

use half::{bf16, f16};
use mantissa_num::{Given, Quantized, Scheme, quantize};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule};
use zerocopy::IntoBytes;

use crate::dlpack::{self, CPU, DataType, Taken};
use crate::error::input;

/// Element types: their names, and what DLPack calls them.
const DTYPES: [(&str, DataType); 9] = [
    ("float32", DataType { code: 2, bits: 32, lanes: 1 }),
    ("bfloat16", DataType { code: 4, bits: 16, lanes: 1 }),
    ("float16", DataType { code: 2, bits: 16, lanes: 1 }),
    ("float64", DataType { code: 2, bits: 64, lanes: 1 }),
    ("uint8", DataType { code: 1, bits: 8, lanes: 1 }),
    ("int8", DataType { code: 0, bits: 8, lanes: 1 }),
    ("uint16", DataType { code: 1, bits: 16, lanes: 1 }),
    ("int32", DataType { code: 0, bits: 32, lanes: 1 }),
    ("int64", DataType { code: 0, bits: 64, lanes: 1 }),
];

/// Returns the place of an element type of [`DTYPES`].
fn dtype_named(name: &str) -> usize {
    DTYPES.iter().position(|(known, _)| *known == name).unwrap_or_default()
}

/// A tensor without gaps, row by row.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreArray {
    dtype: usize,
    shape: Vec<usize>,
    elements: Elements,
}

/// Elements of a tensor.
enum Elements {
    Floats(Vec<f32>),
    Bytes(Vec<u8>),
    Taken(Taken),
}

impl Elements {
    fn bytes(&self) -> &[u8] {
        match self {
            Elements::Floats(values) => values.as_slice().as_bytes(),
            Elements::Bytes(bytes) => bytes,
            Elements::Taken(taken) => taken.bytes().unwrap_or_default(),
        }
    }
}

impl CoreArray {
    /// Makes a tensor of f32 values.
    pub fn floats(values: Vec<f32>, shape: Vec<usize>) -> Self {
        CoreArray { dtype: dtype_named("float32"), shape, elements: Elements::Floats(values) }
    }

    fn bytes_of(bytes: Vec<u8>) -> Self {
        CoreArray { dtype: dtype_named("uint8"), shape: vec![bytes.len()], elements: Elements::Bytes(bytes) }
    }

    fn dlpack(&self) -> DataType {
        DTYPES[self.dtype].1
    }

    /// Sizes of the axes.
    pub fn sizes(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the values as f32.
    pub fn values(&self) -> PyResult<Vec<f32>> {
        let bytes = self.elements.bytes();
        let (two, four) = (|b: &[u8]| [b[0], b[1]], |b: &[u8]| [b[0], b[1], b[2], b[3]]);
        Ok(match DTYPES[self.dtype].0 {
            "float32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(four(b))).collect(),
            "bfloat16" => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes(two(b)).to_f32()).collect(),
            "float16" => bytes.chunks_exact(2).map(|b| f16::from_le_bytes(two(b)).to_f32()).collect(),
            "float64" => {
                let eight = |b: &[u8]| [b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]];
                bytes.chunks_exact(8).map(|b| f64::from_le_bytes(eight(b)) as f32).collect()
            }
            other => return Err(input("x", other, "float32, float64, float16 or bfloat16")),
        })
    }
}

#[pymethods]
impl CoreArray {
    /// Takes a tensor of another library, without a copy if it has no gaps.
    #[staticmethod]
    fn taken(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        let taken = Taken::new(capsule)?;
        let layout = taken.layout();
        let Some(dtype) = DTYPES.iter().position(|(_, dtype)| *dtype == layout.dtype) else {
            let got = format!("DLPack type {} of {} bits", layout.dtype.code, layout.dtype.bits);
            let known: Vec<&str> = DTYPES.iter().map(|(name, _)| *name).collect();
            return Err(input("x", &got, &known.join(", ")));
        };
        let elements = match taken.bytes() {
            Some(_) => Elements::Taken(taken),
            None => Elements::Bytes(taken.gathered()),
        };
        Ok(CoreArray { dtype, shape: layout.shape, elements })
    }

    /// Makes a tensor of f32 values, little-endian, row by row.
    #[staticmethod]
    fn from_floats(values: &[u8], shape: Vec<usize>) -> PyResult<Self> {
        if shape.iter().try_fold(4usize, |n, size| n.checked_mul(*size)) != Some(values.len()) {
            return Err(input(
                "values",
                &format!("{} bytes", values.len()),
                &format!("f32 values of {shape:?}"),
            ));
        }
        let floats = values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Self::floats(floats, shape))
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        DTYPES[self.dtype].0
    }

    /// Sizes of the axes.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    /// Address of the first element.
    #[getter]
    fn address(&self) -> usize {
        self.elements.bytes().as_ptr() as usize
    }

    /// Returns the elements' bytes, little-endian, row by row.
    fn tobytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.elements.bytes())
    }

    /// Returns the values as a tensor of f32.
    fn float(&self) -> PyResult<Self> {
        Ok(Self::floats(self.values()?, self.shape.clone()))
    }

    /// Returns the same elements as unsigned integers of 16 bits, without their type: a copy.
    fn bits(&self) -> PyResult<Self> {
        if self.dlpack().bits != 16 {
            return Err(input("x", self.dtype(), "elements of 16 bits"));
        }
        let elements = Elements::Bytes(self.elements.bytes().to_vec());
        Ok(CoreArray { dtype: dtype_named("uint16"), shape: self.shape.clone(), elements })
    }

    /// Returns a capsule that holds the tensor.
    fn dlpack_capsule<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyCapsule>> {
        let this = slf.get();
        let owner = slf.clone().into_any().unbind();
        dlpack::give(slf.py(), this.elements.bytes().as_ptr(), this.dlpack(), &this.shape, owner)
    }

    /// Type and number of the device.
    #[staticmethod]
    fn device() -> (i32, i32) {
        (CPU, 0)
    }
}

/// Quantized matrix `[rows, cols]`.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreTensor {
    scheme: String,
    tensor: Quantized,
    shape: Vec<usize>,
}

#[pymethods]
impl CoreTensor {
    /// Scheme.
    #[getter]
    fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Sizes of the axes.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    /// Codes, little-endian: one for each element, or whole blocks of a codec.
    fn codes(&self) -> CoreArray {
        CoreArray::bytes_of(self.tensor.codes.to_le_bytes())
    }

    /// Scale codes, little-endian, one for each block.
    fn scales(&self) -> CoreArray {
        CoreArray::bytes_of(self.tensor.scales.to_le_bytes())
    }

    /// Zero points, one for each block; empty for a symmetric scheme.
    fn zeros(&self) -> Vec<i32> {
        self.tensor.zeros().to_vec()
    }

    /// Bits of each weight, scales and zero points included.
    #[getter]
    fn bits_per_weight(&self) -> f64 {
        self.tensor.format.bits_per_weight(self.tensor.rows, self.tensor.cols)
    }

    /// Values as f32.
    fn dequantize(&self, py: Python<'_>) -> PyResult<CoreArray> {
        let values = py.detach(|| self.tensor.dequantize());
        let values = values.map_err(|error| input("tensor", &error.to_string(), "a whole tensor"))?;
        Ok(CoreArray::floats(values, self.shape.clone()))
    }
}

/// Quantizes a tensor, whose last axis holds the elements of rows, to nearest under a scheme.
#[pyfunction]
pub fn quantize_tensor(py: Python<'_>, x: &CoreArray, scheme: &str) -> PyResult<CoreTensor> {
    let parsed: Scheme = scheme.parse().map_err(|error| {
        input("scheme", &format!("\"{scheme}\" ({error})"), "a scheme such as \"int4-g128\"")
    })?;
    let Some((&cols, leading)) = x.shape.split_last().filter(|_| !x.shape.contains(&0)) else {
        return Err(input("x", &format!("the shape {:?}", x.shape), "at least one axis and one element"));
    };
    let (values, rows) = (x.values()?, leading.iter().product());
    let made = py.detach(|| quantize(&parsed, &values, rows, cols, Given::default()));
    let tensor =
        made.map_err(|error| input("values", &error.to_string(), &format!("values that {parsed} holds")))?;
    Ok(CoreTensor { scheme: parsed.to_string(), tensor, shape: x.shape.clone() })
}
