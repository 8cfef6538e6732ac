//! The pipeline on small random models: every kind of recipe is read back and verified, and impossible ones are
//! refused.
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{calibration, files, model};
use mantissa_model::LinearInput;
use mantissa_quant::calibrate::{Calibration, CalibrationSet};
use mantissa_quant::verify::verify;
use mantissa_quant::{Options, Outcome, Plan, Quality, QuantError, Recipe, Start, run};
use mantissa_store::Dtype;
use mantissa_store::convention::{ModelFiles, Weight, awq, compressed_tensors, gptq, native};
use tempfile::TempDir;

fn options(threads: usize) -> Options {
    Options { threads, ..Options::default() }
}

fn quantize(model: &Path, recipe: &str, out: &Path, options: Options) -> Result<Outcome, QuantError> {
    let source = ModelFiles::open(model)?;
    let plan = Plan::new(&source, Recipe::load(recipe)?, options)?;
    run(
        &plan,
        &source,
        &mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true),
        Start::Resume,
        &mut |_| ControlFlow::Continue(()),
    )
}

const RECIPES: &[&str] = &[
    "rtn-int8-channel",
    "rtn-int4-g32",
    "rtn-int4-g32-asym",
    "rtn-int3-g8-asym",
    "rtn-int2-g16",
    "rtn-int5-channel-asym",
    "rtn-int8-tensor",
    "rtn-int6-g16:restricted",
    "rtn-nf4",
    "rtn-fp4-bnb-g128",
    "rtn-nvfp4",
    "rtn-nvfp4:te",
    "rtn-mxfp4",
    "rtn-mxfp4:ct",
    "rtn-mxfp6-e2m3",
    "rtn-mxfp6-e3m2:even",
    "rtn-mxfp8-e4m3:rceil",
    "rtn-mxfp8-e5m2",
    "rtn-mxint8",
    "rtn-fp8-e4m3-channel",
    "rtn-fp8-e4m3-tensor",
    "rtn-fp8-e4m3-t16x16",
    "rtn-fp8-e5m2-channel",
    "rtn-fp6-e3m2-g16",
    "rtn-fp8-e4m3",
    "rtn-bf16",
    "rtn-f16",
    "rtn-int8-channel+int8-token",
    "rtn-fp8-e4m3-channel+fp8-e4m3-token",
    "rtn-mxfp4:ct+mxfp4:ct",
];

#[test]
fn every_recipe_verifies_with_its_measured_errors() {
    let temp = TempDir::new().unwrap();
    for dtype in [Dtype::F32, Dtype::BF16] {
        let source = model(temp.path(), dtype, 1);
        for recipe in RECIPES {
            let out = temp.path().join(format!("{dtype}-{}", recipe.replace(':', "_")));
            let outcome =
                quantize(&source, recipe, &out, options(2)).unwrap_or_else(|e| panic!("{recipe}: {e}"));
            let found = verify(&out, Some(&source), 2).unwrap();
            assert!(found.ok, "{dtype} {recipe}: {:?}", found.faults);
            assert_eq!(found.weights, 14, "{recipe}");
            assert!(
                found.max_error_in_bounds.unwrap() <= 1.0 && found.max_logit_difference.is_some(),
                "{recipe}"
            );
            assert_eq!(outcome.quality.layers.len(), 14);
        }
    }
}

const GPTQ_RECIPES: [&str; 8] = [
    "gptq-int4-g32",
    "gptq-int3-g32-asym",
    "gptq-int8-channel+int8-token",
    "gptq-nvfp4",
    "gptq-mxfp4:ct",
    "gptq-fp8-e4m3-channel",
    "gptq-mxint8",
    "gptq-nf4-g32",
];

#[test]
fn gptq_recipes_verify_and_report_their_output_error() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 7);
    for recipe in GPTQ_RECIPES {
        let out = temp.path().join(recipe.replace(':', "_"));
        let with = Options { calibration: Some(calibration()), ..options(2) };
        let outcome = quantize(&source, recipe, &out, with).unwrap_or_else(|e| panic!("{recipe}: {e}"));
        let found = verify(&out, Some(&source), 2).unwrap();
        assert!(found.ok, "{recipe}: {:?}", found.faults);
        for layer in &outcome.quality.layers {
            assert_eq!(
                (layer.method.as_str(), &layer.fallback),
                ("gptq", &None),
                "{recipe} {}",
                layer.module
            );
            assert!(layer.output_error.is_some_and(|e| e > 0.0), "{recipe} {}", layer.module);
        }
    }
}

