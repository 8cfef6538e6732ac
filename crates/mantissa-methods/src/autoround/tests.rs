use mantissa_num::{Given, Scheme, quantize};

use super::*;
use crate::gptq::Hessian;
use crate::metric::Metric;

fn weight(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| ((i * i + 7 * i) as f32 * 0.137).sin() * (1.0 + (i % 5) as f32)).collect()
}

fn learned(scheme: &str, w: &[f32], cols: usize, signed: bool) -> LearnedWeight {
    let scheme: Scheme = scheme.parse().unwrap();
    let amax = w.iter().fold(0f32, |amax, v| amax.max(v.abs()));
    LearnedWeight::new(&scheme, w, cols, &vec![1.0; cols], scheme.outer_scale(amax), signed, 2).unwrap()
}

fn error(w: &[f32], q: &[f32]) -> f64 {
    w.iter().zip(q).map(|(w, q)| f64::from(w - q).powi(2)).sum()
}

const SCHEMES: [&str; 10] = [
    "int4-g32",
    "int4-g32-asym",
    "int3-g32",
    "int2-g32-asym",
    "int8-channel",
    "int4-g32:restricted",
    "nvfp4",
    "mxfp4",
    "nf4",
    "fp8-e4m3-channel",
];

#[test]
fn the_first_values_are_no_worse_than_rounding_to_nearest_and_are_what_is_stored() {
    let (rows, cols) = (20, 128);
    let w = weight(rows, cols);
    for name in SCHEMES {
        for signed in [false, true] {
            let learned = learned(name, &w, cols, signed);
            let mut values = vec![0.0; w.len()];
            learned.fake_quantize(&mut values, 2);
            let q = learned.quantized();
            q.check().unwrap();
            assert_eq!(q.dequantize().unwrap(), values, "{name}: what is stored is what was learned with");
            let scheme: Scheme = name.parse().unwrap();
            let nearest = quantize(&scheme, &w, rows, cols, Given::default()).unwrap().dequantize().unwrap();
            let (first, nearest) = (error(&w, &values), error(&w, &nearest));
            // Compares with a grid of clips: within one step where the published range is the best.
            assert!(first <= nearest * 1.02, "{name}: {first} against {nearest}");
            if signed && name == "int4-g32" {
                assert!(
                    first < 0.95 * nearest,
                    "the extra code on the larger side: {first} against {nearest}"
                );
            }
        }
    }
}

#[test]
fn offsets_reach_both_neighbours_and_no_other() {
    let (rows, cols) = (4, 64);
    let w = weight(rows, cols);
    for name in SCHEMES {
        let start = learned(name, &w, cols, false);
        // Positive gradients lower values; the clips do not change.
        let [low, first, high] = [1.0f32, 0.0, -1.0].map(|direction| {
            let mut moved = start.clone();
            (0..300).for_each(|_| moved.step(&vec![direction; w.len()], 0.005, 0.0, 2));
            let mut values = vec![0.0; w.len()];
            moved.fake_quantize(&mut values, 1);
            values
        });
        let mut beyond = 0;
        for (i, &w) in w.iter().enumerate() {
            assert!(low[i] <= first[i] && first[i] <= high[i], "{name}");
            assert!(low[i] == high[i] || (low[i] <= w && w <= high[i]), "{name}: {w} between its neighbours");
            beyond += usize::from(low[i] == high[i]);
        }
        assert!(beyond * 4 < w.len(), "{name}: {beyond} weights are clipped");
    }
}

#[test]
fn clips_follow_the_gradient_of_their_group() {
    let (rows, cols) = (8, 160);
    let w = weight(rows, cols);
    for name in ["int4-g32", "int4-g32-asym", "int3-g32"] {
        // Ranges start as narrow as allowed: only the smallest weights count at first.
        let h: Vec<f32> = (0..cols).map(|column| if column % 5 == 0 { 1.0 } else { 0.0 }).collect();
        let scheme: Scheme = name.parse().unwrap();
        let mut learned = LearnedWeight::new(&scheme, &w, cols, &h, None, false, 2).unwrap();
        // The most important weights are those that clip: the largest of each group.
        let matters = |i: usize| {
            let group = &w[i / 32 * 32..][..32];
            if group.iter().all(|other| other.abs() <= w[i].abs()) { 100.0 } else { 1.0 }
        };
        let distance = |learned: &LearnedWeight| {
            let mut values = vec![0.0; w.len()];
            learned.fake_quantize(&mut values, 1);
            let gradient: Vec<f32> =
                values.iter().zip(&w).enumerate().map(|(i, (q, w))| matters(i) * (q - w)).collect();
            let sum: f64 = gradient.iter().enumerate().map(|(i, g)| f64::from(g * g / matters(i))).sum();
            (sum, gradient)
        };
        let (before, _) = distance(&learned);
        for _ in 0..60 {
            let (_, gradient) = distance(&learned);
            learned.step(&gradient, 0.0, 0.01, 2);
        }
        let (after, _) = distance(&learned);
        assert!(after < 0.4 * before, "{name}: {before} → {after}");
    }
}

