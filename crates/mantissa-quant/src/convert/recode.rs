//! Recoding: codes and scales of one format as another format that decodes to the same values.

use mantissa_num::format::{Affine, Format, Offset, ScaleTree, Sense};
use mantissa_num::minifloat::{self, BF16, E2M1, E4M3, F16, MiniFloat};
use mantissa_num::{Blocks, Code, CodecId, Codes, Quantized, Rounding, ScaleLevel, Scheme};
use mantissa_store::convention::{Container, LinearPlan};

/// Result whose error is a reason.
type Why<T> = std::result::Result<T, String>;

/// Returns the scheme under which `container` holds `q` without loss, with the recoded weight. `only` is the only scale
/// dtype allowed for integers.
///
/// # Errors
/// Reason why there is none: what does not fit the first format that the container holds, or why it holds none.
pub(super) fn target(
    q: &Quantized,
    container: Container,
    module: &str,
    input: Option<&Scheme>,
    only: Option<Code>,
) -> Why<(Scheme, Quantized)> {
    let (mut misfit, mut not_held) = (None, None);
    for format in candidates(q) {
        let scheme = Scheme::writing(format.clone());
        let integers = matches!(&format, Format::Affine(Affine { code: Code::Int(_), .. }));
        let fixed =
            !integers || only.is_none_or(|code| format.scale().is_none_or(|scale| scale.code == code));
        let plan = LinearPlan::new(module, &scheme, input, (q.rows, q.cols));
        match container.specs(&plan) {
            Ok(_) if !fixed => {}
            Ok(_) => match recode(q, &format).and_then(|recoded| exact(q, recoded)) {
                Ok(recoded) => return Ok((scheme, recoded)),
                Err(why) => misfit = misfit.or(Some(why)),
            },
            Err(error) => not_held = not_held.or(Some(error.why)),
        }
    }
    Err(misfit.or(not_held).unwrap_or_else(|| format!("{} has no format for it", container.name())))
}

/// Returns formats that may decode to the same values, the nearest first.
fn candidates(q: &Quantized) -> Vec<Format> {
    let mut all = vec![q.format.clone()];
    let mut add = |format: Format| {
        if !all.contains(&format) {
            all.push(format);
        }
    };
    let base = match unpack_blocks(q) {
        Some(affine) => affine.format,
        None => q.format.clone(),
    };
    let codes = [Code::Float(BF16), Code::Float(F16), Code::F32];
    for format in senses(&base) {
        add(format.clone());
        for format in offsets(&format) {
            let wide =
                format.scale().is_some_and(|scale| scale.outer.is_none() && codes.contains(&scale.code));
            if wide {
                codes.iter().for_each(|&code| add(format.clone().with_scale_code(code)));
            } else {
                add(format);
            }
        }
    }
    if let Format::Affine(Affine { code: Code::Int(bits), scale: Some(_), .. }) = &base {
        CodecId::of_integers(*bits).into_iter().for_each(|id| add(Format::Codec(id)));
    }
    all
}

/// Returns the format with each sense of NVFP4's global scale.
fn senses(format: &Format) -> Vec<Format> {
    let mut all = vec![format.clone()];
    let Format::Affine(Affine { code: Code::Float(E2M1), scale: Some(scale), .. }) = format else {
        return all;
    };
    if scale.code == Code::Float(E4M3) {
        all.extend(
            [Some(Sense::Divisor), Some(Sense::Multiplier), None].map(|sense| Scheme::nvfp4(sense).format),
        );
    }
    all
}

/// Returns the format with and without zero points.
fn offsets(format: &Format) -> Vec<Format> {
    let Format::Affine(affine) = format else { return vec![format.clone()] };
    let other = match (affine.code, affine.offset) {
        (Code::Int(_), Offset::None) => Offset::Zero,
        (Code::Int(_), Offset::Zero) => Offset::None,
        _ => return vec![format.clone()],
    };
    vec![format.clone(), Format::Affine(Affine { offset: other, ..affine.clone() })]
}

