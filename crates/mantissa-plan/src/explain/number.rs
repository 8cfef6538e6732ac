//! Anatomy of a number: how formats store it, what becomes of it, and its neighbours.

use mantissa_num::format::{Affine, Format};
use mantissa_num::minifloat::MiniFloat;
use mantissa_num::{Blocks, Code, Given, Quantized, Scheme, TensorError, quantize};
use serde::Serialize;

/// Number as a format stores it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Anatomy {
    /// Scheme.
    pub scheme: String,
    /// Stored value.
    pub value: f64,
    /// Stored value less the number.
    pub error: f64,
    /// Error over the number; absent for 0.
    pub relative_error: Option<f64>,
    /// Bits of the code: sign, exponent and mantissa of a float, all bits of others.
    pub bits: Vec<(&'static str, String)>,
    /// Power of two of the leading digit of a float; absent for others.
    pub exponent: Option<i32>,
    /// Scale of the block, if there is one.
    pub scale: Option<f64>,
    /// Nearest representable value below.
    pub below: Option<f64>,
    /// Nearest representable value above.
    pub above: Option<f64>,
    /// True if the number lies beyond what the scale of its block reaches, so that it becomes the last value there.
    pub clipped: bool,
    /// What the format does with the number, where that is special, and what it does with the scale.
    pub note: Option<String>,
}

/// A number cannot be shown under a scheme.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AnatomyError {
    /// The scheme has no codes of single elements.
    #[error(
        "--as {0}: expected a format with one code for each element, got one that codes blocks; fix: mantissa cast shows its error on a tensor"
    )]
    Blocks(String),
    /// The number cannot be quantized.
    #[error("--as {scheme}: {fault}")]
    Tensor {
        /// Scheme.
        scheme: String,
        /// Reason.
        fault: TensorError,
    },
}

/// Elements of the made-up tensor: whole blocks of 16, of which the first holds the number and the last the largest magnitude
/// of the tensor.
const TENSOR: usize = 64;

/// Shows `number` under a scheme, in a block whose scale comes from the largest magnitude `amax`; a number beyond it is clipped,
/// as under a static scale. A format with a scale for the tensor beside that of the block (NVFP4) takes it from the magnitude
/// `tensor`, at least `amax`.
///
/// # Errors
/// [`AnatomyError`].
pub fn anatomy(number: f64, scheme: &Scheme, amax: f32, tensor: f32) -> Result<Anatomy, AnatomyError> {
    let name = scheme.to_string();
    if matches!(scheme.format, Format::Affine(Affine { code: Code::F64, .. })) {
        return Ok(double(number, name));
    }
    let x = number as f32;
    if scheme.format.code_bits() == 0 {
        return Err(AnatomyError::Blocks(name));
    }
    let fault = |fault| AnatomyError::Tensor { scheme: name.clone(), fault };
    let amax = amax.abs();
    let beyond = scheme.format.scale().is_some() && x.abs() > amax;
    let amax = if beyond { amax } else { amax.max(x.abs()) };
    let mut block = vec![x.clamp(-amax, amax), amax];
    let outer = scheme.format.scale().and_then(|scale| scale.outer.as_ref());
    if outer.is_some_and(|(blocks, _)| *blocks == Blocks::Tensor) {
        block.resize(TENSOR, 0.0);
        block[TENSOR - 1] = tensor.max(amax);
    }
    let stored = quantize(scheme, &block, 1, block.len(), Given::default()).map_err(fault)?;
    let values = stored.dequantize().map_err(fault)?;
    let code = if beyond { code_beyond(scheme, x, &block, stored.outer()) } else { stored.codes.get(0) };
    let value = f64::from(stored.block_decoder(0).value(scheme.format.element(code)));
    let error = value - number;
    let (below, above) = neighbours(&stored, value);
    // The step to the last value on its side, beyond which there is none.
    let step = match number > 0.0 {
        true => below.filter(|_| above.is_none()).map(|below| value - below),
        false => above.filter(|_| below.is_none()).map(|above| above - value),
    };
    let step = step.filter(|step| beyond && error.abs() > step / 2.0);
    let float = float_of(&scheme.format);
    let scale = scheme.format.scale().map(|_| f64::from(stored.block_decoder(0).scale()));
    Ok(Anatomy {
        bits: bits(&scheme.format, code),
        exponent: float.and_then(|float| exponent(float, code)),
        clipped: step.is_some(),
        note: joined([
            note(x, value, &scheme.format),
            step.map(|step| clip_note(amax, value, error, step)),
            scale.and_then(|scale| scale_note(&scheme.format, scale, amax, values[1])),
        ]),
        relative_error: (number != 0.0 && value.is_finite()).then(|| error / number),
        scheme: name,
        value,
        error,
        scale,
        below,
        above,
    })
}

