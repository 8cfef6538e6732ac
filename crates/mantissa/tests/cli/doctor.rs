//! `doctor` on checkpoints with planted faults, with and without the source, and on sound ones, which it must
//! not accuse.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::convention::gguf::to_hf_order;
use mantissa_store::{Gguf, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::lint::{rewrite, synthetic_of};
use crate::support::{
    fail, left_to_nightly, mantissa, root, sampled, shared, stderr, strict_json, succeed, text, tiny_models,
};

/// Runs `doctor`; returns the exit code and the report.
fn doctor(model: &str, arguments: &[&str]) -> (i32, Value) {
    let output = mantissa(&[&["doctor", model, "--json", "--quiet"], arguments].concat());
    let report =
        strict_json::parse(&output.stdout).unwrap_or_else(|_| panic!("{model}: {}", stderr(&output)));
    (output.status.code().unwrap(), report)
}

/// Fails if a sound model is accused.
pub fn never_accused(model: &str, arguments: &[&str]) -> Value {
    let (code, report) = doctor(model, arguments);
    assert!(code == 0 && report["fault"].is_null(), "{model} {arguments:?}: {report}");
    report
}

/// Fails unless the fault found has this tensor and this repair.
fn named(model: &Path, arguments: &[&str], tensor: &str, repair: Option<&str>) -> Value {
    let (code, report) = doctor(text(model), arguments);
    let fault = &report["fault"];
    let found = (fault["tensor"].as_str().unwrap_or("none"), fault["alternative"].as_str());
    assert_eq!((code, found), (1, (tensor, repair)), "{arguments:?}: {report}");
    assert_eq!(report["verdict"], "faulty");
    report
}

fn quantize(model: &str, recipe: &str, out: &Path) {
    succeed(&["quantize", model, "--recipe", recipe, "--out", text(out), "--quiet"]);
}

/// Makes a model in bf16, and the same quantized by `recipe`.
fn models(dir: &Path, recipe: &str) -> (PathBuf, PathBuf) {
    let (model, out) = (synthetic_of(dir, "bf16"), dir.join("q"));
    quantize(text(&model), recipe, &out);
    (model, out)
}

fn nibbles(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
}

fn reciprocal(bytes: &mut [u8]) {
    let scale = f32::from_le_bytes(bytes[..4].try_into().unwrap());
    bytes.copy_from_slice(&(1.0 / scale).to_le_bytes());
}

/// Decrements each 4-bit field.
fn one_less(bytes: &mut [u8]) {
    bytes.iter_mut().for_each(|b| *b = (*b & 15).saturating_sub(1) | (*b >> 4).saturating_sub(1) << 4);
}

/// Applies `change` to the output's tensors whose names contain `module` and end with `part`.
fn plant(out: &Path, module: &str, part: &str, change: &dyn Fn(&mut [u8])) {
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name.contains(module) && name.ends_with(part) {
            change(bytes);
        }
    });
}

