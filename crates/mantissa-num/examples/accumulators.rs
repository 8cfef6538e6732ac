//! Error of long dot products of E4M3 for each accumulator: root mean square of the error next to that of the exact
//! sum, 64 products of each length. Results are in docs/results/arithmetic.md.

use mantissa_num::minifloat::E4M3;
use mantissa_num::round::random_u32;
use mantissa_num::{Accumulator, AccumulatorError};

const UNITS: [&str; 4] = ["f32", "hopper", "hopper-128", "hopper-32"];

/// Factor from a seed and its index.
type Draw = fn(u64, u64) -> f64;

fn main() -> Result<(), AccumulatorError> {
    let units = UNITS.map(str::parse::<Accumulator>);
    println!("factors, K: {}", UNITS.join(", "));
    let kinds: [(&str, Draw); 2] =
        [("of one sign", |seed, i| 448.0 * uniform(seed, i)), ("normal", |seed, i| 64.0 * normal(seed, i))];
    for (name, draw) in kinds {
        for k in [256, 1024, 4096, 16_384, 65_536] {
            let mut errors = [0f64; UNITS.len()];
            let mut energy = 0f64;
            for product in 0..64 {
                let [a, b] = [2 * product, 2 * product + 1].map(|seed| -> Vec<f32> {
                    (0..k).map(|i| E4M3.decode(E4M3.encode_saturating(draw(seed, i) as f32))).collect()
                });
                let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                energy += exact * exact;
                for (error, unit) in errors.iter_mut().zip(&units) {
                    *error += (f64::from(unit.clone()?.dot(&a, &b)) - exact).powi(2);
                }
            }
            let shares = errors.map(|error| format!("{:.1e}", (error / energy).sqrt()));
            println!("{name}, {k}: {}", shares.join(", "));
        }
    }
    Ok(())
}

/// Uniform between 0 and 1, excluding both.
fn uniform(seed: u64, i: u64) -> f64 {
    (f64::from(random_u32(seed, i)) + 0.5) / 2f64.powi(32)
}

/// Normal value by the Box–Muller transform.
fn normal(seed: u64, i: u64) -> f64 {
    let angle = std::f64::consts::TAU * uniform(seed, 2 * i + 1);
    (-2.0 * uniform(seed, 2 * i).ln()).sqrt() * angle.cos()
}
