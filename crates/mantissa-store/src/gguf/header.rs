//! Parses and checks everything before the data section.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use super::cursor::{Cursor, Input};
use super::types::{GgmlType, Storage};
use super::value::{Metadata, Value, ValueType};
use super::{DEFAULT_ALIGNMENT, MAGIC, MAX_ALIGNMENT, MAX_ARRAY_DEPTH};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::error::gguf_fault::{GgufFault, TensorFault};
use crate::reader::{RegularFile, reserve};

/// Fewest bytes of a key-value pair: length, type, one byte of value.
const MIN_PAIR: u64 = 8 + 4 + 1;
/// Fewest bytes of a tensor info: name length, dimension count, one dimension, type, offset.
const MIN_INFO: u64 = 8 + 4 + 8 + 4 + 8;
const MAX_DIMENSIONS: u32 = 4;

/// A checked header.
#[derive(Clone, Debug)]
pub struct GgufHeader {
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// Alignment of the data section and of every tensor in it.
    pub alignment: u64,
    /// Key-value pairs.
    pub metadata: Metadata,
    /// Tensor infos, in the order of the file.
    pub tensors: Vec<GgufTensor>,
    by_name: HashMap<String, usize>,
}

/// Place and type of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// The name, an opaque key.
    pub name: String,
    /// Type.
    pub ty: GgmlType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl GgufTensor {
    /// Number of elements. Saturates, which no checked header's tensor can reach.
    pub fn numel(&self) -> u64 {
        self.shape.iter().fold(1, |count: u64, &dim| count.saturating_mul(dim as u64))
    }

    /// Dtype and shape of the bytes: blocks are rows of bytes.
    pub(super) fn stored_shape(&self) -> (Dtype, Vec<usize>) {
        let Storage::Plain(dtype) = self.ty.storage else {
            let mut shape = self.shape.clone();
            if let Some(cols) = shape.last_mut() {
                *cols = self.ty.row_bytes(*cols).unwrap_or(0);
            }
            return (Dtype::U8, shape);
        };
        (dtype, self.shape.clone())
    }
}

impl GgufHeader {
    /// Parses the file held in `bytes`. `path` only labels errors.
    ///
    /// # Errors
    /// [`Error::Gguf`](crate::Error::Gguf) for the first fault found.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        parse(Cursor::new(Input::Bytes(path, bytes)))
    }

    pub(super) fn read(source: &RegularFile) -> Result<Self> {
        parse(Cursor::new(Input::File(source)))
    }

    /// Tensor with this name.
    pub fn get(&self, name: &str) -> Option<&GgufTensor> {
        self.position(name).map(|at| &self.tensors[at])
    }

    /// The index of the tensor with this name.
    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Adds tensors, for example from another file of the same model; returns the name of one that exists already.
    pub(crate) fn extend(&mut self, tensors: Vec<GgufTensor>) -> std::result::Result<(), String> {
        for tensor in tensors {
            if self.by_name.insert(tensor.name.clone(), self.tensors.len()).is_some() {
                return Err(tensor.name);
            }
            self.tensors.push(tensor);
        }
        Ok(())
    }
}

fn parse(mut cursor: Cursor<'_>) -> Result<GgufHeader> {
    let version = parse_version(&mut cursor)?;
    let tensor_count = cursor.u64(|| "tensor count".into())?;
    let pair_count = cursor.u64(|| "key count".into())?;
    cursor.check_count(pair_count, MIN_PAIR, || "key count".into())?;
    cursor.check_count(tensor_count, MIN_INFO, || "tensor count".into())?;
    let metadata = parse_metadata(&mut cursor, pair_count)?;
    check_known_keys(&cursor, &metadata)?;
    let alignment = parse_alignment(&cursor, &metadata)?;
    let tensors = parse_tensors(&mut cursor, tensor_count)?;
    let data_start = cursor.at().next_multiple_of(alignment);
    let tensors = place(&cursor, tensors, alignment, data_start)?;
    let by_name = tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect();
    Ok(GgufHeader { version, alignment, metadata, tensors, by_name })
}

