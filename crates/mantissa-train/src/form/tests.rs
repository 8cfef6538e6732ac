#![allow(clippy::unwrap_used)]

use mantissa_num::{Given, Hadamard, Rounding, Scheme, fake_quantize};

use super::*;
use crate::health::Watch;

/// Values of many magnitudes with outliers, zeros and ties.
fn values(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let mut value = |i: usize| {
        let bits = next();
        let size = 2f32.powi((i / 97 % 9) as i32 - 12);
        match bits % 11 {
            0 => 0.0,
            1 => -0.0,
            2 => size * ((bits >> 4) % 15) as f32 * 0.5,
            3 => size * 60.0,
            _ => size * ((bits >> 4) as f32 / 524_288.0 - 1.0),
        }
    };
    (0..n).map(&mut value).collect()
}

fn operand(scheme: &str, stochastic: bool) -> OperandPolicy {
    let mut policy = OperandPolicy::new(scheme.parse().unwrap());
    if stochastic {
        policy.scheme.encoder.rounding = Rounding::Stochastic { seed: 0 };
    }
    policy
}

/// Makes the form of one operand of a matmul whose other operand is like it; returns its storage and values.
fn made(
    policy: &OperandPolicy,
    rotation: Option<Rotation>,
    x: &[f32],
    cols: usize,
    transposed: bool,
    threads: usize,
) -> (Precision, Vec<f32>) {
    let gemm = GemmPolicy { left: policy.clone(), right: policy.clone(), rotation };
    let [rule, _] = rules(&gemm);
    let mut form = Form::new(rule.storage(), x.len(), x.len()).unwrap();
    let source = Source { values: StoreRef::F32(x), rows: x.len() / cols, cols, transposed };
    let making = Making { seed: 77, signs: 5, history: None, threads, watch: None };
    form.make(&rule, source, making);
    let mut out = vec![0.0; x.len()];
    form.values(&mut out);
    (rule.storage(), out)
}

fn transposed(x: &[f32], cols: usize) -> Vec<f32> {
    let rows = x.len() / cols;
    (0..x.len()).map(|i| x[i % rows * cols + i / rows]).collect()
}

/// Every scheme of the recipes and many others, nearest and stochastic, has the values of the reference.
#[test]
fn forms_have_the_values_of_the_reference() {
    let (rows, cols) = (150, 200);
    let x = values(rows * cols, 3);
    let mut narrow = 0;
    for scheme in [
        "fp8-e4m3-tensor",
        "fp8-e5m2-tensor",
        "fp8-e4m3-token",
        "fp8-e5m2-channel",
        "fp8-e4m3-g48",
        "fp8-e4m3-t1x128:floor1e-12",
        "fp8-e4m3-t128x128:floor1e-12",
        "fp8-e4m3-t128x128:floor1e-4",
        "fp8-e4m3-t128x128:ue8m0",
        "mxfp8-e4m3:rceil",
        "mxfp8-e5m2",
        "mxfp6-e2m3:even",
        "mxfp4",
        "mxfp4:ct",
        "mxfp4:torchao-rceil",
        "nvfp4:te",
        "nvfp4:te-2d",
        "nvfp4:4over6",
        "nvfp4:ct",
        "nvfp4:torchao",
        "nvfp4:torchao-1level",
        "int8-token:restricted",
        "int8-tensor:restricted",
        "int8-channel",
        "int8-t32x32:restricted",
        "int8-token:torchao",
        "int4-g32",
        "int4-g32-asym",
        "int3-channel",
        "ternary-tensor",
        "ternary-channel",
        "nf4",
        "mxint8",
        "mxfp4:deepgemm",
        "bf16",
        "f16",
        "f32",
    ] {
        for stochastic in [false, true] {
            let policy = operand(scheme, stochastic);
            for turned in [false, true] {
                let (found_storage, found) = made(&policy, None, &x, cols, turned, 2);
                let mut expected = if turned { transposed(&x, cols) } else { x.clone() };
                let (n, k) = if turned { (cols, rows) } else { (rows, cols) };
                let mut reference = policy.scheme.clone();
                if stochastic {
                    reference.encoder.rounding = Rounding::Stochastic { seed: 77 };
                }
                fake_quantize(&reference, &mut expected, n, k, Given::default()).unwrap();
                narrow += usize::from(found_storage == Precision::Bf16);
                for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                    let same = a == b || (*a == 0.0 && *b == 0.0);
                    assert!(same, "{scheme} stochastic {stochastic} turned {turned} {i}: {a:e} for {b:e}");
                }
                // Threads change nothing.
                assert_eq!(made(&policy, None, &x, cols, turned, 1).1, found);
            }
        }
    }
    assert!(narrow > 70, "{narrow} operands fit bf16");
}