/// Changes a config.
fn configure(out: &Path, change: impl Fn(&mut serde_json::Map<String, Value>)) {
    let path = out.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn a_sound_model_has_no_fault() {
    for recipe in ["rtn-int4-g32", "rtn-int2-g32", "nvfp4", "w8a8", "mxfp4", "nf4"] {
        let temp = TempDir::new().unwrap();
        let (model, out) = models(temp.path(), recipe);
        let report = never_accused(text(&out), &["--reference", text(&model)]);
        assert_eq!(
            (&report["verdict"], &report["whole"]["faulty"]),
            (&"sound".into(), &false.into()),
            "{recipe}"
        );
        assert_eq!(report["layers"].as_array().unwrap().len(), 4);
        assert_eq!(report["tensors"].as_array().unwrap().len(), 21);
    }
}

/// Weights that the source stores transposed, under other names, or as codes with a scale factor.
#[test]
fn an_artifact_with_another_layout_than_its_source_has_no_fault() {
    let temp = TempDir::new().unwrap();
    for (model, recipe, file, quantized) in [
        ("gpt2", "rtn-int4-channel", "folder", 8),
        // Rows of 24 are not divisible into blocks of 32.
        ("gpt2", "rtn-q8_0", "q.gguf", 6),
        ("gpt-oss", "rtn-int4-channel", "folder", 32),
        ("bitnet-silu", "rtn-q4_0", "q.gguf", 12),
    ] {
        let (source, out) = (root().join("tests/data/tiny").join(model), temp.path().join(model).join(file));
        fs::create_dir_all(out.parent().unwrap()).unwrap();
        quantize(text(&source), recipe, &out);
        let report = never_accused(text(&out), &["--reference", text(&source)]);
        assert_eq!(report["verdict"], "sound", "{model} {recipe}");
        // Rounding explains the deviation of its linear layers.
        let rounded = |row: &&Value| row["expected"].as_f64().unwrap() > 0.0;
        let count = report["tensors"].as_array().unwrap().iter().filter(rounded).count();
        assert_eq!(count, quantized, "{model} {recipe}: {report}");
        assert!(report["layers"].as_array().unwrap().iter().all(|row| rounded(&row)), "{report}");
    }
}

/// A fault in a transposed weight, and one in an expert that the source stores stacked.
#[test]
fn faults_are_named_where_the_source_has_another_layout() {
    let temp = TempDir::new().unwrap();
    for (model, module) in
        [("gpt2", "transformer.h.1.mlp.c_fc"), ("gpt-oss", "model.layers.1.mlp.experts.2.up_proj")]
    {
        let (source, out) = (root().join("tests/data/tiny").join(model), temp.path().join(model));
        quantize(text(&source), "rtn-int4-channel", &out);
        plant(&out, module, "weight_packed", &nibbles);
        let tensor = format!("{module}.weight");
        let report = named(&out, &["--reference", text(&source)], &tensor, Some("nibbles swapped"));
        assert_eq!(report["fault"]["layers"], serde_json::json!([1]), "{report}");
    }
}

/// Each fault in one tensor of the second layer: the tensor and its repair are named.
#[test]
fn planted_faults_are_named_with_their_repair() {
    let plus_one = |bytes: &mut [u8]| {
        // Norms of the synthetic model are 1, in bf16.
        for word in bytes.chunks_exact_mut(2) {
            assert_eq!(word, [0x80, 0x3f]);
            word.copy_from_slice(&[0x00, 0x40]);
        }
    };
    let damaged = |bytes: &mut [u8]| bytes.iter_mut().step_by(3).for_each(|b| *b = b.wrapping_mul(7) ^ 0x15);
    type Change<'a> = &'a dyn Fn(&mut [u8]);
    let cases: [(&str, &str, &str, Change<'_>, Option<&str>); 6] = [
        ("rtn-int4-g32", "mlp.up_proj", "weight_packed", &nibbles, Some("nibbles swapped")),
        ("nvfp4", "self_attn.o_proj", "weight_global_scale", &reciprocal, Some("1 / global scale")),
        ("mxfp4", "self_attn.v_proj", "weight_packed", &nibbles, Some("nibbles swapped")),
        ("rtn-int4-g32-asym", "mlp.up_proj", "weight_zero_point", &one_less, Some("zero points + 1")),
        ("rtn-int8-g32", "post_attention_layernorm", "weight", &plus_one, Some("norms - 1")),
        ("rtn-int4-g32", "mlp.down_proj", "weight_packed", &damaged, None),
    ];
    for (recipe, module, part, change, repaired) in cases {
        let temp = TempDir::new().unwrap();
        let (model, out) = models(temp.path(), recipe);
        let planted = format!("model.layers.1.{module}");
        plant(&out, &planted, part, change);
        let report = named(&out, &["--reference", text(&model)], &format!("{planted}.weight"), repaired);
        assert_eq!(report["fault"]["layers"], serde_json::json!([1]), "{report}");
        let line = fail(1, &["doctor", text(&out), "--reference", text(&model), "--quiet"]);
        assert!(line.contains(&planted), "{line}");
    }
}

/// Swapped tensors, and column scales that no norm undoes, in a dense model.
#[test]
fn faults_of_dense_models_are_named() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "bf16");
    let copy = |name: &str| {
        let out = temp.path().join(name);
        fs::create_dir(&out).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(model.join(file), out.join(file)).unwrap();
        }
        out
    };
    let swapped = copy("swapped");
    let file = SafeTensors::open(&model.join("model.safetensors")).unwrap();
    let read =
        |name: &str| file.read(file.get(&format!("model.layers.1.mlp.{name}.weight")).unwrap()).unwrap();
    let (gate, up) = (read("gate_proj"), read("up_proj"));
    plant(&swapped, "layers.1.mlp.gate_proj", "weight", &|bytes| bytes.copy_from_slice(&up));
    plant(&swapped, "layers.1.mlp.up_proj", "weight", &|bytes| bytes.copy_from_slice(&gate));
    let gate = "model.layers.1.mlp.gate_proj.weight";
    named(&swapped, &["--reference", text(&model)], gate, Some("gate and up swapped"));
    // Every other column times 8: three more in the bf16 exponent.
    let scaled = copy("scaled");
    plant(&scaled, "layers.1.mlp.up_proj", "weight", &|bytes| {
        for word in bytes.chunks_exact_mut(4) {
            let value = u16::from_le_bytes([word[0], word[1]]);
            let times_8 = if value & 0x7f80 == 0 { value } else { value + (3 << 7) };
            word[..2].copy_from_slice(&times_8.to_le_bytes());
        }
    });
    let up = "model.layers.1.mlp.up_proj.weight";
    named(&scaled, &["--reference", text(&model)], up, Some("column scales undone"));
}

