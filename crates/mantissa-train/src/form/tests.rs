#![allow(clippy::unwrap_used)]

use mantissa_num::hadamard::TE_SIGNS16;
use mantissa_num::{Given, Hadamard, Rounding, Scheme, fake_quantize};

use super::rule::rules;
use super::*;
use crate::health::Watch;
use crate::policy::{Gemm, GemmPolicy, OperandPolicy, Rotation, ScaleChoice, Side, Signs};

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

/// A matmul of two operands like this.
fn both(policy: &OperandPolicy) -> GemmPolicy {
    GemmPolicy { left: policy.clone(), right: policy.clone(), rotation: None, accumulator: Accumulator::F32 }
}

/// Makes the form of one operand of a matmul whose other operand is like it; returns its storage and values.
fn made(
    policy: &OperandPolicy,
    rotation: Option<Rotation>,
    x: &[f32],
    cols: usize,
    transposed: bool,
    threads: usize,
) -> (Storage, Vec<f32>) {
    let gemm = GemmPolicy { rotation, ..both(policy) };
    let [rule, _] = rules(&gemm);
    let mut form = Form::new(rule.storage(), x.len(), x.len()).unwrap();
    let source = Source { values: StoreRef::F32(x), rows: x.len() / cols, cols, transposed };
    let making = Making {
        seed: 77,
        signs: 5,
        history: None,
        scales: None,
        amax: None,
        threads,
        watch: None,
        lost: None,
    };
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
    let (mut narrow, mut codes) = (0, 0);
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
        "int8-t48x20",
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
                narrow += usize::from(found_storage == Storage::Float(Precision::Bf16));
                codes += usize::from(found_storage.has_codes());
                for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
                    let same = a == b || (*a == 0.0 && *b == 0.0);
                    assert!(same, "{scheme} stochastic {stochastic} turned {turned} {i}: {a:e} for {b:e}");
                }
                // Threads change nothing.
                assert_eq!(made(&policy, None, &x, cols, turned, 1).1, found);
            }
        }
    }
    assert!(narrow > 60 && codes > 30, "{narrow} operands fit bf16, {codes} are codes");
}

