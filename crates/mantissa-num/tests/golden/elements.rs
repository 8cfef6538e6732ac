//! `elements_decode`, `elements_encode`: code ↔ f32 of every element format.

use mantissa_num::minifloat::{self, MiniFloat, Overflow};
use mantissa_num::{Given, Rounding, Scheme, e8m0, quantize};

use crate::support::{Get, open, same};

fn golden_name(f: &MiniFloat) -> String {
    match f.name {
        "f16" | "bf16" => f.name.into(),
        name => {
            let body = name.split_once('-').unwrap().1;
            let width = &name[2..3];
            if body.ends_with("fnuz") {
                format!("f{width}_{body}")
            } else if body == "e5m2" {
                "f8_e5m2".into()
            } else {
                format!("f{width}_{body}fn")
            }
        }
    }
}

#[test]
fn every_code_decodes() {
    let mut checked = 0;
    for file in open("elements_decode.safetensors") {
        let t = file.tensors();
        for f in minifloat::ALL {
            let Some(values) = t.f32(&format!("{}.decode", golden_name(&f))) else { continue };
            assert_eq!(values.len(), 1 << f.bits());
            for (code, &value) in values.iter().enumerate() {
                assert!(same(f.decode(code as u32), value, true), "{} {code:#x}", f.name);
            }
            checked += 1;
        }
        let scales = t.f32("f8_e8m0fnu.decode").unwrap();
        assert!((0..=255).all(|c| same(e8m0::decode(c), scales[usize::from(c)], true)));
    }
    assert!(checked >= 7);
}

#[test]
fn every_input_encodes_with_saturation_and_with_specials() {
    for file in open("elements_encode.safetensors") {
        let t = file.tensors();
        for f in minifloat::ALL {
            let name = golden_name(&f);
            let x = t.ints(&format!("{name}.x_bits")).unwrap();
            let saturating = t.ints(&format!("{name}.code_saturating")).unwrap();
            let special = t.ints(&format!("{name}.code_ml_dtypes")).unwrap();
            for (i, &bits) in x.iter().enumerate() {
                let value = f32::from_bits(bits as u32);
                let encode = |o| f.encode(value, o, Rounding::NearestEven, 0);
                if value.is_nan() {
                    assert!(!f.has_nan() || f.decode(encode(Overflow::Special)).is_nan(), "{name} {bits:#x}");
                    continue;
                }
                assert_eq!(
                    i64::from(encode(Overflow::Saturate)),
                    saturating[i],
                    "{name} saturating {value:e}"
                );
                assert_eq!(i64::from(encode(Overflow::Special)), special[i], "{name} special {value:e}");
            }
        }
    }
}

#[test]
fn power_of_two_scales_round_three_ways() {
    for file in open("elements_encode.safetensors") {
        let t = file.tensors();
        let x = t.ints("f8_e8m0fnu.x_bits").unwrap();
        type Encode = fn(f32) -> u8;
        let columns: [(&str, Encode); 3] = [
            ("code_floor_of_abs", e8m0::floor_of_abs),
            ("code_ceil_of_abs", e8m0::ceil_of_abs),
            ("code_ml_dtypes", e8m0::nearest),
        ];
        for (column, encode) in columns {
            let expected = t.ints(&format!("f8_e8m0fnu.{column}")).unwrap();
            for (&bits, &code) in x.iter().zip(&expected) {
                let value = f32::from_bits(bits as u32);
                assert_eq!(i64::from(encode(value)), code, "{column} {value:e} {bits:#x}");
            }
        }
    }
}

#[test]
fn integers_round_to_even_and_clamp() {
    for file in open("elements_encode.safetensors") {
        let t = file.tensors();
        let x = t.f32("int.x").unwrap();
        for bits in [8u32, 4] {
            for (rule, column) in [("full", "rne_clamp_full"), ("restricted", "rne_clamp_symmetric")] {
                // A block with a scale of exactly 1 involves only rounding and clamping.
                let scheme: Scheme = format!("int{bits}-tensor:{rule}").parse().unwrap();
                let high = ((1 << (bits - 1)) - 1) as f32;
                let top = if rule == "full" { high + 0.5 } else { high };
                let unit = scheme.block(mantissa_num::blockwise::Range::of(&[top]), false, None);
                let expected = t.ints(&format!("int{bits}.{column}")).unwrap();
                for (&x, &e) in x.iter().zip(&expected) {
                    let code = scheme.encode(x, &unit, 0) as u8 as i8;
                    assert_eq!(i64::from(code), e, "int{bits} {rule} {x:e}");
                }
            }
        }
    }
}

/// No reference data for these elements: checks tf32 against rounding by addition, f64 and ternary against their
/// definitions.
#[test]
fn wide_elements_and_ternary_are_their_formulas() {
    let random = |i: u64| f32::from_bits(mantissa_num::round::random_u32(9, i));
    let mut x: Vec<f32> = (0..20_000).map(random).filter(|v| !v.is_nan()).collect();
    x.extend([0.0, -0.0, f32::MIN_POSITIVE, f32::from_bits(1), f32::INFINITY, f32::MAX, -f32::MAX]);
    let run =
        |name: &str, x: &[f32]| quantize(&name.parse().unwrap(), x, 1, x.len(), Given::default()).unwrap();
    for (x, tf32) in x.iter().zip(run("tf32", &x).dequantize().unwrap()) {
        let bits = x.to_bits();
        let rounded = (bits + 0xfff + (bits >> 13 & 1)) & !0x1fff;
        assert_eq!(tf32.to_bits(), if x.is_finite() { rounded } else { bits }, "{x:e}");
    }
    let f64s = run("f64", &x);
    let wide: Vec<u8> = x.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect();
    assert_eq!(f64s.codes.to_le_bytes(), wide);
    assert_eq!(f64s.dequantize().unwrap(), x);
    // Mean magnitude 1.5: halves go to the even neighbour, 0.
    let ternary = run("ternary-tensor", &[0.0, -0.75, 0.8, 4.45]);
    assert_eq!(ternary.dequantize().unwrap(), [0.0, 0.0, 1.5, 1.5]);
    assert_eq!(run("ternary-tensor:amax", &[0.5, -0.6, 1.0]).dequantize().unwrap(), [0.0, -1.0, 1.0]);
}
