//! `codebooks` and the NF4 and FP4 parts of `bnb_blockwise`.

use mantissa_num::codebook::Book;
use mantissa_num::pack::Packing;
use mantissa_num::{Codes, Given, Quantized, Scheme, quantize};

use crate::support::{Get, assert_same, open};

#[test]
fn code_books_match() {
    for file in open("codebooks.safetensors") {
        let t = file.tensors();
        assert_same("nf4", Book::Nf4.levels(), &t.f32("bnb.nf4").unwrap(), true);
        assert_same("fp4", Book::Fp4Bnb.levels(), &t.f32("bnb.fp4").unwrap(), true);
    }
}

#[test]
fn flat_blocks_match_bitsandbytes() {
    let mut checked = 0;
    for file in open("bnb_blockwise.safetensors") {
        let t = file.tensors();
        for tensor in ["rows", "weights", "last_dim_not_multiple_of_block", "ragged", "code_midpoints"] {
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
