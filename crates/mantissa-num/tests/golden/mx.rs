//! `mx_formats`, `mx_compressed_tensors`: OCP Microscaling under every rule.

use mantissa_num::{Given, Quantized, Scheme, quantize};
use safetensors::SafeTensors;

use crate::support::{Get, assert_codes, assert_same, nibbles, open, same};

const FORMATS: [(&str, &str); 6] = [
    ("mxfp8-e4m3", "mxfp8_e4m3"),
    ("mxfp8-e5m2", "mxfp8_e5m2"),
    ("mxfp6-e2m3", "mxfp6_e2m3"),
    ("mxfp6-e3m2", "mxfp6_e3m2"),
    ("mxfp4", "mxfp4_e2m1"),
    ("mxint8", "mxint8"),
];

fn run(name: &str, rule: &str, x: &[f32], rows: usize, cols: usize) -> Quantized {
    let scheme: Scheme = format!("{name}:{rule}").parse().unwrap();
    quantize(&scheme, x, rows, cols, Given::default()).unwrap()
}

fn scale_codes(q: &Quantized) -> Vec<i64> {
    (0..q.scales.len()).map(|i| q.scales.get(i).into()).collect()
}

fn element_codes(q: &Quantized) -> Vec<i64> {
    let signed = q.format.element(0xff) == -1.0 / 64.0;
    (0..q.codes.len())
        .map(|i| q.codes.get(i))
        .map(|c| if signed { i64::from(c as u8 as i8) } else { c.into() })
        .collect()
}

#[test]
fn ocp_floor_is_bit_exact() {
    for file in open("mx_formats.safetensors") {
        let t = file.tensors();
        let x = t.f32("x").unwrap();
        let (rows, cols) = t.shape2("x");
        for (name, golden) in FORMATS {
            let base = format!("{golden}.ocp_floor");
            let q = run(name, "floor", &x, rows, cols);
            assert_codes(
                &format!("{base}.scale"),
                &scale_codes(&q),
                &t.ints(&format!("{base}.scale_e8m0")).unwrap(),
            );
            assert_codes(&base, &element_codes(&q), &t.ints(&format!("{base}.codes")).unwrap());
            assert_same(
                &base,
                &q.dequantize().unwrap(),
                &t.f32(&format!("{base}.dequant")).unwrap(),
                name != "mxint8",
            );
        }
    }
}

/// torchao divides by 2^-126 for scale code 0 (floor, ceil, even), so codes are compared only for others.
#[test]
fn torchao_rules_choose_the_same_scales_and_codes() {
    for file in open("mx_formats.safetensors") {
        let t = file.tensors();
        for (x_name, suffix) in [("x", ""), ("x_special", ".special")] {
            let x = t.f32(x_name).unwrap();
            let (rows, cols) = t.shape2(x_name);
            for (name, golden) in &FORMATS[..5] {
                for (rule, producer) in
                    [("floor", "floor"), ("ceil", "ceil"), ("even", "even"), ("torchao-rceil", "rceil")]
                {
                    let base = format!("{golden}.torchao_{producer}{suffix}");
                    let q = run(name, rule, &x, rows, cols);
                    let scales = t.ints(&format!("{base}.scale_e8m0")).unwrap();
                    assert_codes(&format!("{base}.scale"), &scale_codes(&q), &scales);
                    torchao_codes(&t, &base, &q, &scales, &x, rule == "torchao-rceil");
                }
                let exact = format!("{golden}.torchao_rceil.scale_e8m0_exact_ceil");
                if x_name == "x" {
                    assert_codes(
                        &exact,
                        &scale_codes(&run(name, "rceil", &x, rows, cols)),
                        &t.ints(&exact).unwrap(),
                    );
                }
            }
        }
    }
}

