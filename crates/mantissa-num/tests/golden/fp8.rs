//! `fp8_tiles`: DeepSeek's 1×128 and 128×128 tiles, plain FP8, DeepGEMM's FP4.

use mantissa_num::blockwise::Range;
use mantissa_num::{Given, Quantized, Scheme, e8m0, quantize};
use safetensors::SafeTensors;

use crate::support::{Get, assert_codes, assert_same, nibbles, open};

/// Golden producers of tiles, as (name up to the tile, after it, rule).
const PRODUCERS: [(&str, &str, &str); 4] = [
    ("deepgemm", "", "floor1e-4"),
    ("deepgemm", "_ue8m0", "ue8m0"),
    ("deepseek_v3_kernel", "", "deepseek-v3"),
    ("torchao", "", "floor1e-12"),
];

fn scales(q: &Quantized) -> Vec<f32> {
    let powers = q.format.scale().unwrap().code.bits() == 8;
    let value = |code: u32| if powers { e8m0::decode(code as u8) } else { f32::from_bits(code) };
    (0..q.scales.len()).map(|i| value(q.scales.get(i))).collect()
}

fn codes(q: &Quantized) -> Vec<i64> {
    (0..q.codes.len()).map(|i| q.codes.get(i).into()).collect()
}

/// Compares scales, codes and, if present, values of one entry. Returns true if the entry is in this file.
fn compare(t: &SafeTensors<'_>, x: &str, base: &str, scheme: &str) -> bool {
    let Some(scale) = t.f32(&format!("{base}.scale")) else { return false };
    let (rows, cols) = t.shape2(x);
    let q = quantize(&scheme.parse().unwrap(), &t.f32(x).unwrap(), rows, cols, Given::default()).unwrap();
    assert_same(&format!("{base}.scale"), &scales(&q), &scale, true);
    match t.ints(&format!("{base}.codes")) {
        Some(expected) => assert_codes(base, &codes(&q), &expected),
        None => {
            let packed: Vec<i64> =
                nibbles(&t.u8(&format!("{base}.packed")).unwrap()).into_iter().map(i64::from).collect();
            assert_codes(base, &codes(&q), &packed);
        }
    }
    if let Some(dequant) = t.f32(&format!("{base}.dequant")) {
        assert_same(base, &q.dequantize().unwrap(), &dequant, true);
    }
    true
}

#[test]
fn tiles_match_each_producer() {
    let mut checked = [0; PRODUCERS.len()];
    for file in open("fp8_tiles.safetensors") {
        let t = file.tensors();
        for (kind, tile) in [("act", "1x128"), ("weight", "128x128")] {
            let prefix = format!("{kind}.");
            for x in t.names() {
                let Some(name) = x.strip_suffix(".x").filter(|n| n.starts_with(&prefix)) else { continue };
                for (i, (before, after, rule)) in PRODUCERS.into_iter().enumerate() {
                    let base = format!("{name}.{before}_{tile}{after}");
                    checked[i] += usize::from(compare(&t, x, &base, &format!("fp8-e4m3-t{tile}:{rule}")));
                }
            }
        }
    }
    assert!(checked.iter().all(|&n| n >= 3), "{checked:?}");
}

#[test]
fn plain_scales_match() {
    for file in open("fp8_tiles.safetensors") {
        let t = file.tensors();
        for (golden, granularity) in [("per_tensor", "tensor"), ("per_row", "channel")] {
            for (golden_element, element) in [("e4m3fn", "fp8-e4m3"), ("e5m2", "fp8-e5m2")] {
                let base = format!("plain.{golden}.{golden_element}");
                assert!(compare(&t, "plain.x", &base, &format!("{element}-{granularity}")), "{base}");
            }
        }
    }
}

#[test]
fn deepgemm_fp4_rounds_halves_toward_zero() {
    for file in open("fp8_tiles.safetensors") {
        let t = file.tensors();
        assert!(compare(&t, "fp4.x", "fp4.deepgemm_1x32", "fp4-e2m1-g32:deepgemm"));
        assert!(compare(&t, "fp4.x", "fp4.deepgemm_1x32_ue8m0", "mxfp4:deepgemm"));
        let x = t.f32("fp4.ties.x").unwrap();
        for (scheme, column) in [("fp4-e2m1-g32:deepgemm", "deepgemm_codes"), ("fp4-e2m1-g32", "rne_codes")] {
            let scheme: Scheme = scheme.parse().unwrap();
            // A block whose amax is the largest element has scale 1.
            let unit = scheme.block(Range::of(&[6.0]), false, None);
            let found: Vec<i64> = x.iter().map(|&x| scheme.encode(x, &unit, 0).into()).collect();
            assert_codes(column, &found, &t.ints(&format!("fp4.ties.{column}")).unwrap());
        }
    }
}
