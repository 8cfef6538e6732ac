//! EXL2 (exllamav2): groups of rows with their own code width, 2 to 8 bits, in one weight.
//!
//! For a module with weight `[N, K]`, whose K columns are sorted by code width: `q_weight` I32 `[Σ rows·bits/32, N']`
//! packed along K, group after group, each a bit stream; `q_scale` I32 `[G, N'/8]`, eight 4-bit fields `s - 1` per
//! word; `q_scale_max` F16 `[G]`; `q_groups` I16 `[2·G]`, bits and first row in `q_weight` of each group; `q_invperm`
//! I32 `[K]`, the new position of each column. `N'` is N rounded up to 32. `w = (q - 2^(b-1)) · s² · q_scale_max /
//! 256`, with the scale as an f16.
//!
//! Source: exllamav2 0.3, `conversion/adaptivegptq.py`, `exllamav2_ext/cuda/{q_matrix,pack_tensor}.cu`,
//! `quant/qdq_util.cuh`.

mod write;

use mantissa_num::minifloat::{F16, Overflow};
use mantissa_num::pack::Packing;
use mantissa_num::stored::{Map, Transforms};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rounding, Scheme};
use serde_json::Value;

use super::container::with_scales_in;
use super::gptq::{centred, group_int};
use super::sound::{self, Names};
use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, LinearWeight, ModelFiles, ModelPlan,
    NamedBytes, Opened, SideTensors, Storable, StoredLinear, StoredTensors, Weight,
};
use crate::{Dtype, Result, TensorSpec};

pub use write::{Squares, quantization_config, specs, square_scale, squares, store, tensors};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "exl2";

const WIDTHS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// Rows of a module's tensors are padded to a multiple of this.
const PADDING: usize = 32;

/// Group of adjacent columns, in the order of the codes.
#[derive(Clone, Copy, Debug)]
struct Group {
    bits: usize,
    /// First row in `q_weight`, and number of rows.
    words: (usize, usize),
    /// First column, and number of columns.
    columns: (usize, usize),
}

/// Weight of `module`, `[rows, cols]`, with its columns in code order.
///
/// # Errors
/// A tensor of the module is missing, has another dtype or shape, or contradicts another.
fn weight(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<(Weight, Transforms)> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    if !files.has(&name("q_weight")) {
        return Ok((files.dense(module, rows, cols)?, Transforms::default()));
    }
    let groups = groups(files, &name("q_groups"), &name("q_weight"), cols)?;
    let step = groups.iter().fold(cols, |step, group| gcd(step, group.columns.0)).max(1);
    let blocks = if step < cols { Blocks::Group(step as u32) } else { Blocks::Row };
    let codes = codes(files, &name("q_weight"), &groups, rows, cols)?;
    let scales = scales(files, module, &groups, (rows, cols), step)?;
    let order = order(files, &name("q_invperm"), cols)?;
    let bits = groups.iter().map(|group| group.bits).max().unwrap_or(8) as u32;
    let f16 = Code::Float(F16);
    let q: Quantized = group_int((bits, blocks), (rows, cols), codes, (f16, Codes::U16(scales)), Vec::new());
    let (codes_name, scales_name) = (name("q_weight"), name("q_scale_max"));
    sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &codes_name }, &q)?;
    let before = order.map(Map::Perm).into_iter().collect();
    Ok((Weight::Quantized(q), Transforms { before, ..Transforms::default() }))
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Groups, derived from the first row of each: all but the last have the columns that fill their rows.
fn groups(files: &ModelFiles, name: &str, weight: &str, cols: usize) -> Result<Vec<Group>> {
    let meta = files.meta(name)?;
    let &[fields] = meta.shape.as_slice() else {
        return Err(files.fault(name, format!("shape {:?}", meta.shape), "[2 · groups]", ""));
    };
    let bytes = files.read_exact(name, &[Dtype::I16, Dtype::U16], &[fields])?;
    let fields: Vec<usize> =
        bytes.as_chunks::<2>().0.iter().map(|b| usize::from(u16::from_le_bytes(*b))).collect();
    let total = files.meta(weight)?.shape.first().copied().unwrap_or(0);
    let pairs = fields.as_chunks::<2>().0;
    if pairs.is_empty() || !fields.len().is_multiple_of(2) {
        return Err(files.fault(name, format!("{} numbers", fields.len()), "pairs of bits and row", ""));
    }
    let (mut groups, mut used) = (Vec::with_capacity(pairs.len()), 0);
    for (i, &[bits, start]) in pairs.iter().enumerate() {
        let fault =
            |found: String, allowed: &str| files.fault(name, format!("group {i}: {found}"), allowed, "");
        if !WIDTHS.contains(&bits) {
            return Err(fault(format!("{bits} bits"), "2, 3, 4, 5, 6 or 8"));
        }
        let last = i + 1 == pairs.len();
        let end = if last { total } else { pairs[i + 1][1] };
        let words = end.checked_sub(start).filter(|&n| n > 0 && (i > 0 || start == 0));
        let words = words
            .ok_or_else(|| fault(format!("rows {start} to {end}"), "rows that follow each other from 0"))?;
        let left = cols - used;
        let columns = if last { left } else { words * 32 / bits };
        let whole = last || (words * 32).is_multiple_of(bits);
        if !whole || columns == 0 || columns > left || (columns * bits).div_ceil(32) != words {
            let found = format!("{columns} of {left} columns of {bits} bits in {words} rows");
            return Err(fault(found, "groups that hold each column once"));
        }
        groups.push(Group { bits, words: (start, words), columns: (used, columns) });
        used += columns;
    }
    Ok(groups)
}

