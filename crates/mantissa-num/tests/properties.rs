//! Properties of every scheme, for any values.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use mantissa_num::grammar::catalogue;
use mantissa_num::scheme::Rule;
use mantissa_num::{Blocks, Code, Given, Rounding, Scheme, TensorError, fake_quantize, minifloat, quantize};
use proptest::prelude::*;

/// Every named scheme in every variant, and integers and floats at every granularity.
fn every_scheme() -> Vec<Scheme> {
    let mut all = Vec::new();
    for scheme in catalogue() {
        all.extend(scheme.variants().iter().map(|v| scheme.clone().with_variant(v.name).unwrap()));
    }
    for blocks in [Blocks::Tensor, Blocks::Row, Blocks::Group(7), Blocks::Tile { rows: 2, cols: 5 }] {
        for bits in 2..=8 {
            all.push(Scheme::int_symmetric(bits, blocks));
            all.push(Scheme::int_asymmetric(bits, blocks));
            all.push(Scheme::int_biased(bits, blocks));
        }
        for float in [minifloat::E4M3, minifloat::E2M1] {
            let scheme = Scheme::scaled_float(Code::Float(float), blocks);
            all.extend(scheme.variants().iter().map(|v| scheme.clone().with_variant(v.name).unwrap()));
        }
    }
    all
}

/// `cols`, or more where a codec's blocks are larger.
fn whole_blocks(scheme: &Scheme, cols: usize) -> usize {
    scheme.format.codec().map_or(cols, |codec| cols.next_multiple_of(codec.elements))
}

/// Difficult rows: zeros, signed zeros, one huge outlier, subnormals, the extremes of f32.
fn hard_rows(cols: usize) -> Vec<Vec<f32>> {
    let ramp: Vec<f32> = (0..cols).map(|i| (i as f32 - cols as f32 / 2.0) * 0.01).collect();
    let with = |i: usize, v: f32| {
        let mut row = ramp.clone();
        row[i] = v;
        row
    };
    vec![
        vec![0.0; cols],
        vec![-0.0; cols],
        vec![3.0; cols],
        vec![-2.5e-3; cols],
        ramp.clone(),
        with(3, 1e38),
        with(4, -f32::MAX),
        ramp.iter().map(|v| v * 1e-42).collect(),
        ramp.iter().map(|v| v * f32::MIN_POSITIVE).collect(),
        (0..cols).map(|i| if i % 2 == 0 { f32::MAX } else { -f32::MAX }).collect(),
        (0..cols).map(|i| f32::from_bits(1 + i as u32)).collect(),
    ]
}

#[test]
fn hard_rows_stay_finite_under_every_scheme() {
    for scheme in every_scheme() {
        let cols = whole_blocks(&scheme, 70);
        for (i, row) in hard_rows(cols).into_iter().enumerate() {
            let quantized = quantize(&scheme, &row, 1, cols, Given::default());
            // GGUF's f16 scales do not cover all of f32.
            let large = scheme.format.codec().is_some() && row.iter().any(|v| v.abs() > 65504.0);
            if large && matches!(quantized, Err(TensorError::ScaleOverflow { .. })) {
                continue;
            }
            let q = quantized.unwrap();
            let values = q.dequantize().unwrap();
            // A plain f16 cast of 1e38 is infinity by IEEE 754.
            let sixteen_bits = ["f16", "bf16", "tf32"].contains(&scheme.to_string().as_str());
            // A rounded-up scale makes the grid at f32::MAX coarser than its distance to 2^128, where torchao and the
            // hardware conversion land too. The default rule stays below.
            let powers = scheme.format.scale().is_some_and(|scale| scale.code == Code::E8m0);
            let up = powers && scheme.encoder.rule != Rule::Floor && row.contains(&-f32::MAX);
            let finite = values.iter().all(|v| v.is_finite()) || sixteen_bits || up;
            assert!(values.iter().all(|v| !v.is_nan()), "{scheme}, row {i}");
            assert!(finite, "{scheme}, row {i}: {values:?}");
            if row.iter().all(|&v| v == 0.0) {
                assert!(values.iter().all(|&v| v == 0.0), "{scheme}, row {i}: {values:?}");
            }
        }
    }
}

#[test]
fn non_finite_values_are_counted_or_have_a_documented_code() {
    let x = [1.0, f32::NAN, -2.0, f32::INFINITY];
    for scheme in every_scheme() {
        let mut padded = x.to_vec();
        padded.resize(whole_blocks(&scheme, 4), 0.0);
        let result = quantize(&scheme, &padded, 1, padded.len(), Given::default());
        if scheme.accepts_non_finite() {
            let values = result.unwrap().dequantize().unwrap();
            let kept = scheme.format.scale().is_some() || values[0] == 1.0;
            assert!(kept, "{scheme}: {values:?}");
        } else {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("2 non-finite") && error.contains("element 1"), "{scheme}: {error}");
        }
    }
    // A NaN in a Microscaling block makes its scale NaN; an infinity determines the scale and makes the rest zero.
    let mx: Scheme = "mxfp4".parse().unwrap();
    assert_eq!(quantize(&mx, &x, 1, 4, Given::default()).unwrap().scales.get(0), 255);
    let inf = quantize(&mx, &[1.0, f32::INFINITY], 1, 2, Given::default()).unwrap();
    assert_eq!((inf.scales.get(0), inf.dequantize().unwrap()[0]), (253, 0.0));
}

