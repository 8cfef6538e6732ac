//! Sizes and counts in messages.

/// Formats a size in bytes with powers of 1000: `2.47 GB`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// Formats a count: `1.24 B`; below a thousand in full.
pub fn count(n: u64) -> String {
    scaled(n as f64, &["", "K", "M", "B", "T", "P"])
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // A value that would print as 1000 uses the next unit.
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", units[unit]).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1_000, "1.00 kB"),
            (2_471_645_608, "2.47 GB"),
            (999_999, "1.00 MB"),
        ];
        for (n, text) in cases {
            assert_eq!(bytes(n), text);
        }
        assert_eq!(count(936_448), "936 K");
        assert_eq!(count(12), "12");
    }
}
