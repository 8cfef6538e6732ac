//! Codes and scales → tensors of a module, and the `quantization_config` that describes them.

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::minifloat::F16;
use mantissa_num::pack::{Packing, transpose};
use mantissa_num::stored::Map;
use mantissa_num::{Blocks, Code, Codes, Quantized, Rule, Scheme, minifloat};
use serde_json::{Value, json};

use super::{PADDING, QUANT_METHOD, WIDTHS, f16};
use crate::convention::{LinearPlan, LinearWeight, NamedBytes, NotStorable, Storable, StoredTensors, Weight};
use crate::{Dtype, TensorSpec};

/// Version of the format that is written.
const VERSION: &str = "0.3.2";

/// Largest root of a scale; it is stored minus one, in 4 bits.
const MAX_ROOT: u8 = 16;

/// Group sizes are multiples of this, so that groups fill whole words at any code width.
const WORD: usize = 32;

/// Scales of a group: squares of small integers times one f16.
#[derive(Clone, Debug, PartialEq)]
pub struct Squares {
    /// The f16 pattern of `q_scale_max`.
    pub largest: u16,
    /// Root of each row, 1 to 16.
    pub roots: Vec<u8>,
}

/// f16 pattern of the scale with `root`, if `unit` is the scale with root 1.
pub fn square_scale(root: u8, unit: u16) -> u16 {
    f16(f32::from(root) * f32::from(root) * F16.decode(unit.into()))
}

/// Writes `scales` (f16 patterns) as squares times one f16; `None` if that is impossible.
pub fn squares(scales: &[u16]) -> Option<Squares> {
    let value = |scale: u16| F16.decode(scale.into());
    let top = scales.iter().copied().max_by(|a, b| value(*a).total_cmp(&value(*b)))?;
    for root in (1..=MAX_ROOT).rev() {
        let near = f16(value(top) / (f32::from(root) * f32::from(root)));
        for unit in [near, near.saturating_sub(1), near.saturating_add(1)] {
            let table: Vec<u16> = (1..=MAX_ROOT).map(|root| square_scale(root, unit)).collect();
            let root_of = |scale: &u16| table.iter().position(|known| known == scale).map(|i| i as u8 + 1);
            let roots: Option<Vec<u8>> = scales.iter().map(root_of).collect();
            let largest = f16(value(unit) * 256.0);
            if let Some(roots) = roots.filter(|_| f16(value(largest) / 256.0) == unit) {
                return Some(Squares { largest, roots });
            }
        }
    }
    None
}

/// Bits of a code and columns of a group, for schemes that this format holds.
fn layout(plan: &LinearPlan<'_>) -> Storable<(u32, usize)> {
    let LinearPlan { module, scheme, cols, .. } = *plan;
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    if plan.input.is_some() {
        return no("exl2 cannot store quantized activations".to_owned());
    }
    let Format::Affine(Affine {
        code: Code::Int(bits),
        blocks: Blocks::Group(group),
        scale: Some(scale),
        offset: Offset::None,
    }) = &scheme.format
    else {
        return no("exl2 holds int2, int3, int4, int5, int6, int8 in groups, without zero points".to_owned());
    };
    let f16 = scale.code == Code::F32 || scale.code == Code::Float(minifloat::F16);
    if !WIDTHS.contains(&(*bits as usize)) || !f16 || scale.outer.is_some() {
        return no("exl2 holds int2, int3, int4, int5, int6, int8 with f16 scales".to_owned());
    }
    let group = *group as usize;
    if !group.is_multiple_of(WORD) || !cols.is_multiple_of(group) {
        let why =
            format!("{module}: groups of {group} are no multiple of {WORD} that divides {cols} columns");
        return no(why);
    }
    // `q_groups` holds the first row of a group in 16 bits.
    if cols / 32 * *bits as usize > usize::from(u16::MAX) {
        return no(format!(
            "{module}: {cols} columns of {bits} bits are more rows of words than 16 bits count"
        ));
    }
    Ok((*bits, group))
}

