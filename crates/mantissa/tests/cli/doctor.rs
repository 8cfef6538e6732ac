//! `doctor` on checkpoints with planted faults, with the source and without.

use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use mantissa_store::convention::gguf::to_hf_order;
use mantissa_store::{Gguf, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::lint::{rewrite, synthetic_of};
use crate::support::{fail, json, mantissa, stderr, succeed, text};

/// Runs `doctor`; gives the exit code and the report.
fn doctor(model: &Path, arguments: &[&str]) -> (i32, Value) {
    let output = mantissa(&[&["doctor", text(model), "--json", "--quiet"], arguments].concat());
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    (output.status.code().unwrap(), report)
}

/// A model in bf16 and the same quantized by `recipe`.
fn models(dir: &Path, recipe: &str) -> (PathBuf, PathBuf) {
    let (model, out) = (synthetic_of(dir, "bf16"), dir.join("q"));
    succeed(&["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"]);
    (model, out)
}

fn fault(report: &Value) -> (&str, Option<&str>) {
    let fault = &report["fault"];
    (fault["tensor"].as_str().unwrap_or("none"), fault["alternative"].as_str())
}

#[test]
fn a_sound_model_has_no_fault() {
    for recipe in ["rtn-int4-g32", "nvfp4", "w8a8"] {
        let temp = TempDir::new().unwrap();
        let (model, out) = models(temp.path(), recipe);
        let (code, report) = doctor(&out, &["--reference", text(&model)]);
        assert_eq!(
            (code, fault(&report), &report["sound"]),
            (0, ("none", None), &true.into()),
            "{recipe}: {report}"
        );
        assert_eq!(report["layers"].as_array().unwrap().len(), 2);
    }
}

/// Each fault in one tensor of the second layer: it is named, and so is what repairs it.
#[test]
#[ignore = "doctor is not finished and hidden: docs/doctor.md"]
fn planted_faults_are_named_with_their_repair() {
    let nibbles = |bytes: &mut Vec<u8>| bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
    let reciprocal = |bytes: &mut Vec<u8>| {
        let scale = f32::from_le_bytes(bytes[..4].try_into().unwrap());
        *bytes = (1.0 / scale).to_le_bytes().to_vec();
    };
    let plus_one = |bytes: &mut Vec<u8>| {
        // Norms of the synthetic model are 1, in bf16.
        for word in bytes.chunks_exact_mut(2) {
            assert_eq!(word, [0x80, 0x3f]);
            word.copy_from_slice(&[0x00, 0x40]);
        }
    };
    let doubled =
        |bytes: &mut Vec<u8>| bytes.iter_mut().step_by(3).for_each(|b| *b = b.wrapping_mul(7) ^ 0x15);
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(&str, &str, &str, Change<'_>, Option<&str>); 4] = [
        ("rtn-int4-g32", "mlp.up_proj", "weight_packed", &nibbles, Some("nibbles swapped")),
        ("nvfp4", "self_attn.o_proj", "weight_global_scale", &reciprocal, Some("1 / global scale")),
        ("rtn-int8-g32", "post_attention_layernorm", "weight", &plus_one, Some("norms - 1")),
        ("rtn-int4-g32", "mlp.down_proj", "weight_packed", &doubled, None),
    ];
    for (recipe, module, part, change, repaired) in cases {
        let temp = TempDir::new().unwrap();
        let (model, out) = models(temp.path(), recipe);
        let planted = format!("model.layers.1.{module}");
        let name = format!("{planted}.{part}");
        rewrite(&out.join("model.safetensors"), |tensor, bytes| {
            if tensor == name {
                change(bytes);
            }
        });
        let (code, report) = doctor(&out, &["--reference", text(&model)]);
        assert_eq!((code, fault(&report)), (1, (&*format!("{planted}.weight"), repaired)), "{report}");
        assert_eq!(report["fault"]["layers"], serde_json::json!([1]), "{report}");
        let line = fail(1, &["doctor", text(&out), "--reference", text(&model), "--quiet"]);
        assert!(line.contains(&planted), "{line}");
    }
}

#[test]
#[ignore = "doctor is not finished and hidden: docs/doctor.md"]
fn a_gguf_file_without_the_permutation_is_named() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("m.gguf");
    // A model that has learnt something: of random weights attention hardly depends on positions.
    let quantize =
        ["quantize", "demo", "--recipe", "rtn-q8_0", "--format", "gguf", "--out", text(&out), "--quiet"];
    succeed(&quantize);
    let sound = doctor(&out, &["--reference", "demo"]);
    assert_eq!((sound.0, fault(&sound.1)), (0, ("none", None)), "{}", sound.1);
    let mut bytes = std::fs::read(&out).unwrap();
    let file = Gguf::open(&out).unwrap();
    for layer in 0..5 {
        for name in ["attn_q", "attn_k"] {
            let tensor = file.get(&format!("blk.{layer}.{name}.weight")).unwrap();
            let (at, stored) = (tensor.offset as usize, file.read(tensor).unwrap());
            let row = stored.len() / tensor.shape[0];
            bytes[at..at + stored.len()].copy_from_slice(&to_hf_order(&stored, row, 4));
        }
    }
    std::fs::write(&out, bytes).unwrap();
    let named = ("model.layers.0.self_attn.q_proj.weight", Some("q and k rows interleaved"));
    let (code, report) = doctor(&out, &["--reference", "demo"]);
    assert_eq!((code, fault(&report)), (1, named), "{report}");
    // The loss shows it, too.
    let (code, report) = doctor(&out, &a_text());
    assert_eq!((code, fault(&report)), (1, named), "{report}");
}

