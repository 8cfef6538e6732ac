//! Means and standard errors from per-window sums.

use serde::{Deserialize, Serialize};

/// Sums of one quantity over one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sum {
    /// Number of positions.
    pub count: u64,
    /// Sum.
    pub sum: f64,
    /// Sum of squares.
    pub squares: f64,
}

impl Sum {
    /// Adds one position.
    pub fn add(&mut self, x: f64) {
        self.count += 1;
        self.sum += x;
        self.squares += x * x;
    }
}

/// Mean with its standard error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Mean over positions.
    pub mean: f64,
    /// Standard error; NaN if there are too few observations.
    pub se: f64,
}

/// Estimates the mean over all positions and its standard error, with windows as the independent unit. Uses
/// the ratio estimator for clusters, `se² = W/(W-1) · sum_w (S_w - mean·n_w)² / N²` (W. Cochran, "Sampling
/// Techniques", 1977, section 6.3 with clusters as units). A single window falls back to its positions.
pub fn estimate(windows: &[Sum]) -> Estimate {
    let n: u64 = windows.iter().map(|w| w.count).sum();
    let total: f64 = windows.iter().map(|w| w.sum).sum();
    let mean = total / n as f64;
    let se = match windows.len() {
        0 => f64::NAN,
        1 => {
            let variance = (windows[0].squares - mean * total) / (n as f64 - 1.0);
            (variance.max(0.0) / n as f64).sqrt()
        }
        w => {
            let spread: f64 = windows.iter().map(|w| (w.sum - mean * w.count as f64).powi(2)).sum();
            (spread * w as f64 / (w as f64 - 1.0)).sqrt() / n as f64
        }
    };
    Estimate { mean, se }
}

/// Returns the number of standard errors beyond which one of `comparisons` differences is no chance: two-sided, 5 % for all
/// of them together (Bonferroni), by Student's distribution with `freedom` degrees of freedom (windows less one). `None`
/// without any: the error of one window is no standard error.
pub fn critical(comparisons: usize, freedom: usize) -> Option<f64> {
    let share = 1.0 - 0.05 / comparisons.max(1) as f64;
    let (mut low, mut high) = (0.0, 1e6);
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if within(middle, freedom.min(MOST_FREEDOM)) < share { low = middle } else { high = middle }
    }
    (freedom > 0).then_some(high)
}

/// Degrees of freedom from which on Student's distribution is the normal one, to three digits.
const MOST_FREEDOM: usize = 1000;

/// Probability that a variable of Student's distribution lies between `-t` and `t` (M. Abramowitz and I. Stegun, "Handbook
/// of Mathematical Functions", 26.7.3 and 26.7.4).
fn within(t: f64, freedom: usize) -> f64 {
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let is_odd = freedom % 2 == 1;
    // Terms in cos θ, cos³ θ, … or in 1, cos² θ, …, each the one before by a ratio of neighbouring numbers.
    let mut term = if is_odd { cos } else { 1.0 };
    let (mut sum, mut power) = (0.0, if is_odd { 1 } else { 0 });
    while power + 2 <= freedom {
        sum += term;
        term *= cos * cos * (power + 1) as f64 / (power + 2) as f64;
        power += 2;
    }
    if is_odd { 2.0 / std::f64::consts::PI * (angle + sin * sum) } else { sin * sum }
}

/// Note on the errors of figures over `windows` windows: those of one window are no standard errors.
pub fn note(windows: usize) -> Option<String> {
    (windows == 1).then(|| {
        "one window: the errors are those of its tokens, which are correlated, and no standard errors; two windows or more have \
         standard errors"
            .to_owned()
    })
}

/// Formats a mean over `windows` windows with its standard error, or says that one window has none.
pub fn with_error(mean: &str, error: &str, unit: &str, windows: usize) -> String {
    match windows {
        1 => format!("{mean} {unit} (one window)"),
        _ => format!("{mean} ± {error} {unit}"),
    }
}

/// Returns the `share` quantile of `sorted` (nearest rank).
pub fn percentile(sorted: &[f32], share: f64) -> f32 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied().unwrap_or(f32::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two-sided 5 % points of Student's distribution, from tables; the last is that of 0.5 %.
    #[test]
    fn critical_values_are_those_of_tables() {
        let table =
            [(1, 1, 12.706), (1, 2, 4.303), (1, 3, 3.182), (1, 10, 2.228), (1, 30, 2.042), (10, 20, 3.153)];
        for (comparisons, freedom, expected) in table {
            let found = critical(comparisons, freedom).unwrap_or(f64::NAN);
            assert!((found - expected).abs() < 1e-3, "{comparisons} {freedom}: {found}");
        }
        assert!(critical(1, 5000).is_some_and(|found| (found - 1.962).abs() < 2e-3));
        assert_eq!(critical(1, 0), None);
    }

    fn window(xs: &[f64]) -> Sum {
        let mut sum = Sum::default();
        xs.iter().for_each(|&x| sum.add(x));
        sum
    }

    #[test]
    fn windows_are_the_unit() {
        // Equal windows: the estimator is the standard error of window means.
        let found = estimate(&[window(&[1.0, 3.0]), window(&[5.0, 7.0]), window(&[3.0, 5.0])]);
        assert!((found.mean - 4.0).abs() < 1e-15);
        assert!((found.se - (4.0f64 / 3.0).sqrt()).abs() < 1e-15, "{}", found.se);
        // Duplicating every position within its window adds no information.
        let doubled = [&[1.0, 1.0, 3.0, 3.0][..], &[5.0, 5.0, 7.0, 7.0], &[3.0, 3.0, 5.0, 5.0]];
        assert!((estimate(&doubled.map(window)).se - found.se).abs() < 1e-15);
    }

    #[test]
    fn one_window_falls_back_on_positions() {
        let found = estimate(&[window(&[1.0, 2.0, 3.0, 4.0])]);
        assert!((found.se - (5.0f64 / 12.0).sqrt()).abs() < 1e-12);
        assert!(estimate(&[]).mean.is_nan());
    }

    #[test]
    fn one_window_states_no_standard_error() {
        assert_eq!(with_error("0.5", "0.1", "nats", 1), "0.5 nats (one window)");
        assert_eq!(with_error("0.5", "0.1", "nats", 2), "0.5 ± 0.1 nats");
        assert!(note(1).is_some_and(|note| note.starts_with("one window: ")));
        assert_eq!((note(2), note(0)), (None, None));
    }

    #[test]
    fn percentiles_by_nearest_rank() {
        let sorted: Vec<f32> = (1..=200).map(|i| i as f32).collect();
        assert_eq!(
            (percentile(&sorted, 0.99), percentile(&sorted, 0.5), percentile(&sorted, 1.0)),
            (198.0, 100.0, 200.0)
        );
        assert!(percentile(&[], 0.5).is_nan());
    }
}