/// A fault outside the weights: config or tokenizer.
#[test]
fn a_config_and_a_tokenizer_of_another_model_are_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int8-g32", &out);
    never_accused(text(&out), &["--reference", "demo"]);
    let original = fs::read(out.join("config.json")).unwrap();
    configure(&out, |config| {
        config.insert("rope_theta".to_owned(), 100.0.into());
    });
    let rope = "config.json: rope_theta, rope_scaling, partial_rotary_factor";
    named(&out, &["--reference", "demo"], rope, None);
    fs::write(out.join("config.json"), &original).unwrap();
    configure(&out, |config| {
        config.insert("rms_norm_eps".to_owned(), 0.5.into());
    });
    named(&out, &["--reference", "demo"], "config.json: rms_norm_eps", None);
    fs::write(out.join("config.json"), &original).unwrap();
    // Another merge order.
    let path = out.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["model"]["merges"].as_array_mut().unwrap().drain(..200);
    fs::write(&path, tokenizer.to_string()).unwrap();
    let (code, report) = doctor(text(&out), &["--reference", "demo"]);
    let found = report["fault"]["tensor"].as_str().unwrap_or("none");
    assert!(code == 1 && found.starts_with("tokenizer: token "), "{report}");
}

#[test]
fn a_gguf_file_without_the_permutation_is_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("m.gguf");
    // A trained model: with random weights, attention hardly depends on positions.
    let quantize =
        ["quantize", "demo", "--recipe", "rtn-q8_0", "--format", "gguf", "--out", text(&out), "--quiet"];
    succeed(&quantize);
    never_accused(text(&out), &["--reference", "demo"]);
    never_accused(text(&out), &a_text());
    let mut bytes = fs::read(&out).unwrap();
    let file = Gguf::open(&out).unwrap();
    for layer in 0..5 {
        for name in ["attn_q", "attn_k"] {
            let tensor = file.get(&format!("blk.{layer}.{name}.weight")).unwrap();
            let (at, stored) = (tensor.offset as usize, file.read(tensor).unwrap());
            let row = stored.len() / tensor.shape[0];
            bytes[at..at + stored.len()].copy_from_slice(&to_hf_order(&stored, row, 4));
        }
    }
    fs::write(&out, bytes).unwrap();
    let (tensor, repair) = ("model.layers.0.self_attn.q_proj.weight", Some("q and k rows interleaved"));
    named(&out, &["--reference", "demo"], tensor, repair);
    // The loss shows it too.
    named(&out, &a_text(), tensor, repair);
}

/// GGUF blocks whose 4-bit fields were written in adjacent pairs or with swapped nibbles.
#[test]
fn the_order_of_fields_in_blocks_is_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("m.gguf");
    for (recipe, swapped, repair) in
        [("rtn-q4_0", true, "nibbles swapped"), ("rtn-q4_0", false, "pairs as halves")]
    {
        let quantize = [
            "quantize",
            "demo",
            "--recipe",
            recipe,
            "--format",
            "gguf",
            "--out",
            text(&out),
            "--quiet",
            "--restart",
        ];
        succeed(&quantize);
        let mut bytes = fs::read(&out).unwrap();
        let file = Gguf::open(&out).unwrap();
        for tensor in file.tensors().iter().filter(|tensor| tensor.ty.name == "Q4_0") {
            let at = tensor.offset as usize;
            for block in bytes[at..][..file.read(tensor).unwrap().len()].chunks_exact_mut(18) {
                let elements: Vec<u8> =
                    block[2..].iter().map(|b| b & 15).chain(block[2..].iter().map(|b| b >> 4)).collect();
                for (j, byte) in block[2..].iter_mut().enumerate() {
                    *byte = if swapped {
                        byte.rotate_left(4)
                    } else {
                        elements[2 * j] | elements[2 * j + 1] << 4
                    };
                }
            }
        }
        fs::write(&out, bytes).unwrap();
        let tensor = "model.layers.0.self_attn.q_proj.weight";
        named(&out, &["--reference", "demo"], tensor, Some(repair));
        named(&out, &a_text(), tensor, Some(repair));
        fs::remove_file(&out).unwrap();
    }
}

