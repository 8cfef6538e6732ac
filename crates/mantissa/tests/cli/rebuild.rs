//! `mantissa rebuild`: the same bytes from `quality.json` and the source; signatures of `quality.json`.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{fail, json as report, left_to_nightly, root, sampled, succeed, text};

const TEXT: &str = "Once upon a time there was a little girl. She had a red ball and a small dog. ";

/// Options of `quantize demo`, of each kind that decides bytes.
const RECIPES: [&str; 11] = [
    "--recipe rtn-int4-g128",
    "--recipe rtn-int4-g32 --format gptq --head int8 --untie",
    "--recipe gptq-int4-g128 --calibration c.txt --samples 4 --length 64 --hold-out 1",
    "--recipe awq-int4-g32-asym --calibration c.txt:1 --calibration default --samples 4 --length 64 --seed 5",
    "--recipe fp8-dynamic",
    "--recipe nvfp4 --format native --round stochastic --seed 3",
    "--recipe mxfp4",
    "--recipe nf4",
    "--recipe smooth-int8-channel+int8-token --calibration-tokens w.json:key",
    "--recipe r.toml --max-shard-size 200K",
    "--recipe rtn-q4_k",
];

fn files(dir: &Path) {
    fs::write(dir.join("c.txt"), TEXT.repeat(40)).unwrap();
    let windows: Vec<Vec<u32>> =
        (0..4).map(|i| (0..32).map(|j| (i * 37 + j * 11) % 200 + 3).collect()).collect();
    fs::write(dir.join("w.json"), json!({"key": windows}).to_string()).unwrap();
    fs::write(dir.join("r.toml"), "method = \"rtn\"\nweights = \"int5-g32\"\nformat = \"native\"\n").unwrap();
}

/// Splits options, with files in `dir`.
fn options(line: &str, dir: &Path) -> Vec<String> {
    let word = |word: &str| {
        let name = word.split(':').next().unwrap_or(word);
        if dir.join(name).is_file() { format!("{}/{word}", dir.display()) } else { word.to_owned() }
    };
    line.split(' ').map(word).collect()
}

#[test]
fn ten_recipes_are_rebuilt_bit_for_bit() {
    let temp = TempDir::new().unwrap();
    files(temp.path());
    for (i, line) in sampled(RECIPES.iter().enumerate(), 3) {
        let ending = if line.contains("q4_k") { ".gguf" } else { "" };
        let (out, again) =
            (temp.path().join(format!("o{i}{ending}")), temp.path().join(format!("again{i}{ending}")));
        let mut args =
            vec!["quantize".to_owned(), "demo".into(), "--out".into(), text(&out).into(), "--quiet".into()];
        args.extend(options(line, temp.path()));
        succeed(&args);
        // The record holds names: files are found beside the working folder by --file.
        let mut args =
            vec!["rebuild", text(&out), "--source", "demo", "--out", text(&again), "--json", "--quiet"];
        let places: Vec<String> = ["c.txt", "w.json"]
            .iter()
            .map(|name| format!("{name}={}/{name}", temp.path().display()))
            .collect();
        for place in &places {
            args.extend(["--file", place]);
        }
        let found = report(&args);
        assert_eq!(found["identical"], true, "{line}: {found}");
        let quality = |path: &Path| -> Value {
            let path = if ending.is_empty() {
                path.join("quality.json")
            } else {
                format!("{}.quality.json", path.display()).into()
            };
            serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
        };
        let (old, new) = (quality(&out), quality(&again));
        assert_eq!(old["rebuild"], new["rebuild"], "{line}");
        assert_eq!((&old["layers"], &old["recipe"]), (&new["layers"], &new["recipe"]), "{line}");
        assert!(!old["rebuild"].to_string().contains(text(temp.path())), "no place: {}", old["rebuild"]);
    }
}

