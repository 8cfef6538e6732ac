//! `codebooks` and `bnb_blockwise`: NF4, FP4, the dynamic maps, double quantization.

use mantissa_num::blockwise::nest;
use mantissa_num::codebook::Book;
use mantissa_num::pack::Packing;
use mantissa_num::{
    Blocks, Code, Codes, Format, Given, Quantized, ScaleLevel, ScaleTree, Scheme, Sense, Table, quantize,
};
use safetensors::SafeTensors;

use crate::support::{Get, assert_codes, assert_same, open};

const TENSORS: [&str; 5] = ["rows", "weights", "last_dim_not_multiple_of_block", "ragged", "code_midpoints"];

#[test]
fn code_books_match() {
    for file in open("codebooks.safetensors") {
        let t = file.tensors();
        assert_same("nf4", Book::Nf4.levels(), &t.f32("bnb.nf4").unwrap(), true);
        assert_same("fp4", Book::Fp4Bnb.levels(), &t.f32("bnb.fp4").unwrap(), true);
        let (signed, unsigned) = (Book::Dyn8.levels(), Book::Dyn8Unsigned.levels());
        assert_same("dyn8", signed, &t.f32("bnb.dynamic8_signed").unwrap(), true);
        assert_same("dyn8-unsigned", unsigned, &t.f32("bnb.dynamic8_unsigned").unwrap(), true);
        assert_same("lin8", Book::Lin8.levels(), &t.f32("bnb.linear8_signed").unwrap(), true);
        assert_same(
            "lin8-unsigned",
            Book::Lin8Unsigned.levels(),
            &t.f32("bnb.linear8_unsigned").unwrap(),
            true,
        );
        assert_same("dyn4", Book::Dyn4.levels(), &t.f32("torchao_optim.dynamic4_signed").unwrap(), true);
    }
}