/// A short part of the built-in text, to save time.
fn a_text() -> Vec<&'static str> {
    const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../mantissa-jobs/demo/text/stories.txt");
    vec!["--text", TEXT, "--context", "64", "--limit", "504"]
}

/// Without the source, the loss on a text decides, on the trained built-in model.
#[test]
fn a_text_reveals_the_fault_of_a_trained_model() {
    let whole = |recipe: &str, part: &str, change: &dyn Fn(&mut [u8]), repair: &str| {
        let temp = TempDir::new().unwrap();
        let out = temp.path().join("q");
        quantize("demo", recipe, &out);
        let sound = never_accused(text(&out), &a_text());
        assert!(sound["verdict"] == "sound" && sound["trials"].as_array().unwrap().len() > 4, "{sound}");
        // With another BOS other tokens are predicted: the unchanged model is measured on them too.
        for trial in sound["trials"].as_array().unwrap() {
            let other = trial["alternative"] == "the other BOS";
            assert_eq!(trial["unchanged_ppl"].is_f64(), other, "{trial}");
            assert!(!other || trial["unchanged_ppl"] != sound["baseline"]["ppl"], "{trial}");
        }
        plant(&out, "_proj", part, change);
        let report = named(&out, &a_text(), "model.layers.0.self_attn.q_proj.weight", Some(repair));
        let tried = report["trials"].as_array().unwrap().iter().find(|t| t["alternative"] == repair).unwrap();
        assert!(
            tried["decisive"] == true && report["fault"]["layers"].as_array().unwrap().len() > 2,
            "{report}"
        );
        let base = report["baseline"]["ppl"].as_f64().unwrap();
        assert!(tried["ppl"].as_f64().unwrap() < 0.5 * base, "{report}");
    };
    whole("rtn-int4-g32", "weight_packed", &nibbles, "nibbles swapped");
    if !left_to_nightly() {
        whole("rtn-int4-g32-asym", "weight_zero_point", &one_less, "zero points + 1");
    }
}

/// Scales written group by group.
#[test]
fn transposed_scales_are_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int4-g32", &out);
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name.ends_with("weight_scale") {
            let rows = if name.contains("gate") || name.contains("up_") { 384 } else { 128 };
            let (width, size) = (bytes.len() / 2 / rows, bytes.len() / 2);
            let at = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
            *bytes = (0..size).flat_map(|i| at(i % rows * width + i / rows)).collect();
        }
    });
    let (tensor, repair) = ("model.layers.0.self_attn.q_proj.weight", Some("block scales transposed"));
    named(&out, &["--reference", "demo"], tensor, repair);
    named(&out, &a_text(), tensor, repair);
}

/// A fault in one tensor, without the source.
#[test]
fn a_text_reveals_the_faulty_tensor() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int4-g32", &out);
    let planted = "model.layers.1.mlp.down_proj";
    plant(&out, planted, "weight_packed", &nibbles);
    let report = named(&out, &a_text(), &format!("{planted}.weight"), Some("nibbles swapped"));
    assert_eq!(report["fault"]["layers"], serde_json::json!([1]));
}

/// A model with an untested fault: nothing is wrongly named.
#[test]
fn untested_faults_are_not_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int4-g32", &out);
    configure(&out, |config| {
        config.insert("hidden_act".to_owned(), "gelu".into());
    });
    never_accused(text(&out), &a_text());
}

/// Fields of the config are tried with the values of published models.
#[test]
fn a_text_reveals_a_field_of_the_config() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int4-g32", &out);
    let original = fs::read(out.join("config.json")).unwrap();
    for (field, wrong, repair) in
        [("rope_theta", 100.0, "rope_theta 10000"), ("rms_norm_eps", 0.5, "rms_norm_eps 1e-5")]
    {
        configure(&out, |config| {
            config.insert(field.to_owned(), wrong.into());
        });
        let arguments = [&a_text()[..4], &["--limit", "1323"]].concat();
        named(&out, &arguments, &format!("config.json: {field}"), Some(repair));
        fs::write(out.join("config.json"), &original).unwrap();
    }
}

