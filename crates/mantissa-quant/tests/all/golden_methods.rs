//! HQQ, SmoothQuant and AWQ compared with results of the published code, within the tolerances of the data's README.
//!
//! The committed file has a part of the data. If all of it lies next to the repository, that is used too.
use std::path::PathBuf;

use mantissa_num::Scheme;
use mantissa_quant::awq::{self, WeightReader};
use mantissa_quant::hqq::{HqqOptions, hqq, quantize, with_float_zero};
use mantissa_quant::smooth;
use mantissa_store::SafeTensors;

#[test]
fn hqq_matches_the_published_code() {
    for file in files("hqq") {
        let w = f32s(&file, "W");
        for bits in [8, 4, 3, 2] {
            let name = format!("hqq_lib.w{bits}_g64_axis1");
            if file.get(&format!("{name}.codes")).is_none() {
                continue;
            }
            let grids = hqq(&w, 64, bits, HqqOptions::default(), 2);
            let (scales, zeros) =
                (f32s(&file, &format!("{name}.scale")), f32s(&file, &format!("{name}.zero")));
            for (i, (found, expected)) in grids.zero.iter().zip(&zeros).enumerate() {
                assert!((found - expected).abs() <= 1e-4, "{name}: zero {i}: {found} for {expected}");
            }
            let errors = f64s(&file, &format!("{name}.f64.errors_per_iteration"));
            for (found, expected) in grids.errors.iter().zip(&errors) {
                assert!((found - expected).abs() <= 1e-5 * expected, "{name}: error {found} for {expected}");
            }
            let scheme = with_float_zero(format!("int{bits}-g64").parse::<Scheme>().unwrap());
            let (q, _) =
                quantize(&scheme, &w, 256, HqqOptions { scales: false, ..HqqOptions::default() }, 2).unwrap();
            let expected = file.read(file.get(&format!("{name}.codes")).unwrap()).unwrap();
            let half = 1 << (bits - 1);
            let ours = (0..w.len()).map(|i| i32::from(q.codes.get(i) as u8 as i8) + half);
            let equal = ours.zip(&expected).filter(|(a, b)| *a == i32::from(**b)).count();
            assert!(equal as f64 >= 0.999 * w.len() as f64, "{name}: {equal} of {} codes", w.len());
            let values = q.dequantize().unwrap();
            for (i, value) in values.iter().enumerate() {
                let expected = (f32::from(expected[i]) - zeros[i / 64]) * scales[i / 64];
                // Differing codes are one step apart.
                assert!((value - expected).abs() <= 1.001 * scales[i / 64], "{name}: value {i}");
            }
        }
    }
}

#[test]
fn smooth_scales_match_the_published_formula() {
    for file in files("awq_smoothquant") {
        let inputs = f32s(&file, "smoothquant.act_scales");
        let mut weights = vec![0.0; inputs.len()];
        for name in ["W", "smoothquant.W2"] {
            smooth::column_peaks(&f32s(&file, name), &mut weights);
        }
        for alpha in ["0.3", "0.5", "0.75", "0.85"] {
            let found = smooth::scales(&inputs, &weights, alpha.parse().unwrap());
            let expected = f64s(&file, &format!("smoothquant.alpha{alpha}.scales_f64"));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    (f64::from(*found) - expected).abs() <= 2e-6 * expected,
                    "{alpha}: {found} {expected}"
                );
            }
        }
    }
}

/// AWQ's own group quantization: the range need not include 0, and the zero point is added after rounding.
fn pseudo_quantize(bits: u32, group: usize) -> impl Fn(&[f32]) -> Vec<f32> + Sync {
    let top = ((1u32 << bits) - 1) as f32;
    move |w| {
        let of_group = |x: &[f32]| -> Vec<f32> {
            let range = |(low, high): (f32, f32), v: &f32| (low.min(*v), high.max(*v));
            let (low, high) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), range);
            let scale = (high - low).max(1e-5) / top;
            let zero = (-(low / scale).round_ties_even()).clamp(0.0, top);
            let code = |v: &f32| ((v / scale).round_ties_even() + zero).clamp(0.0, top);
            x.iter().map(|v| (code(v) - zero) * scale).collect()
        };
        w.chunks(group).flat_map(of_group).collect()
    }
}

#[test]
fn awq_matches_the_published_search() {
    for file in files("awq_smoothquant") {
        let (x, w) = (f32s(&file, "X"), f32s(&file, "W"));
        let (cols, tokens, rows) = (128, x.len() / 128, w.len() / 128);
        let means: Vec<f32> = (0..cols)
            .map(|c| x.iter().skip(c).step_by(cols).map(|v| f64::from(v.abs())).sum::<f64>() / tokens as f64)
            .map(|mean| mean as f32)
            .collect();
        let candidates = awq::candidates(&means);
        for (bits, group) in [(4, 32), (4, 64), (3, 32), (3, 64)] {
            let name = format!("search.llm_awq.w{bits}_g{group}");
            if file.get(&format!("{name}.losses_f64")).is_none() {
                continue;
            }
            let quantize = pseudo_quantize(bits, group);
            let readers = [WeightReader { weight: &w, quantize: &quantize }];
            let found = awq::search(&x, &readers, &candidates, None, 2);
            for (k, (loss, expected)) in
                found.losses.iter().zip(f64s(&file, &format!("{name}.losses_f64"))).enumerate()
            {
                let loss = loss / (tokens * rows) as f64;
                assert!((loss - expected).abs() <= 1e-5 * expected, "{name} {k}: {loss} for {expected}");
            }
            let best = file.read(file.get(&format!("{name}.best_index")).unwrap()).unwrap();
            assert_eq!(found.best, usize::from(best[0]), "{name}");
            for (s, expected) in
                candidates[found.best].iter().zip(f64s(&file, &format!("{name}.best_scales_f64")))
            {
                assert!((f64::from(*s) - expected).abs() <= 1e-6 * expected, "{name}: {s} for {expected}");
            }
        }
        let Some(meta) = file.get("auto_clip.w4_g32.best_step_f64") else { continue };
        let steps = file.read(meta).unwrap();
        let quantize = pseudo_quantize(4, 32);
        let found = awq::clips(&x, &WeightReader { weight: &w, quantize: &quantize }, cols, 32, 2);
        let equal = found.iter().zip(steps.chunks_exact(4)).filter(|(a, b)| **a == b[0]).count();
        assert!(equal as f64 >= 0.97 * found.len() as f64, "{equal} of {} clips", found.len());
    }
}

fn files(name: &str) -> Vec<SafeTensors> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let name = format!("{name}.safetensors");
    let whole = root.join("../shared/golden").join(&name);
    if !whole.exists() {
        println!("skipped: the whole of the reference data is not beside the repository");
    }
    let committed = root.join("tests/data/golden").join(&name);
    let paths = [Some(committed), whole.exists().then_some(whole)];
    paths.into_iter().flatten().map(|path| SafeTensors::open(&path).unwrap()).collect()
}

fn f32s(file: &SafeTensors, name: &str) -> Vec<f32> {
    let bytes = file.read(file.get(name).unwrap()).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

fn f64s(file: &SafeTensors, name: &str) -> Vec<f64> {
    let bytes = file.read(file.get(name).unwrap()).unwrap();
    bytes.as_chunks::<8>().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
}