/// Codes `[rows, cols]`, signed, in the order of the file.
fn codes(files: &ModelFiles, name: &str, groups: &[Group], rows: usize, cols: usize) -> Result<Vec<u8>> {
    let (across, down) =
        (rows.next_multiple_of(PADDING), groups.last().map_or(0, |group| group.words.0 + group.words.1));
    let bytes = files.read_exact(name, &[Dtype::I32], &[down, across])?;
    let mut codes = vec![0; rows * cols];
    let mut line = Vec::new();
    for &Group { bits, words, columns } in groups {
        let packing = Packing { offset_binary: false, ..Packing::gptq(bits as u32) };
        for row in 0..rows {
            line.clear();
            line.extend(
                (words.0..words.0 + words.1).flat_map(|word| &bytes[4 * (word * across + row)..][..4]),
            );
            let fields = packing.unpack(&line, 1, columns.1, false);
            let fields = fields.ok_or_else(|| files.fault(name, "a wrong length", "whole words", ""))?;
            let out = &mut codes[row * cols + columns.0..][..columns.1];
            out.iter_mut().zip(fields).for_each(|(out, field)| *out = centred(field, bits as u32) as u8);
        }
    }
    Ok(codes)
}

/// Scales `[rows, cols / step]` as f16 patterns; a group's scales are repeated for each `step` of its columns.
fn scales(
    files: &ModelFiles,
    module: &str,
    groups: &[Group],
    (rows, cols): (usize, usize),
    step: usize,
) -> Result<Vec<u16>> {
    let (scale, max) = (format!("{module}.q_scale"), format!("{module}.q_scale_max"));
    let across = rows.next_multiple_of(PADDING);
    let packed = files.read_exact(&scale, &[Dtype::I32], &[groups.len(), across / 8])?;
    let largest = files.read_exact(&max, &[Dtype::F16], &[groups.len()])?;
    files.expect_finite(&max, Dtype::F16, &largest)?;
    let largest: Vec<f32> =
        largest.as_chunks::<2>().0.iter().map(|b| F16.decode(u16::from_le_bytes(*b).into())).collect();
    let fields =
        Packing { offset_binary: false, ..Packing::gptq(4) }.unpack(&packed, groups.len(), across, false);
    let fields = fields.ok_or_else(|| files.fault(&scale, "a wrong length", "whole words", ""))?;
    let mut scales = Vec::with_capacity(rows * cols.div_ceil(step));
    for row in 0..rows {
        for (g, group) in groups.iter().enumerate() {
            let root = f32::from(fields[g * across + row]) + 1.0;
            let scale = f16(root * root * F16.decode(f16(largest[g] / 256.0).into()));
            scales.extend(std::iter::repeat_n(scale, group.columns.1.div_ceil(step)));
        }
    }
    Ok(scales)
}

fn f16(x: f32) -> u16 {
    F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16
}

/// Column at each position of the codes; `None` if they are in the original order.
fn order(files: &ModelFiles, name: &str, cols: usize) -> Result<Option<Vec<u32>>> {
    if !files.has(name) {
        return Ok(None);
    }
    let meta = files.meta(name)?;
    let bytes = files.read_exact(name, &[Dtype::I32, Dtype::I16], &[cols])?;
    let places: Vec<Option<usize>> = match meta.dtype {
        Dtype::I16 => {
            bytes.as_chunks::<2>().0.iter().map(|b| Some(usize::from(u16::from_le_bytes(*b)))).collect()
        }
        _ => bytes.as_chunks::<4>().0.iter().map(|b| usize::try_from(i32::from_le_bytes(*b)).ok()).collect(),
    };
    let mut order = vec![u32::MAX; cols];
    for (column, place) in places.into_iter().enumerate() {
        match place.and_then(|place| order.get_mut(place)) {
            Some(slot) if *slot == u32::MAX => *slot = column as u32,
            _ => {
                let found = format!("place {place:?} of column {column}");
                return Err(files.fault(name, found, format!("each of 0 to {} once", cols - 1), ""));
            }
        }
    }
    let own = order.iter().enumerate().all(|(place, &column)| place == column as usize);
    Ok((!own).then_some(order))
}

/// EXL2, read by exllamav2.
#[derive(Debug)]
pub(super) struct Exl2;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Exl2);

impl Convention for Exl2 {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, |_, _| Ok(Exl2))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { square_scales: true, ..Facts::default() })
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        _: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        tensors(plan, q)
    }

    fn store(&self, module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
        store(module, layer)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        Ok(quantization_config(model.bits_per_weight))
    }

    fn as_stored(&self, scheme: Scheme, _dtype: Dtype) -> Scheme {
        with_scales_in(scheme, Dtype::F16)
    }
}

impl Opened for Exl2 {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("q_weight", &["q_groups", "q_scale", "q_scale_max"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(weight(files, module, rows, cols)?.into())
    }
}
