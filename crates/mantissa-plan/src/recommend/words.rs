//! Figures in the words of a recommendation.

/// Formats bytes in GB, or MB below a tenth of it: `19.3 GB`.
pub fn gb(bytes: f64) -> String {
    match bytes / 1e9 {
        n if n < 0.009_95 => format!("{:.2} MB", bytes / 1e6),
        n if n < 0.0995 => format!("{:.0} MB", bytes / 1e6),
        n if n < 9.95 => format!("{n:.2} GB"),
        n if n < 99.5 => format!("{n:.1} GB"),
        n => format!("{n:.0} GB"),
    }
}

/// Formats a rate with two to four digits: `8.4`, `127`, `12.3k`.
pub fn rate(value: f64) -> String {
    match value {
        v if v < 9.95 => format!("{v:.1}"),
        v if v < 9950.0 => format!("{v:.0}"),
        v if v < 99_500.0 => format!("{:.1}k", v / 1e3),
        v => format!("{:.0}k", v / 1e3),
    }
}