/// Faults of one layer that cost the loss next to nothing: the signs of gate and up, and the mean of the weights.
#[test]
fn weights_reveal_faults_that_cost_little() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    quantize("demo", "rtn-int4-g32-asym", &out);
    let sound = never_accused(text(&out), &a_text());
    let up = |lean: &Value| lean["up"].as_f64().unwrap().abs();
    assert!(sound["signs"].as_array().unwrap().iter().all(|lean| up(lean) < 4.0), "{sound}");
    let original = fs::read(out.join("model.safetensors")).unwrap();
    plant(&out, "layers.2.mlp.up_proj", "weight_zero_point", &one_less);
    let tensor = "model.layers.2.mlp.up_proj.weight";
    let report = named(&out, &a_text(), tensor, Some("zero points + 1"));
    assert_eq!(report["fault"]["layers"], serde_json::json!([2]), "{report}");
    fs::write(out.join("model.safetensors"), &original).unwrap();
    let file = SafeTensors::open(&out.join("model.safetensors")).unwrap();
    let all: std::collections::BTreeMap<String, Vec<u8>> =
        file.tensors().iter().map(|meta| (meta.name.clone(), file.read(meta).unwrap())).collect();
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name.contains("layers.3.mlp.gate_proj") {
            bytes.clone_from(&all[&name.replace("gate_proj", "up_proj")]);
        } else if name.contains("layers.3.mlp.up_proj") {
            bytes.clone_from(&all[&name.replace("up_proj", "gate_proj")]);
        }
    });
    let gate = "model.layers.3.mlp.gate_proj.weight";
    let report = named(&out, &a_text(), gate, Some("gate and up swapped"));
    let lean = &report["signs"][3];
    assert!(up(lean) > 6.0 && report["fault"]["layers"] == serde_json::json!([3]), "{report}");
}

/// Untrained models are equally good in any order, so the verdict is undecided.
#[test]
fn random_models_are_not_accused() {
    let temp = TempDir::new().unwrap();
    let tokens = temp.path().join("tokens.json");
    let window =
        |seed: u64| (0..24).map(|i| mantissa_num::round::random_u32(seed, i) % 30).collect::<Vec<_>>();
    fs::write(&tokens, serde_json::json!((0..16).map(window).collect::<Vec<_>>()).to_string()).unwrap();
    for path in sampled(tiny_models(), 5) {
        let report = never_accused(text(&path), &["--tokens", text(&tokens)]);
        assert!(
            report["verdict"] == "undecided" && report["undecided"].is_string(),
            "{}: {report}",
            path.display()
        );
        let report = never_accused(text(&path), &["--reference", text(&path)]);
        assert_eq!(report["verdict"], "sound", "{}", path.display());
    }
}

/// Every model and checkpoint of the data next to the checkout, on in-domain and other texts.
#[test]
fn no_model_beside_the_checkout_is_accused() {
    let (Some(models), Some(artifacts)) = (shared("models"), shared("artifacts")) else { return };
    let folders = |path: &Path| {
        let mut all: Vec<_> = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all.into_iter().filter(|path| path.join("config.json").is_file()).collect::<Vec<_>>()
    };
    let reference = models.join("babyllama-105");
    // The first tokens of five in-domain windows.
    let known = fs::read(models.join("../reference/peers/babyllama-105-tokens.json")).unwrap();
    let known: Value = serde_json::from_slice(&known).unwrap();
    let windows: Vec<&[Value]> =
        known["eval_in"].as_array().unwrap().iter().take(5).map(|w| &w.as_array().unwrap()[..65]).collect();
    let temp = TempDir::new().unwrap();
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, serde_json::json!(windows).to_string()).unwrap();
    for model in sampled(folders(&models), 6) {
        never_accused(text(&model), &a_text());
    }
    for artifact in sampled(folders(&artifacts), 9) {
        let report = never_accused(text(&artifact), &["--reference", text(&reference)]);
        assert_eq!(report["verdict"], "sound", "{}", artifact.display());
        let report = never_accused(text(&artifact), &["--tokens", text(&tokens)]);
        assert_eq!(report["verdict"], "sound", "{}", artifact.display());
    }
}