/// The first layer has the same input in every run, so its output errors can be compared.
#[test]
fn gptq_beats_rtn_in_output_error() {
    let temp = TempDir::new().unwrap();
    let source = ModelFiles::open(&model(temp.path(), Dtype::F32, 8)).unwrap();
    let config = mantissa_model::load_config(&source).unwrap();
    let set = calibration();
    let mut states = Calibration::begin(&source, &config, &set.windows, 2).unwrap();
    let layer = states.next_layer().unwrap().unwrap();
    let go_on = &mut || ControlFlow::Continue(());
    let hessian = states.statistics(&layer, &[LinearInput::Qkv], go_on).unwrap().remove(0);
    let error = |name: &str, recipe: &str| {
        let out = temp.path().join(recipe);
        let with = Options { calibration: Some(set.clone()), ..options(2) };
        let done = run(
            &Plan::new(&source, Recipe::load(recipe).unwrap(), with).unwrap(),
            &source,
            &mantissa_store::Output::new(&out),
            Start::Restart,
            &mut |_| ControlFlow::Continue(()),
        )
        .unwrap();
        let stored = ModelFiles::open(&out).unwrap().linear(name, 64, 64, false).unwrap();
        let Weight::Quantized(q) = stored.weight else { panic!("{name} is not quantized") };
        let w = source.tensor_f32(&format!("{name}.weight"), &[64, 64]).unwrap();
        let loss = hessian.loss(&w, &q.dequantize().unwrap());
        let reported = done.quality.layers.iter().find(|l| l.module == name).unwrap().output_error;
        assert!(reported.is_none_or(|r| (r / loss - 1.0).abs() < 1e-6), "{recipe}: {reported:?} for {loss}");
        loss
    };
    let name = "model.layers.0.self_attn.q_proj";
    for scheme in ["int4-g32", "int3-g32-asym", "nvfp4"] {
        let (rounded, solved) =
            (error(name, &format!("rtn-{scheme}")), error(name, &format!("gptq-{scheme}")));
        assert!(solved < 0.8 * rounded, "{scheme}: {solved} for {rounded}");
    }
}

#[test]
fn a_dead_input_falls_back_to_rtn_with_a_note() {
    let temp = TempDir::new().unwrap();
    let path = model(temp.path(), Dtype::F32, 9);
    let weights = path.join("model.safetensors");
    let meta = mantissa_store::SafeTensors::open(&weights).unwrap();
    let up = meta.get("model.layers.1.mlp.up_proj.weight").unwrap();
    let mut bytes = std::fs::read(&weights).unwrap();
    bytes[up.offset as usize..(up.offset + up.len) as usize].fill(0);
    std::fs::write(&weights, bytes).unwrap();
    let with = Options { calibration: Some(calibration()), ..options(2) };
    let out = temp.path().join("out");
    let report = quantize(&path, "gptq-int4-g32", &out, with).unwrap().quality;
    assert_eq!(report.fallbacks, ["model.layers.1.mlp.down_proj"]);
    assert_eq!(report.calibration.unwrap().tokens, calibration().tokens() as u64);
    for layer in report.layers {
        let fallen = layer.module == "model.layers.1.mlp.down_proj";
        assert_eq!(layer.method, if fallen { "rtn" } else { "gptq" }, "{}", layer.module);
        assert_eq!(layer.fallback.is_some_and(|why| why.contains("zero in every calibration token")), fallen);
    }
    assert!(verify(&out, Some(&path), 2).unwrap().ok);
}