/// A little of the text inside the program, to spare time.
fn a_text() -> Vec<&'static str> {
    const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/text/stories.txt");
    vec!["--text", TEXT, "--context", "64", "--limit", "320"]
}

/// Without the source, the loss on a text says it: on the model inside, which has learnt something.
#[test]
#[ignore = "doctor is not finished and hidden: docs/doctor.md"]
fn a_text_tells_the_fault_of_a_trained_model() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    let (code, report) = doctor(&out, &a_text());
    assert_eq!((code, fault(&report)), (0, ("none", None)), "{report}");
    assert!(report["trials"].as_array().unwrap().len() > 5, "{report}");
    // Every layer: found by trying the whole model.
    let weights = out.join("model.safetensors");
    rewrite(&weights, |name, bytes| {
        if name.ends_with("weight_packed") {
            bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
        }
    });
    let (code, report) = doctor(&out, &a_text());
    let named = ("model.layers.0.self_attn.q_proj.weight", Some("nibbles swapped"));
    assert_eq!((code, fault(&report)), (1, named), "{report}");
    let layers = report["fault"]["layers"].as_array().unwrap().len();
    let config = json(&["inspect", "demo", "--json"]);
    assert!(layers >= 1 && config.is_object(), "{report}");
    let ppl = |name: &str| {
        let trials = report["trials"].as_array().unwrap().iter();
        trials.filter(|t| t["alternative"] == name).find_map(|t| t["ppl"].as_f64()).unwrap()
    };
    assert!(ppl("nibbles swapped") < 0.5 * report["baseline"]["ppl"].as_f64().unwrap());
    assert!(ppl("nibbles swapped") < ppl("block scales transposed"));
}

/// A fault in one tensor, without the source.
#[test]
fn a_text_tells_the_tensor() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    let file = SafeTensors::open(&out.join("model.safetensors")).unwrap();
    let planted = "model.layers.1.mlp.down_proj";
    assert_eq!(file.get(&format!("{planted}.weight_packed")).unwrap().dtype, Dtype::I32);
    rewrite(&out.join("model.safetensors"), |name, bytes| {
        if name == format!("{planted}.weight_packed") {
            bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
        }
    });
    let (code, report) = doctor(&out, &a_text());
    assert_eq!(
        (code, fault(&report)),
        (1, (&*format!("{planted}.weight"), Some("nibbles swapped"))),
        "{report}"
    );
}