/// Recodes `q` to `format`.
///
/// # Errors
/// The part of `q` that `format` cannot hold, and its place.
pub(super) fn recode(q: &Quantized, format: &Format) -> Why<Quantized> {
    if q.format == *format {
        return Ok(Quantized { format: format.clone(), ..q.clone() });
    }
    let q = &unpack_blocks(q).unwrap_or_else(|| q.clone());
    match format {
        Format::Codec(id) => pack_blocks(q, *id),
        Format::Affine(to) => affine(q, to),
        _ => Err("code books cannot be recoded".to_owned()),
    }
}

/// Recodes integers or floats with scales.
fn affine(q: &Quantized, to: &Affine) -> Why<Quantized> {
    let Format::Affine(from) = &q.format else {
        return Err("its codes are not integers or floats".to_owned());
    };
    let (Some(old), Some(new)) = (&from.scale, &to.scale) else {
        return Err("expected scales in both formats, got one without".to_owned());
    };
    if from.code != to.code || from.blocks != to.blocks {
        return Err("codes or groups differ".to_owned());
    }
    let mut out =
        Quantized { codes: q.codes.clone(), ..Quantized::empty(Format::Affine(to.clone()), q.rows, q.cols) };
    let scales = scales(q, old.code, new.code)?;
    let outer = global_scale(q.outer(), old, new)?;
    let zeros = match (from.offset, to.offset) {
        (a, b) if a == b => q.zeros().to_vec(),
        (Offset::None, Offset::Zero) => vec![0; from.blocks.count(q.rows, q.cols)],
        (Offset::Zero, Offset::None) => match q.zeros().iter().position(|&zero| zero != 0) {
            None => Vec::new(),
            Some(at) => return Err(format!("zero point of group {at}: expected 0, got {}", q.zeros()[at])),
        },
        _ => return Err("expected zero points, got float minima".to_owned()),
    };
    out.scales = ScaleLevel::from(scales).with_zeros(zeros).with_outer(outer);
    Ok(out)
}

/// Recodes scales to another dtype.
fn scales(q: &Quantized, from: Code, to: Code) -> Why<Codes> {
    if from == to {
        return Ok(q.scales.codes.clone());
    }
    let mut out = Codes::with_capacity(to.unit_bytes(), q.scales.len());
    for i in 0..q.scales.len() {
        let value = from.decode(q.scales.get(i));
        let code = match to {
            Code::F32 => value.to_bits(),
            Code::Float(float) => encode(float, value),
            _ => return Err("scales of this dtype cannot be recoded".to_owned()),
        };
        if to.decode(code) != value {
            let name = if let Code::Float(float) = to { float.name } else { "f32" };
            return Err(format!("scale {value:e} of group {i} is not representable in {name}"));
        }
        out.push(code);
    }
    Ok(out)
}

fn encode(float: MiniFloat, value: f32) -> u32 {
    float.encode(value, minifloat::Overflow::Special, Rounding::NearestEven, 0)
}

/// Converts values to f16 words; `None` if one is not representable.
pub(super) fn f16_words(values: &[f32]) -> Option<Vec<u16>> {
    let word = |&value: &f32| {
        let code = encode(F16, value);
        (F16.decode(code) == value).then_some(code as u16)
    };
    values.iter().map(word).collect()
}

/// Converts a global scale to another sense.
fn global_scale(stored: Option<f32>, from: &ScaleTree, to: &ScaleTree) -> Why<Option<f32>> {
    let sense = |tree: &ScaleTree| tree.tensor_wide().map(|tree| tree.sense);
    let factor = match (sense(from), stored) {
        (None, _) | (_, None) => 1.0,
        (Some(Sense::Divisor), Some(stored)) => 1.0 / stored,
        (Some(Sense::Multiplier), Some(stored)) => stored,
        (Some(Sense::Amax { full_scale }), Some(stored)) => stored / full_scale as f32,
        _ => return Err("scales of scales of another kind cannot be recoded".to_owned()),
    };
    match sense(to) {
        a if a == sense(from) => Ok(stored),
        None if factor == 1.0 => Ok(None),
        None => Err(format!("global scale: expected none, got {factor:e}")),
        Some(Sense::Multiplier) => Ok(Some(factor)),
        Some(Sense::Divisor) => Ok(Some(1.0 / factor)),
        Some(_) => Err("scales of scales of another kind cannot be recoded".to_owned()),
    }
}