#[test]
fn unsupported_gptq_recipes_are_refused_before_any_work() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 10);
    let out = temp.path().join("out");
    let refused = |recipe: &str, calibration| {
        let error = quantize(&source, recipe, &out, Options { calibration, ..options(1) }).unwrap_err();
        assert_eq!(error.class(), mantissa_store::ErrorClass::Input, "{recipe}: {error}");
        assert!(!out.exists());
        error.to_string()
    };
    let windows = |windows: &[Vec<u32>]| Some(CalibrationSet::new("w.json", windows.to_vec()));
    assert!(refused("gptq-int4-g32", None).contains("--calibration TEXT"));
    assert!(refused("gptq-int4-g32", windows(&[vec![], vec![]])).contains("no tokens"));
    let message = refused("gptq-int4-g32", windows(&[vec![1], vec![1, 96]]));
    assert!(
        message.contains("w.json: window 1: expected below 96, the model's vocabulary, got token 96"),
        "{message}"
    );
    assert!(refused("gptq-int4-g32", windows(&[vec![1; 65]])).contains("65 tokens"));
    assert!(refused("gptq-int8-tensor", Some(calibration())).contains("groups or channels"));
    assert!(refused("gptq-q8_0", Some(calibration())).contains("use rtn"));
    let path = temp.path().join("r.toml");
    let text = "method = \"gptq\"\nweights = \"int4-g32\"\n[gptq]\ngroups = \"current\"\n";
    std::fs::write(&path, text).unwrap();
    assert!(refused(path.to_str().unwrap(), Some(calibration())).contains("g_idx"));
    // From left to right, groups that follow the order have adjacent columns.
    std::fs::write(&path, format!("{text}act_order = false\n")).unwrap();
    let with = Options { calibration: Some(calibration()), ..options(1) };
    quantize(&source, path.to_str().unwrap(), &out, with).unwrap();
    assert!(verify(&out, Some(&source), 1).unwrap().ok);
}

#[test]
fn groups_follow_the_column_order_if_the_format_stores_it() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 12);
    for (groups, weights, checkpoint_format) in
        [("current", "int4-g32", "gptq"), ("original", "int3-g32-asym", "gptq_v2")]
    {
        let path = temp.path().join("r.toml");
        let text = format!(
            "method = \"gptq\"\nweights = \"{weights}\"\nformat = \"gptq\"\n[gptq]\ngroups = \"{groups}\"\n"
        );
        std::fs::write(&path, text).unwrap();
        let out = temp.path().join(groups);
        let with = Options { calibration: Some(calibration()), ..options(2) };
        quantize(&source, path.to_str().unwrap(), &out, with).unwrap();
        let found = verify(&out, Some(&source), 2).unwrap();
        assert!(found.ok && found.weights == 14, "{:?} {:?}", found.faults, found.notes);
        let json = |name: &str| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(out.join(name)).unwrap()).unwrap()
        };
        let config = json("quantize_config.json");
        assert_eq!(json("config.json")["quantization_config"], config);
        assert_eq!(config["desc_act"], true);
        assert_eq!(config["checkpoint_format"], checkpoint_format);
        let files = ModelFiles::open(&out).unwrap();
        assert!(files.notes().is_empty(), "{:?}", files.notes());
        let linear = files.linear("model.layers.0.mlp.down_proj", 64, 96, false).unwrap();
        assert!(!linear.transforms.is_empty(), "columns moved");
    }
}

#[test]
fn grouped_integers_have_the_same_codes_in_every_format() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F16, 13);
    for recipe in ["rtn-int4-g32", "rtn-int4-g32-asym", "rtn-int4-channel"] {
        let mut codes = Vec::new();
        for container in [compressed_tensors::CONTAINER, gptq::CONTAINER, awq::CONTAINER] {
            let out = temp.path().join(format!("{recipe}-{}", container.name()));
            quantize(&source, recipe, &out, Options { container: Some(container), ..options(2) }).unwrap();
            let found = verify(&out, Some(&source), 2).unwrap();
            assert!(found.ok && found.weights == 14, "{recipe} {container:?}: {:?}", found.faults);
            assert!(found.max_error_in_bounds.unwrap() <= 1.0);
            let files = ModelFiles::open(&out).unwrap();
            let linear = files.linear("model.layers.1.self_attn.k_proj", 32, 64, false).unwrap();
            let Weight::Quantized(q) = linear.weight else { panic!() };
            codes.push(q);
        }
        assert!(codes.windows(2).all(|pair| pair[0] == pair[1]), "{recipe}");
    }
}

