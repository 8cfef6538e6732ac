//! Sizes and counts in messages and arguments.

/// Formats a size in bytes with powers of 1000: `2.47 GB`.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// Formats a count: `1.24 B`; below a thousand in full.
pub fn count(n: u64) -> String {
    scaled(n as f64, &["", "K", "M", "B", "T", "P"])
}

/// Says how many things of a kind there are, in full: `1 step`, `2 steps`.
pub fn counted(n: u64, name: &str) -> String {
    format!("{n} {}", number(n, name))
}

/// Returns the name of a kind of thing in the number that `n` of them have: `entry`, `entries`.
pub fn number(n: u64, name: &str) -> String {
    match name.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
        _ if n == 1 => name.to_owned(),
        Some(stem) => format!("{stem}ies"),
        None => format!("{name}s"),
    }
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

/// Parses a size: digits with an optional decimal point, then K M G T (powers of 1000) or Ki Mi Gi Ti (powers
/// of 1024), in any case, with an optional B.
///
/// # Errors
/// A message with the accepted forms.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("expected a size such as 12G, 800M or 4Gi, got {text:?}");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let factor: f64 = match unit {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "g" => 1e9,
        "t" => 1e12,
        "ki" => 1024.0,
        "mi" => 1024f64.powi(2),
        "gi" => 1024f64.powi(3),
        "ti" => 1024f64.powi(4),
        _ => return Err(wrong()),
    };
    let value = digits.parse::<f64>().map_err(|_| wrong())? * factor;
    if value < 1.0 || value >= u64::MAX as f64 { Err(wrong()) } else { Ok(value as u64) }
}

/// Shortens the name of a tensor: `layer 12 down_proj`. Other texts stay as they are.
pub fn short(name: &str) -> String {
    if name.contains(' ') || !name.contains('.') {
        return name.to_owned();
    }
    let parts: Vec<&str> = name.trim_end_matches(".weight").split('.').collect();
    let last = parts.last().copied().unwrap_or(name);
    match parts.iter().find(|part| part.bytes().all(|digit| digit.is_ascii_digit())) {
        Some(layer) if *layer != last => format!("layer {layer} {last}"),
        _ => last.to_owned(),
    }
}

/// Parses a number of tokens: digits, or with a k of 1024.
///
/// # Errors
/// A message with the accepted forms.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let lower = text.to_lowercase();
    let (digits, factor) = lower.strip_suffix('k').map_or((&*lower, 1), |digits| (digits, 1024));
    let count = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
    let allowed = (1..=1 << 30).contains(&count.unwrap_or(0));
    count
        .filter(|_| allowed)
        .ok_or_else(|| format!("expected a number of tokens such as 8192 or 32k, got {text:?}"))
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

    #[test]
    fn sizes_parse() {
        let cases =
            [("12G", 12_000_000_000), ("1.5k", 1500), ("4Gi", 4 << 30), ("800MB", 800_000_000), ("7", 7)];
        for (text, n) in cases {
            assert_eq!(parse_bytes(text), Ok(n), "{text}");
        }
        for text in ["", "G", "-1G", "1X", "1e9", "0", "1..2", "99999999T", "inf"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_short() {
        for (name, shown) in [
            ("model.layers.12.mlp.down_proj.weight", "layer 12 down_proj"),
            ("model.layers.3.mlp.experts.7.up_proj", "layer 3 up_proj"),
            ("model.embed_tokens.weight", "embed_tokens"),
            ("lm_head.weight", "lm_head"),
            ("blk.3.ffn_down.weight", "layer 3 ffn_down"),
            ("hash of the source", "hash of the source"),
            ("evaluation", "evaluation"),
        ] {
            assert_eq!(short(name), shown);
        }
    }
}