/// Checks that `recoded` decodes to the values of `q`.
fn exact(q: &Quantized, recoded: Quantized) -> Why<Quantized> {
    if let Some(verdict) = same_but_for_reciprocal(q, &recoded) {
        return verdict.map(|()| recoded);
    }
    let decode = |q: &Quantized| q.dequantize().map_err(|error| error.to_string());
    let (old, new) = (decode(q)?, decode(&recoded)?);
    match old.iter().zip(&new).position(|(a, b)| a != b) {
        None => Ok(recoded),
        Some(at) => Err(format!("element {at}: expected {:e}, got {:e}", old[at], new[at])),
    }
}

/// Compares two NVFP4 weights whose global scales have different senses: codes and block scales must be equal, and
/// global scales reciprocal within one unit in the last place. `None` for other weights.
pub(super) fn same_but_for_reciprocal(a: &Quantized, b: &Quantized) -> Option<Why<()>> {
    let (a, b) =
        (unpack_blocks(a).unwrap_or_else(|| a.clone()), unpack_blocks(b).unwrap_or_else(|| b.clone()));
    let sense = |q: &Quantized| q.format.scale().and_then(ScaleTree::tensor_wide).map(|tree| tree.sense);
    let (x, y) = match (sense(&a), sense(&b)) {
        (Some(Sense::Divisor), Some(Sense::Multiplier)) => (1.0 / a.outer()?, b.outer()?),
        (Some(Sense::Multiplier), Some(Sense::Divisor)) => (1.0 / b.outer()?, a.outer()?),
        _ => return None,
    };
    if a.codes != b.codes || a.scales.codes != b.scales.codes {
        return Some(Err("codes or block scales differ".to_owned()));
    }
    let apart = x.to_bits().abs_diff(y.to_bits());
    Some(if apart <= 1 {
        Ok(())
    } else {
        Err(format!("expected global scales within 1 ulp, got {x:e} and {y:e}, {apart} ulp apart"))
    })
}

/// Unpacks GGUF blocks that hold only codes and scales.
fn unpack_blocks(q: &Quantized) -> Option<Quantized> {
    let Format::Codec(id) = q.format else { return None };
    let Codes::Packed(bytes) = &q.codes else { return None };
    id.unpack_affine(bytes, q.rows, q.cols)
}

/// Packs symmetric integers into blocks of Q4_0 or Q8_0.
fn pack_blocks(q: &Quantized, id: CodecId) -> Why<Quantized> {
    let block = id.codec().elements;
    let Format::Affine(Affine { code: Code::Int(bits), blocks, scale: Some(scale), .. }) = &q.format else {
        return Err("its codes are not integers".to_owned());
    };
    let whole = match blocks {
        Blocks::Group(g) => (*g as usize).is_multiple_of(block),
        Blocks::Row | Blocks::Tensor => true,
        _ => false,
    };
    if id.integer_bits() != Some(*bits) || !whole || !q.cols.is_multiple_of(block) {
        return Err(format!("expected groups of whole blocks of {block}, got others"));
    }
    if let Some(at) = q.zeros().iter().position(|&zero| zero != 0) {
        return Err(format!("zero point of group {at}: expected 0, got {}", q.zeros()[at]));
    }
    let words = scales(q, scale.code, Code::Float(F16))?;
    let Codes::U8(codes) = &q.codes else { return Err("codes wider than a byte".to_owned()) };
    let mut bytes = Vec::with_capacity(codes.len() / block * id.codec().bytes);
    for (i, codes) in codes.chunks_exact(block).enumerate() {
        let at = i * block;
        let scale = words.get(blocks.index(q.cols, at / q.cols, at % q.cols)) as u16;
        id.pack_integers(scale, codes, &mut bytes);
    }
    Ok(Quantized { codes: Codes::Packed(bytes), ..Quantized::empty(Format::Codec(id), q.rows, q.cols) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