#[test]
fn bytes_do_not_depend_on_threads() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 2);
    for recipe in [
        "rtn-int4-g32-asym",
        "rtn-nvfp4",
        "rtn-nf4",
        "rtn-mxfp4",
        "rtn-int8-channel+int8-token",
        "gptq-int4-g32",
        "gptq-nvfp4",
        "spqr-int3-g16",
    ] {
        let out = |threads: usize| temp.path().join(format!("{recipe}-{threads}"));
        for threads in [1, 2, 5] {
            let calibration = (!recipe.starts_with("rtn")).then(calibration);
            quantize(&source, recipe, &out(threads), Options { calibration, ..options(threads) }).unwrap();
        }
        assert_eq!(files(&out(1)), files(&out(2)), "{recipe}");
        assert_eq!(files(&out(1)), files(&out(5)), "{recipe}");
    }
}

#[test]
fn fused_layers_share_the_global_scale() {
    let temp = TempDir::new().unwrap();
    quantize(&model(temp.path(), Dtype::F32, 3), "rtn-nvfp4", &temp.path().join("q"), options(2)).unwrap();
    let files = ModelFiles::open(&temp.path().join("q")).unwrap();
    let global = |layer: usize, module: &str| {
        let name = format!("model.layers.{layer}.{module}.weight_global_scale");
        files.checkpoint().read_f32(&name).unwrap()[0]
    };
    for layer in 0..2 {
        let q = global(layer, "self_attn.q_proj");
        assert_eq!([global(layer, "self_attn.k_proj"), global(layer, "self_attn.v_proj")], [q, q]);
        assert_eq!(global(layer, "mlp.gate_proj"), global(layer, "mlp.up_proj"));
        assert_ne!(q, global(layer, "mlp.down_proj"));
    }
}

#[test]
fn scales_are_stored_in_the_dtype_of_the_model() {
    let temp = TempDir::new().unwrap();
    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
        let out = temp.path().join(format!("q-{dtype}"));
        quantize(&model(temp.path(), dtype, 4), "rtn-int4-g32", &out, options(1)).unwrap();
        let files = ModelFiles::open(&out).unwrap();
        let meta = files.checkpoint().get("model.layers.0.mlp.up_proj.weight_scale").unwrap();
        assert_eq!(meta.dtype, dtype);
    }
}

#[test]
fn a_recipe_file_mixes_schemes_and_keeps_layers() {
    let temp = TempDir::new().unwrap();
    let path = temp.path().join("mixed.toml");
    let text = "weights = \"int4-g32\"\nkeep = [\"model.layers.0.*\"]\n[[layers]]\nmodules = [\"*.down_proj\"]\nweights = \"int8-channel\"\n";
    std::fs::write(&path, text).unwrap();
    let recipe = path.display().to_string();
    let source = model(temp.path(), Dtype::BF16, 5);
    for container in [compressed_tensors::CONTAINER, native::CONTAINER, gptq::CONTAINER] {
        let out = temp.path().join(container.name());
        let with = Options { container: Some(container), max_shard_bytes: 60_000, ..options(2) };
        let outcome = quantize(&source, &recipe, &out, with).unwrap();
        assert_eq!((outcome.quality.layers.len(), outcome.quality.kept.len()), (7, 7));
        let found = verify(&out, Some(&source), 2).unwrap();
        assert!(found.ok, "{:?}", found.faults);
        let files = ModelFiles::open(&out).unwrap();
        assert!(files.checkpoint().files().count() > 1, "sharded");
        let config = mantissa_model::load_config(&files).unwrap();
        let bits = config.linears().into_iter().map(|l| {
            match files.linear(&l.module, l.rows, l.cols, false).unwrap().weight {
                Weight::Quantized(q) => q.format.code_bits(),
                _ => 32,
            }
        });
        assert_eq!(bits.collect::<Vec<_>>(), [32, 32, 32, 32, 32, 32, 32, 4, 4, 4, 4, 4, 4, 8]);
    }
}

#[test]
fn tampering_is_detected() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    let source = model(temp.path(), Dtype::F32, 6);
    quantize(&source, "rtn-int4-g32", &out, options(1)).unwrap();
    let weights = out.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let at = bytes.len() - 1000;
    bytes[at] ^= 0x11;
    std::fs::write(&weights, bytes).unwrap();
    let found = verify(&out, Some(&source), 2).unwrap();
    assert!(!found.ok && found.faults.iter().any(|f| f.contains("SHA-256")), "{:?}", found.faults);
}