/// Sources that a GGUF file presents otherwise than a folder: a model whose factors are multiplied into the weights, and the
/// file made of it.
#[test]
fn outputs_of_gguf_sources_are_rebuilt() {
    let temp = TempDir::new().unwrap();
    let (model, file) = (temp.path().join("m"), temp.path().join("s.gguf"));
    fs::create_dir(&model).unwrap();
    let tiny = root().join("tests/data/tiny/falcon-h1");
    let mut config: Value =
        serde_json::from_str(&fs::read_to_string(tiny.join("config.json")).unwrap()).unwrap();
    config["time_step_limit"] = json!([0.0, {"__float__": "Infinity"}]);
    fs::write(model.join("config.json"), config.to_string()).unwrap();
    fs::copy(tiny.join("model.safetensors"), model.join("model.safetensors")).unwrap();
    for (source, recipe, format, made, again) in [
        (&model, "rtn-f32", "gguf", "s.gguf", "s2.gguf"),
        (&file, "rtn-q8_0", "gguf", "q.gguf", "q2.gguf"),
        (&file, "rtn-int8-channel", "compressed-tensors", "c", "c2"),
    ] {
        let [made, again] = [made, again].map(|name| temp.path().join(name));
        let line = ["quantize", text(source), "--recipe", recipe, "--format", format, "--out", text(&made)];
        succeed(&[&line[..], &["--quiet"]].concat());
        let line = ["rebuild", text(&made), "--source", text(source), "--out", text(&again), "--json"];
        let found = report(&[&line[..], &["--quiet"]].concat());
        assert_eq!(found["identical"], true, "{recipe} {format}: {found}");
    }
}

#[test]
fn what_fit_found_and_what_was_chosen_are_rebuilt() {
    if left_to_nightly() {
        return;
    }
    let temp = TempDir::new().unwrap();
    let sample = temp.path().join("s.txt");
    fs::write(&sample, TEXT.repeat(60)).unwrap();
    let (fitted, chosen) = (temp.path().join("fit"), temp.path().join("chosen"));
    succeed(&[
        "fit",
        "demo",
        "--budget",
        "6bpw",
        "--schemes",
        "int4-g32,int8-g32",
        "--text",
        text(&sample),
        "--context",
        "64",
        "--out",
        text(&fitted),
        "--quiet",
    ]);
    succeed(&["quantize", "demo", "--for", "transformers", "--out", text(&chosen), "--quiet"]);
    let converted = temp.path().join("converted");
    let plain = temp.path().join("plain");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", text(&plain), "--quiet"]);
    succeed(&["convert", text(&plain), "--format", "gptq", "--out", text(&converted), "--quiet"]);
    for (made, source) in [(&fitted, "demo"), (&chosen, "demo"), (&converted, text(&plain))] {
        let again = temp.path().join("again");
        let quality = made.join("quality.json");
        succeed(&["rebuild", text(&quality), "--source", source, "--out", text(&again), "--quiet"]);
        fs::remove_dir_all(&again).unwrap();
    }
}

/// A record of earlier versions: the command line.
fn line(command: &str, arguments: &Value) -> Value {
    json!({"command": command, "arguments": arguments, "seed": 0})
}

/// Files of earlier versions hold a command line, which stands for the same job.
#[test]
fn command_lines_of_earlier_versions_are_rebuilt() {
    let temp = TempDir::new().unwrap();
    files(temp.path());
    let recipe = fs::read_to_string(temp.path().join("r.toml")).unwrap();
    for (i, (options_given, arguments, recipe)) in [
        (
            "--recipe gptq-int4-g128 --calibration c.txt --samples 4 --length 64 --hold-out 1 --seed 5",
            json!([
                "--calibration=c.txt",
                "--samples=4",
                "--length=64",
                "--hold-out=1",
                "--recipe=gptq-int4-g128",
                "--format=compressed-tensors"
            ]),
            None,
        ),
        (
            "--recipe r.toml --max-shard-size 200K --round stochastic --seed 5",
            json!(["--round=stochastic", "--max-shard-size=200K", "--recipe=r.toml", "--format=native"]),
            Some(recipe),
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let (out, again) = (temp.path().join(format!("o{i}")), temp.path().join(format!("a{i}")));
        let mut args =
            vec!["quantize".to_owned(), "demo".into(), "--out".into(), text(&out).into(), "--quiet".into()];
        args.extend(options(options_given, temp.path()));
        succeed(&args);
        let path = out.join("quality.json");
        let mut quality: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let new = std::mem::replace(&mut quality["rebuild"], line("quantize", &arguments));
        quality["rebuild"]["seed"] = json!(5);
        if let Some(recipe) = recipe {
            quality["rebuild"]["recipe"] = json!(recipe);
        }
        fs::write(&path, quality.to_string()).unwrap();
        let place = format!("c.txt={}/c.txt", temp.path().display());
        let args =
            ["rebuild", text(&path), "--source", "demo", "--out", text(&again), "--file", &place, "--quiet"];
        let found = report(&[&args[..], &["--json"]].concat());
        assert_eq!(found["identical"], true, "{found}");
        let made = fs::read_to_string(again.join("quality.json")).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&made).unwrap()["rebuild"], new);
    }
}

