//! A finished, unchanged job answers at once; what differs is refused with the difference.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use crate::support::{fail, json, root, succeed, text};

/// Files below a folder or beside a file, with inode, time of change and content.
fn state(path: &Path) -> BTreeMap<String, (u64, i64, Vec<u8>)> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap() };
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let data = fs::metadata(&path).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            found.insert(name, (data.ino(), data.mtime_nsec() + data.mtime(), fs::read(&path).unwrap()));
        }
    }
    found
}

/// Copies a model folder without its attributes.
fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::write(to.join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
}

fn model(dir: &Path) -> String {
    let path = dir.join("model");
    copy(&root().join("tests/data/tiny/llama2-gqa-tied"), &path);
    text(&path).to_owned()
}

#[test]
fn the_same_command_answers_and_touches_nothing() {
    let dir = TempDir::new().unwrap();
    let model = model(dir.path());
    for (recipe, out) in [("rtn-int8-channel", "folder"), ("rtn-q8_0", "one/file.gguf")] {
        let out = dir.path().join(out);
        let arguments = ["quantize", &model, "--recipe", recipe, "--out", text(&out), "--quiet", "--json"];
        let first = json(&arguments);
        let before = state(&out);
        let again = json(&arguments);
        assert_eq!((&first["already_complete"], &again["already_complete"]), (&false.into(), &true.into()));
        // All that is recorded is reported again.
        for field in
            ["output", "recipe", "bytes", "hashes", "layers", "tensors", "rebuild", "loads_in", "next"]
        {
            assert_eq!(first[field], again[field], "{recipe}: {field}");
        }
        assert!(state(&out) == before, "{recipe}");
        let shown = succeed(&["quantize", &model, "--recipe", recipe, "--out", text(&out)]);
        assert!(shown.contains("already complete: all files have the hashes"), "{shown}");
        // Asked for anew, it is made anew, to the same bytes.
        let anew = json(&[&arguments[..], &["--overwrite"]].concat());
        assert_eq!(anew["already_complete"], false);
        let contents = |state: &BTreeMap<String, (u64, i64, Vec<u8>)>| {
            state.iter().map(|(name, (_, _, bytes))| (name.clone(), bytes.clone())).collect::<Vec<_>>()
        };
        assert!(contents(&state(&out)) == contents(&before), "{recipe}");
    }
}

#[test]
fn the_same_content_is_the_same_job_and_a_difference_is_named() {
    let dir = TempDir::new().unwrap();
    let model = model(dir.path());
    let out = dir.path().join("out");
    let sample = dir.path().join("sample.txt");
    fs::write(&sample, "Some words of a text. ".repeat(60)).unwrap();
    let base = ["quantize", &model, "--out", text(&out), "--quiet", "--json"];
    let measured = [
        "--recipe",
        "gptq-int4-g8",
        "--calibration",
        text(&sample),
        "--length",
        "32",
        "--text",
        text(&sample),
    ];
    let run = |more: &[&str]| json(&[&base[..], &measured, more].concat())["already_complete"].clone();
    assert_eq!(run(&[]), false);
    let before = state(&out);
    // Inputs that were touched or copied, other words for the same settings, and an output without its mark.
    let now = SystemTime::now() + Duration::from_secs(60);
    fs::File::options()
        .append(true)
        .open(Path::new(&model).join("config.json"))
        .unwrap()
        .set_modified(now)
        .unwrap();
    assert_eq!(run(&["--seed", "0"]), true);
    let copied = dir.path().join("copied");
    copy(&out, &copied);
    let other = dir.path().join("other");
    copy(Path::new(&model), &other);
    let arguments = ["quantize", text(&other), "--out", text(&copied), "--quiet", "--json"];
    assert_eq!(json(&[&arguments[..], &measured].concat())["already_complete"], true);
    assert!(state(&out) == before);
    // Settings, inputs and limits that differ.
    let refused = |more: &[&str]| fail(2, &[&base[..], &measured, more].concat());
    for (more, why) in [
        (&["--seed", "1"][..], "weights.seed 0, now 1"),
        (&["--keep", "*.down_proj"], "weights.keep none, now [\"*.down_proj\"]"),
        (&["--samples", "2"], "weights.calibration.samples none, now 2"),
        (&["--context", "16"], "not measured on this text"),
        (&["--max-kl", "0.0000001"], "at most 0.0000001"),
    ] {
        let line = refused(more);
        assert!(
            line.contains("a folder that differs: ") && line.contains(why) && line.contains("--overwrite"),
            "{line}"
        );
    }
    fs::write(&sample, "Other words of a text. ".repeat(60)).unwrap();
    assert!(refused(&[]).contains("the calibration, whose windows are others"));
    fs::write(&sample, "Some words of a text. ".repeat(60)).unwrap();
    assert_eq!(run(&[]), true);
    let weights = Path::new(&model).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    fs::write(&weights, &bytes).unwrap();
    assert!(refused(&[]).contains("model.safetensors of the source"));
    bytes[at] ^= 1;
    fs::write(&weights, &bytes).unwrap();
    assert_eq!(run(&[]), true);
    // An output that was changed is none of this job.
    let config = out.join("config.json");
    fs::write(&config, fs::read_to_string(&config).unwrap() + "\n").unwrap();
    let line = refused(&[]);
    assert!(line.contains("config.json: expected") && line.contains("as in the manifest"), "{line}");
}