/// Encodes a number beyond the largest magnitude from which the scale of the first block of `values` comes.
fn code_beyond(scheme: &Scheme, x: f32, values: &[f32], outer: Option<f32>) -> u32 {
    let geometry = scheme.format.blocks();
    let end = geometry.runs(values.len(), 0).next().map_or(values.len(), |(_, _, end)| end);
    let short = matches!(geometry, Blocks::Flat(group) if (end as u64) < u64::from(group));
    scheme.encode(x, &scheme.block_of(&values[..end], short, outer), 0)
}

/// Says that a number is clipped to the last value that a scale reaches, and how large the error is beside that of rounding.
fn clip_note(amax: f32, value: f64, error: f64, step: f64) -> String {
    let end = if value < 0.0 { "smallest" } else { "largest" };
    format!(
        "clipped: the scale comes from {amax}, so {value:.6} is the {end} value; the error, {error:.6}, is {:.0} times what rounding makes at most (half a step, {:.6})",
        error.abs() / (step / 2.0),
        step / 2.0
    )
}

/// Shows a number as f64 stores it: exactly.
fn double(x: f64, scheme: String) -> Anatomy {
    let bits = x.to_bits();
    let (field, mantissa) = (bits >> 52 & 0x7ff, bits & ((1 << 52) - 1));
    let finite = |x: f64| x.is_finite().then_some(x);
    let subnormal = x != 0.0 && field == 0;
    Anatomy {
        scheme,
        value: x,
        error: 0.0,
        relative_error: (x != 0.0).then_some(0.0),
        bits: vec![
            ("sign", format!("{:b}", bits >> 63)),
            ("exponent", format!("{field:011b}")),
            ("mantissa", format!("{mantissa:052b}")),
        ],
        exponent: Some(field.max(1) as i32 - 1023),
        scale: None,
        below: finite(x.next_down()),
        above: finite(x.next_up()),
        clipped: false,
        note: subnormal.then(|| {
            format!("subnormal: below {:e}, the smallest normal value, digits are lost", f64::MIN_POSITIVE)
        }),
    }
}