#[test]
fn a_static_scale_is_used_unchanged() {
    let scheme: Scheme = "fp8-e4m3-tensor@static".parse().unwrap();
    let given = Given { outer: Some(0.25), ..Given::default() };
    let q = quantize(&scheme, &[1.0, 1000.0, -0.3], 1, 3, given).unwrap();
    assert_eq!(q.dequantize().unwrap(), [1.0, 112.0, -0.3125]);
}

#[test]
fn partners_can_share_the_outer_scale() {
    let scheme: Scheme = "nvfp4".parse().unwrap();
    let (small, large) = ([0.5f32; 16], [6.0f32; 16]);
    let outer = scheme.outer_scale(6.0);
    let given = Given { outer, ..Given::default() };
    let a = quantize(&scheme, &small, 1, 16, given).unwrap();
    let b = quantize(&scheme, &large, 1, 16, given).unwrap();
    assert_eq!((a.outer(), b.outer()), (outer, Some(448.0)));
}

proptest! {
    #[test]
    fn rounding_errs_by_at_most_the_bound_and_fake_quantizing_agrees(
        which in 0usize..1000, rows in 1usize..4, cols in 1usize..80, seed in any::<u64>(), exponent in -20i32..20
    ) {
        let all = every_scheme();
        let scheme = &all[which % all.len()];
        let cols = whole_blocks(scheme, cols);
        let scale = 2f32.powi(exponent);
        let x: Vec<f32> = (0..rows * cols)
            .map(|i| (mantissa_num::round::random_u32(seed, i as u64) as f32 / u32::MAX as f32 - 0.5) * scale)
            .collect();
        let quantized = quantize(scheme, &x, rows, cols, Given::default());
        let large = scheme.format.codec().is_some() && x.iter().any(|v| v.abs() > 65504.0);
        prop_assume!(!(large && matches!(quantized, Err(TensorError::ScaleOverflow { .. }))));
        let q = quantized.unwrap();
        let values = q.dequantize().unwrap();
        // The largest value of a block is at most one gap away; so is every other.
        let blocks = scheme.format.blocks();
        let bound = scheme.format.error_bound();
        for row in 0..if bound.is_finite() { rows } else { 0 } {
            for (block, start, end) in blocks.runs(cols, row) {
                let gap = q.block_decoder(block).value(bound) - q.block_decoder(block).value(0.0);
                for col in start..end {
                    let (x, y) = (x[row * cols + col], values[row * cols + col]);
                    // NVFP4 block scales are themselves rounded by up to 1/16, and reciprocals by an ulp.
                    let coarse = scheme.format.scale().is_some_and(|s| !matches!(s.code, Code::F32 | Code::E8m0));
                    let bound = gap.abs() * 1.0001 + x.abs() * if coarse { 0.125 } else { 1e-6 };
                    // One level of E4M3 scales covers at most 448 · 6.
                    if scheme.to_string() == "nvfp4:torchao-1level" && x.abs() > 2688.0 {
                        continue;
                    }
                    let plain = scheme.format.scale().is_none();
                    let top = scheme.format.element(scheme.encode(f32::MAX, &scheme.block_with_scale(1.0), 0));
                    if plain && y.abs() == top && x.abs() > top.min(65504.0) {
                        continue; // a plain cast saturates or, in 16 bits, becomes infinite
                    }
                    prop_assert!((x - y).abs() <= bound, "{scheme}: {x:e} -> {y:e}, gap {gap:e}");
                }
            }
        }
        let mut faked = x.clone();
        fake_quantize(scheme, &mut faked, rows, cols, Given::default()).unwrap();
        // A block type's f16 scale overflows beyond 65504 times its largest element, to NaN and infinity as in ggml.
        let equal = faked.iter().zip(&values).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
        prop_assert!(equal, "{scheme}: {faked:?} {values:?}");
    }

    #[test]
    fn stochastic_rounding_does_not_depend_on_panels(seed in any::<u64>(), cols in 1usize..40) {
        let mut scheme = Scheme::int_symmetric(4, Blocks::Row);
        scheme.encoder.rounding = Rounding::Stochastic { seed };
        let x: Vec<f32> = (0..3 * cols).map(|i| (i as f32 * 0.37).sin()).collect();
        let whole = quantize(&scheme, &x, 3, cols, Given::default()).unwrap();
        let last = Given { first_index: 2 * cols as u64, ..Given::default() };
        let panel = quantize(&scheme, &x[2 * cols..], 1, cols, last).unwrap();
        for i in 0..cols {
            prop_assert_eq!(whole.codes.get(2 * cols + i), panel.codes.get(i));
        }
    }
}