#[test]
fn another_source_another_result_and_a_hostile_record_are_refused() {
    let temp = TempDir::new().unwrap();
    let (out, again) = (temp.path().join("o"), temp.path().join("again"));
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", text(&out), "--quiet"]);
    let path = out.join("quality.json");
    let rebuild = |code: i32, source: &str| {
        fail(
            code,
            &["rebuild", text(&path), "--source", source, "--out", text(&again), "--overwrite", "--quiet"],
        )
    };
    let tiny = root().join("tests/data/tiny/llama1-mha");
    let error = rebuild(2, text(&tiny));
    assert!(error.contains("the model that was quantized"), "{error}");
    assert!(!again.exists());
    let old: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let write = |change: &dyn Fn(&mut Value)| {
        let mut new = old.clone();
        change(&mut new);
        fs::write(&path, format!("{new:#}\n")).unwrap();
    };
    // The recorded hash of a weight file.
    write(&|new| new["hashes"]["weights"]["model.safetensors"]["sha256"] = json!("0".repeat(64)));
    let error = rebuild(1, "demo");
    assert!(error.contains("got others in model.safetensors"), "{error}");
    for (line, message) in [
        (line("quantize", &json!(["--recipe=rtn-int4-g128", "--json=/tmp/x"])), "--json=/tmp/x"),
        (line("quantize", &json!(["--recipe=rtn-int4-g128", "--out=/tmp/x"])), "--out=/tmp/x"),
        (line("quantize", &json!(["--calibration=/etc/passwd"])), "a plain name, without a folder"),
        (line("quantize", &json!(["--calibration=none.txt"])), "--file none.txt=PATH"),
        (line("quantize", &json!(["demo"])), "demo"),
        (line("cast", &json!(["--recipe=rtn-int4-g128"])), "quantize or convert"),
    ] {
        write(&|new| new["rebuild"] = line.clone());
        let error = rebuild(2, "demo");
        assert!(error.contains(message), "{error}");
    }
    // A job of another version, with a field that it does not have, or of another name.
    for (key, value, message) in [
        ("version", json!(99), "version: expected 1, got 99"),
        ("json", json!("/tmp/x"), "unknown field"),
        ("job", json!("cast"), "expected quantize, got cast"),
    ] {
        write(&|new| new["rebuild"][key] = value.clone());
        let error = rebuild(2, "demo");
        assert!(error.contains(message), "{key}: {error}");
    }
    // The command line names the place, not the record.
    let (elsewhere, made) = (temp.path().join("elsewhere"), temp.path().join("made"));
    write(&|new| new["rebuild"]["out"] = json!(elsewhere));
    succeed(&["rebuild", text(&path), "--source", "demo", "--out", text(&made), "--quiet"]);
    assert!(made.exists() && !elsewhere.exists());
    write(&|new| drop(new.as_object_mut().unwrap().remove("rebuild")));
    let error = rebuild(2, "demo");
    assert!(error.contains("rebuild"), "{error}");
}