fn parse_version(cursor: &mut Cursor<'_>) -> Result<u32> {
    let magic: [u8; 4] = cursor.array(|| "magic".into())?;
    let mut swapped = magic;
    swapped.reverse();
    if magic != MAGIC {
        let fault =
            if swapped == MAGIC { GgufFault::SwappedMagic } else { GgufFault::Magic { found: magic } };
        return Err(cursor.fault(fault));
    }
    let version = cursor.u32(|| "version".into())?;
    let fault = match version {
        2 | 3 => return Ok(version),
        0 => GgufFault::VersionZero,
        1 => GgufFault::VersionOne,
        // No version will reach 65536, so the low half is zero only if the bytes are reversed.
        _ if version & 0xffff == 0 => GgufFault::BigEndian { version: version.swap_bytes() },
        found => GgufFault::FutureVersion { found },
    };
    Err(cursor.fault(fault))
}

fn parse_metadata(cursor: &mut Cursor<'_>, count: u64) -> Result<Metadata> {
    let mut metadata = Metadata::new(cursor.path());
    for index in 0..count {
        let key = cursor.string(|| format!("key number {index}"))?;
        if key.is_empty() {
            return Err(cursor.fault(GgufFault::EmptyKey { index }));
        }
        cursor.charge((2 * key.len() + PAIR_MEMORY) as u64, || format!("key number {index}"))?;
        let ty = parse_type(cursor, &key)?;
        metadata.starts.push(cursor.at());
        let value = parse_value(cursor, &key, ty, 0)?;
        let at = metadata.entries.len();
        if metadata.by_key.insert(key.clone(), at).is_some() {
            return Err(cursor.fault(GgufFault::DuplicateKey { key }));
        }
        metadata.entries.push((key, value));
    }
    Ok(metadata)
}

/// Memory of a pair beyond its key's bytes: the entry and its place in the map, with growth slack.
const PAIR_MEMORY: usize =
    2 * (size_of::<(String, Value)>() + size_of::<(String, usize)>() + size_of::<u64>());

fn parse_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType> {
    let found = cursor.u32(|| format!("type of key \"{}\"", crate::shown::Shown(key)))?;
    ValueType::from_id(found).ok_or_else(|| cursor.fault(GgufFault::ValueType { key: key.to_owned(), found }))
}

fn parse_value(cursor: &mut Cursor<'_>, key: &str, ty: ValueType, depth: usize) -> Result<Value> {
    let part = || format!("value of key \"{}\"", crate::shown::Shown(key));
    Ok(match ty {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(part)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(part)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(part)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(part)?)),
        ValueType::U32 => Value::U32(cursor.u32(part)?),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(part)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(part)?)),
        ValueType::U64 => Value::U64(cursor.u64(part)?),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(part)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(part)?)),
        ValueType::String => Value::String(cursor.string(part)?),
        ValueType::Bool => match cursor.array(part)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [found] => return Err(cursor.fault(GgufFault::Bool { key: key.to_owned(), found })),
        },
        ValueType::Array => parse_array(cursor, key, depth)?,
    })
}

