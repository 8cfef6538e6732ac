//! Outputs never replace inputs or foreign files; an output that does not verify replaces nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use mantissa_store::SafeTensors;
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, stderr, succeed, text};

/// Returns every file below `dir` with its content, following links.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(contents(&path));
        } else {
            all.insert(path.clone(), fs::read(path).unwrap());
        }
    }
    all
}

/// Makes a model, a file of token windows, and links to the model's files.
fn inputs(dir: &Path) -> PathBuf {
    let model = dir.join("model");
    succeed(&["synth", "--preset", "tiny", "--out", text(&model)]);
    let windows: Vec<Vec<u32>> = (0..8).map(|i| (0..24).map(|j| (i * 7 + j * 13) % 256).collect()).collect();
    fs::write(dir.join("w.json"), format!("{windows:?}")).unwrap();
    fs::hard_link(model.join("model.safetensors"), dir.join("hard")).unwrap();
    symlink("model/config.json", dir.join("soft")).unwrap();
    model
}

#[test]
fn no_output_replaces_an_input_under_any_name() {
    let temp = TempDir::new().unwrap();
    let model = inputs(temp.path());
    let (model, at) = (text(&model), |name: &str| text(&temp.path().join(name)).to_owned());
    let windows = at("w.json");
    let before = contents(temp.path());
    let eval = ["eval", model, "--tokens", &windows];
    let fit = ["fit", model, "--budget", "9bpw", "--schemes", "int4-g32,int8-g32", "--tokens", &windows];
    let spare = at("spare");
    for target in ["model/config.json", "model/model.safetensors", "hard", "soft", "w.json"] {
        let target = at(target);
        let joined = format!("--json={target}");
        let commands: [Vec<&str>; 9] = [
            [&eval[..], &[&joined]].concat(),
            [&eval[..], &["--per-window", &target]].concat(),
            [&eval[..], &["--logits", &target]].concat(),
            [&fit[..], &["--out", &spare, "--save-recipe", &target]].concat(),
            vec!["imatrix", model, "--calibration-tokens", &windows, "--out", &target],
            vec!["cast", &target, "--scheme", "int8-channel", "--out", &target],
            vec!["inspect", &target, &joined],
            [&["quantize", model, "--recipe", "rtn-q8_0", "--text", &windows][..], &["--out", &target]]
                .concat(),
            vec!["recalibrate", model, "--tokens", &windows, "--out", &target],
        ];
        for command in commands {
            for more in [&[][..], &["--overwrite"]] {
                let line = fail(2, &[&command[..], more].concat());
                assert!(
                    line.contains("output:") || line.contains("a folder or nothing"),
                    "{command:?}: {line}"
                );
                assert!(contents(temp.path()) == before, "{command:?}");
            }
        }
    }
}

#[test]
fn outputs_of_other_commands_are_replaced_only_on_request() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let model = inputs(temp.path());
    let dense = at("dense");
    succeed(&["synth", "--preset", "tiny", "--seed", "1", "--out", text(&dense)]);
    let before = contents(&dense);
    let quantize = ["quantize", text(&model), "--recipe", "rtn-int4-g32", "--quiet", "--out"];
    let line = fail(2, &[&quantize[..], &[text(&dense)]].concat());
    assert!(line.contains("--overwrite") && line.contains(text(&dense)), "{line}");
    assert!(contents(&dense) == before);
    // A folder without a manifest is not replaced even on request.
    let foreign = at("foreign");
    fs::create_dir(&foreign).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(dense.join(name), foreign.join(name)).unwrap();
    }
    let of_others = contents(&foreign);
    fail(2, &[&quantize[..], &[text(&foreign), "--overwrite"]].concat());
    assert!(contents(&foreign) == of_others);
    // On request, and then by the same command again.
    succeed(&[&quantize[..], &[text(&dense), "--overwrite"]].concat());
    let quantized = contents(&dense);
    assert!(quantized != before);
    succeed(&[&quantize[..], &[text(&dense), "--threads", "1"]].concat());
    assert!(contents(&dense) == quantized);
    // An edited output no longer belongs to this command.
    fs::write(dense.join("config.json"), "{}").unwrap();
    fail(2, &[&quantize[..], &[text(&dense)]].concat());
    assert_eq!(fs::read(dense.join("config.json")).unwrap(), b"{}");
    // The same for single files.
    let report = at("report.json");
    fs::write(&report, "notes").unwrap();
    let inspect = ["inspect", text(&model), &format!("--json={}", report.display())];
    fail(2, &inspect);
    assert_eq!(fs::read(&report).unwrap(), b"notes");
    succeed(&[&inspect[..], &["--overwrite"]].concat());
    succeed(&inspect);
}

