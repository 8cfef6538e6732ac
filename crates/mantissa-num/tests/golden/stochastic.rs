//! `stochastic_rounding`: the two bf16 maps for a given random word, and exact probabilities.

use mantissa_num::Rounding;
use mantissa_num::minifloat::{BF16, E2M1, E4M3, E5M2, MiniFloat, Overflow};

use crate::support::{Get, assert_codes, open};

fn encode(format: MiniFloat, x: f32, overflow: Overflow, word: u32) -> i64 {
    format.encode(x, overflow, Rounding::Drawn { word }, 0).into()
}

/// Rounding adds a word to the truncated bits and truncates; the other map compares, and is the same under `r ->
/// 65535 - r`.
#[test]
fn bf16_maps_match_for_a_given_word() {
    for file in open("stochastic_rounding.safetensors") {
        let t = file.tensors();
        let get = |name: &str| t.ints(name).unwrap();
        let (bits, random, finite) = (get("x_bits"), get("rand_u16"), get("finite_mask"));
        let rows: Vec<usize> = (0..bits.len()).filter(|&i| finite[i] != 0).collect();
        let round = |i: usize, word: u32| {
            // Our own draw has 32 bits; a 16-bit word is its upper half.
            encode(BF16, f32::from_bits(bits[i] as u32), Overflow::Special, word << 16)
        };
        let pick = |values: Vec<i64>| rows.iter().map(|&i| values[i]).collect::<Vec<i64>>();
        let added: Vec<i64> = rows.iter().map(|&i| round(i, 65535 - random[i] as u32)).collect();
        assert_codes("add then truncate", &added, &pick(get("bf16_add_then_truncate")));
        let compared: Vec<i64> = rows.iter().map(|&i| round(i, random[i] as u32)).collect();
        assert_codes("compare", &compared, &pick(get("bf16_torchao_compare")));
    }
}

#[test]
fn probabilities_are_exact() {
    const FORMATS: [(&str, MiniFloat); 3] = [("f8_e4m3fn", E4M3), ("f8_e5m2", E5M2), ("f4_e2m1fn", E2M1)];
    for file in open("stochastic_rounding.safetensors") {
        let t = file.tensors();
        for (name, format) in FORMATS {
            let get = |kind: &str| t.ints(&format!("{name}.{kind}")).unwrap();
            let (toward, away) = (get("code_toward_zero"), get("code_away_from_zero"));
            let probabilities = t.f64(&format!("{name}.prob_away_f64")).unwrap();
            for (i, &x) in t.f32(&format!("{name}.x")).unwrap().iter().enumerate() {
                // A draw of all ones never rounds up; one of all zeros always does unless the value is exact.
                let low = encode(format, x, Overflow::Saturate, u32::MAX);
                let high = encode(format, x, Overflow::Saturate, 0);
                if probabilities[i] == 1.0 {
                    // The largest finite value itself, listed as fully up from the code below.
                    assert_eq!((low, high), (away[i], away[i]), "{name}[{i}] {x:e}");
                    continue;
                }
                assert_eq!(low, toward[i], "{name}[{i}] {x:e}");
                let expected = if probabilities[i] == 0.0 { toward[i] } else { away[i] };
                assert_eq!(high, expected, "{name}[{i}] {x:e}");
                // The share of the 2^32 draws that round up is the probability, truncated below 2^-32.
                let threshold = (probabilities[i] * 4_294_967_296.0).floor() as u64;
                let rounds_up =
                    |word: u64| encode(format, x, Overflow::Saturate, word as u32) == high && high != low;
                assert!(threshold == 0 || rounds_up(threshold - 1), "{name}[{i}] {x:e}");
                assert!(threshold > u64::from(u32::MAX) || !rounds_up(threshold), "{name}[{i}] {x:e}");
            }
        }
    }
}

/// From the file's specification: k of N draws away from zero is binomial with the exact probability, within five
/// standard deviations; over many x the mean of z is within 5/sqrt(M).
#[test]
fn draws_are_independent_and_unbiased() {
    const DRAWS: u64 = 4000;
    for file in open("stochastic_rounding.safetensors") {
        let t = file.tensors();
        let x = t.f32("f8_e4m3fn.x").unwrap();
        let away = t.ints("f8_e4m3fn.code_away_from_zero").unwrap();
        let probabilities = t.f64("f8_e4m3fn.prob_away_f64").unwrap();
        let mut z = Vec::new();
        for (i, (&x, &p)) in x.iter().zip(&probabilities).enumerate() {
            let spread = (DRAWS as f64 * p * (1.0 - p)).sqrt();
            let rounding = Rounding::Stochastic { seed: 11 };
            let first = i as u64 * DRAWS;
            let up = (first..first + DRAWS)
                .filter(|&n| i64::from(E4M3.encode(x, Overflow::Saturate, rounding, n)) == away[i])
                .count() as f64;
            if spread == 0.0 {
                continue;
            }
            let score = (up - DRAWS as f64 * p) / spread;
            assert!(score.abs() <= 5.0, "{x:e}: {up} of {DRAWS}, probability {p}");
            z.push(score);
        }
        let mean = z.iter().sum::<f64>() / z.len() as f64;
        assert!(mean.abs() <= 5.0 / (z.len() as f64).sqrt(), "{mean}");
    }
}
