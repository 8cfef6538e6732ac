//! Verification of GGUF files: every written type verifies, and any change in a file is detected.
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use crate::common::{model, sized_model};
use mantissa_quant::verify::{Verification, verify};
use mantissa_quant::{Options, Outcome, Plan, QuantError, Recipe, Start, quality_path, run};
use mantissa_store::convention::{ModelFiles, gguf};
use mantissa_store::failpoint::{Failing, Operation, failing};
use mantissa_store::{Dtype, ErrorClass, FileDigest, Gguf, Manifest, manifest_path};
use rustix::io::Errno;
use tempfile::TempDir;

fn try_quantize(model: &Path, recipe: &str, out: &Path) -> Result<Outcome, QuantError> {
    let source = ModelFiles::open(model)?;
    let options = Options { threads: 2, container: Some(gguf::CONTAINER), ..Options::default() };
    let plan = Plan::new(&source, Recipe::load(recipe)?, options)?;
    run(
        &plan,
        &source,
        &mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true),
        Start::Resume,
        &mut |_| ControlFlow::Continue(()),
    )
}

fn quantize(model: &Path, recipe: &str, out: &Path) {
    try_quantize(model, recipe, out).unwrap();
}

/// Verifies with one and with three threads, which must agree.
fn checked(path: &Path, reference: Option<&Path>) -> Verification {
    let found = verify(path, reference, 1).unwrap();
    assert_eq!(found, verify(path, reference, 3).unwrap());
    found
}

/// Rewrites the file and updates its manifest.
fn rewrite(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    let beside = manifest_path(path);
    let mut manifest = Manifest::read_file(&beside).unwrap();
    *manifest.files.values_mut().next().unwrap() = FileDigest::of(bytes);
    fs::write(beside, manifest.to_json()).unwrap();
}

/// Returns the offset of a tensor's bytes in the file.
fn place(path: &Path, tensor: &str) -> usize {
    usize::try_from(Gguf::open(path).unwrap().get(tensor).unwrap().offset).unwrap()
}

fn written(temp: &TempDir, recipe: &str) -> (PathBuf, PathBuf) {
    let (model, out) = (model(temp.path(), Dtype::BF16, 5), temp.path().join("m.gguf"));
    quantize(&model, recipe, &out);
    (model, out)
}

#[test]
fn every_written_type_verifies() {
    let temp = TempDir::new().unwrap();
    let all = [
        "f32",
        "f16",
        "bf16",
        "q8_0",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "tq1_0",
        "tq2_0",
        "gguf-mxfp4",
        "gguf-nvfp4",
        "mxfp4",
        "mxfp4:ceil",
        "mxfp4:ct",
        "nvfp4",
        "nvfp4:te",
        "nvfp4:torchao",
        "nvfp4:4over6",
    ];
    // Blocks of 256 divide the rows of the first model; in the others, rows that do not fit are f16.
    for (dtype, sizes, schemes) in [
        (Dtype::BF16, [256, 256], &all[..]),
        (Dtype::F32, [64, 96], &all[..8]),
        (Dtype::F16, [64, 96], &all[7..]),
    ] {
        let model = sized_model(temp.path(), dtype, 1, sizes);
        for scheme in schemes {
            let out = temp.path().join(format!("{dtype}-{scheme}.gguf"));
            quantize(&model, &format!("rtn-{scheme}"), &out);
            let found = checked(&out, Some(&model));
            assert!(found.ok && found.notes.is_empty(), "{dtype} {scheme}: {found:?}");
            let tensors = 2 * 9 + 3;
            assert_eq!((found.files, found.weights, found.compared), (2, tensors, tensors), "{scheme}");
            assert_eq!(found.max_logit_difference, Some(0.0), "{scheme}");
            let worst = found.max_error_in_bounds.unwrap();
            assert!(worst <= 1.0 && (*scheme != "f32" || worst == 0.0), "{dtype} {scheme}: {worst}");
            // Blocks divide every row here.
            assert!(!scheme.starts_with("q") || worst > 0.2, "{dtype} {scheme}: {worst}");
        }
    }
}

#[test]
fn every_architecture_verifies() {
    let temp = TempDir::new().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/tiny");
    for name in [
        "llama-bias",
        "llama-headdim",
        "llama-rope-linear",
        "llama1-mha",
        "llama2-gqa-tied",
        "llama3-rope",
        "mqa",
        "qwen2-bias",
        "qwen3-qknorm",
        "hunyuan",
        "mamba2",
        "apertus",
    ] {
        let (model, out) = (tiny.join(name), temp.path().join(format!("{name}.gguf")));
        quantize(&model, "rtn-f16", &out);
        let found = checked(&out, Some(&model));
        assert!(found.ok, "{name}: {found:?}");
        assert!(found.compared == found.weights && found.compared > 10, "{name}: {found:?}");
    }
}