#[test]
fn conversions_several_formats_and_fits_answer_as_well() {
    let dir = TempDir::new().unwrap();
    let model = model(dir.path());
    let at = |name: &str| text(&dir.path().join(name)).to_owned();
    let sample = dir.path().join("sample.txt");
    fs::write(&sample, "Some words of a text. ".repeat(60)).unwrap();
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", &at("q"), "--quiet"]);
    let convert =
        ["convert", &at("q"), "--format", "gptq", "--out", &at("c"), "--json", "--quiet"].map(str::to_owned);
    let fit = [
        "fit",
        &model,
        "--schemes",
        "int4-g8,int8-g8",
        "--text",
        text(&sample),
        "--context",
        "32",
        "--budget",
        "11bpw",
        "--out",
        &at("f"),
        "--save-recipe",
        &at("f.toml"),
        "--html",
        &at("f.html"),
        "--json",
        "--quiet",
    ]
    .map(str::to_owned);
    for arguments in [&convert[..], &fit[..]] {
        assert_eq!(json(arguments)["already_complete"], false);
        let again = json(arguments);
        assert_eq!(again["already_complete"], true, "{arguments:?}");
        assert!(again["layers"].is_array() && again["hashes"].is_object());
    }
    // A page that is gone is made again, with the rest.
    fs::remove_file(at("f.html")).unwrap();
    assert_eq!(json(&fit)["already_complete"], false);
    assert!(Path::new(&at("f.html")).is_file());
    let several = [
        "quantize",
        &model,
        "--recipe",
        "rtn-int8-channel",
        "--format",
        "native",
        "--format",
        "compressed-tensors",
    ];
    let out = at("s");
    let several = [&several[..], &["--out", &out, "--json", "--quiet"]].concat();
    assert_eq!(json(&several)["outputs"][1]["already_complete"], false);
    assert_eq!(json(&several)["outputs"][1]["already_complete"], true);
}

#[test]
fn the_difference_of_a_job_comes_before_its_report() {
    let dir = TempDir::new().unwrap();
    let (model, sample) = (model(dir.path()), dir.path().join("sample.json"));
    let (out, report) = (dir.path().join("out"), dir.path().join("report.json"));
    let windows = |first: usize| {
        let ids: Vec<usize> = (0..64).map(|i| 3 + (first + i) % 40).collect();
        fs::write(&sample, serde_json::json!([ids]).to_string()).unwrap();
    };
    windows(0);
    let to = format!("--json={}", text(&report));
    let arguments =
        ["quantize", &model, "--recipe", "gptq-int8-channel", "--out", text(&out), "--quiet", &to];
    let arguments = [&arguments[..], &["--calibration-tokens", text(&sample)]].concat();
    succeed(&arguments);
    let before = fs::read(&report).unwrap();
    windows(1);
    let line = fail(2, &arguments);
    assert!(line.contains("a folder that differs: ") && line.contains("calibration"), "{line}");
    // Without a finished output, the report of another job is refused before the work, as ever.
    fs::remove_dir_all(&out).unwrap();
    let line = fail(2, &arguments);
    assert!(line.contains("report.json: ") && !out.exists(), "{line}");
    assert_eq!(fs::read(&report).unwrap(), before);
}