#[test]
fn what_has_no_table_is_refused() {
    for name in ["bf16", "q4_k", "nf4-dq", "fp8-e4m3-t128x128", "int4-t128x128"] {
        let scheme: Scheme = name.parse().unwrap();
        let found = LearnedWeight::new(&scheme, &[1.0; 256], 256, &[1.0; 256], None, false, 1);
        assert!(matches!(found, Err(AutoRoundError::Scheme { .. })), "{name}");
    }
    let scheme: Scheme = "int4-g32".parse().unwrap();
    let found = LearnedWeight::new(&scheme, &[1.0; 64], 64, &[1.0; 63], None, false, 1);
    assert!(matches!(found, Err(AutoRoundError::Length { found: 63, expected: 64, .. })));
}

#[test]
fn resetting_forgets_what_was_learned() {
    let w = weight(4, 64);
    for name in SCHEMES {
        let start = learned(name, &w, 64, true);
        let mut moved = start.clone();
        let gradient: Vec<f32> = w.iter().map(|w| w.cos()).collect();
        (0..50).for_each(|_| moved.step(&gradient, 0.01, 0.01, 1));
        assert!(moved.quantized() != start.quantized(), "{name}");
        moved.reset();
        assert_eq!(moved.quantized(), start.quantized(), "{name}");
    }
}

/// After large gradients of one sign, small ones of the other sign do not reverse the steps at once.
#[test]
fn steps_have_momentum() {
    let w = weight(4, 64);
    let after = |gradients: [(usize, f32); 2]| {
        let mut learned = learned("int4-g32", &w, 64, false);
        for (steps, gradient) in gradients {
            (0..steps).for_each(|_| learned.step(&vec![gradient; w.len()], 0.01, 0.0, 1));
        }
        learned.quantized()
    };
    assert_eq!(after([(20, 1.0), (5, -0.05)]), after([(20, 1.0), (5, 1.0)]));
    assert!(after([(20, 1.0), (5, -2.0)]) != after([(20, 1.0), (5, 1.0)]));
}

#[test]
fn a_metric_is_symmetric_and_has_the_mean_of_the_identity() {
    let (hidden, tokens) = (5, 300);
    let gradients: Vec<f32> =
        (0..hidden * tokens).map(|i| (i as f32 * 0.7).sin() * (i % hidden) as f32).collect();
    let mut moments = Hessian::new(hidden).unwrap();
    moments.add(&gradients, 1);
    let metric = Metric::new(&moments).unwrap();
    let identity: Vec<f32> =
        (0..hidden * hidden).map(|i| f32::from(u8::from(i % (hidden + 1) == 0))).collect();
    let mut m = Vec::new();
    metric.weigh(&identity, &mut m, 1);
    let trace: f32 = (0..hidden).map(|i| m[i * hidden + i]).sum();
    assert!((trace - hidden as f32).abs() < 1e-4, "{trace}");
    assert!((0..hidden).all(|i| (0..hidden).all(|j| m[i * hidden + j] == m[j * hidden + i])));
    // A direction without gradients keeps a tenth of the identity.
    assert!((m[0] - 0.1).abs() < 1e-6 && m[1].abs() < 1e-6, "{m:?}");
    let errors: Vec<f32> = (0..1100 * hidden).map(|i| (i as f32 * 0.3).cos()).collect();
    let (mut one, mut three) = (Vec::new(), Vec::new());
    metric.weigh(&errors, &mut one, 1);
    metric.weigh(&errors, &mut three, 3);
    assert!(one == three);
    let expected: f32 = (0..hidden).map(|j| errors[j] * m[j * hidden + 2]).sum();
    assert!((one[2] - expected).abs() < 1e-5, "{} {expected}", one[2]);
    assert!(Metric::new(&Hessian::from_sum(vec![0.0; 25], hidden, 7).unwrap()).is_none());
}
