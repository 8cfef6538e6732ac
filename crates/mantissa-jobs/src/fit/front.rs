//! Best choices of every size, from the measured KL of the units.

use mantissa_quant::allocate::StorageOption;
use serde::Serialize;

use super::family::{Candidate, Family};

/// Sizes that are tried between the smallest and the largest.
const STEPS: u64 = 16;

/// A choice that no other of its size or less surpasses.
#[derive(Debug, Serialize)]
pub struct Point {
    /// Bits per weight of the quantized layers.
    pub bits_per_weight: f64,
    /// Methods of the layers.
    pub method: String,
    /// Sum of the units' own KL, nats/token.
    pub predicted_kl: f64,
}

/// Returns the Pareto front of size and predicted KL over all families, from the smallest size.
pub(super) fn front(families: &[Family]) -> Vec<Point> {
    let mut points: Vec<Point> = families.iter().flat_map(points).collect();
    points.sort_by(|a, b| {
        a.bits_per_weight.total_cmp(&b.bits_per_weight).then(a.predicted_kl.total_cmp(&b.predicted_kl))
    });
    let mut least = f64::INFINITY;
    points.retain(|point| {
        let better = point.predicted_kl < least;
        least = least.min(point.predicted_kl);
        better
    });
    points
}

/// Returns the best choice of one family at each of several sizes.
fn points(family: &Family) -> Vec<Point> {
    let units: Vec<Vec<StorageOption>> =
        family.costs.iter().map(|row| row.iter().map(Candidate::choice).collect()).collect();
    let total = |pick: fn(&[StorageOption]) -> u64| units.iter().map(|row| pick(row)).sum::<u64>();
    let least = total(|row| row.iter().map(|c| c.size).min().unwrap_or(0));
    let most = total(|row| row.iter().map(|c| c.size).max().unwrap_or(0));
    let weights: u64 =
        family.units.iter().flat_map(|unit| &unit.linears).map(|l| (l.rows * l.cols) as u64).sum();
    let at = |step: u64| {
        let limit =
            least + (most - least) / STEPS * step + if step == STEPS { (most - least) % STEPS } else { 0 };
        let found = family.allocate(&units, limit).ok()?;
        let size: u64 = units.iter().zip(&found.choices).map(|(row, &at)| row[at].size).sum();
        let bits_per_weight = size as f64 / weights.max(1) as f64;
        Some(Point { bits_per_weight, method: family.methods_of(&found), predicted_kl: found.cost })
    };
    (0..=STEPS).filter_map(at).collect()
}
