//! SpQR, and models with sparse outliers next to codes, through the command line.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::main_job::windows;
use crate::support::{fail, json, succeed, text};
use crate::trellis::{kl, quantize, same_bytes_everywhere};

fn recipe(dir: &Path, name: &str, rest: &str) -> PathBuf {
    let path = dir.join(format!("{name}.toml"));
    fs::write(&path, format!("method = \"spqr\"\n{rest}")).unwrap();
    path
}

#[test]
fn outliers_are_stored_counted_and_read_twice() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let (out, dense) = (temp.path().join("out"), temp.path().join("dense"));
    let done = quantize(&model, "spqr-int3-g16", &tokens, &out, &[]);
    let found = &done["verification"];
    assert_eq!((&found["ok"], &found["weights"]), (&true.into(), &14.into()), "{found}");
    assert!(!found["notes"].to_string().contains("decoded twice"), "{found}");
    assert_eq!((&done["container"], &done["method"]), (&"native".into(), &"spqr".into()));
    let layer = &done["layers"][0];
    assert_eq!((&layer["scale_dtype"], &layer["outliers"]), (&"f16".into(), &41.into()), "{layer}");
    // Codes, a 16-bit scale per 16 of them, a count per row, and value and column for 41 of 4096 weights.
    let bits = 3.0 + 1.0 + 16.0 / 64.0 + 32.0 * 41.0 / 4096.0;
    assert!((layer["bits_per_weight"].as_f64().unwrap() - bits).abs() < 1e-9, "{layer}");
    let listed = json(&["inspect", text(&out), "--json"]);
    let (stored, planned) = (&listed["linear_bits_per_weight"], &done["linear_bits_per_weight"]);
    assert!((stored.as_f64().unwrap() - planned.as_f64().unwrap()).abs() < 1e-3, "{stored} {planned}");
    let verified = json(&["verify", text(&out), "--reference", text(&model), "--json", "--quiet"]);
    assert_eq!(verified["ok"], true, "{verified}");
    // Decoded codes plus outliers equal the weight stored in one piece.
    let arguments =
        ["convert", text(&out), "--format", "native", "--requantize", "f32", "--out", text(&dense)];
    succeed(&[&arguments[..], &["--quiet"]].concat());
    let difference = kl(&out, &dense, &tokens);
    assert!(difference.abs() < 1e-6, "{difference}");
    let no = temp.path().join("no");
    let line = fail(2, &["convert", text(&out), "--format", "gptq", "--out", text(&no)]);
    assert!(line.contains("side tensors (outliers)"), "{line}");
}

#[test]
fn more_outliers_lose_less_independent_of_threads_and_level() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let mut costs = Vec::new();
    for share in ["0.002", "0.02", "0.1"] {
        let table = format!("weights = \"int3-g32-asym\"\n[gptq]\ndamp = 0.02\n[spqr]\noutliers = {share}\n");
        let recipe = recipe(temp.path(), share, &table);
        let out = temp.path().join(share.replace('.', "-"));
        assert_eq!(quantize(&model, text(&recipe), &tokens, &out, &[])["verification"]["ok"], true);
        costs.push(kl(&out, &model, &tokens));
    }
    assert!(costs[1] < costs[0] && costs[2] < 0.8 * costs[1], "{costs:?}");
    same_bytes_everywhere(temp.path(), &model, "spqr-nf4", &tokens);
}

#[test]
fn formats_without_outliers_are_refused_before_any_work() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let rotated =
        recipe(temp.path(), "r", "weights = \"int4-g32\"\ntransform = \"rotate\"\n[rotate]\nonline = true\n");
    let moved = recipe(temp.path(), "m", "weights = \"int4-g32\"\n[gptq]\ngroups = \"current\"\n");
    for (recipe, format, says) in [
        ("spqr-int4-g32", "gptq", "gptq stores no outliers beside its codes"),
        ("spqr-int4-g32", "compressed-tensors", "compressed-tensors stores no outliers"),
        ("spqr-int4-g32+int8-token", "native", "no activation scheme"),
        (text(&rotated), "native", "online = false in [rotate]"),
        (text(&moved), "native", "needs a g_idx"),
        ("spqr-trellis2", "native", "schemes other than a trellis"),
        ("spqr-q4_0", "native", "its blocks have their own search"),
    ] {
        let out = temp.path().join("out");
        let arguments =
            ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)];
        let line = fail(2, &[&arguments[..], &["--calibration-tokens", &tokens]].concat());
        assert!(line.contains(says), "{recipe} {format}: {line}");
        assert!(!out.exists());
    }
}

/// Without coverage, layers fall back to RTN, with the largest errors stored as outliers.
#[test]
fn a_fallback_keeps_the_outliers_with_the_largest_errors() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let few = temp.path().join("few.json");
    fs::write(&few, "[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]]").unwrap();
    let recipe = recipe(temp.path(), "d", "weights = \"int3-g32\"\n[gptq]\ndamp = 0.00001\n");
    let out = temp.path().join("out");
    let arguments =
        ["quantize", text(&model), "--recipe", text(&recipe), "--out", text(&out), "--json", "--quiet"];
    let more = ["--calibration-tokens", text(&few), "--hold-out", "1"];
    let done = json(&[&arguments[..], &more].concat());
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let given_up = done["fallbacks"].as_array().unwrap();
    assert!(!given_up.is_empty(), "{done}");
    let rounded = temp.path().join("rounded");
    succeed(&["quantize", text(&model), "--recipe", "rtn-int3-g32", "--out", text(&rounded), "--quiet"]);
    let plain = fs::read_to_string(rounded.join("quality.json")).unwrap();
    let plain: Value = serde_json::from_str(&plain).unwrap();
    for module in given_up {
        let of = |quality: &Value| {
            let layers = quality["layers"].as_array().unwrap();
            layers.iter().find(|layer| &layer["module"] == module).unwrap().clone()
        };
        let (kept, plain) = (of(&done), of(&plain));
        assert_eq!(kept["method"], "rtn");
        let [kept, plain] = [kept, plain].map(|layer| layer["mse"].as_f64().unwrap());
        assert!(kept < 0.98 * plain, "{module}: {kept} {plain}");
    }
    assert!(kl(&out, &model, &tokens) > 0.0);
}