#[test]
fn another_model_is_not_the_source() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize(&model(temp.path(), Dtype::F32, 7), "rtn-int4-g32", &out, options(1)).unwrap();
    // Same shapes and other weights: errors far beyond the bound.
    let found = verify(&out, Some(&model(temp.path(), Dtype::F32, 8)), 2).unwrap();
    assert!(found.faults.iter().any(|f| f.contains("× the bound")), "{:?}", found.faults);
    // A quantized model is the source of a conversion, which is lossless; its quantization error is not the
    // conversion's.
    let found = verify(&out, Some(&out), 2).unwrap();
    assert!(found.faults.iter().any(|fault| fault.contains("mse")), "{:?}", found.faults);
    assert!(!found.ok);
}

#[test]
fn unstorable_layers_are_refused_before_anything_is_written() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    let source = model(temp.path(), Dtype::F32, 9);
    let attempt = |recipe: &str, container| {
        let with = Options { container, ..options(1) };
        quantize(&source, recipe, &out, with).unwrap_err()
    };
    let error = attempt("rtn-int4-g24", None);
    let text = error.to_string();
    assert!(
        matches!(error, QuantError::NotStorable { .. }) && text.contains("q_proj") && text.contains("24"),
        "{text}"
    );
    assert!(attempt("rtn-nf4", Some(compressed_tensors::CONTAINER)).to_string().contains("code books"));
    assert!(!out.exists());
    // The native format holds ragged groups.
    let native = Options { container: Some(native::CONTAINER), ..options(1) };
    quantize(&source, "rtn-int4-g24", &out, native).unwrap();
    assert!(verify(&out, Some(&source), 2).unwrap().ok);
    // A quantized model cannot be a source.
    let error = quantize(&out, "rtn-int4-g32", &temp.path().join("again"), options(1)).unwrap_err();
    assert!(matches!(error, QuantError::AlreadyQuantized { .. }), "{error}");
}

#[test]
fn values_without_a_code_name_tensor_and_element() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 10);
    let path = source.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let meta = mantissa_store::SafeTensors::open(&path).unwrap();
    let tensor = meta.get("model.layers.1.mlp.up_proj.weight").unwrap();
    bytes[tensor.offset as usize + 40..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let out = temp.path().join("q");
    // Also if the scheme has a code for NaN, because such a weight is damage.
    for recipe in ["rtn-int4-g32", "mxfp4", "nvfp4", "rtn-fp8-e5m2-channel", "rtn-int8-tensor"] {
        let error = quantize(&source, recipe, &out, options(2)).unwrap_err().to_string();
        let says = "tensor \"model.layers.1.mlp.up_proj.weight\": expected finite values, got 1 non-finite values, the first (NaN) at element 10";
        assert!(error.contains(says), "{recipe}: {error}");
        assert!(!out.exists());
    }
}

/// Copied, unquantized tensors are also checked, and non-finite values are counted over the whole tensor.
#[test]
fn copied_tensors_must_be_finite() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 10);
    let path = source.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let meta = mantissa_store::SafeTensors::open(&path).unwrap();
    let at = meta.get("model.embed_tokens.weight").unwrap().offset as usize;
    for i in [100, 101, 5000] {
        bytes[at + 2 * i..][..2].copy_from_slice(&[0x80, 0x7f]);
    }
    std::fs::write(&path, bytes).unwrap();
    for recipe in ["rtn-int4-g32", "rtn-q4_0"] {
        let out = temp.path().join(format!("{recipe}.gguf"));
        let error = quantize(&source, recipe, &out, options(2)).unwrap_err().to_string();
        let says = "tensor \"model.embed_tokens.weight\": expected finite values, got 3 non-finite values, the first (inf) at element 100";
        assert!(error.contains(says), "{recipe}: {error}");
        assert!(!out.exists());
    }
}

#[test]
fn the_report_counts_scales_and_zero_points() {
    let temp = TempDir::new().unwrap();
    let outcome = quantize(
        &model(temp.path(), Dtype::F32, 11),
        "rtn-int4-g32-asym",
        &temp.path().join("q"),
        options(1),
    )
    .unwrap();
    // 4 bits, an f32 scale and a 4-bit zero point per 32 weights.
    assert_eq!(outcome.quality.linear_bits_per_weight, 4.0 + 36.0 / 32.0);
    let read = Quality::read(&temp.path().join("q")).unwrap().unwrap();
    assert_eq!(read, outcome.quality);
}