/// Joins what there is to say.
fn joined(notes: [Option<String>; 3]) -> Option<String> {
    let notes: Vec<String> = notes.into_iter().flatten().collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

/// Says how the scale of a block is rounded itself, and what that does to the block's largest value, stored as `largest`.
fn scale_note(format: &Format, scale: f64, amax: f32, largest: f32) -> Option<String> {
    let top = f64::from(float_of(format)?.max());
    let (block, largest) = (f64::from(amax), largest.abs());
    let exact = block / top;
    let change = scale / exact - 1.0;
    // Rounding of the f32 arithmetic is no rounding of the scale.
    if exact <= 0.0 || !change.is_finite() || change.abs() < 1e-6 {
        return None;
    }
    let fate = match block > top * scale {
        true => format!("is clipped to {largest:.6}"),
        false => format!("becomes {largest:.6}"),
    };
    Some(format!(
        "the scale of the block is rounded too, from {exact:.6e} to {scale:.6e} ({:+.2} %): the block's largest value, {amax}, {fate}",
        100.0 * change
    ))
}

/// Returns the float of a format's elements.
fn float_of(format: &Format) -> Option<MiniFloat> {
    match format {
        Format::Affine(Affine { code: Code::Float(float), .. }) => Some(*float),
        Format::Affine(Affine { code: Code::F32, .. }) => Some(SINGLE),
        Format::Affine(Affine { code: Code::Tf32, .. }) => Some(mantissa_num::minifloat::TF32),
        _ => None,
    }
}

/// Fields of an f32.
const SINGLE: MiniFloat = MiniFloat {
    name: "f32",
    exponent_bits: 8,
    mantissa_bits: 23,
    bias: 127,
    special: mantissa_num::minifloat::Special::Ieee,
};

/// Splits a code into its fields.
fn bits(format: &Format, code: u32) -> Vec<(&'static str, String)> {
    let text = |value: u32, width: u32| format!("{:0width$b}", value & mask(width), width = width as usize);
    let Some(float) = float_of(format) else {
        return vec![("code", text(code, format.code_bits()))];
    };
    let (e, m) = (float.exponent_bits, float.mantissa_bits);
    // The code of TF32 is the pattern of the f32.
    let code = if format.code_bits() == 32 { code >> (31 - e - m) } else { code };
    vec![("sign", text(code >> (e + m), 1)), ("exponent", text(code >> m, e)), ("mantissa", text(code, m))]
}

fn mask(width: u32) -> u32 {
    if width >= 32 { u32::MAX } else { (1 << width) - 1 }
}

/// Returns the power of two of a float's leading digit, or of its subnormals; `None` for infinities and NaN.
fn exponent(float: MiniFloat, code: u32) -> Option<i32> {
    let (e, m) = (float.exponent_bits, float.mantissa_bits);
    let code = if float.name == "tf32" { code >> 13 } else { code };
    let field = code >> m & mask(e);
    let special = e == 8 && field == mask(e);
    (!special).then(|| field.max(1) as i32 - float.bias)
}

/// Finds the representable values next to `value`, in its block.
fn neighbours(stored: &Quantized, value: f64) -> (Option<f64>, Option<f64>) {
    let format = &stored.format;
    let width = format.code_bits();
    if width > 16 {
        return next_floats(format, value as f32);
    }
    let decoder = stored.block_decoder(0);
    let signed =
        matches!(format, Format::Affine(Affine { code: Code::Int(_) | Code::Ternary | Code::Fixed64, .. }));
    let element = |code: u32| {
        // Integer codes are sign-extended.
        let code = if signed { ((code << (32 - width)) as i32 >> (32 - width)) as u32 } else { code };
        f64::from(decoder.value(format.element(code)))
    };
    let values = (0..1u32 << width).map(element).filter(|value| value.is_finite());
    let (mut below, mut above) = (None::<f64>, None::<f64>);
    for other in values {
        if other < value && below.is_none_or(|below| other > below) {
            below = Some(other);
        }
        if other > value && above.is_none_or(|above| other < above) {
            above = Some(other);
        }
    }
    (below, above)
}

/// Returns the floats next to an f32, or to one rounded to TF32.
fn next_floats(format: &Format, value: f32) -> (Option<f64>, Option<f64>) {
    let finite = |x: f32| x.is_finite().then_some(f64::from(x));
    if !matches!(format, Format::Affine(Affine { code: Code::Tf32, .. })) {
        return (finite(value.next_down()), finite(value.next_up()));
    }
    let step = 1u32 << 13;
    let moved = |up: bool| {
        let bits = value.to_bits();
        let away = up != value.is_sign_negative();
        let bits = if away { bits.checked_add(step) } else { bits.checked_sub(step) };
        bits.and_then(|bits| finite(f32::from_bits(bits)))
    };
    (moved(false), moved(true))
}

/// Says what is special about a stored value.
fn note(x: f32, value: f64, format: &Format) -> Option<String> {
    if value == 0.0 && x != 0.0 {
        return Some("rounds to 0: below half of the smallest step".to_owned());
    }
    let float = float_of(format).filter(|_| format.scale().is_none())?;
    let largest = f64::from(float.max());
    if f64::from(x.abs()) > largest {
        return Some(format!("beyond the largest finite value, {largest}"));
    }
    let least = f64::from(float.min_normal());
    (value != 0.0 && value.abs() < least)
        .then(|| format!("subnormal: below {least:e}, the smallest normal value, digits are lost"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn of(x: f32, scheme: &str, amax: f32) -> Anatomy {
        anatomy(f64::from(x), &scheme.parse().unwrap(), amax, amax).unwrap()
    }

    #[test]
    fn a_tenth_in_every_format() {
        let single = of(0.1, "f32", 0.1);
        let fields: Vec<_> = single.bits.iter().map(|(_, bits)| bits.as_str()).collect();
        assert_eq!(fields, ["0", "01111011", "10011001100110011001101"]);
        assert_eq!((single.exponent, single.error), (Some(-4), 0.0));
        let half = of(0.1, "bf16", 0.1);
        assert_eq!(half.value, 0.10009765625);
        assert_eq!(half.bits[2].1, "1001101");
        assert_eq!((half.below, half.above), (Some(0.099609375), Some(0.1005859375)));
        let eight = of(0.1, "fp8-e4m3", 0.1);
        assert_eq!((eight.value, eight.exponent), (0.1015625, Some(-4)));
        assert_eq!(
            eight.bits.iter().map(|(_, bits)| bits.as_str()).collect::<Vec<_>>(),
            ["0", "0011", "101"]
        );
        let four = of(0.1, "fp4-e2m1", 0.1);
        assert_eq!((four.value, four.below, four.above), (0.0, Some(-0.5), Some(0.5)));
        assert!(four.note.unwrap().contains("rounds to 0"));
        let tf32 = of(0.1, "tf32", 0.1);
        assert_eq!(tf32.bits[2].1.len(), 10);
        assert!(tf32.below.unwrap() < tf32.value && tf32.value < tf32.above.unwrap());
    }

    #[test]
    fn blocks_scale_their_elements() {
        // amax 1 in int8: scale 1 / 127.5.
        let int8 = of(0.1, "int8-g32", 1.0);
        assert!((int8.scale.unwrap() - 1.0 / 127.5).abs() < 1e-6 && int8.error.abs() < 0.5 / 127.5);
        assert_eq!(int8.bits[0].1.len(), 8);
        let nvfp4 = of(0.1, "nvfp4", 1.0);
        assert!(nvfp4.below.unwrap() < nvfp4.value && nvfp4.value < nvfp4.above.unwrap());
        let nf4 = of(-0.1, "nf4", 1.0);
        assert!((nf4.value + 0.0911).abs() < 1e-3, "{nf4:?}");
        assert!(anatomy(0.1, &"q4_k".parse().unwrap(), 1.0, 1.0).is_err());
    }

    /// f64 0.1 is 0x3FB999999999999A: exponent field 01111111011 = 1019 (-4). Its f32 is 0.100000001490116, 1.49e-9 more.
    #[test]
    fn a_double_keeps_all_its_bits() {
        let of = |x: f64, scheme: &str| anatomy(x, &scheme.parse().unwrap(), 0.0, 0.0).unwrap();
        let found = of(0.1, "f64");
        assert_eq!((found.value, found.error, found.exponent), (0.1, 0.0, Some(-4)));
        let bits: String = found.bits.iter().map(|(_, bits)| bits.as_str()).collect();
        assert_eq!(u64::from_str_radix(&bits, 2), Ok(0.1f64.to_bits()));
        assert_eq!((found.below, found.above), (Some(0.1f64.next_down()), Some(0.1f64.next_up())));
        assert!((of(0.1, "f32").error - 1.490_116e-9).abs() < 1e-14);
        // -5e-324 and 1.7e308 are at the ends.
        assert!(of(-5e-324, "f64").note.unwrap().contains("subnormal"));
        assert_eq!((of(f64::MAX, "f64").above, of(f64::MAX, "f64").exponent), (None, Some(1023)));
    }

    /// NVFP4, block of amax 0.1 in a tensor of amax 1: the tensor's scale is 1 / (6 × 448) = 3.7202e-4, the block's
    /// (0.1 / 6) / 3.7202e-4 = 44.8, which E4M3 (steps of 4 from 32 to 64) rounds to 44: 44 × 3.7202e-4 = .0163690, 1.79 % less
    /// than 0.1 / 6 = .0166667, so that the largest code, 6, is .0982143 and 0.1 is clipped. With amax 0.11: 49.28 rounds to 48
    /// (-2.6 %); 0.105: 47.04 to 48 (+2.04 %), so that 0.105 is 5.88 of 6 and becomes 6 × .0178571 = .1071429.
    #[test]
    fn the_scale_of_a_block_is_rounded_and_clips() {
        let of =
            |x: f64, amax: f32, tensor: f32| anatomy(x, &"nvfp4".parse().unwrap(), amax, tensor).unwrap();
        let found = of(0.1, 0.1, 1.0);
        assert!((found.scale.unwrap() - 44.0 / 2688.0).abs() < 1e-7, "{found:?}");
        assert!((found.value - 6.0 * 44.0 / 2688.0).abs() < 1e-6, "{found:?}");
        let note = found.note.unwrap();
        assert!(note.contains("(-1.79 %)") && note.contains("is clipped to 0.098214"), "{note}");
        let note = of(0.0525, 0.105, 1.0).note.unwrap();
        assert!(note.contains("(+2.04 %)") && note.contains("becomes 0.107143"), "{note}");
        // Alone in its tensor the block's scale is 448, which E4M3 has.
        assert_eq!(of(0.1, 0.1, 0.1).note, None);
        // MXFP4: 0.1 / 6 = .0167 becomes a power of two: 2^-6 = .0156 by the floor of the exponent, and 0.1 is clipped to
        // 6 × 2^-6 = .09375.
        let found = anatomy(0.1, &"mxfp4:floor".parse().unwrap(), 0.1, 0.1).unwrap();
        assert!(found.note.unwrap().contains("clipped to 0.09375"));
    }

    /// The guide's example: 8 in a row of amax 0.8. Scale 0.8 / 127.5 = .00627451: the largest code, 127, is .796863, so the
    /// error is -7.203137 = 2296 × .00313725. Over 127 the scale is .00629921 and the largest value 0.8. INT4 asymmetric, range
    /// -0.8 to 0.8: scale 1.6 / 15 = .106667, zero point round(-8 + 7.5) = 0, values -8 to 7: -.853333 and .746667.
    #[test]
    fn what_lies_beyond_the_scale_is_clipped() {
        let found = of(8.0, "int8-channel", 0.8);
        assert!((found.value - 127.0 * 0.8 / 127.5).abs() < 1e-6 && found.clipped, "{found:?}");
        assert!((found.error + 7.203_137).abs() < 1e-5 && found.above.is_none(), "{found:?}");
        assert_eq!(found.bits[0].1, "01111111");
        let note = found.note.unwrap();
        assert!(note.contains("0.796863 is the largest value") && note.contains("is 2296 times"), "{note}");
        assert!((of(8.0, "int8-channel:restricted", 0.8).error + 7.2).abs() < 1e-6);
        for (x, value) in [(8.0, 7.0 * 1.6 / 15.0), (-8.0, -8.0 * 1.6 / 15.0)] {
            let found = of(x, "int4-channel-asym", 0.8);
            let right = if x > 0.0 { found.value > 0.0 } else { (found.value - value).abs() < 1e-6 };
            assert!(found.clipped && right, "{found:?}");
        }
        // MXFP4: 0.8 has the exponent -1, the scale is 2^-3, and the largest element 6 is .75. NF4 ends at amax.
        assert_eq!((of(8.0, "mxfp4:floor", 0.8).value, of(-8.0, "mxfp4:floor", 0.8).value), (0.75, -0.75));
        assert!((of(8.0, "nf4", 0.8).value - 0.8).abs() < 1e-6);
        // A scale that is rounded up reaches further than amax, so that 0.9 is rounded and not clipped: 2^-2 × 4.
        let found = of(0.9, "mxfp4:ceil", 0.8);
        assert_eq!((found.value, found.clipped), (1.0, false));
        assert!(!of(0.6, "int8-channel", 0.8).clipped && !of(8.0, "bf16", 0.8).clipped);
    }

    #[test]
    fn limits_are_named() {
        assert!(of(1e6, "f16", 1e6).note.unwrap().contains("65504"));
        assert!(of(1e-6, "f16", 1e-6).note.unwrap().contains("subnormal"));
        assert_eq!(of(0.0, "bf16", 0.0).relative_error, None);
    }
}
