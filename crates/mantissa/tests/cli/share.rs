//! Nothing is skipped silently: the share of the parameters that will be quantized is shown before work, and weights
//! that would be skipped are refused.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::tiny;
use crate::multimodal::with_tensors;
use crate::support::{File, fail, json, mantissa, stderr, text, write};

fn recipe(dir: &Path, rest: &str) -> PathBuf {
    let path = dir.join("recipe.toml");
    fs::write(&path, format!("method = \"rtn\"\nweights = \"int8-channel\"\n{rest}")).unwrap();
    path
}

/// Copies a model with its fused experts under other names.
fn renamed(out: &Path) -> PathBuf {
    let model = tiny("qwen3-moe-fused");
    fs::create_dir(out).unwrap();
    fs::copy(model.join("config.json"), out.join("config.json")).unwrap();
    let file = File::open(&model.join("model.safetensors"));
    let named = |name: &str| {
        name.replace("experts.gate_up_proj", "experts.w13").replace("experts.down_proj", "experts.w2")
    };
    let tensors: Vec<_> = file
        .names()
        .into_iter()
        .map(|name| (named(&name), file.dtype(&name), file.shape(&name), file.bytes(&name)))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, &shape[..], bytes.clone()))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

#[test]
fn fused_experts_under_unknown_names_are_refused() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (renamed(&temp.path().join("model")), temp.path().join("out"));
    for more in [&["--quiet"][..], &["--dry-run", "--quiet"]] {
        let arguments = ["quantize", text(&model), "--recipe", "rtn-int8-channel", "--out", text(&out)];
        let line = fail(2, &[&arguments[..], more].concat());
        assert!(
            line.contains("fused experts: expected") && line.contains("mlp.experts.gate_up_proj for all"),
            "{line}"
        );
        assert!(
            line.contains("got tensor model.layers.0.mlp.experts.w") && line.contains("qwen3_moe"),
            "{line}"
        );
    }
    assert!(!out.exists());
}

#[test]
fn fused_weights_that_would_be_skipped_are_refused_unless_kept() {
    let temp = TempDir::new().unwrap();
    let experts = "model.layers.1.mlp.experts.gate_up_proj";
    let more: &[(&str, &[usize])] =
        &[(experts, &[4, 48, 32]), ("model.layers.1.mlp.experts.down_proj", &[4, 32, 24])];
    let model = with_tensors(&tiny("qwen3-qknorm"), &temp.path().join("model"), more);
    let out = temp.path().join("out");
    let arguments = |recipe: &str| {
        ["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"].map(str::to_owned)
    };
    for more in [&[][..], &["--dry-run".to_owned()]] {
        let line = fail(2, &[&arguments("rtn-int8-channel")[..], more].concat());
        assert!(line.contains("expected at least 95 % of the linear layers to be quantized, got "), "{line}");
        assert!(line.contains(&format!("does not know tensor \"{experts}\" [4, 48, 32]")), "{line}");
    }
    assert!(!out.exists());
    let keep = recipe(temp.path(), "keep = [\"model.layers.*.mlp.experts.*\"]\n");
    let done = json(&[&arguments(text(&keep))[..], &["--json".to_owned()]].concat());
    assert_eq!(done["share"]["quantized"], done["share"]["covered"], "{done}");
    assert!(File::open(&out.join("model.safetensors")).has(experts));
}

#[test]
fn a_recipe_for_a_tower_is_refused() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let tower = recipe(temp.path(), "[[layers]]\nmodules = [\"model.visual.*\"]\nweights = \"int4-g8\"\n");
    let model = tiny("qwen3-vl");
    let arguments = ["quantize", text(&model), "--recipe", text(&tower), "--out", text(&out), "--quiet"];
    let line = fail(2, &arguments);
    assert!(line.contains("layers: expected modules of the text model, got \"model.visual.*\""), "{line}");
    assert!(!out.exists());
    // A pattern for the text model that also fits a tower is meant for the text model; to keep a tower is no error.
    let both = "keep = [\"model.visual.*\"]\n[[layers]]\nmodules = [\"*_proj\"]\nweights = \"int4-g8\"\n";
    let both = recipe(temp.path(), both);
    let output = mantissa(&["quantize", text(&model), "--recipe", text(&both), "--out", text(&out)]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn the_share_is_shown_before_work_and_recorded() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("qwen3-moe"), temp.path().join("out"));
    let keep = recipe(temp.path(), "keep = [\"*.k_proj\"]\n");
    let arguments = ["quantize", text(&model), "--recipe", text(&keep), "--out", text(&out)];
    let preview = json(&[&arguments[..], &["--dry-run", "--json"]].concat());
    let share = &preview["share"];
    let number = |of: &Value, field: &str| of[field].as_u64().unwrap();
    let kept = share["kept"].as_array().unwrap();
    let reason = |modules: &str| {
        let found = kept.iter().find(|kept| kept["modules"] == modules);
        found.map(|kept| (kept["count"].as_u64().unwrap(), kept["why"].as_str().unwrap().to_owned()))
    };
    assert_eq!(
        reason("model.layers.*.self_attn.k_proj"),
        Some((2, "--keep or the recipe names it".to_owned()))
    );
    assert!(reason("model.layers.*.mlp.gate").is_some_and(|(n, why)| n == 2 && why.starts_with("router")));
    assert!(reason("model.embed_tokens").is_some() && reason("lm_head").is_some());
    assert!(number(share, "linear") > number(share, "quantized"));
    let schemes = share["schemes"].as_array().unwrap();
    let expected: u64 = schemes.iter().map(|scheme| number(scheme, "bytes")).sum();
    assert_eq!(expected, number(&preview, "output_bytes"));
    let run = mantissa(&arguments);
    let said = stderr(&run);
    assert!(
        said.contains("% of the parameters of linear layers quantized") && said.contains("int8-channel"),
        "{said}"
    );
    let quality: Value = serde_json::from_slice(&fs::read(out.join("quality.json")).unwrap()).unwrap();
    assert_eq!(&quality["share"], share);
    assert_eq!((number(&quality, "bytes"), number(&quality, "expected_bytes")), (expected, expected));
    let shown = mantissa(&[&arguments[..], &["--dry-run", "--overwrite"]].concat());
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("kept model.layers.*.mlp.gate (2, "), "{shown}");
}