#[test]
fn two_outputs_of_a_command_are_two_paths() {
    let temp = TempDir::new().unwrap();
    let model = inputs(temp.path());
    let at = |name: &str| text(&temp.path().join(name)).to_owned();
    let (windows, out) = (at("w.json"), at("out"));
    let same = format!("--json={out}");
    fail(2, &["eval", text(&model), "--tokens", &windows, "--per-window", &out, &same]);
    let inside = format!("--json={out}/report.json");
    fail(2, &["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", &out, &inside]);
    assert!(!Path::new(&out).exists());
}

#[test]
fn an_output_that_does_not_verify_replaces_nothing() {
    let temp = TempDir::new().unwrap();
    let model = inputs(temp.path());
    let out = temp.path().join("out");
    let file = temp.path().join("out.gguf");
    let to = |out: &Path, recipe: &str| {
        let all =
            ["quantize", text(&model), "--recipe", recipe, "--overwrite", "--quiet", "--out", text(out)];
        all.map(str::to_owned)
    };
    succeed(&to(&out, "rtn-int8-channel"));
    succeed(&to(&file, "rtn-q8_0"));
    // Norms so large that every logit overflows: the weights are finite, the output is not.
    let weights = model.join("model.safetensors");
    let meta = {
        let open = SafeTensors::open(&weights).unwrap();
        open.get("model.norm.weight").unwrap().clone()
    };
    let mut bytes = fs::read(&weights).unwrap();
    let range = meta.offset as usize..(meta.offset + meta.len) as usize;
    bytes[range].as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = 0x7f7fu16.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    let before = contents(temp.path());
    for (out, recipe) in [(&out, "rtn-int4-g32"), (&file, "rtn-q4_0")] {
        let output = mantissa(&to(out, recipe));
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
        assert!(stderr(&output).contains("nothing was put at"), "{}", stderr(&output));
        assert!(contents(temp.path()) == before);
    }
}

#[test]
fn fit_works_in_a_folder_of_its_own() {
    let temp = TempDir::new().unwrap();
    let model = inputs(temp.path());
    // A folder with a work folder's name that holds an input must be left alone.
    let strangers = temp.path().join("o.fit");
    fs::create_dir(&strangers).unwrap();
    fs::write(strangers.join("thesis.tex"), "years of work").unwrap();
    fs::rename(&model, strangers.join("model")).unwrap();
    let (model, out) = (strangers.join("model"), temp.path().join("o"));
    let before = contents(&strangers);
    let windows = temp.path().join("w.json");
    let fit = ["fit", text(&model), "--budget", "9bpw", "--schemes", "int4-g32,int8-g32", "--tokens"];
    let done = json(&[&fit[..], &[text(&windows), "--out", text(&out), "--json", "--quiet"]].concat());
    assert_eq!(done["verification"]["ok"], true);
    assert!(contents(&strangers) == before);
    let names: Vec<_> = fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().contains(".mantissa-")), "{names:?}");
}

#[test]
fn replacing_is_advised_only_where_it_is_allowed() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let command = ["quantize", "demo", "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"];
    let replacing = [&command[..], &["--overwrite"]].concat();
    let line = fail(2, &command);
    assert!(line.contains("without mantissa-manifest.json") && !line.contains("--overwrite"), "{line}");
    assert_eq!(line, fail(2, &replacing));
    fs::remove_file(out.join("notes.txt")).unwrap();
    // A finished output of another job may be replaced, until a file of somebody else is in it.
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    assert!(fail(2, &command).contains("--overwrite"));
    fs::write(out.join("notes.txt"), "mine").unwrap();
    let line = fail(2, &command);
    assert!(line.contains("got \"notes.txt\"; fix: move that file away"), "{line}");
    assert_eq!(line, fail(2, &replacing));
    fs::remove_file(out.join("notes.txt")).unwrap();
    succeed(&replacing);
}