#[test]
fn any_changed_byte_is_detected_by_the_hash() {
    let temp = TempDir::new().unwrap();
    let (model, out) = written(&temp, "rtn-q8_0");
    let whole = fs::read(&out).unwrap();
    for i in 0..40 {
        let mut bytes = whole.clone();
        let at = mantissa_num::round::random_u32(1, i) as usize % bytes.len();
        bytes[at] ^= 1 << (i % 8);
        fs::write(&out, bytes).unwrap();
        let found = checked(&out, Some(&model));
        assert!(!found.ok && found.faults[0].contains("SHA-256"), "byte {at}: {found:?}");
    }
}

/// Without hashes every bit of tensor infos and padding can still be checked.
#[test]
fn any_changed_bit_of_tensor_infos_is_detected() {
    let temp = TempDir::new().unwrap();
    let (model, out) = written(&temp, "rtn-q8_0");
    let whole = fs::read(&out).unwrap();
    let name = b"token_embd.weight";
    let infos = whole.windows(name.len()).position(|bytes| bytes == name).unwrap() - 8;
    let data = place(&out, "token_embd.weight");
    for at in infos..data {
        for bit in [0, 7] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            rewrite(&out, &bytes);
            // The file is unreadable, or readable with a fault.
            if let Ok(found) = verify(&out, Some(&model), 1) {
                assert!(!found.ok, "byte {at}, bit {bit}: {found:?}");
            }
        }
    }
    for bytes in [&whole[..whole.len() - 1], &[&whole[..], &[0; 32]].concat(), &[&whole[..], &[1]].concat()] {
        rewrite(&out, bytes);
        assert!(verify(&out, Some(&model), 1).map_or(true, |found| !found.ok), "{} bytes", bytes.len());
    }
}

#[test]
fn no_changed_key_makes_it_panic() {
    let temp = TempDir::new().unwrap();
    let (_, out) = written(&temp, "rtn-q8_0");
    let whole = fs::read(&out).unwrap();
    let end = whole.windows(17).position(|bytes| bytes == b"token_embd.weight").unwrap();
    for at in 0..end {
        for value in [0x00, 0xff, whole[at] ^ 0x80, whole[at] ^ 1] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            fs::write(&out, bytes).unwrap();
            let _ = verify(&out, None, 1);
        }
    }
}

#[test]
fn weights_that_differ_from_the_source_are_detected_with_valid_hashes() {
    let temp = TempDir::new().unwrap();
    let (model, out) = written(&temp, "rtn-q8_0");
    let whole = fs::read(&out).unwrap();
    let tampered = |change: &dyn Fn(&mut Vec<u8>), says: &str| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        rewrite(&out, &bytes);
        let found = checked(&out, Some(&model));
        assert!(!found.ok && found.faults.iter().any(|fault| fault.contains(says)), "{found:?}");
    };
    let q = place(&out, "blk.0.attn_q.weight");
    // The exponent of a block's scale, a code, and two rows in Hugging Face order (two blocks of 34 bytes per row).
    tampered(&|bytes| bytes[q + 1] ^= 4, "layers.0.self_attn.q_proj.weight: element [0, ");
    tampered(&|bytes| bytes[q + 34 + 2] ^= 0x40, "q_proj.weight: element [0, 32]");
    tampered(&|bytes| (0..68).for_each(|i| bytes.swap(q + 68 + i, q + 136 + i)), "q_proj.weight: element [");
    let norm = place(&out, "blk.1.ffn_norm.weight");
    tampered(&|bytes| bytes[norm + 4 * 63] ^= 1, "post_attention_layernorm.weight: element [63, 0]");
}

#[test]
fn another_source_is_detected() {
    let temp = TempDir::new().unwrap();
    let (model, out) = written(&temp, "rtn-q8_0");
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let other = |from: &str, to: &str, says: &str| {
        assert!(config.contains(from), "{config}");
        fs::write(model.join("config.json"), config.replace(from, to)).unwrap();
        let found = checked(&out, Some(&model));
        assert!(!found.ok && found.faults.iter().any(|fault| fault.contains(says)), "{found:?}");
    };
    other("\"rope_theta\":10000.0", "\"rope_theta\":10001.0", "rotary frequency 1");
    other("\"rms_norm_eps\":0.00001", "\"rms_norm_eps\":0.00002", "rms_norm_eps");
    other("\"max_position_embeddings\":64", "\"max_position_embeddings\":63", "max_position_embeddings");
    let unlike = crate::common::model(temp.path(), Dtype::BF16, 6);
    let found = checked(&out, Some(&unlike));
    assert!(!found.ok && found.max_error_in_bounds.unwrap() > 2.0, "{found:?}");
}

