//! `kv_cache`: `[batch, head, token, head_dim]`, per token and head, and per channel over groups of tokens.

use mantissa_num::pack::{Packing, transpose};
use mantissa_num::{Codes, Given, Quantized, Scheme, quantize};
use safetensors::SafeTensors;

use crate::support::{Get, assert_bytes, assert_codes, assert_same, open};

fn run(scheme: &str, x: &[f32], rows: usize, cols: usize) -> Quantized {
    let scheme: Scheme = scheme.parse().unwrap();
    quantize(&scheme, x, rows, cols, Given::default()).unwrap()
}

fn scales(q: &Quantized) -> Vec<f32> {
    (0..q.scales.len()).map(|i| f32::from_bits(q.scales.get(i))).collect()
}

fn bytes(q: &Quantized) -> Vec<u8> {
    let Codes::U8(codes) = &q.codes else { panic!("codes of at most 8 bits are bytes") };
    codes.clone()
}

/// Codes as in the data: unsigned if there is a minimum.
fn codes(q: &Quantized) -> Vec<i64> {
    let shift = if q.format.has_bias() { 1 << (q.format.code_bits() - 1) } else { 0 };
    let signed = q.format.element(0xff) == -1.0;
    bytes(q).iter().map(|&c| if signed { i64::from(c as i8) + shift } else { c.into() }).collect()
}

/// The dtype-specific name of an entry's codes.
fn golden_codes(t: &SafeTensors<'_>, base: &str) -> Vec<i64> {
    let names = ["codes", "codes_i8", "codes_u8"];
    names.iter().find_map(|n| t.ints(&format!("{base}.{n}"))).unwrap_or_else(|| panic!("{base} has codes"))
}

fn compare(t: &SafeTensors<'_>, base: &str, q: &Quantized) {
    assert_same(&format!("{base}.scale"), &scales(q), &t.f32(&format!("{base}.scale")).unwrap(), true);
    assert_codes(base, &codes(q), &golden_codes(t, base));
    if let Some(min) = t.f32(&format!("{base}.min")) {
        assert_same(&format!("{base}.min"), q.biases(), &min, false);
    }
    if let Some(dequant) = t.f32(&format!("{base}.dequant")) {
        assert_same(base, &q.dequantize().unwrap(), &dequant, false);
    }
}

#[test]
fn tokens_and_heads_match() {
    const ENTRIES: [(&str, &str); 6] = [
        ("int8_sym", "int8-head:restricted"),
        ("int4_sym", "int4-head:restricted"),
        ("int8_asym", "int8-head-asym:minmax"),
        ("int4_asym", "int4-head-asym:minmax"),
        ("fp8_e4m3", "fp8-e4m3-head"),
        ("fp8_e4m3_per_tensor", "fp8-e4m3-tensor"),
    ];
    for file in open("kv_cache.safetensors") {
        let t = file.tensors();
        for side in ["k", "v"] {
            let x = t.f32(&format!("{side}.x")).unwrap();
            let (rows, cols) = t.shape2(&format!("{side}.x"));
            for (entry, scheme) in ENTRIES {
                if t.tensor(&format!("{side}.{entry}.scale")).is_err() {
                    continue; // a tensor-wide scale cannot be cut to a subset
                }
                compare(&t, &format!("{side}.{entry}"), &run(scheme, &x, rows, cols));
            }
            let packed = Packing::rows(4).pack(&bytes(&run("int4-head:restricted", &x, rows, cols)), cols);
            let expected = t.u8(&format!("{side}.int4_sym.packed_low_nibble_first")).unwrap();
            assert_bytes(&format!("{side} packed"), &packed, &expected);
        }
    }
}

#[test]
fn groups_of_a_token_match() {
    for file in open("kv_cache.safetensors") {
        let t = file.tensors();
        let x = t.f32("v.x").unwrap();
        let (rows, cols) = t.shape2("v.x");
        for bits in [2, 4] {
            let q = run(&format!("int{bits}-g32-asym:minmax"), &x, rows, cols);
            compare(&t, &format!("v.per_token_group32_int{bits}"), &q);
        }
    }
}

/// Groups of tokens per channel (KIVI's keys) are groups of a row of the transpose, per head.
#[test]
fn groups_of_tokens_per_channel_match() {
    for file in open("kv_cache.safetensors") {
        let t = file.tensors();
        let x = t.f32("k.x").unwrap();
        let shape = t.tensor("k.x").unwrap().shape().to_vec();
        let (tokens, channels) = (shape[2], shape[3]);
        for bits in [2, 4] {
            let base = format!("k.per_channel_group8_int{bits}");
            let get = |name: &str| t.f32(&format!("{base}.{name}")).unwrap();
            let (scale, min, dequant) = (get("scale"), get("min"), get("dequant"));
            let expected = golden_codes(&t, &base);
            let groups = tokens / 8;
            for (head, x) in x.chunks_exact(tokens * channels).enumerate() {
                let scheme = format!("int{bits}-g8-asym:minmax");
                let q = run(&scheme, &transpose(x, tokens, channels), channels, tokens);
                let at = |all: &[f32], n: usize| all[head * n..][..n].to_vec();
                let n = groups * channels;
                // The data has [group, channel], the transpose [channel, group].
                assert_same(&base, &transpose(&scales(&q), channels, groups), &at(&scale, n), true);
                assert_same(&base, &transpose(q.biases(), channels, groups), &at(&min, n), false);
                let n = tokens * channels;
                assert_codes(&base, &transpose(&codes(&q), channels, tokens), &expected[head * n..][..n]);
                let values = transpose(&q.dequantize().unwrap(), channels, tokens);
                assert_same(&base, &values, &at(&dequant, n), false);
            }
        }
    }
}
