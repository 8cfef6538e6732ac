//! Schemes of the KV cache: those that nothing else can use, and the usual ones of the grammar.

use std::io::{self, Write};

use mantissa_model::{KvPolicy, ModelConfig};
use serde::Serialize;
use serde_json::json;

use crate::output::{Align, Table};

/// Head width and number of key/value heads for which bits are given.
const HEAD: usize = 128;
const HEADS: usize = 8;

/// Schemes with their descriptions.
const SCHEMES: [(&str, &str); 10] = [
    ("int8-head", "int8, one scale per token and head; short name: int8"),
    ("fp8-e4m3-head", "FP8, one scale per token and head; short name: fp8"),
    ("int4-head-asym", "int4 with zero points per token and head; short name: int4"),
    ("turbo4", "TurboQuant: rotated heads on the levels of least squared error"),
    ("turbo3", "the same with 3 bits; 1 to 8 are possible"),
    ("turbo2", "the same with 2 bits"),
    ("nuq4", "KVQuant: levels learned on --calibration"),
    ("nuq4-1%", "the same, with the largest 1 % of each token in f16"),
    ("nuq3-1%", "the same with 3 bits; 1 to 8 are possible"),
    ("nuq2-1%", "the same with 2 bits"),
];

/// Scheme of the KV cache.
#[derive(Serialize)]
pub struct Row {
    /// Name for `--kv` and `+kv-` in recipes.
    pub name: &'static str,
    /// Bits per element of keys and values, scales included.
    pub bits_per_element: f64,
    /// One line about it.
    pub about: &'static str,
}

/// Returns the schemes with their bits.
pub fn rows() -> Vec<Row> {
    let config = json!({
        "model_type": "llama", "hidden_size": HEAD * HEADS, "intermediate_size": HEAD, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "vocab_size": 32, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
    });
    let Ok(config) = ModelConfig::from_json(&config, "config.json") else { return Vec::new() };
    let bits = |name: &str| {
        let bytes = name.parse::<KvPolicy>().ok()?.bytes_per_token(&config).ok()?;
        Some(8.0 * bytes / (2 * HEAD * HEADS) as f64)
    };
    let row = |(name, about)| Some(Row { name, bits_per_element: bits(name)?, about });
    SCHEMES.into_iter().filter_map(row).collect()
}

/// Prints the schemes.
///
/// # Errors
/// As `out`.
pub fn print(rows: &[Row], out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\nKV cache (--kv, +kv- in recipes); bits per element with {HEADS} heads of {HEAD}:")?;
    let mut table = Table::new([("scheme", Align::Left), ("bits", Align::Right), ("meaning", Align::Left)]);
    for row in rows {
        table.row([row.name.to_owned(), format!("{:.3}", row.bits_per_element), row.about.to_owned()]);
    }
    table.write(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scheme_parses_and_counts_its_scales() {
        let rows = rows();
        assert_eq!(rows.len(), SCHEMES.len());
        let bits = |name: &str| rows.iter().find(|row| row.name == name).map(|row| row.bits_per_element);
        assert_eq!(bits("int8-head"), Some(8.25));
        assert_eq!(bits("turbo4"), Some(4.125));
    }
}