fn parse_array(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<Value> {
    if depth >= MAX_ARRAY_DEPTH {
        return Err(cursor.fault(GgufFault::Depth { key: key.to_owned(), allowed: MAX_ARRAY_DEPTH }));
    }
    let part = || format!("array of key \"{}\"", crate::shown::Shown(key));
    let items = parse_type(cursor, key)?;
    let count = cursor.u64(part)?;
    cursor.check_count(count, items.min_bytes(), || format!("length of {}", part()))?;
    cursor.charge(count.saturating_mul(size_of::<Value>() as u64), part)?;
    let mut values = reserve(cursor.path(), &part(), count, count.saturating_mul(size_of::<Value>() as u64))?;
    for _ in 0..count {
        values.push(parse_value(cursor, key, items, depth + 1)?);
    }
    Ok(Value::Array(items, values))
}

/// Keys whose type the format defines, with what it is.
const KNOWN_KEYS: [(&str, ValueType, Option<ValueType>, &str); 18] = [
    ("general.architecture", ValueType::String, None, "a string"),
    ("general.alignment", ValueType::U32, None, "u32"),
    ("general.quantization_version", ValueType::U32, None, "u32"),
    ("general.file_type", ValueType::U32, None, "u32"),
    ("general.name", ValueType::String, None, "a string"),
    ("tokenizer.ggml.model", ValueType::String, None, "a string"),
    ("tokenizer.ggml.pre", ValueType::String, None, "a string"),
    ("tokenizer.ggml.tokens", ValueType::Array, Some(ValueType::String), "an array of strings"),
    ("tokenizer.ggml.merges", ValueType::Array, Some(ValueType::String), "an array of strings"),
    ("tokenizer.ggml.scores", ValueType::Array, Some(ValueType::F32), "an array of f32"),
    ("tokenizer.ggml.token_type", ValueType::Array, Some(ValueType::I32), "an array of i32"),
    ("tokenizer.ggml.bos_token_id", ValueType::U32, None, "u32"),
    ("tokenizer.ggml.eos_token_id", ValueType::U32, None, "u32"),
    ("tokenizer.ggml.unknown_token_id", ValueType::U32, None, "u32"),
    ("tokenizer.ggml.padding_token_id", ValueType::U32, None, "u32"),
    ("tokenizer.ggml.add_bos_token", ValueType::Bool, None, "a boolean"),
    ("tokenizer.ggml.add_eos_token", ValueType::Bool, None, "a boolean"),
    ("tokenizer.chat_template", ValueType::String, None, "a string"),
];

fn check_known_keys(cursor: &Cursor<'_>, metadata: &Metadata) -> Result<()> {
    for (key, ty, items, allowed) in KNOWN_KEYS {
        let Some(value) = metadata.get(key) else { continue };
        let found = match value {
            Value::Array(items, _) => (ValueType::Array, Some(*items)),
            other => (other.value_type(), None),
        };
        if found != (ty, items) {
            let (key, found) = (key.to_owned(), value.kind());
            return Err(cursor.fault(GgufFault::KeyType { key, found, allowed }));
        }
    }
    Ok(())
}

fn parse_alignment(cursor: &Cursor<'_>, metadata: &Metadata) -> Result<u64> {
    let stated = metadata.get("general.alignment").and_then(Value::as_u64);
    match stated.unwrap_or(DEFAULT_ALIGNMENT) {
        alignment if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => Ok(alignment),
        found => Err(cursor.fault(GgufFault::Alignment { found, allowed: MAX_ALIGNMENT })),
    }
}

/// Tensors whose offset is still relative to the data section.
fn parse_tensors(cursor: &mut Cursor<'_>, count: u64) -> Result<Vec<GgufTensor>> {
    let mut names = HashSet::new();
    let mut tensors = Vec::new();
    for index in 0..count {
        let name = cursor.string(|| format!("name of tensor number {index}"))?;
        // Stored here, in the map of names and, while parsing, in the set.
        cursor.charge((2 * name.len() + TENSOR_MEMORY) as u64, || format!("tensor number {index}"))?;
        let tensor = parse_tensor(cursor, name)?;
        if !names.insert(tensor.name.clone()) {
            return Err(tensor_fault(cursor, &tensor.name, TensorFault::Duplicate));
        }
        tensors.push(tensor);
    }
    Ok(tensors)
}

/// Memory of a tensor beyond its name's bytes: info, dimensions, entries of set and map, with the slack of growing.
const TENSOR_MEMORY: usize = 2 * (size_of::<GgufTensor>() + 32 + 2 * size_of::<(String, usize)>());

fn parse_tensor(cursor: &mut Cursor<'_>, name: String) -> Result<GgufTensor> {
    let part = || format!("info of tensor \"{}\"", crate::shown::Shown(&name));
    let dimensions = cursor.u32(part)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(tensor_fault(cursor, &name, TensorFault::Dimensions { found: dimensions }));
    }
    let mut dims = Vec::with_capacity(MAX_DIMENSIONS as usize);
    for _ in 0..dimensions {
        dims.push(cursor.u64(part)?);
    }
    let id = cursor.u32(part)?;
    let offset = cursor.u64(part)?;
    let Some(ty) = GgmlType::from_id(id) else {
        let allowed: Vec<_> = GgmlType::ALL.iter().map(|ty| format!("{} ({})", ty.id, ty.name)).collect();
        let fault = TensorFault::Type { found: id, allowed: allowed.join(", ") };
        return Err(tensor_fault(cursor, &name, fault));
    };
    match byte_len(ty, &dims) {
        Ok((shape, len)) => Ok(GgufTensor { name, ty, shape, offset, len }),
        Err(fault) => Err(tensor_fault(cursor, &name, fault)),
    }
}

