//! `int_affine`: symmetric and asymmetric integers per tensor, channel and group, and int32 packing.

use mantissa_num::pack::{Packing, transpose};
use mantissa_num::{Given, Quantized, Scheme, quantize};

use crate::support::{Get, assert_codes, assert_same, open};

const TENSORS: [&str; 5] = ["dyadic", "gaussian", "outlier_channels", "skewed_positive", "student_t3"];
const BLOCKS: [(&str, &str); 4] =
    [("tensor", "tensor"), ("channel", "channel"), ("group32", "g32"), ("group64", "g64")];

fn codes(q: &Quantized) -> Vec<i64> {
    (0..q.codes.len()).map(|i| i64::from(q.codes.get(i) as u8 as i8)).collect()
}

fn scales(q: &Quantized) -> Vec<f32> {
    (0..q.scales.len()).map(|i| f32::from_bits(q.scales.get(i))).collect()
}

#[test]
fn scales_codes_and_zero_points_match_each_producer() {
    let mut checked = 0;
    for file in open("int_affine.safetensors") {
        let t = file.tensors();
        for tensor in TENSORS {
            let Some(x) = t.f32(&format!("{tensor}.x")) else { continue };
            let (rows, cols) = t.shape2(&format!("{tensor}.x"));
            for (bits, symmetric) in [(8, true), (8, false), (4, true), (4, false)] {
                for (golden, blocks) in BLOCKS {
                    let kind = if symmetric { "sym" } else { "asym" };
                    let base = format!("{tensor}.int{bits}_{kind}_{golden}");
                    let run = |rule: &str| {
                        let scheme: Scheme = format!("int{bits}-{blocks}-{kind}:{rule}").parse().unwrap();
                        quantize(&scheme, &x, rows, cols, Given::default()).unwrap()
                    };
                    checked += compressed_tensors(&t, &base, &run(if symmetric { "full" } else { "ct" }));
                    if symmetric {
                        checked += plain(&t, &format!("{base}.restricted"), "codes_i8", &run("restricted"));
                        checked += plain(
                            &t,
                            &format!("{base}.torchao_no_clipping_err"),
                            "codes",
                            &run("no-clipping-err"),
                        );
                    }
                    checked += torchao(&t, &base, symmetric, bits, &run("torchao"));
                }
            }
        }
    }
    assert!(checked > 20, "{checked}");
}

fn plain(t: &safetensors::SafeTensors<'_>, base: &str, codes_name: &str, q: &Quantized) -> usize {
    let Some(scale) = t.f32(&format!("{base}.scale")) else { return 0 };
    assert_same(&format!("{base}.scale"), &scales(q), &scale, true);
    assert_codes(base, &codes(q), &t.ints(&format!("{base}.{codes_name}")).unwrap());
    1
}

fn compressed_tensors(t: &safetensors::SafeTensors<'_>, base: &str, q: &Quantized) -> usize {
    let base = format!("{base}.compressed_tensors");
    if plain(t, &base, "codes_i8", q) == 0 {
        return 0;
    }
    if let Some(zeros) = t.ints(&format!("{base}.zero_point_i8")) {
        let found: Vec<i64> = q.zeros().iter().map(|&z| z.into()).collect();
        assert_codes(&format!("{base}.zero"), &found, &zeros);
    }
    assert_same(
        &format!("{base}.dequant"),
        &q.dequantize().unwrap(),
        &t.f32(&format!("{base}.dequant")).unwrap(),
        false,
    );
    if let Some(packed) = t.u8(&format!("{base}.packed_i32")) {
        let mantissa_num::Codes::U8(codes) = &q.codes else { panic!("int codes are bytes") };
        assert_eq!(Packing::compressed_tensors_int(4).pack(codes, q.cols), packed, "{base}.packed_i32");
    }
    1
}

fn torchao(t: &safetensors::SafeTensors<'_>, base: &str, symmetric: bool, bits: u32, q: &Quantized) -> usize {
    let base = format!("{base}.torchao");
    let Some(scale) = t.f32(&format!("{base}.scale")) else { return 0 };
    assert_same(&format!("{base}.scale"), &scales(q), &scale, true);
    // torchao's asymmetric codes and zero points live in the unsigned domain.
    let shift = if symmetric { 0 } else { 1 << (bits - 1) };
    let found: Vec<i64> = codes(q).iter().map(|c| c + shift).collect();
    assert_codes(&base, &found, &t.ints(&format!("{base}.codes")).unwrap());
    if let Some(zeros) = t.ints(&format!("{base}.zero_point_i32")) {
        let found: Vec<i64> = q.zeros().iter().map(|&z| i64::from(z) + shift).collect();
        assert_codes(&format!("{base}.zero"), &found, &zeros);
    }
    1
}

#[test]
fn int32_packing_along_both_axes() {
    for file in open("int_affine.safetensors") {
        let t = file.tensors();
        for bits in 1..=8 {
            let base = format!("pack_int32.bits{bits}");
            let codes = t.u8(&format!("{base}.codes_i8")).unwrap();
            let (rows, cols) = t.shape2(&format!("{base}.codes_i8"));
            let packing = Packing::compressed_tensors_int(bits);
            let packed = packing.pack(&codes, cols);
            assert_eq!(packed, t.u8(&format!("{base}.packed_i32")).unwrap(), "{base}");
            assert_eq!(packing.unpack(&packed, rows, cols, true).unwrap(), codes, "{base}");
            // Packed along dim 0, the input is the transpose.
            let down = transpose(&codes, rows, cols);
            let packed = packing.pack_dim0(&down, cols, rows);
            assert_eq!(packed, t.u8(&format!("{base}.packed_dim0_i32")).unwrap(), "{base} dim 0");
            assert_eq!(packing.unpack_dim0(&packed, cols, rows, true).unwrap(), down, "{base} dim 0");
        }
    }
}
