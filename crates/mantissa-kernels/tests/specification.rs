//! Integer quantizers against `mantissa-num`, the specification, bit for bit, at every available level.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use mantissa_kernels::{Isa, Kernels};
use mantissa_num::{Given, Scheme, quantize};
use proptest::prelude::*;

/// Rows of ordinary magnitude, of any magnitude, and with the largest values.
fn row() -> impl Strategy<Value = Vec<f32>> {
    let any = prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO;
    let huge = prop_oneof![Just(f32::MAX), Just(f32::MIN), Just(3e38_f32), Just(-1e38_f32), Just(0.0_f32)];
    let lengths = 1..200_usize;
    prop_oneof![
        prop::collection::vec(-4.0_f32..4.0, lengths.clone()),
        prop::collection::vec(0.0_f32..4.0, lengths.clone()),
        prop::collection::vec(any, lengths.clone()),
        prop::collection::vec(huge, lengths.clone()),
        prop::collection::vec(Just(0.0_f32), lengths),
    ]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #[test]
    fn symmetric(x in row(), bits_ in 2_u32..=8, group in prop::sample::select(vec![8_usize, 16, 32, 64, 128])) {
        let scheme: Scheme = format!("int{bits_}-g{group}").parse().unwrap();
        let expected = quantize(&scheme, &x, 1, x.len(), Given::default()).unwrap();
        for isa in Isa::available() {
            let kernels = Kernels::new(isa).unwrap();
            let (mut scales, mut codes) = (vec![0.0; x.len().div_ceil(group)], vec![0; x.len()]);
            let qmax = ((1_i32 << (bits_ - 1)) - 1) as i8;
            let scale_div = ((1_i32 << bits_) - 1) as f32 / 2.0;
            kernels.quant_int_sym(&x, group, -qmax - 1, qmax, scale_div, &mut scales, &mut codes).unwrap();
            let scales_expected: Vec<u32> = (0..scales.len()).map(|i| expected.scales.get(i)).collect();
            prop_assert_eq!(bits(&scales), scales_expected);
            let codes_expected: Vec<i8> = (0..x.len()).map(|i| expected.codes.get(i) as u8 as i8).collect();
            prop_assert_eq!(codes, codes_expected);
        }
    }

    #[test]
    fn asymmetric(x in row(), bits_ in 2_u32..=8, group in prop::sample::select(vec![8_usize, 16, 32, 64, 128])) {
        let scheme: Scheme = format!("int{bits_}-g{group}-asym").parse().unwrap();
        let expected = quantize(&scheme, &x, 1, x.len(), Given::default()).unwrap();
        for isa in Isa::available() {
            let kernels = Kernels::new(isa).unwrap();
            let groups = x.len().div_ceil(group);
            let (mut scales, mut zeros, mut codes) = (vec![0.0; groups], vec![0; groups], vec![0; x.len()]);
            kernels.quant_int_asym(&x, group, bits_, &mut scales, &mut zeros, &mut codes).unwrap();
            let scales_expected: Vec<u32> = (0..groups).map(|i| expected.scales.get(i)).collect();
            prop_assert_eq!(bits(&scales), scales_expected);
            let zeros: Vec<i32> = zeros.into_iter().map(i32::from).collect();
            prop_assert_eq!(&zeros, expected.zeros());
            let codes_expected: Vec<i8> = (0..x.len()).map(|i| expected.codes.get(i) as u8 as i8).collect();
            prop_assert_eq!(&codes, &codes_expected);
            // And back: the unsigned domain of the packed formats decodes to the same values as the specification.
            let offset = 1_i32 << (bits_ - 1);
            let unsigned: Vec<u8> = codes.iter().map(|&c| (i32::from(c) + offset) as u8).collect();
            let zeros: Vec<f32> = zeros.iter().map(|&z| (z + offset) as f32).collect();
            let mut out = vec![0.0; x.len()];
            kernels.dequant_int8_zero(&unsigned, &zeros, &scales, group, &mut out);
            prop_assert_eq!(out, expected.dequantize().unwrap());
        }
    }
}
