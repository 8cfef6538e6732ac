//! Means and standard errors from per-window sums.

/// Sums of one quantity over one window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