#[test]
fn flat_blocks_match_bitsandbytes() {
    let mut checked = 0;
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        for tensor in TENSORS {
            let Some(x) = t.f32(&format!("{tensor}.x")) else { continue };
            let (rows, cols) = t.shape2(&format!("{tensor}.x"));
            for (book, name) in [("nf4", "nf4"), ("fp4-bnb", "fp4")] {
                for block in [64, 128] {
                    let base = format!("{tensor}.{name}_b{block}");
                    let Some(absmax) = t.f32(&format!("{base}.absmax")) else { continue };
                    let scheme: Scheme = format!("{book}-g{block}").parse().unwrap();
                    let q = quantize(&scheme, &x, rows, cols, Given::default()).unwrap();
                    let found: Vec<f32> =
                        (0..q.scales.len()).map(|i| f32::from_bits(q.scales.get(i))).collect();
                    assert_same(&format!("{base}.absmax"), &found, &absmax, true);
                    compare_packed(&base, &q, &t.u8(&format!("{base}.packed")).unwrap());
                    assert_same(
                        &base,
                        &q.dequantize().unwrap(),
                        &t.f32(&format!("{base}.dequant_f32")).unwrap(),
                        false,
                    );
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 8, "{checked}");
}

/// Codes 0 and 8 of FP4 both decode to zero, and the data says to compare zeros by value.
fn compare_packed(base: &str, q: &Quantized, packed: &[u8]) {
    let expected = Packing::bitsandbytes()
        .unpack(&packed[..q.codes.len().div_ceil(2)], 1, q.codes.len(), false)
        .unwrap();
    let Codes::U8(codes) = &q.codes else { panic!("4-bit codes are bytes") };
    for (i, (&f, &e)) in codes.iter().zip(&expected).enumerate() {
        let equal = f == e || q.format.element(f.into()) == q.format.element(e.into());
        assert!(equal, "{base}[{i}]: found {f}, expected {e}");
    }
    if base.contains("nf4") {
        // The unused low nibble after an odd number of codes is padding.
        let whole = codes.len() / 2;
        assert_eq!(Packing::bitsandbytes().pack(codes, q.cols)[..whole], packed[..whole], "{base}");
    }
}

fn f32_scales(q: &Quantized) -> Vec<f32> {
    (0..q.scales.len()).map(|i| f32::from_bits(q.scales.get(i))).collect()
}

fn wide(codes: &Codes) -> Vec<i64> {
    (0..codes.len()).map(|i| codes.get(i).into()).collect()
}

#[test]
fn dynamic_maps_match_nearest_and_table() {
    let mut checked = 0;
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        for tensor in TENSORS {
            let Some(x) = t.f32(&format!("{tensor}.x")) else { continue };
            let (rows, cols) = t.shape2(&format!("{tensor}.x"));
            let magnitudes: Vec<f32> = x.iter().map(|v| v.abs()).collect();
            for (book, golden, x) in
                [("dyn8", "signed", &x), ("dyn8-unsigned", "unsigned_of_abs", &magnitudes)]
            {
                for block in [256, 4096] {
                    let base = format!("{tensor}.dynamic8_{golden}_b{block}");
                    let Some(absmax) = t.f32(&format!("{base}.absmax")) else { continue };
                    let run = |rule: &str| {
                        let scheme: Scheme = format!("{book}-g{block}:{rule}").parse().unwrap();
                        quantize(&scheme, x, rows, cols, Given::default()).unwrap()
                    };
                    let (nearest, table) = (run("nearest"), run("cpu"));
                    assert_same(&base, &f32_scales(&nearest), &absmax, true);
                    let codes = |kind: &str| t.ints(&format!("{base}.codes_{kind}")).unwrap();
                    assert_codes(&format!("{base} nearest"), &wide(&nearest.codes), &codes("nearest"));
                    assert_codes(&format!("{base} table"), &wide(&table.codes), &codes("lut65536"));
                    if let Some(dequant) = t.f32(&format!("{base}.dequant_nearest")) {
                        assert_same(&base, &nearest.dequantize().unwrap(), &dequant, false);
                    }
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 8, "{checked}");
}

#[test]
fn double_quantization_matches_given_the_offset() {
    let mut checked = 0;
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        for tensor in TENSORS {
            for (book, golden) in [("nf4", "nf4"), ("fp4-bnb", "fp4")] {
                let base = format!("{tensor}.{golden}_b64_double_quant");
                if t.f32(&format!("{base}.offset")).is_some() {
                    compare_double_quantized(&t, tensor, &base, &format!("{book}-dq").parse().unwrap());
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 2, "{checked}");
}

fn compare_double_quantized(t: &SafeTensors<'_>, tensor: &str, base: &str, scheme: &Scheme) {
    let get = |name: &str| t.f32(&format!("{base}.{name}")).unwrap();
    let offset = get("offset")[0];
    let tree = scheme.format.scale().unwrap();
    let absmax = t.f32(&format!("{}.absmax", base.trim_end_matches("_double_quant"))).unwrap();

    // Our mean is within one unit in the last place of the package's f32 sum.
    let x = t.f32(&format!("{tensor}.x")).unwrap();
    let (rows, cols) = t.shape2(&format!("{tensor}.x"));
    let mut q = quantize(scheme, &x, rows, cols, Given::default()).unwrap();
    let ours = q.nested().unwrap().mean;
    assert!(ours.to_bits().abs_diff(offset.to_bits()) <= 1, "{base}: {ours:e}, expected {offset:e}");

    q.scales = nest(tree, &absmax, Some(offset)).unwrap();
    let (codes, nested) = (&q.scales.codes, q.nested().unwrap());
    assert_codes(base, &wide(codes), &t.ints(&format!("{base}.absmax_codes")).unwrap());
    assert_same(base, &nested.factors(), &get("nested_absmax"), true);
    assert_same(base, Book::Dyn8.levels(), &get("nested_code"), true);
    let scales: Vec<f32> =
        (0..codes.len()).map(|i| nested.scale(i, tree.code.decode(codes.get(i)))).collect();
    assert_same(&format!("{base}.scales"), &scales, &get("absmax_reconstructed"), true);
    assert_same(&format!("{base}.dequant"), &q.dequantize().unwrap(), &get("dequant_f32"), false);
}

/// A bf16 tensor: quantized as its f32 values, and dequantized to bf16.
#[test]
fn nf4_of_bf16_matches() {
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        let Some(bits) = t.ints("weights.nf4_b64_from_bf16.x_bf16") else { continue };
        let (rows, cols) = t.shape2("weights.nf4_b64_from_bf16.x_bf16");
        let bf16: Scheme = "bf16".parse().unwrap();
        let x: Vec<f32> = bits.iter().map(|&b| bf16.format.element(b as u32)).collect();
        let q = quantize(&"nf4".parse().unwrap(), &x, rows, cols, Given::default()).unwrap();
        compare_packed("nf4 of bf16", &q, &t.u8("weights.nf4_b64_from_bf16.packed").unwrap());
        let out = quantize(&bf16, &q.dequantize().unwrap(), rows, cols, Given::default()).unwrap();
        assert_codes(
            "dequant",
            &wide(&out.codes),
            &t.ints("weights.nf4_b64_from_bf16.dequant_bf16").unwrap(),
        );
    }
}

/// torchao's NF4Tensor keeps 8-bit integer scales around their mean: another leaf of the same tree. Its levels are
/// NF4 rounded to four decimals; the file has the table.
#[test]
fn torchao_nf4_decodes() {
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        let Some(expected) = t.f32("weights.torchao_nf4.dequant") else { continue };
        let get = |name: &str| t.f32(&format!("weights.torchao_nf4.{name}")).unwrap();
        let (rows, cols) = t.shape2("weights.torchao_nf4.dequant");
        let per_factor = t.ints("weights.torchao_nf4.scaler_block_size").unwrap()[0] as u32;
        let residual = ScaleTree { code: Code::F32, sense: Sense::Residual, outer: None };
        let scale = ScaleTree::below(Code::Int(8), Blocks::Flat(per_factor), residual);
        let format = Format::Table(Table { book: Book::Nf4, blocks: Blocks::Flat(64), scale });
        let packed = t.u8("weights.torchao_nf4.quantized_data").unwrap();
        // It divides by this factor; the tree multiplies by a scale.
        let factors: Vec<f32> = get("quantization_factor").iter().map(|f| 1.0 / f).collect();
        let nested = ScaleLevel::residual(&factors, get("scaler_mean")[0]);
        let codes = Codes::U8(t.u8("weights.torchao_nf4.quantized_scalers_i8").unwrap());
        let q = Quantized {
            codes: Codes::U8(Packing::bitsandbytes().unpack(&packed, rows, cols, false).unwrap()),
            scales: ScaleLevel::from(codes).with_residual(nested),
            ..Quantized::empty(format, rows, cols)
        };
        q.check().unwrap();
        let levels = get("code");
        for (i, e) in expected.iter().enumerate() {
            let v = q.block_decoder(i / 64).value(levels[q.codes.get(i) as usize]);
            assert!((v - e).abs() <= 3e-7 * e.abs(), "torchao_nf4[{i}]: found {v:e}, expected {e:e}");
        }
    }
}