/// A record is a file from somewhere: no value of an option may lead to a file that the user did not name.
#[test]
fn records_name_no_file_by_its_path() {
    let temp = TempDir::new().unwrap();
    let (out, again) = (temp.path().join("o"), temp.path().join("again"));
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", text(&out), "--quiet"]);
    let (path, pipe) = (out.join("quality.json"), out.join("p.toml"));
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let old: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let options = [
        "recipe",
        "format",
        "head",
        "embeddings",
        "calibration",
        "calibration-tokens",
        "samples",
        "length",
        "generated-samples",
        "imatrix",
        "hold-out",
        "calibration-dtype",
        "round",
        "max-shard-size",
    ];
    let places = [
        text(&pipe).to_owned(),
        "/etc/passwd".to_owned(),
        "/etc/passwd:0.5".to_owned(),
        "default:/etc/passwd".to_owned(),
        "../o/p.toml".to_owned(),
        "./p.toml".to_owned(),
        "p.toml/".to_owned(),
        "..".to_owned(),
        ".".to_owned(),
        String::new(),
        "p\u{1b}[31m.toml".to_owned(),
        "p\n.toml".to_owned(),
        "p\0".to_owned(),
    ];
    let rebuild_of = |record: Value| {
        let mut new = old.clone();
        new["rebuild"] = record;
        fs::write(&path, new.to_string()).unwrap();
        let given = ["rebuild", text(&path), "--source", "demo", "--out", text(&again), "--quiet"];
        let error = fail(2, &given);
        assert!(error.contains("quality.json: rebuild: ") && !error.contains('\u{1b}'), "{error}");
        assert!(!again.exists());
        error
    };
    let rebuild = |arguments: Value| rebuild_of(line("quantize", &arguments));
    // The same in the job that this version records.
    for place in &places {
        for (field, key, value) in [
            ("recipe", "name", json!(place)),
            ("calibration", "texts", json!([{"path": place, "weight": 1.0}])),
            ("calibration", "tokens", json!(place)),
        ] {
            let mut record = old["rebuild"].clone();
            record["weights"][field][key] = value;
            let error = rebuild_of(record);
            assert!(error.contains("expected a plain name"), "{key} {place}: {error}");
        }
        let mut record = old["rebuild"].clone();
        record["weights"]["imatrix"] = json!(place);
        assert!(rebuild_of(record).contains("--imatrix: expected a plain name"));
    }
    for option in options {
        for place in &places {
            let error = rebuild(json!([format!("--{option}={place}")]));
            assert!(error.contains(&format!("--{option}: expected a plain name")), "{error}");
        }
        rebuild(json!([format!("--{option}"), text(&pipe)]));
    }
    // A recipe file is in the record or nowhere.
    let error = rebuild(json!(["--recipe=p.toml"]));
    assert!(error.contains("the text of the file in rebuild.recipe"), "{error}");
}

#[test]
fn a_signature_is_checked() {
    let folder = root().join("tests/data/signed");
    let key = folder.join("minisign.pub");
    let artifact = folder.join("model");
    let found = report(&["verify", text(&artifact), "--key", text(&key), "--strict", "--json", "--quiet"]);
    assert_eq!((&found["ok"], found["signed"].is_string()), (&json!(true), true), "{found}");
    let line = fs::read_to_string(&key).unwrap().lines().nth(1).unwrap().to_owned();
    succeed(&["verify", text(&artifact), "--key", &line, "--quiet"]);
    // Another key, a changed file, no signature.
    let other = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
    let error = fail(1, &["verify", text(&artifact), "--key", other, "--quiet"]);
    assert!(error.contains("by this key, got another"), "{error}");
    let temp = TempDir::new().unwrap();
    let copy = temp.path().join("m");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&artifact).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    let quality = copy.join("quality.json");
    let changed = fs::read_to_string(&quality).unwrap().replacen("int4", "int8", 1);
    fs::write(&quality, changed).unwrap();
    let error = fail(1, &["verify", text(&copy), "--key", &line, "--quiet"]);
    assert!(error.contains("by this key, got another"), "{error}");
    fs::remove_file(copy.join("quality.json.minisig")).unwrap();
    let error = fail(1, &["verify", text(&copy), "--key", &line, "--quiet"]);
    assert!(error.contains("minisign -Sm quality.json"), "{error}");
    let error = fail(2, &["verify", text(&artifact), "--key", text(&quality), "--quiet"]);
    assert!(error.contains("no public key"), "{error}");
}
