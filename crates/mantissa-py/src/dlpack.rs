//! Exchange of tensors without copies: DLPack's structures, version 0 (`dltensor`), which every library reads.
//!
//! Source: <https://dmlc.github.io/dlpack/latest/c_api.html>. All `unsafe` of exchange is here.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Name of a capsule that holds a tensor, and of one whose tensor was taken.
const NAME: &CStr = c"dltensor";
const USED: &CStr = c"used_dltensor";

/// Device of main memory, `kDLCPU`.
pub const CPU: i32 = 1;

/// Most axes of a tensor.
const AXES: usize = 32;

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    /// Kind: 0 signed integers, 1 unsigned ones, 2 floats, 4 bfloat16.
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    /// Null for a tensor without gaps, row by row.
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// A tensor of another library, until it is dropped.
pub struct Taken(NonNull<Managed>);

// SAFETY: the structure belongs to this value alone; the protocol lets any thread read it and call its deleter.
unsafe impl Send for Taken {}
// SAFETY: as above; nothing here writes it.
unsafe impl Sync for Taken {}

impl Drop for Taken {
    fn drop(&mut self) {
        // SAFETY: the structure was taken from its capsule, which will not delete it any more.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

/// Where a tensor's elements lie.
pub struct Layout {
    pub dtype: DataType,
    pub shape: Vec<usize>,
    /// Elements between two neighbours along each axis.
    pub strides: Vec<isize>,
    /// First element.
    pub data: *const u8,
}

impl Taken {
    /// Takes the tensor out of a capsule.
    ///
    /// # Errors
    /// BufferError for another capsule, another device, or a malformed tensor.
    pub fn new(capsule: &Bound<'_, PyCapsule>) -> PyResult<Self> {
        let wrong = |what: &str| PyBufferError::new_err(format!("DLPack: expected {what}"));
        let pointer = capsule
            .pointer_checked(Some(NAME))
            .map_err(|_| wrong("a capsule \"dltensor\" that nobody has taken from"))?;
        let managed: NonNull<Managed> = pointer.cast();
        // SAFETY: a capsule of this name holds a `DLManagedTensor`.
        let tensor = unsafe { &managed.as_ref().tensor };
        if tensor.device != CPU {
            return Err(wrong("a tensor in main memory; fix: x.cpu()"));
        }
        let axes = usize::try_from(tensor.ndim).ok().filter(|axes| *axes <= AXES);
        if axes.is_none_or(|axes| axes > 0 && tensor.shape.is_null()) || tensor.dtype.lanes != 1 {
            return Err(wrong("at most 32 axes, and elements of one lane"));
        }
        // SAFETY: the capsule is alive; renaming it is how the protocol takes its tensor.
        if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), USED.as_ptr()) } != 0 {
            return Err(PyErr::fetch(capsule.py()));
        }
        Ok(Taken(managed))
    }

    /// Returns the layout of the tensor.
    pub fn layout(&self) -> Layout {
        // SAFETY: the tensor lives as long as `self`.
        let tensor = unsafe { &self.0.as_ref().tensor };
        let axes = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: shape, and strides unless null, have `ndim` elements; checked not to be null above.
        let of = |list: *const i64| unsafe { (0..axes).map(|i| *list.add(i)).collect::<Vec<i64>>() };
        let shape: Vec<usize> = of(tensor.shape).iter().map(|n| usize::try_from(*n).unwrap_or(0)).collect();
        let strides = match tensor.strides.is_null() {
            true => row_by_row(&shape),
            false => of(tensor.strides).into_iter().map(|n| n as isize).collect(),
        };
        let offset = usize::try_from(tensor.byte_offset).unwrap_or(0);
        Layout { dtype: tensor.dtype, shape, strides, data: tensor.data.cast::<u8>().wrapping_add(offset) }
    }

    /// Returns the bytes of a tensor without gaps, row by row; `None` for another one.
    pub fn bytes(&self) -> Option<&[u8]> {
        let layout = self.layout();
        let unit = usize::from(layout.dtype.bits / 8);
        let len = layout.shape.iter().product::<usize>() * unit;
        if layout.strides != row_by_row(&layout.shape) && len > unit {
            return None;
        }
        if len == 0 {
            return Some(&[]);
        }
        // SAFETY: a tensor without gaps has so many bytes, which its owner keeps as long as `self`.
        Some(unsafe { std::slice::from_raw_parts(layout.data, len) })
    }

    /// Returns the bytes of every element, row by row, of a tensor with gaps.
    pub fn gathered(&self) -> Vec<u8> {
        let layout = self.layout();
        let unit = usize::from(layout.dtype.bits / 8);
        let count: usize = layout.shape.iter().product();
        let mut all = Vec::with_capacity(count * unit);
        let mut at = vec![0usize; layout.shape.len()];
        for _ in 0..count {
            let offset: isize = at.iter().zip(&layout.strides).map(|(i, stride)| *i as isize * stride).sum();
            let first = layout.data.wrapping_offset(offset * unit as isize);
            // SAFETY: the element lies in the tensor: every index is below the axis's length.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(first, unit) });
            for axis in (0..at.len()).rev() {
                at[axis] += 1;
                if at[axis] < layout.shape[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
        all
    }
}

/// Strides of a tensor without gaps, row by row.
fn row_by_row(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis] as isize;
    }
    strides
}

/// A tensor that was given away, with the owner of its elements.
struct Given {
    managed: Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// Dropped with the tensor.
    _owner: Py<PyAny>,
}

/// Makes a capsule of the elements at `data`, which lie row by row as long as `owner` lives.
///
/// # Errors
/// No memory for the capsule.
pub fn give<'py>(
    py: Python<'py>,
    data: *const u8,
    dtype: DataType,
    shape: &[usize],
    owner: Py<PyAny>,
) -> PyResult<Bound<'py, PyCapsule>> {
    let strides = row_by_row(shape).into_iter().map(|n| n as i64).collect();
    let shape: Vec<i64> = shape.iter().map(|n| *n as i64).collect();
    let tensor = DlTensor {
        data: data.cast_mut().cast(),
        device: CPU,
        device_id: 0,
        ndim: shape.len() as i32,
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let mut given = Box::new(Given { managed, shape, strides, _owner: owner });
    given.managed.tensor.shape = given.shape.as_mut_ptr();
    given.managed.tensor.strides = given.strides.as_mut_ptr();
    let given = Box::into_raw(given);
    // SAFETY: `given` is a valid pointer; its context finds the whole box again.
    let pointer = unsafe {
        (*given).managed.context = given.cast();
        NonNull::new_unchecked(&raw mut (*given).managed).cast::<c_void>()
    };
    // SAFETY: the pointer is valid until `unused` or the taker deletes it.
    unsafe { PyCapsule::new_with_pointer_and_destructor(py, pointer, NAME, Some(unused)) }
}

/// Deleter of a tensor that was given away.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the taker calls this once, with the structure that it was given.
    let given = unsafe { Box::from_raw((*managed).context.cast::<Given>()) };
    // Whoever deletes may not hold the interpreter lock, which dropping its object needs. At the interpreter's end nothing
    // can be dropped any more.
    if Python::try_attach(|_| ()).is_none() {
        std::mem::forget(given);
        return;
    }
    Python::attach(|_| drop(given));
}

/// Destructor of a capsule: deletes the tensor if nobody has taken it.
unsafe extern "C" fn unused(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with the capsule; a taken one has another name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>();
            delete(managed);
        }
    }
}
