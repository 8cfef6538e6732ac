//! `verify --strict`: fails if no hash covers the bytes of a model.

use std::fs;
use std::path::Path;

use mantissa_store::{Dtype, Manifest, SafeTensors};
use tempfile::TempDir;

use crate::support::{fail, mantissa, sampled, stderr, succeed, text, whole, write};
use crate::unopenable::model;

/// Flips a bit in `path`.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

/// Rewrites the manifest at `path` without the file `name`.
fn omit(path: &Path, name: &str) {
    let mut manifest = Manifest::read_file(path).unwrap();
    assert!(manifest.files.remove(name).is_some(), "{name}: {manifest:?}");
    fs::write(path, manifest.to_json()).unwrap();
}

#[test]
fn strict_verification_fails_where_no_hash_vouches_for_bytes() {
    let temp = TempDir::new().unwrap();
    let (dense, out) = (temp.path().join("dense"), temp.path().join("out"));
    model(&dense);
    let manifest = out.join("mantissa-manifest.json");
    let verify = |strict: bool, code: i32| {
        let arguments = ["verify", text(&out), "--quiet"];
        let output = mantissa(&[&arguments[..], if strict { &["--strict"] } else { &[] }].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        String::from_utf8(output.stdout).unwrap() + &said
    };
    let write_out = || {
        let _ = fs::remove_dir_all(&out);
        succeed(&["quantize", text(&dense), "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"]);
    };
    write_out();
    verify(true, 0);
    // Tools leave hidden files behind.
    fs::write(out.join(".gitattributes"), "x").unwrap();
    assert!(verify(true, 0).contains("note: .gitattributes: "));
    // Changed bytes under a manifest fail without --strict too.
    flip(&out.join("model.safetensors"));
    for strict in [false, true] {
        assert!(verify(strict, 1).contains("fault: model.safetensors: expected SHA-256"));
    }
    // Weights missing from the manifest are unchecked.
    write_out();
    omit(&manifest, "model.safetensors");
    assert!(verify(false, 0).contains("note: model.safetensors: the manifest does not list this file"));
    let said = verify(true, 1);
    assert!(said.contains("NOT verified") && said.contains("error: verify: model.safetensors: "), "{said}");
    // A tensor that no other check reads.
    fs::remove_file(out.join("quality.json")).unwrap();
    omit(&manifest, "quality.json");
    let path = out.join("model.safetensors");
    let file = SafeTensors::open(&path).unwrap();
    let norm = file.get("model.norm.weight").unwrap();
    let at = usize::try_from(norm.offset).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    verify(false, 0);
    verify(true, 1);
    // No manifest.
    write_out();
    fs::remove_file(&manifest).unwrap();
    assert!(
        verify(false, 0)
            .contains("note: no mantissa-manifest.json next to the weights: not checked for damage")
    );
    assert!(
        verify(true, 1)
            .contains("error: verify: no mantissa-manifest.json next to the weights: not checked for damage")
    );
    // A file outside the manifest, such as weights that another reader would load.
    write_out();
    write(&out.join("more.safetensors"), &[("x", Dtype::F32, &[1], vec![0; 4])]);
    assert!(verify(true, 1).contains("error: verify: more.safetensors: "));
}

#[test]
fn strict_verification_of_a_gguf_file_asks_for_its_manifest() {
    let temp = TempDir::new().unwrap();
    let (dense, out) = (temp.path().join("dense"), temp.path().join("q.gguf"));
    model(&dense);
    let quantize = ["quantize", text(&dense), "--recipe", "q8_0", "--out", text(&out), "--quiet"];
    succeed(&quantize);
    let strict = ["verify", text(&out), "--strict", "--quiet"];
    succeed(&strict);
    let manifest = temp.path().join("q.gguf.mantissa-manifest.json");
    let whole = fs::read(&manifest).unwrap();
    omit(&manifest, "q.gguf");
    succeed(&strict[..2]);
    assert!(fail(1, &strict).contains("verify: q.gguf: the manifest does not list this file"));
    fs::remove_file(&manifest).unwrap();
    succeed(&strict[..2]);
    let line = fail(1, &strict);
    assert!(
        line.contains("verify: no q.gguf.mantissa-manifest.json next to the weights: not checked for damage"),
        "{line}"
    );
    fs::write(&manifest, whole).unwrap();
    flip(&out);
    assert!(fail(1, &strict).contains("q.gguf: expected SHA-256"));
    assert!(fail(1, &["verify", text(&out), "--quiet"]).contains("q.gguf: expected SHA-256"));
}

/// A flipped bit in any byte of the manifest is a fault: of a folder and of a GGUF file.
#[test]
fn a_changed_byte_of_the_manifest_is_found() {
    let temp = TempDir::new().unwrap();
    let model = temp.path().join("model");
    let sizes = ["--hidden", "32", "--layers", "1", "--ffn", "64", "--heads", "2", "--kv-heads", "1"];
    succeed(&[&["synth", "--preset", "tiny", "--out", text(&model), "--vocab", "64"][..], &sizes].concat());
    for (recipe, name, manifest) in [
        ("rtn-int4-g8", "folder", "folder/mantissa-manifest.json"),
        ("rtn-q8_0", "m.gguf", "m.gguf.mantissa-manifest.json"),
    ] {
        let out = temp.path().join(name);
        succeed(&["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"]);
        let strict = ["verify", text(&out), "--strict", "--quiet"];
        succeed(&strict);
        let path = temp.path().join(manifest);
        let good = fs::read(&path).unwrap();
        let (mut tried, mut accepted) = (0, Vec::new());
        // Every byte, each with one of its bits.
        for (at, bit) in sampled((0..good.len()).map(|at| (at, at % 8)), 7) {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            fs::write(&path, &bytes).unwrap();
            tried += 1;
            if mantissa(&strict).status.success() {
                accepted.push((at, bit));
            }
        }
        println!("{name}: {} of {tried} flips accepted", accepted.len());
        assert!(tried > if whole() { 300 } else { 40 } && accepted.is_empty(), "{name}: {accepted:?}");
        // A field that describes the run, with its name.
        let changed =
            String::from_utf8(good.clone()).unwrap().replacen("\"command\": \"q", "\"command\": \"p", 1);
        fs::write(&path, changed).unwrap();
        let line = fail(1, &strict);
        assert!(line.contains("mantissa-manifest.json: sha256: expected"), "{line}");
        // The manifest of an earlier version has no digest, which is a note.
        let old: Vec<_> = std::str::from_utf8(&good)
            .unwrap()
            .lines()
            .filter(|line| !line.starts_with("  \"sha256\""))
            .collect();
        fs::write(&path, old.join("\n")).unwrap();
        assert!(succeed(&["verify", text(&out), "--strict"]).contains("written by an earlier version"));
    }
}
