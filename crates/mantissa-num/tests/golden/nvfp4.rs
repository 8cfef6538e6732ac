//! `nvfp4`: every producer's scales and codes, and the order of scales for tensor cores.

use mantissa_num::{Blocks, Given, Quantized, Scheme, quantize, swizzle};

use crate::support::{Get, assert_bytes, assert_codes, assert_same, nibbles, open};

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

/// A producer's entry: its rule, the names of its tensors, and the scale repeated for each row of a tile.
struct Producer {
    entry: &'static str,
    rule: &'static str,
    outer: Option<&'static str>,
    dequant: Option<&'static str>,
}

const TE_DEQUANT: &str = "dequant_code_x_scale_x_amax_over_2688";

const fn producer(
    entry: &'static str,
    rule: &'static str,
    outer: Option<&'static str>,
    dequant: Option<&'static str>,
) -> Producer {
    Producer { entry, rule, outer, dequant }
}

const PRODUCERS: [Producer; 6] = [
    producer("compressed_tensors", "ct", Some("global_scale"), Some("dequant")),
    producer("transformer_engine_1x16", "te", Some("amax"), Some(TE_DEQUANT)),
    producer("transformer_engine_16x16", "te-2d", Some("amax"), Some(TE_DEQUANT)),
    producer("transformer_engine_4over6_mse_e4m3max256", "4over6", Some("amax"), None),
    producer("torchao_1level", "torchao-1level", None, Some("dequant")),
    producer("torchao_2level", "torchao", Some("per_tensor_scale"), Some("dequant")),
];

#[test]
fn every_rule_is_bit_exact() {
    for Producer { entry, rule, outer, dequant } in PRODUCERS {
        let scheme: Scheme = format!("nvfp4:{rule}").parse().unwrap();
        let mut checked = 0;
        for file in open("nvfp4.safetensors") {
            let t = file.tensors();
            for name in tensors(&t) {
                let base = format!("{name}.{entry}");
                let Some(scales) = t.ints(&format!("{base}.scale_e4m3")) else { continue };
                let (rows, cols) = t.shape2(&format!("{name}.x"));
                let x = t.f32(&format!("{name}.x")).unwrap();
                let q = quantize(&scheme, &x, rows, cols, Given::default()).unwrap();
                checked += 1;
                // torchao divides zero by zero in an all-zero tensor: not copied.
                if rule == "torchao" && x.iter().all(|&v| v == 0.0) {
                    assert!(q.dequantize().unwrap().iter().all(|&v| v == 0.0), "{base}");
                    continue;
                }
                if let Some(outer) = outer {
                    assert_same(
                        &base,
                        &[q.outer().unwrap()],
                        &t.f32(&format!("{base}.{outer}")).unwrap(),
                        true,
                    );
                }
                assert_codes(&format!("{base}.scale"), &by_row(&q), &scales);
                compare_codes(&base, &q, &t.u8(&format!("{base}.codes_packed")).unwrap());
                if let Some(expected) = dequant.and_then(|dequant| t.f32(&format!("{base}.{dequant}"))) {
                    assert_same(&base, &q.dequantize().unwrap(), &expected, false);
                }
            }
        }
        assert!(checked >= 6, "{entry}: {checked}");
    }
}

/// Scale codes with one row per row of the tensor: the producers repeat a tile's.
fn by_row(q: &Quantized) -> Vec<i64> {
    let per_row = q.cols.div_ceil(16);
    let codes = scale_codes(q);
    match q.format.blocks() {
        Blocks::Tile { rows, .. } => {
            (0..q.rows).flat_map(|r| codes[r / rows as usize * per_row..][..per_row].to_vec()).collect()
        }
        _ => codes,
    }
}

#[test]
fn block_scales_are_tiled_for_tensor_cores() {
    let mut checked = 0;
    for file in open("nvfp4.safetensors") {
        let t = file.tensors();
        for i in 0..3 {
            let Some(scales) = t.u8(&format!("swizzle_{i}.scales")) else { continue };
            let (rows, cols) = t.shape2(&format!("swizzle_{i}.scales"));
            let blocked = t.u8(&format!("swizzle_{i}.blocked")).unwrap();
            assert_bytes(&format!("swizzle_{i}"), &swizzle::to_blocked(&scales, rows, cols), &blocked);
            assert_eq!(swizzle::from_blocked(&blocked, rows, cols).unwrap(), scales, "swizzle_{i}");
            checked += 1;
        }
    }
    assert!(checked >= 2);
}
