//! `nvfp4`: two-level scales of compressed-tensors and Transformer Engine.

use mantissa_num::{Given, Quantized, Scheme, quantize};

use crate::support::{Get, assert_codes, assert_same, nibbles, open};

fn tensors(t: &safetensors::SafeTensors<'_>) -> Vec<String> {
    t.names().iter().filter_map(|n| n.strip_suffix(".x")).map(Into::into).collect()
}

fn scale_codes(q: &Quantized) -> Vec<i64> {
    (0..q.scales.len()).map(|i| q.scales.get(i).into()).collect()
}

/// Zero codes 0 and 8 may differ between producers.
fn compare_codes(base: &str, q: &Quantized, packed: &[u8]) {
    for (i, expected) in nibbles(packed).into_iter().enumerate() {
        let found = q.codes.get(i);
        let equal = q.format.element(found) == q.format.element(expected.into());
        assert!(equal, "{base}[{i}]: found {found}, expected {expected}");
    }
}

#[test]
fn compressed_tensors_rule_is_bit_exact() {
    let mut checked = 0;
    for file in open("nvfp4.safetensors") {
        let t = file.tensors();
        for name in tensors(&t) {
            let base = format!("{name}.compressed_tensors");
            let Some(global) = t.f32(&format!("{base}.global_scale")) else { continue };
            let (rows, cols) = t.shape2(&format!("{name}.x"));
            let scheme: Scheme = "nvfp4:ct".parse().unwrap();
            let q = quantize(&scheme, &t.f32(&format!("{name}.x")).unwrap(), rows, cols, Given::default())
                .unwrap();
            assert_same(&base, &[q.outer.unwrap()], &global, true);
            assert_codes(
                &format!("{base}.scale"),
                &scale_codes(&q),
                &t.ints(&format!("{base}.scale_e4m3")).unwrap(),
            );
            compare_codes(&base, &q, &t.u8(&format!("{base}.codes_packed")).unwrap());
            assert_same(&base, &q.dequantize().unwrap(), &t.f32(&format!("{base}.dequant")).unwrap(), false);
            checked += 1;
        }
    }
    assert!(checked >= 6);
}

#[test]
fn transformer_engine_rule_is_bit_exact() {
    let mut checked = 0;
    for file in open("nvfp4.safetensors") {
        let t = file.tensors();
        for name in tensors(&t) {
            let base = format!("{name}.transformer_engine_1x16");
            let Some(amax) = t.f32(&format!("{base}.amax")) else { continue };
            let (rows, cols) = t.shape2(&format!("{name}.x"));
            let scheme: Scheme = "nvfp4:te".parse().unwrap();
            let q = quantize(&scheme, &t.f32(&format!("{name}.x")).unwrap(), rows, cols, Given::default())
                .unwrap();
            assert_same(&base, &[q.outer.unwrap()], &amax, true);
            assert_codes(
                &format!("{base}.scale"),
                &scale_codes(&q),
                &t.ints(&format!("{base}.scale_e4m3")).unwrap(),
            );
            compare_codes(&base, &q, &t.u8(&format!("{base}.codes_packed")).unwrap());
            let dequant = t.f32(&format!("{base}.dequant_code_x_scale_x_amax_over_2688")).unwrap();
            assert_same(&base, &q.dequantize().unwrap(), &dequant, false);
            checked += 1;
        }
    }
    assert!(checked >= 6);
}
