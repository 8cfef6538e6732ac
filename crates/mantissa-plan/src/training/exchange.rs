//! Bytes that devices exchange in a step of data-parallel training.
//!
//! For N parameters on d devices, gradients of g and weights of w bytes, every device sends `(d - 1)/d · N` times
//!
//! ```text
//! ZeRO 0         2 g         gradients are summed by parts, then the sums are gathered
//! ZeRO 1, 2      g + w       each device updates its part, then the weights are gathered
//! ZeRO 3         g + 2 w     weights are gathered for the forward and again for the backward
//! ```
//!
//! (Rajbhandari et al. 2020, arXiv 1910.02054, section 7; ZeRO++, Wang et al. 2023, arXiv 2306.10209, section 3; DiLoCo,
//! Douillard et al. 2023, arXiv 2311.08105, algorithm 1: an outer step after every H inner ones.)

use serde::Serialize;

/// Exchange of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Exchange {
    /// Way of sharing, and formats.
    pub way: &'static str,
    /// True if `mantissa train` has it for as many devices.
    pub trained: bool,
    /// Bytes that each device sends in a step.
    pub sent: f64,
    /// Seconds of it on the link, nothing computed meanwhile.
    pub seconds: f64,
}

/// Bytes of a value with the f32 scale of its group.
const fn grouped(bits: f64, group: f64) -> f64 {
    (bits + 32.0 / group) / 8.0
}

/// Inner steps between two outer ones of DiLoCo.
const INNER: f64 = 20.0;

/// Most ranks of a run of `mantissa train`.
const MOST_RANKS: u64 = 8;

/// Returns the exchanges of a step that trains `parameters` parameters, with gradients and weights of these bytes, on `devices`
/// devices whose links carry `link` bytes/s each.
pub fn exchanges(
    parameters: f64,
    (gradients, weights): (f64, f64),
    devices: u64,
    link: f64,
) -> Vec<Exchange> {
    let share = parameters * (devices.max(1) - 1) as f64 / devices.max(1) as f64;
    let (int8, fp8, int4) = (grouped(8.0, 256.0), grouped(8.0, 256.0), grouped(4.0, 64.0));
    let ways = [
        ("ZeRO 0, gradients as stored", true, 2.0 * gradients),
        ("ZeRO 1, gradients and weights as stored", true, gradients + weights),
        ("ZeRO 2, gradients and weights as stored", false, gradients + weights),
        ("ZeRO 1, gradients in int8-g256", true, int8 + weights),
        ("ZeRO 1, gradients in int4-g64+hadamard", true, int4 + weights),
        ("ZeRO 1, gradients in int8-g256, weights in fp8-e4m3-g256", true, int8 + fp8),
        ("ZeRO 3, gradients and weights as stored", false, gradients + 2.0 * weights),
        ("ZeRO 3, gradients in int4-g64, weights in int8-g256", false, int4 + 2.0 * int8),
        ("DiLoCo, an outer step in int4-g64 after 20 inner ones", false, 2.0 * int4 / INNER),
    ];
    let of = |(way, trained, bytes): (&'static str, bool, f64)| {
        let sent = share * bytes;
        Exchange { way, trained: trained && devices <= MOST_RANKS, sent, seconds: sent / link }
    };
    ways.map(of).into()
}

/// Parses the speed of a link into bytes/s: `100Gb` and `100Gbit/s` are bits, `12.5GB/s` bytes.
///
/// # Errors
/// The accepted forms.
pub fn parse_link(text: &str) -> Result<f64, String> {
    let wrong =
        || "expected the speed of a link with its unit, such as 100Gb (bits) or 12.5GB/s (bytes)".to_owned();
    let end = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(end);
    let unit = unit.trim_end_matches("/s").trim_end_matches("ps");
    let scale = match unit {
        "Gb" | "Gbit" => 1e9 / 8.0,
        "Mb" | "Mbit" => 1e6 / 8.0,
        "Tb" | "Tbit" => 1e12 / 8.0,
        "GB" => 1e9,
        "MB" => 1e6,
        "TB" => 1e12,
        _ => return Err(wrong()),
    };
    let speed = number.trim().parse::<f64>().ok().map(|number| number * scale);
    speed.filter(|speed| (1e3..=1e15).contains(speed)).ok_or_else(wrong)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_those_of_the_papers() {
        // ZeRO, section 7: 2 ψ elements for stages 0 to 2, 3 ψ for stage 3, for many devices.
        let found = exchanges(1e9, (2.0, 2.0), 1 << 16, 12.5e9);
        let sent = |way: &str| found.iter().find(|e| e.way.starts_with(way)).unwrap().sent / 2e9;
        for (way, elements) in
            [("ZeRO 0", 2.0), ("ZeRO 1, gradients and", 2.0), ("ZeRO 3, gradients and", 3.0)]
        {
            assert!((sent(way) - elements).abs() < 1e-3, "{way}");
        }
        assert!(found.iter().all(|e| (e.seconds - e.sent / 12.5e9).abs() < 1e-12));
        assert!(exchanges(1e9, (2.0, 2.0), 1, 1e9).iter().all(|e| e.sent == 0.0));
    }

    #[test]
    fn links_are_bits_or_bytes() {
        for (text, speed) in [
            ("100Gb", 12.5e9),
            ("100Gbit/s", 12.5e9),
            ("400Gbps", 50e9),
            ("12.5GB/s", 12.5e9),
            ("900GB", 9e11),
        ] {
            assert_eq!(parse_link(text), Ok(speed), "{text}");
        }
        for wrong in ["", "100", "Gb", "100Gx", "-1Gb", "1e99Gb", "NaNGb"] {
            assert!(parse_link(wrong).is_err(), "{wrong}");
        }
    }
}