/// Tensors of a quantized linear layer whose groups all have the same code width.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not in this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let (bits, group) = layout(plan)?;
    let words = plan.cols * bits as usize / 32;
    Ok(all_specs(plan.module, words, plan.cols / group, plan.rows, plan.cols))
}

fn all_specs(module: &str, words: usize, groups: usize, rows: usize, cols: usize) -> Vec<TensorSpec> {
    let across = rows.next_multiple_of(PADDING);
    let spec = |suffix: &str, dtype, shape| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    vec![
        spec("q_weight", Dtype::I32, vec![words, across]),
        spec("q_scale", Dtype::I32, vec![groups, across / 8]),
        spec("q_scale_max", Dtype::F16, vec![groups]),
        spec("q_groups", Dtype::I16, vec![2 * groups]),
        spec("q_invperm", Dtype::I32, vec![cols]),
    ]
}

/// Adjacent columns that share a scale in each row.
struct Span {
    bits: usize,
    start: usize,
    end: usize,
    squares: Squares,
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`]; also if the scales of a group are not squares times one f16.
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let (bits, group) = layout(plan)?;
    let mut spans = Vec::with_capacity(q.cols / group);
    for block in 0..q.cols / group {
        let squares = squares_of(plan, q, block)?;
        spans.push(Span { bits: bits as usize, start: block * group, end: (block + 1) * group, squares });
    }
    let own: Vec<u32> = (0..q.cols as u32).collect();
    Ok(bytes(plan.module, q, &spans, &own))
}

fn squares_of(plan: &LinearPlan<'_>, q: &Quantized, block: usize) -> Storable<Squares> {
    let Codes::U16(scales) = &q.scales.codes else {
        let why = format!("{}: exl2 stores scales in f16", plan.module);
        return Err(NotStorable { scheme: plan.scheme.to_string(), why });
    };
    let across = q.format.blocks().count(1, q.cols);
    let column: Vec<u16> = scales.iter().skip(block).step_by(across).copied().collect();
    squares(&column).ok_or_else(|| NotStorable {
        scheme: plan.scheme.to_string(),
        why: format!("{}: scales of group {block} are no squares of 1 to 16 times one f16", plan.module),
    })
}

/// Tensors of spans that hold the columns of `q` in sequence; `order` is the original column at each position.
fn bytes(module: &str, q: &Quantized, spans: &[Span], order: &[u32]) -> Vec<(String, Vec<u8>)> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let Codes::U8(codes) = &q.codes else { return Vec::new() };
    let across = q.rows.next_multiple_of(PADDING);
    let by_column = transpose(codes, q.rows, q.cols);
    let (mut weight, mut roots, mut largest, mut table) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut place = vec![0u32; q.cols];
    let mut at = 0;
    for span in spans {
        let (width, row) = (span.end - span.start, weight.len() / (4 * across).max(1));
        let mut fields = vec![0; width * across];
        for (column, fields) in (span.start..span.end).zip(fields.chunks_exact_mut(across)) {
            fields[..q.rows].copy_from_slice(&by_column[column * q.rows..][..q.rows]);
            place[order[column] as usize] = at;
            at += 1;
        }
        weight.extend(Packing::gptq(span.bits as u32).pack_dim0(&fields, width, across));
        roots.extend(span.squares.roots.iter().map(|root| root - 1));
        roots.resize(roots.len() + across - q.rows, 0);
        largest.extend(span.squares.largest.to_le_bytes());
        table.extend([span.bits as u16, row as u16].map(u16::to_le_bytes).concat());
    }
    let nibbles = Packing { offset_binary: false, ..Packing::gptq(4) };
    vec![
        (name("q_weight"), weight),
        (name("q_scale"), nibbles.pack(&roots, across)),
        (name("q_scale_max"), largest),
        (name("q_groups"), table),
        (name("q_invperm"), place.into_iter().flat_map(u32::to_le_bytes).collect()),
    ]
}

/// Tensors of a layer as it was read. Blocks that share their scales become one group, and a group takes the fewest
/// bits that hold its codes. Groups are sorted from widest to narrowest, the order in which kernels process them.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold all parts.
pub fn store(module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
    let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
    let scheme = Scheme::new(q.format.clone(), Rule::Amax);
    let no = |why: &str| Err(NotStorable { scheme: scheme.to_string(), why: format!("{module}: {why}") });
    let own: Vec<u32> = (0..q.cols as u32).collect();
    let order = match (layer.transforms.before.as_slice(), layer.transforms.after.as_slice()) {
        ([], []) => own.as_slice(),
        ([Map::Perm(order)], []) => order.as_slice(),
        _ => return no("exl2 stores no side tensors except the column order"),
    };
    let (Format::Affine(Affine { code: Code::Int(_), blocks, offset: Offset::None, .. }), Codes::U8(codes)) =
        (&q.format, &q.codes)
    else {
        return no("exl2 holds integers in groups, without zero points");
    };
    if layer.input.is_some() || !layer.transforms.extras.is_empty() || !blocks.within_rows() {
        return no("exl2 holds integers in groups, without zero points or quantized inputs");
    }
    let plan = LinearPlan::new(module, &scheme, None, (q.rows, q.cols));
    let step = blocks.len(1, q.cols).max(1);
    let mut spans: Vec<Span> = Vec::new();
    for block in 0..blocks.count(1, q.cols) {
        let (start, end) = (block * step, ((block + 1) * step).min(q.cols));
        let squares = squares_of(&plan, q, block)?;
        let bits = width_of(codes, q.cols, start..end);
        match spans.last_mut() {
            Some(last) if last.squares == squares => {
                (last.end, last.bits) = (end, last.bits.max(bits));
            }
            _ => spans.push(Span { bits, start, end, squares }),
        }
    }
    spans.sort_by_key(|span| std::cmp::Reverse(span.bits));
    let ragged = |span: &Span| !((span.end - span.start) * span.bits).is_multiple_of(32);
    if spans.iter().rev().skip(1).any(ragged) {
        return no("groups that do not fill whole words");
    }
    let words = spans.iter().map(|span| ((span.end - span.start) * span.bits).div_ceil(32)).sum();
    let specs = all_specs(module, words, spans.len(), q.rows, q.cols);
    let bytes = bytes(module, q, &spans, order).into_iter().map(|(_, bytes)| bytes);
    Ok(specs.into_iter().zip(bytes).collect())
}

/// Narrowest code width that holds the given columns.
fn width_of(codes: &[u8], cols: usize, columns: std::ops::Range<usize>) -> usize {
    let lines = codes.chunks_exact(cols.max(1)).flat_map(|row| &row[columns.clone()]);
    let (low, high) = lines.fold((0, 0), |(low, high): (i8, i8), &code| {
        let code = code as i8;
        (low.min(code), high.max(code))
    });
    let holds = |bits: usize| i32::from(low) >= -(1 << (bits - 1)) && i32::from(high) < 1 << (bits - 1);
    WIDTHS.into_iter().find(|&bits| holds(bits)).unwrap_or(8)
}

/// `quantization_config` for layers of `bits` bits per weight on average.
pub fn quantization_config(bits: f64) -> Value {
    json!({"quant_method": QUANT_METHOD, "version": VERSION, "bits": bits, "head_bits": 16})
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_squares_or_refused() {
        for unit in [0x0001, 0x0203, 0x0444, 0x1234, 0x2c00] {
            let roots = [3, 16, 1, 7, 12];
            let scales = roots.map(|root| square_scale(root, unit));
            let found = squares(&scales).unwrap();
            let unit = f16(F16.decode(found.largest.into()) / 256.0);
            for (root, scale) in found.roots.into_iter().zip(scales) {
                assert_eq!(square_scale(root, unit), scale);
            }
        }
        assert_eq!(squares(&[f16(0.01), f16(0.0101)]), None);
        assert_eq!(squares(&[]), None);
    }
}