fn torchao_codes(
    t: &SafeTensors<'_>,
    base: &str,
    q: &Quantized,
    scales: &[i64],
    x: &[f32],
    also_zero_scale: bool,
) {
    let packed = t.u8(&format!("{base}.codes_packed")).map(|p| nibbles(&p));
    let expected: Option<Vec<i64>> =
        packed.map(|p| p.into_iter().map(i64::from).collect()).or_else(|| t.ints(&format!("{base}.codes")));
    let found = element_codes(q);
    let dequant = t.f32(&format!("{base}.dequant"));
    let ours = q.dequantize().unwrap();
    for i in 0..found.len() {
        let scale = scales[i / 32];
        if scale == 255 || x[i].is_nan() {
            assert!(ours[i].is_nan(), "{base}[{i}]");
            continue;
        }
        if scale == 0 && !also_zero_scale {
            continue;
        }
        if let Some(expected) = &expected {
            let equal = found[i] == expected[i];
            assert!(equal, "{base}[{i}]: found {:#x}, expected {:#x} for {:e}", found[i], expected[i], x[i]);
        }
        if let Some(dequant) = &dequant {
            assert!(same(ours[i], dequant[i], true), "{base}.dequant[{i}]: {:e} {:e}", ours[i], dequant[i]);
        }
    }
}

/// microxcaling takes the exponent from an f32 logarithm (wrong just below a power of two) and loses the sign of
/// zero; its `even` mode is otherwise the OCP rule. The test shows that blocks with different scales are of that
/// kind.
#[test]
fn microxcaling_even_equals_floor_but_for_its_logarithm() {
    for file in open("mx_formats.safetensors") {
        let t = file.tensors();
        let x = t.f32("x").unwrap();
        let (rows, cols) = t.shape2("x");
        for (name, golden) in FORMATS {
            let base = format!("{golden}.microxcaling_even");
            let Some(expected) = t.f32(&format!("{base}.dequant")) else { continue };
            let scales = t.ints(&format!("{base}.scale_e8m0")).unwrap();
            let q = run(name, "floor", &x, rows, cols);
            let ours = q.dequantize().unwrap();
            for (block, &scale) in scales.iter().enumerate() {
                let range = block * 32..(block + 1) * 32;
                let amax = x[range.clone()].iter().fold(0f32, |a, v| a.max(v.abs()));
                if i64::from(q.scales.get(block)) == scale {
                    assert!(
                        range.clone().all(|i| same(ours[i], expected[i], false) || !expected[i].is_finite()),
                        "{base} block {block}"
                    );
                } else {
                    let just_below = amax.to_bits() & 0x007f_ffff > 0x007f_ff00;
                    assert!(
                        just_below || amax < 1e-30 || scale == 255,
                        "{base} block {block}: {scale}, amax {amax:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn compressed_tensors_rounds_the_exponent_by_element_width() {
    for file in open("mx_compressed_tensors.safetensors") {
        let t = file.tensors();
        let x = t.f32("x").unwrap();
        let (rows, cols) = t.shape2("x");
        for (name, golden) in [("mxfp4", "mxfp4"), ("mxfp6-e2m3", "mxfp6_e2m3"), ("mxfp8-e4m3", "mxfp8_e4m3")]
        {
            let base = format!("{golden}.compressed_tensors");
            let q = run(name, "ct", &x, rows, cols);
            let found: Vec<f32> =
                (0..q.scales.len()).map(|i| mantissa_num::e8m0::decode(q.scales.get(i) as u8)).collect();
            assert_same(
                &format!("{base}.scale"),
                &found,
                &t.f32(&format!("{base}.scale_f32")).unwrap(),
                true,
            );
            let elements: Vec<f32> = (0..q.codes.len()).map(|i| q.format.element(q.codes.get(i))).collect();
            assert_same(
                &format!("{base}.values"),
                &elements,
                &t.f32(&format!("{base}.values")).unwrap(),
                false,
            );
            assert_same(&base, &q.dequantize().unwrap(), &t.f32(&format!("{base}.dequant")).unwrap(), false);
        }
    }
}
