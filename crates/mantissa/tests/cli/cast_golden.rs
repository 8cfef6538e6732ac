//! `mantissa cast` against the reference data of `tests/data/golden`, by family. The library's own tests
//! cover all values; these check the command's layout, names and signs.

use crate::support::{File, root, succeed, text, write_x};

/// Casts tensor `x` of a golden file with `--packed`; returns the golden file and the output.
fn cast(golden: &str, x: &str, scheme: &str) -> (File, File) {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let file = File::open(&root().join("tests/data/golden").join(golden));
    write_x(&input, &file.shape(x), &file.f32(x));
    succeed(&["cast", text(&input), "--scheme", scheme, "--out", text(&out), "--packed"]);
    // The open file stays readable after its folder is gone.
    (file, File::open(&out))
}

fn same_values(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f == e || (f.is_nan() && e.is_nan()), "{what}[{i}]: found {f:e}, expected {e:e}");
    }
}

fn nibbles(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|b| [b & 15, b >> 4]).collect()
}

#[test]
fn integers_match_compressed_tensors() {
    let prefix = "dyadic.int4_asym_group32.compressed_tensors";
    let (golden, out) = cast("int_affine.safetensors", "dyadic.x", "int4-g32-asym");
    assert_eq!(out.bytes("x.codes"), golden.bytes(&format!("{prefix}.codes_i8")));
    assert_eq!(out.f32("x.scale"), golden.f32(&format!("{prefix}.scale")));
    let zeros: Vec<i32> =
        golden.bytes(&format!("{prefix}.zero_point_i8")).iter().map(|&b| i32::from(b as i8)).collect();
    assert_eq!(out.i32("x.zero"), zeros);
    assert_eq!(out.bytes("x.packed"), golden.bytes(&format!("{prefix}.packed_i32")));
    same_values("dequant", &out.f32("x.dequant"), &golden.f32(&format!("{prefix}.dequant")));
    for (scheme, case) in [("int8-channel-sym:full", "int8_sym_channel"), ("int4-g32", "int4_sym_group32")] {
        let (golden, out) = cast("int_affine.safetensors", "dyadic.x", scheme);
        let prefix = format!("dyadic.{case}.compressed_tensors");
        assert_eq!(out.bytes("x.codes"), golden.bytes(&format!("{prefix}.codes_i8")), "{scheme}");
        assert_eq!(out.f32("x.scale"), golden.f32(&format!("{prefix}.scale")), "{scheme}");
        assert!(!out.has("x.zero"));
    }
}

#[test]
fn microscaling_matches_ocp() {
    for (scheme, case) in [
        ("mxfp8-e4m3", "mxfp8_e4m3"),
        ("mxfp6-e2m3", "mxfp6_e2m3"),
        ("mxfp4:floor", "mxfp4_e2m1"),
        ("mxint8", "mxint8"),
    ] {
        let (golden, out) = cast("mx_formats.safetensors", "x", scheme);
        assert_eq!(out.bytes("x.scale"), golden.bytes(&format!("{case}.ocp_floor.scale_e8m0")), "{scheme}");
        assert_eq!(out.bytes("x.codes"), golden.bytes(&format!("{case}.ocp_floor.codes")), "{scheme}");
        same_values(scheme, &out.f32("x.dequant"), &golden.f32(&format!("{case}.ocp_floor.dequant")));
    }
}

#[test]
fn nvfp4_matches_both_producers() {
    for (scheme, case, global, dequant) in [
        ("nvfp4", "compressed_tensors", "global_scale", "dequant"),
        ("nvfp4:te", "transformer_engine_1x16", "amax", "dequant_code_x_scale_x_amax_over_2688"),
    ] {
        let (golden, out) = cast("nvfp4.safetensors", "dyadic_amax42.x", scheme);
        let at = |name: &str| format!("dyadic_amax42.{case}.{name}");
        assert_eq!(out.f32("x.global"), golden.f32(&at(global)), "{scheme}");
        assert_eq!(out.bytes("x.scale"), golden.bytes(&at("scale_e4m3")), "{scheme}");
        let signless =
            |codes: Vec<u8>| codes.into_iter().map(|c| if c == 8 { 0 } else { c }).collect::<Vec<_>>();
        let packed = golden.bytes(&at("codes_packed"));
        assert_eq!(signless(out.bytes("x.codes")), signless(nibbles(&packed)), "{scheme}");
        assert_eq!(signless(nibbles(&out.bytes("x.packed"))), signless(nibbles(&packed)), "{scheme}");
        same_values(scheme, &out.f32("x.dequant"), &golden.f32(&at(dequant)));
    }
}