/// The product of two forms is the product of their values.
#[test]
fn products_multiply_the_values() {
    let (m, n, k) = (70, 33, 96);
    let (a, b) = (values(m * k, 1), values(n * k, 2));
    for scheme in [
        "fp8-e4m3-tensor",
        "int8-token:restricted",
        "int8-tensor",
        "int8-t32x32:restricted",
        "int4-g32",
        "ternary-channel",
        "nvfp4:te",
        "fp8-e4m3-t1x128",
        "bf16",
        "f16",
    ] {
        let policy = operand(scheme, false);
        let [rule, other] = rules(&both(&policy));
        let make = |rule: &Rule, x: &[f32]| {
            let mut form = Form::new(rule.storage(), x.len(), x.len()).unwrap();
            let source = Source { values: StoreRef::F32(x), rows: x.len() / k, cols: k, transposed: false };
            let making = Making {
                seed: 1,
                signs: 1,
                history: None,
                scales: None,
                amax: None,
                threads: 1,
                watch: None,
                lost: None,
            };
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

/// Rotated operands equal operands of rotated lines; values after the last whole run stay as they are.
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
        let gemm = both(&policy);
        let [rule, _] = rules(&gemm);
        let mut form = Form::new(rule.storage(), x.len(), 64).unwrap();
        let (mut sum, draws, watch) = (vec![0f64; x.len()], 400, Watch::health());
        for seed in 0..draws {
            let source = Source { values: StoreRef::F32(&x), rows: 64, cols: 64, transposed: false };
            let place = (0, mantissa_model::LinearKind::Q, Gemm::Dgrad, Side::Left);
            let making = Making {
                seed,
                signs: 0,
                history: None,
                scales: None,
                amax: None,
                threads: 1,
                watch: Some((&watch, place)),
                lost: None,
            };
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
        let health = watch.operands(&policy, &crate::health::tests::config());
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

/// The product of forms for an emulated accumulator equals `Accumulator::dot` of the elements, times the scales.
#[test]
fn accumulators_add_the_elements() {
    let (m, n, k) = (5, 7, 320);
    let (a, b) = (values(m * k, 1), values(n * k, 2));
    let accumulator = "hopper-128".parse().unwrap();
    for scheme in ["fp8-e4m3-tensor", "fp8-e4m3-token", "fp8-e4m3-t1x128"] {
        let policy = operand(scheme, false);
        let [rule, _] = rules(&GemmPolicy { accumulator, ..both(&policy) });
        let form = |x: &[f32]| {
            let mut form = Form::new(rule.storage(), x.len(), x.len() / k).unwrap();
            let source = Source { values: StoreRef::F32(x), rows: x.len() / k, cols: k, transposed: false };
            form.make(
                &rule,
                source,
                Making {
                    seed: 1,
                    signs: 1,
                    history: None,
                    scales: None,
                    amax: None,
                    threads: 2,
                    watch: None,
                    lost: None,
                },
            );
            form
        };
        let (a, b) = (form(&a), form(&b));
        let mut out = vec![0.25; m * n];
        product(a.all(), b.all(), &mut out, true);
        let unit = rule.storage().unit().unwrap_or(k);
        for (i, found) in out.iter().enumerate() {
            let (row, col) = (i / n, i % n);
            let (x, y) = (&a.values[row * k..][..k], &b.values[col * k..][..k]);
            let units = x.chunks(unit).zip(y.chunks(unit)).enumerate();
            let sum = units.fold(0f32, |sum, (u, (x, y))| {
                let scale = |form: &Form, line: usize| form.scales.get(line * k.div_ceil(unit) + u).copied();
                let scale = scale(&a, row).unwrap_or(1.0) * scale(&b, col).unwrap_or(1.0);
                scale.mul_add(accumulator.dot(x, y), sum)
            });
            let factors = a.factors[row] * b.factors[col] * a.factor * b.factor;
            assert!(
                (found - 0.25 - sum * factors).abs() <= 1e-6 * ((sum * factors).abs() + 1.0),
                "{scheme} {i}"
            );
        }
        // Fewer bits than f32 show.
        let mut exact = vec![0.25; m * n];
        let mut values = [vec![0.0; m * k], vec![0.0; n * k]];
        a.values(&mut values[0]);
        b.values(&mut values[1]);
        kernels().gemm_nt(
            mantissa_kernels::MatRef::new(&values[0], m, k),
            mantissa_kernels::MatRef::new(&values[1], n, k),
            mantissa_kernels::MatMut::new(&mut exact, m, n),
            true,
        );
        assert!(out.iter().zip(&exact).any(|(x, y)| (x - y).abs() > 1e-5 * y.abs()), "{scheme}");
    }
}

/// Quartet's quantizers against a restatement in PyTorch (tests/data/make_quartet.py).
#[test]
fn quartet_is_the_restatement_in_pytorch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/train/quartet.safetensors");
    let file = mantissa_store::SafeTensors::open(std::path::Path::new(path)).unwrap();
    let read = |name: &str| file.read_f32(file.get(name).unwrap()).unwrap();
    let (x, cols) = (read("x"), 96);
    let forward = OperandPolicy { scales: ScaleChoice::Deviation, mask: true, ..operand("mxfp4", false) };
    let rotation = Some(Rotation { order: 32, signs: Signs::Plain });
    let (storage, values) = made(&forward, rotation, &x, cols, false, 2);
    assert_eq!(storage, Storage::Float(Precision::Bf16));
    // A rotated value may be off by its last bits and round to the other neighbour of a tie.
    let differ = values.iter().zip(&read("values")).filter(|(a, b)| (*a - *b).abs() > 1e-6 * b.abs()).count();
    assert!(differ <= 1, "{differ} values");

    let [rule, _] = rules(&GemmPolicy { rotation, ..both(&forward) });
    let source = Source { values: StoreRef::F32(&x), rows: 8, cols, transposed: false };
    let making = Making {
        seed: 1,
        signs: 1,
        history: None,
        scales: None,
        amax: None,
        threads: 2,
        watch: None,
        lost: None,
    };
    let mut mask = vec![0; 8 * cols / 8];
    rule.mask(source, making, &mut mask);
    let expected = file.read(file.get("mask").unwrap()).unwrap();
    assert!(expected.iter().enumerate().all(|(i, bit)| mask[i / 8] >> (i % 8) & 1 == *bit));
    assert!(expected.iter().filter(|bit| **bit == 0).count() > 5);
    let mut gradient = read("gradient");
    rule.pass_back(&mut gradient, cols, &mask, 1);
    assert!(gradient.iter().zip(&read("passed")).all(|(a, b)| (a - b).abs() < 1e-5));

    let backward = OperandPolicy { headroom: 1.333_333_4, ..operand("mxfp4", true) };
    let (_, values) = made(&backward, None, &x, cols, false, 2);
    let neighbours = read("neighbours");
    let (low, high) = neighbours.split_at(x.len());
    let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * b.abs();
    let [mut down, mut up] = [0, 0];
    for (i, value) in values.iter().enumerate() {
        assert!(near(*value, low[i]) || near(*value, high[i]), "{i}: {value} for {} and {}", low[i], high[i]);
        down += usize::from(near(*value, low[i]));
        up += usize::from(near(*value, high[i]));
    }
    assert!(down > 200 && up > 200, "{down} {up}");
}

/// MS-EDEN is unbiased over rotations, with less than half the squared error of stochastic elements (Quartet II,
/// arXiv 2601.22813, section 4); its values are elements of E2M1 under E4M3 scales.
#[test]
fn eden_is_unbiased_and_nearer_than_stochastic_elements() {
    let (rows, cols, draws) = (4, 256, 400);
    let bell = |i: usize| {
        (0..12)
            .map(|j| mantissa_num::round::random_u32(9, (i * 12 + j) as u64))
            .fold(-6.0, |s, w| s + f64::from(w) / 4_294_967_296.0)
    };
    let x: Vec<f32> = (0..rows * cols).map(|i| bell(i) as f32).collect();
    let rotation = Some(Rotation { order: 128, signs: Signs::Step });
    let errors = [
        OperandPolicy { scales: ScaleChoice::Eden, headroom: 0.988_125, ..operand("nvfp4:4over6", false) },
        OperandPolicy { headroom: 1.0625, ..operand("nvfp4:te", true) },
    ]
    .map(|policy| {
        let [rule, _] = rules(&GemmPolicy { rotation, ..both(&policy) });
        assert_eq!(rule.storage(), Storage::Float(Precision::Bf16));
        let mut form = Form::new(rule.storage(), x.len(), rows).unwrap();
        let (mut sum, mut single) = (vec![0f64; x.len()], 0.0);
        for draw in 0..draws {
            let making = Making {
                seed: 3 + draw,
                signs: 1000 + draw,
                history: None,
                scales: None,
                amax: None,
                threads: 1,
                watch: None,
                lost: None,
            };
            let source = Source { values: StoreRef::F32(&x), rows, cols, transposed: false };
            form.make(&rule, source, making);
            let mut values = vec![0.0; x.len()];
            form.values(&mut values);
            let hadamard = rule.hadamard(making.signs).unwrap();
            values.chunks_exact_mut(cols).for_each(|line| hadamard.transpose(line));
            single += values.iter().zip(&x).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
            sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += f64::from(*value));
        }
        let (n, square) = (f64::from(draws as u32), x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>());
        let of_mean: f64 = sum.iter().zip(&x).map(|(sum, x)| (sum / n - f64::from(*x)).powi(2)).sum();
        let projection = sum.iter().zip(&x).map(|(sum, x)| sum / n * f64::from(*x)).sum::<f64>() / square;
        let single = single / n;
        assert!((projection - 1.0).abs() < 0.003, "{projection}");
        assert!((of_mean / single * n - 1.0).abs() < 0.2, "{of_mean} {single}");
        single / square
    });
    assert!(errors[0] < 0.5 * errors[1], "{errors:?}");
}
