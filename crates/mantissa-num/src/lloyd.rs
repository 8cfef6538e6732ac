//! Scalar quantizers with the least squared error: levels fitted to values, or to a density.
//!
//! Lloyd's iteration (Lloyd 1982, "Least Squares Quantization in PCM"; Max 1960) assigns each value to its nearest
//! level and moves each level to the weighted mean of its values, until nothing changes. For sorted values a level's
//! share is a consecutive run, whose mean follows from running sums.

/// Maximum number of iterations; further gains are far below the error of an f32 level.
const ITERATIONS: usize = 2000;

/// Number of points at which a density is sampled.
const POINTS: usize = 16_384;

/// Returns `count` ascending levels with the least `Σ weight · (value - level)²` by Lloyd's iteration, starting at
/// equal shares of the weight. Pairs that are not finite or have no weight are ignored; without any the levels are 0.
pub fn levels(values: &[(f32, f32)], count: usize) -> Vec<f32> {
    let usable = |(value, weight): &&(f32, f32)| value.is_finite() && weight.is_finite() && *weight > 0.0;
    let mut sorted: Vec<(f32, f32)> = values.iter().filter(usable).copied().collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let Some(last) = sorted.len().checked_sub(1) else { return vec![0.0; count] };
    let mut distinct: Vec<f32> = sorted.iter().map(|(value, _)| *value).collect();
    distinct.dedup();
    if distinct.len() <= count {
        distinct.resize(count, sorted[last].0);
        return distinct;
    }
    // Running sums of the weights, and of the weighted values.
    let mut sums = vec![(0f64, 0f64)];
    for (value, weight) in &sorted {
        let (weights, values) = sums[sums.len() - 1];
        let weight = f64::from(*weight);
        sums.push((weights + weight, values + weight * f64::from(*value)));
    }
    let total = sums[sums.len() - 1].0;
    let start = |i: usize| {
        let share = total * (i as f64 + 0.5) / count as f64;
        let place = sums.partition_point(|(weights, _)| *weights < share);
        f64::from(sorted[place.saturating_sub(1).min(last)].0)
    };
    let mut levels: Vec<f64> = (0..count).map(start).collect();
    for _ in 0..ITERATIONS {
        let mut moved = false;
        let (mut first, mut next) = (0, Vec::with_capacity(count));
        for (i, &level) in levels.iter().enumerate() {
            let end = match levels.get(i + 1) {
                Some(above) => {
                    first + sorted[first..].partition_point(|(v, _)| 2.0 * f64::from(*v) <= level + above)
                }
                None => sorted.len(),
            };
            let (below, up_to) = (sums[first], sums[end]);
            // A level without values stays, because values may reach it later.
            let mean = if end > first { (up_to.1 - below.1) / (up_to.0 - below.0) } else { level };
            moved |= mean != level;
            next.push(mean);
            first = end;
        }
        next.sort_by(f64::total_cmp);
        levels = next;
        if !moved {
            break;
        }
    }
    levels.into_iter().map(|level| level as f32).collect()
}

/// Returns `2^bits` levels with the least squared error for one coordinate of a random vector of `dim` coordinates
/// and length `√dim`. The density is proportional to `(1 - x²/dim)^((dim - 3)/2)` (Zandieh et al. 2025, "TurboQuant",
/// arXiv 2504.19874, lemma 1), the normal density in the limit. `dim` is at least 2, and `bits` 1 to 8.
pub fn sphere_levels(dim: usize, bits: u32) -> Vec<f32> {
    let dim = dim.max(2) as f64;
    // Beyond ten the normal density is negligible in f64.
    let reach = dim.sqrt().min(10.0);
    let width = 2.0 * reach / POINTS as f64;
    let point = |i: usize| {
        let x = width * (i as f64 + 0.5) - reach;
        (x as f32, ((dim - 3.0) / 2.0 * (1.0 - x * x / dim).ln()).exp() as f32)
    };
    let half = 1usize << bits.clamp(1, 8) >> 1;
    // Make the levels exactly symmetric; the iteration is symmetric only up to rounding.
    let all = levels(&(0..POINTS).map(point).collect::<Vec<_>>(), 2 * half);
    let magnitude = |i: usize| (all[half + i] - all[half - 1 - i]) / 2.0;
    (0..2 * half).map(|i| if i < half { -magnitude(half - 1 - i) } else { magnitude(i - half) }).collect()
}

/// Index of the level nearest to `x` among ascending `levels`, the lower one for ties; the first for NaN.
pub fn nearest(levels: &[f32], x: f32) -> usize {
    let above = levels.partition_point(|level| *level < x);
    match (above.checked_sub(1), levels.get(above)) {
        (Some(below), Some(level)) if level - x < x - levels[below] => above,
        (Some(below), _) => below,
        (None, _) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean squared error of the levels on the normal density.
    fn normal_error(levels: &[f32]) -> f64 {
        let (mut sum, mut total) = (0.0, 0.0);
        for i in 0..200_000 {
            let x = -10.0 + f64::from(i) * 1e-4;
            let p = (-x * x / 2.0).exp();
            let error = x - f64::from(levels[nearest(levels, x as f32)]);
            (sum, total) = (sum + p * error * error, total + p);
        }
        sum / total
    }

    /// Errors in Max's table for the normal density (1960, table I).
    #[test]
    fn levels_of_long_vectors_match_the_normal_density() {
        for (bits, error) in [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)] {
            let levels = sphere_levels(1 << 20, bits);
            let found = normal_error(&levels);
            assert!((found / error - 1.0).abs() < 2e-3, "{bits}: {found}");
        }
        let two = sphere_levels(1 << 20, 2);
        for (level, tabulated) in two.iter().zip([-1.510, -0.4528, 0.4528, 1.510]) {
            assert!((level - tabulated).abs() < 1e-3, "{two:?}");
        }
    }

    /// One coordinate of a vector in three dimensions is uniform (Archimedes), so its best levels are evenly spaced.
    #[test]
    fn levels_of_three_dimensions_are_even() {
        let levels = sphere_levels(3, 3);
        for (i, level) in levels.iter().enumerate() {
            let even = 3f32.sqrt() * ((2 * i + 1) as f32 / 8.0 - 1.0);
            assert!((level - even).abs() < 1e-3, "{levels:?}");
        }
    }

    #[test]
    fn levels_are_the_values_where_those_are_few_and_follow_the_weights() {
        let values = [(3.0, 1.0), (-1.0, 2.0), (0.5, 1.0), (3.0, 5.0), (f32::NAN, 1.0), (9.0, 0.0)];
        assert_eq!(levels(&values, 3), [-1.0, 0.5, 3.0]);
        assert_eq!(levels(&[(0.0, 3.0), (1.0, 1.0)], 1), [0.25]);
        assert_eq!(levels(&[], 2), [0.0, 0.0]);
        assert_eq!(levels(&[(2.0, 1.0)], 2), [2.0, 2.0]);
    }

    #[test]
    fn the_nearest_level_is_found() {
        let levels = [-1.0, 0.0, 2.0];
        for (x, at) in [(-5.0, 0), (-0.5, 0), (-0.4, 1), (0.9, 1), (1.1, 2), (7.0, 2), (f32::NAN, 0)] {
            assert_eq!(nearest(&levels, x), at, "{x}");
        }
    }
}