#[test]
fn nf4_matches_bitsandbytes_on_ragged_rows() {
    let (golden, out) = cast("bnb_blockwise.safetensors", "ragged.x", "nf4-g64");
    assert_eq!(out.f32("x.scale"), golden.f32("ragged.nf4_b64.absmax"));
    same_values("nf4", &out.f32("x.dequant"), &golden.f32("ragged.nf4_b64.dequant_f32"));
    // The first element is in the high nibble. 707 codes leave half a byte, where bitsandbytes has the code
    // of zero.
    let codes = |packed: Vec<u8>| packed.iter().flat_map(|b| [b >> 4, b & 15]).take(707).collect::<Vec<_>>();
    let expected = codes(golden.bytes("ragged.nf4_b64.packed"));
    assert_eq!(out.bytes("x.codes"), expected);
    assert_eq!(codes(out.bytes("x.packed")), expected);
}

#[test]
fn double_quantization_matches_bitsandbytes() {
    for scheme in ["nf4-dq", "fp4-bnb-dq"] {
        let case = format!("rows.{}_b64_double_quant", &scheme[..3]);
        let (golden, out) = cast("bnb_blockwise.safetensors", "rows.x", scheme);
        let at = |name: &str| format!("{case}.{name}");
        assert_eq!(out.bytes("x.scale"), golden.bytes(&at("absmax_codes")), "{scheme}");
        // The mean sums in another order there.
        let close = |found: &[f32], expected: &[f32], what: &str| {
            assert_eq!(found.len(), expected.len(), "{what}");
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 4e-7 * b.abs();
            assert!(found.iter().zip(expected).all(near), "{scheme} {what}: {found:?} {expected:?}");
        };
        close(&out.f32("x.nested_offset"), &golden.f32(&at("offset")), "offset");
        close(&out.f32("x.nested_scale"), &golden.f32(&at("nested_absmax")), "absmax");
        close(&out.f32("x.dequant"), &golden.f32(&at("dequant_f32")), "dequant");
    }
}

#[test]
fn block_types_match_gguf() {
    for kind in ["q4_0", "q8_0"] {
        let (golden, out) = cast("gguf_blocks.safetensors", "input.gaussian", kind);
        let case = format!("{}.gaussian.gguf_py", kind.to_uppercase());
        assert_eq!(out.names(), ["x.dequant", "x.packed"]);
        assert_eq!(out.bytes("x.packed"), golden.bytes(&format!("{case}_bytes")), "{kind}");
        same_values(kind, &out.f32("x.dequant"), &golden.f32(&format!("{case}_dequant")));
    }
}

#[test]
fn dynamic_maps_match_bitsandbytes() {
    for (scheme, codes) in [("dyn8", "codes_nearest"), ("dyn8:cpu", "codes_lut65536")] {
        let (golden, out) = cast("bnb_blockwise.safetensors", "ragged.x", scheme);
        let at = |name: &str| format!("ragged.dynamic8_signed_b256.{name}");
        assert_eq!(out.bytes("x.codes"), golden.bytes(&at(codes)), "{scheme}");
        assert_eq!(out.bytes("x.packed"), golden.bytes(&at(codes)), "{scheme}");
        assert_eq!(out.f32("x.scale"), golden.f32(&at("absmax")), "{scheme}");
    }
}

#[test]
fn tiles_of_power_of_two_scales_match_deepgemm() {
    let (golden, out) = cast("fp8_tiles.safetensors", "act.ragged_200.x", "fp8-e4m3-t1x128:ue8m0");
    let at = |name: &str| format!("act.ragged_200.deepgemm_1x128_ue8m0.{name}");
    assert_eq!(out.bytes("x.codes"), golden.bytes(&at("codes")));
    let scales: Vec<f32> =
        out.bytes("x.scale").iter().map(|&code| 2f32.powi(i32::from(code) - 127)).collect();
    assert_eq!(scales, golden.f32(&at("scale")));
    same_values("tiles", &out.f32("x.dequant"), &golden.f32(&at("dequant")));
}

#[test]
fn minima_are_the_bias_of_a_cache() {
    let (golden, out) = cast("kv_cache.safetensors", "k.x", "int4-head-asym:minmax");
    assert_eq!(out.f32("x.bias"), golden.f32("k.int4_asym.min"));
    assert_eq!(out.f32("x.scale"), golden.f32("k.int4_asym.scale"));
    let unsigned: Vec<u8> = out.bytes("x.codes").iter().map(|code| code.wrapping_add(8)).collect();
    assert_eq!(unsigned, golden.bytes("k.int4_asym.codes_u8"));
    same_values("cache", &out.f32("x.dequant"), &golden.f32("k.int4_asym.dequant"));
}