/// The product of two forms is the product of their values.
#[test]
fn products_multiply_the_values() {
    let (m, n, k) = (70, 33, 96);
    let (a, b) = (values(m * k, 1), values(n * k, 2));
    for scheme in ["fp8-e4m3-tensor", "int8-token:restricted", "nvfp4:te", "fp8-e4m3-t1x128", "bf16", "f16"] {
        let policy = operand(scheme, false);
        let [rule, other] = rules(&GemmPolicy { left: policy.clone(), right: policy, rotation: None });
        let make = |rule: &Rule, x: &[f32]| {
            let mut form = Form::new(rule.storage(), x.len(), x.len()).unwrap();
            let source = Source { values: StoreRef::F32(x), rows: x.len() / k, cols: k, transposed: false };
            let making = Making { seed: 1, signs: 1, history: None, threads: 1, watch: None };
            form.make(rule, source, making);
            let mut values = vec![0.0; x.len()];
            form.values(&mut values);
            (form, values)
        };
        let ((a, left), (b, right)) = (make(&rule, &a), make(&other, &b));
        let mut out = vec![0.5; m * n];
        product(a.all(), b.all(), &mut out, true);
        let mut alone = vec![0.0; m * n];
        product(a.all(), b.all(), &mut alone, false);
        for (i, (found, alone)) in out.iter().zip(&alone).enumerate() {
            let (x, y) = (&left[i / n * k..][..k], &right[i % n * k..][..k]);
            let terms = x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y));
            let (exact, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
            let near = |found: f32, exact: f64| (f64::from(found) - exact).abs() <= 1e-6 * (size + 1.0);
            assert!(
                near(*alone, exact) && near(*found, exact + 0.5),
                "{scheme} {i}: {found} {alone} {exact}"
            );
        }
    }
}

/// Rotated operands are those of rotated lines; values after the last whole run stay as they are.
#[test]
fn rotations_run_along_the_contraction_axis() {
    let (rows, cols) = (20, 40);
    let x = values(rows * cols, 9);
    for (signs, transform) in [
        (Signs::Plain, Hadamard::new(16).unwrap()),
        (Signs::TransformerEngine, Hadamard::new(16).unwrap().with_signs(&TE_SIGNS16).unwrap()),
        (Signs::Step, Hadamard::new(16).unwrap().randomized(5)),
    ] {
        let rotation = Some(Rotation { order: 16, signs });
        let (_, found) = made(&operand("nvfp4:te", false), rotation, &x, cols, true, 2);
        let mut expected = transposed(&x, cols);
        expected.chunks_exact_mut(rows).for_each(|line| transform.forward(line));
        let scheme: Scheme = "nvfp4:te".parse().unwrap();
        fake_quantize(&scheme, &mut expected, cols, rows, Given::default()).unwrap();
        assert!(found.iter().zip(&expected).all(|(a, b)| a == b), "{signs:?}");
    }
}

/// With headroom, stochastic rounding clips nothing and is right on average.
#[test]
fn headroom_makes_stochastic_rounding_unbiased() {
    let x = values(64 * 64, 4);
    for (scheme, headroom) in [("nvfp4:te", 17.0 / 16.0), ("mxfp4", 4.0 / 3.0)] {
        let policy = OperandPolicy { headroom, ..operand(scheme, true) };
        let gemm = GemmPolicy { left: policy.clone(), right: policy, rotation: None };
        let [rule, _] = rules(&gemm);
        let mut form = Form::new(rule.storage(), x.len(), 64).unwrap();
        let (mut sum, draws, watch) = (vec![0f64; x.len()], 400, Watch::health());
        for seed in 0..draws {
            let source = Source { values: StoreRef::F32(&x), rows: 64, cols: 64, transposed: false };
            let place = (0, mantissa_model::LinearKind::Q, Gemm::Dgrad, Side::Left);
            let making = Making { seed, signs: 0, history: None, threads: 1, watch: Some((&watch, place)) };
            form.make(&rule, source, making);
            let mut values = vec![0.0; x.len()];
            form.values(&mut values);
            sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        let error: f64 = sum.iter().zip(&x).map(|(s, x)| (s / draws as f64 - f64::from(*x)).powi(2)).sum();
        let size: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
        // A single draw is off by about a fifth; the mean of n draws by that over the root of n.
        assert!((error / size).sqrt() < 0.3 / (draws as f64).sqrt(), "{scheme}: {}", (error / size).sqrt());
        let mut policy = crate::policy::Policy::fp32();
        policy.linear.dgrad.left = OperandPolicy { headroom, ..operand(scheme, true) };
        let health = watch.operands(&policy, 1);
        assert_eq!((health.len(), health[0].operand), (1, "dgrad dy"));
        // A subnormal E4M3 scale may be off by more than the headroom.
        let most = if scheme == "mxfp4" { 0.0 } else { 1e-3 };
        assert!(health[0].saturated <= most, "{scheme}: {}", health[0].saturated);
        assert!(health[0].sqnr_db.unwrap() > 8.0, "{health:?}");
    }
}

/// NaN reaches the product.
#[test]
fn non_finite_values_are_not_lost() {
    let mut x = values(16 * 32, 4);
    x[100] = f32::NAN;
    for scheme in ["nvfp4:te", "fp8-e4m3-tensor", "int8-token:restricted", "mxfp8-e4m3", "nf4"] {
        let (_, found) = made(&operand(scheme, false), None, &x, 32, false, 1);
        assert!(found[100].is_nan(), "{scheme}");
    }
}