/// The shape, outermost first, and the bytes of a tensor with these dimensions, fastest first.
pub(super) fn byte_len(ty: GgmlType, dims: &[u64]) -> std::result::Result<(Vec<usize>, u64), TensorFault> {
    if let Some(&found) = dims.iter().find(|&&dim| i64::try_from(dim).is_err()) {
        return Err(TensorFault::Dimension { found });
    }
    let overflow = || TensorFault::Overflow { shape: dims.to_vec() };
    let (elements, bytes) = ty.block();
    let row = dims.first().copied().unwrap_or(0);
    if row % elements as u64 != 0 {
        return Err(TensorFault::Row { found: row, block: elements, ty: ty.name });
    }
    // Zero dimensions count as one here: the product of the others must not overflow either.
    let fits = |product: Option<u64>| product.filter(|&n| i64::try_from(n).is_ok());
    let product = dims.iter().try_fold(1u64, |n, &dim| fits(n.checked_mul(dim.max(1))));
    let blocks = product.map(|n| n.div_ceil(elements as u64));
    fits(blocks.and_then(|n| n.checked_mul(bytes as u64))).ok_or_else(overflow)?;
    let rows: u64 = dims.iter().skip(1).product();
    let shape = dims.iter().rev().map(|&dim| usize::try_from(dim)).collect::<std::result::Result<_, _>>();
    Ok((shape.map_err(|_| overflow())?, row / elements as u64 * bytes as u64 * rows))
}

/// Checks offsets against alignment, data and one another, and makes them absolute.
fn place(
    cursor: &Cursor<'_>,
    mut tensors: Vec<GgufTensor>,
    alignment: u64,
    data_start: u64,
) -> Result<Vec<GgufTensor>> {
    let available = cursor.len().saturating_sub(data_start);
    for tensor in &tensors {
        let &GgufTensor { offset, len, .. } = tensor;
        let fault = if offset % alignment != 0 {
            TensorFault::Unaligned { found: offset, alignment }
        } else if (len > 0 && offset.checked_add(len).is_none_or(|end| end > available))
            || (len == 0 && offset > available.next_multiple_of(alignment))
        {
            TensorFault::PastEnd { offset, len, available }
        } else {
            continue;
        };
        return Err(tensor_fault(cursor, &tensor.name, fault));
    }
    check_overlap(cursor, &tensors)?;
    tensors.iter_mut().for_each(|tensor| {
        // A tensor without elements may lie at the padded end; it has no bytes.
        tensor.offset =
            (data_start + tensor.offset).min(if tensor.len == 0 { cursor.len() } else { u64::MAX });
    });
    Ok(tensors)
}

fn check_overlap(cursor: &Cursor<'_>, tensors: &[GgufTensor]) -> Result<()> {
    let mut order: Vec<&GgufTensor> = tensors.iter().filter(|tensor| tensor.len > 0).collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        let end = pair[0].offset + pair[0].len;
        if pair[1].offset < end {
            let previous = pair[0].name.clone();
            let fault = TensorFault::Overlap { offset: pair[1].offset, end, previous };
            return Err(tensor_fault(cursor, &pair[1].name, fault));
        }
    }
    Ok(())
}

fn tensor_fault(cursor: &Cursor<'_>, tensor: &str, fault: TensorFault) -> crate::Error {
    cursor.fault(GgufFault::Tensor { tensor: tensor.to_owned(), fault })
}