#[test]
fn a_renamed_file_keeps_its_manifest() {
    let temp = TempDir::new().unwrap();
    let (model, out) = written(&temp, "rtn-q4_0");
    let renamed = temp.path().join("other name.gguf");
    fs::rename(&out, &renamed).unwrap();
    let alone = checked(&renamed, Some(&model));
    assert!(alone.ok && alone.files == 0 && alone.notes.len() == 2, "{alone:?}");
    fs::rename(manifest_path(&out), manifest_path(&renamed)).unwrap();
    let found = checked(&renamed, Some(&model));
    assert!(
        !found.ok && found.faults[0].contains("quality.json: expected the file that the manifest lists"),
        "{found:?}"
    );
    fs::rename(quality_path(&out), quality_path(&renamed)).unwrap();
    let found = checked(&renamed, Some(&model));
    assert!(found.ok && found.files == 2 && found.notes.is_empty(), "{found:?}");
}

/// Every write fails in turn, alone and with all later ones.
#[test]
fn a_failed_write_leaves_the_old_or_the_new_file_without_a_wrong_manifest() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path(), Dtype::BF16, 5);
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("m.gguf");
    let beside = [quality_path(&out), manifest_path(&out)];
    let read = || (fs::read(&out).unwrap(), beside.each_ref().map(|path| fs::read(path).ok()));
    quantize(&model, "rtn-q8_0", &out);
    let new = read();
    for which in [Failing::Once as fn(u64) -> Failing, Failing::From] {
        let mut writes = 0;
        loop {
            quantize(&model, "rtn-q4_0", &out);
            let old = read();
            let attempt = || try_quantize(&model, "rtn-q8_0", &out);
            let (result, _) = failing(Operation::Write, which(writes), Errno::NOSPC, attempt);
            let Err(error) = result else { break };
            assert_eq!(error.class(), ErrorClass::Environment, "{error}");
            let found = read();
            let whole = found == old || found == new;
            // Once the file is in place, later failures can only lose the files beside it.
            let of = if found.0 == new.0 { &new } else { &old };
            let missing = found.1[1].is_none() && (found.1[0].is_none() || found.1[0] == of.1[0]);
            let bare = missing && (found.0 == new.0 || (found.0 == old.0 && writes > 3));
            assert!(whole || bare, "write {writes}: {error}");
            assert!(
                found.0 == new.0 || which(0) == Failing::From(0) || found == old,
                "write {writes}: {error}"
            );
            quantize(&model, "rtn-q8_0", &out);
            assert!(read() == new, "write {writes}");
            let all = ["m.gguf", "m.gguf.mantissa-manifest.json", "m.gguf.quality.json"];
            assert_eq!(crate::common::names_in(&dir), all, "write {writes}");
            writes += 1;
        }
        assert!(writes > 8, "{writes}");
    }
}

#[test]
fn values_beyond_a_type_are_refused_by_name() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (model(temp.path(), Dtype::BF16, 5), temp.path().join("m.gguf"));
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let files = ModelFiles::open(&model).unwrap();
    let name = "model.layers.1.mlp.up_proj.weight";
    let (_, meta) = files.checkpoint().locate(name).unwrap();
    let at = meta.offset as usize + 2 * 100;
    // 2^24 in bf16 exceeds 127 · 65504, which is just below 2^23.
    bytes[at..at + 2].copy_from_slice(&[0x80, 0x4b]);
    fs::write(&path, bytes).unwrap();
    for (recipe, says) in
        [("rtn-q8_0", "1 blocks beyond it in q8_0"), ("rtn-q4_1", "element 96"), ("rtn-f16", "in f16")]
    {
        let error = try_quantize(&model, recipe, &out).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(name) && text.contains(says) && text.contains("65504"), "{text}");
        assert_eq!(error.class(), ErrorClass::Input);
    }
    quantize(&model, "rtn-bf16", &out);
    assert!(checked(&out, Some(&model)).ok);
    quantize(&model, "rtn-gguf-mxfp4", &out);
    assert!(checked(&out, Some(&model)).ok);
}
