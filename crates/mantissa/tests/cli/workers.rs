//! Jobs that several workers divide: the bytes are those of one process, whoever computes what, and however often a
//! worker dies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use mantissa_num::round::random_u32;
use tempfile::TempDir;

use crate::support::{command, fail, mantissa, sampled, shared_out, stderr, succeed, text};

/// Folder with a model of two layers and calibration windows for it.
struct Place(TempDir);

impl Place {
    fn new(sizes: &[&str]) -> Self {
        let place = Place(TempDir::new().unwrap());
        succeed(&[&["synth", "--out", text(&place.at("model")), "--preset", "tiny"], sizes].concat());
        let window = |seed: u64| (0..32).map(|i| (i * 7 + seed * 13) % 60).collect::<Vec<_>>();
        let sets = serde_json::json!({ "w": (1..5).map(window).collect::<Vec<_>>() });
        fs::write(place.at("windows.json"), sets.to_string()).unwrap();
        place
    }

    fn tiny() -> Self {
        Self::new(&[
            "--hidden",
            "64",
            "--layers",
            "2",
            "--ffn",
            "128",
            "--heads",
            "4",
            "--kv-heads",
            "2",
            "--vocab",
            "64",
        ])
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the words of a command in this folder; `w` stands for the calibration.
    fn words(&self, line: &str, out: &str) -> Vec<String> {
        let windows = format!("--calibration-tokens {}:w", self.at("windows.json").display());
        let line = line.replace("WINDOWS", &windows).replace("MODEL", text(&self.at("model")));
        let line = format!("{line} --out {} --threads 1 --quiet", self.at(out).display());
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn start(&self, words: &[String]) -> Child {
        let mut command = command();
        command.args(words).current_dir(self.0.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    fn worker(&self, job: &str) -> Child {
        self.start(&["worker", job, "--threads", "1", "--quiet"].map(str::to_owned))
    }
}

fn succeeds(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

/// Returns the files of an output by name; a GGUF file and those beside it are in one folder.
fn bytes(out: &Path) -> BTreeMap<String, Vec<u8>> {
    if out.is_file() {
        let name = out.file_name().unwrap().to_str().unwrap().to_owned();
        return BTreeMap::from([(name, fs::read(out).unwrap())]);
    }
    let entries = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.is_file())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect()
}

/// Commands of each kind: independent layers, calibrated ones, a transform before them, layers that are learned together,
/// mixed methods, GGUF with codecs and importance, several formats, a conversion.
const COMMANDS: [(&str, &str); 10] = [
    ("rtn", "quantize MODEL --recipe rtn-int4-g32"),
    ("gptq", "quantize MODEL --recipe gptq-int4-g32 WINDOWS"),
    ("nvfp4", "quantize MODEL --recipe scalesweep-gptaq-nvfp4 WINDOWS"),
    ("awq", "quantize MODEL --recipe awq-rtn-int4-g32 WINDOWS"),
    ("autoround", "quantize MODEL --recipe autoround-int4-g32 WINDOWS"),
    ("hqq", "quantize MODEL --recipe hqq-int4-g32"),
    ("w8a8", "quantize MODEL --recipe gptq-int8-channel+int8-token WINDOWS"),
    ("gguf.gguf", "quantize MODEL --recipe rtn-q8_0"),
    ("q4_k.gguf", "quantize MODEL --recipe q4_k_m WINDOWS"),
    ("several", "quantize MODEL --recipe rtn-int4-g32 --format compressed-tensors --format gptq"),
];

/// Divides a command among workers, and shows what is told of them.
fn divided(words: Vec<String>, workers: u32) -> Vec<String> {
    let shown = words.into_iter().filter(|word| word != "--quiet");
    shown.chain(["--workers".to_owned(), workers.to_string()]).collect()
}

#[test]
fn any_number_of_workers_writes_the_same_bytes() {
    let place = Place::tiny();
    for (i, (name, line)) in COMMANDS.into_iter().enumerate() {
        let alone = mantissa(&place.words(line, &format!("alone/{name}")));
        assert!(alone.status.success(), "{name}: {}", stderr(&alone));
        let expected = bytes(&place.at(&format!("alone/{name}")));
        for workers in shared_out([2, 4, 3, 1], 4, i) {
            let out = format!("w{workers}/{name}");
            let done = mantissa(&divided(place.words(line, &out), workers));
            assert!(done.status.success(), "{name}, {workers}: {}", stderr(&done));
            assert!(!stderr(&done).contains("ended early"), "{name}, {workers}: {}", stderr(&done));
            assert!(bytes(&place.at(&out)) == expected, "{name} by {workers} workers");
            assert!(!place.at(&format!("{out}.job")).exists(), "the folder of the job is left");
        }
    }
}

/// A wide input, whose XᵀX is divided, and more windows than groups.
#[test]
fn passes_of_a_calibration_are_divided() {
    let place =
        Place::new(&["--hidden", "256", "--layers", "2", "--ffn", "512", "--heads", "4", "--vocab", "64"]);
    let window = |seed: u64| (0..24).map(|i| (i * 5 + seed * 11) % 60).collect::<Vec<_>>();
    let sets = serde_json::json!({ "w": (1..41).map(window).collect::<Vec<_>>() });
    fs::write(place.at("windows.json"), sets.to_string()).unwrap();
    let lines = [
        ("f32", "quantize MODEL --recipe gptq-int4-g32 WINDOWS --hold-out 4"),
        ("bf16", "quantize MODEL --recipe gptq-int4-g32 WINDOWS --calibration-dtype bf16"),
        ("drift", "quantize MODEL --recipe gptaq-int4-g32 WINDOWS"),
    ];
    for (name, line) in sampled(lines, 2) {
        let line = format!("{line} --verify=false");
        succeed(&place.words(&line, &format!("alone-{name}")));
        let words = place.words(&line, name);
        let job = format!("{name}.job");
        let worker = |index: &str| {
            let mut command = command();
            command.args(["worker", &job, "--threads", index, "--quiet", "--json"]);
            command.env("PMI_RANK", index).env("PMI_SIZE", "3").current_dir(place.0.path());
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let writer = place.start(&[words, vec!["--job".to_owned(), job.clone()]].concat());
        while !place.at(&job).join("job.json").exists() {
            sleep(Duration::from_millis(1));
        }
        let outputs = ["1", "2"].map(worker).map(|child| child.wait_with_output().unwrap());
        succeeds(writer);
        assert!(bytes(&place.at(name)) == bytes(&place.at(&format!("alone-{name}"))), "{name}");
        let computed = outputs.map(|output| {
            assert!(output.status.success(), "{}", stderr(&output));
            let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            report["computed"].as_u64().unwrap()
        });
        // Windows and bands of two layers are more than the solutions of 14 weights.
        assert!(computed.iter().sum::<u64>() > 14, "{name}: {computed:?}");
        damage_passes(&place.at(&job).join("units"));
        let again = [place.words(&line, "again"), ["--job", &*job].map(str::to_owned).to_vec()].concat();
        succeeds(place.start(&again));
        assert!(bytes(&place.at("again")) == bytes(&place.at(name)), "{name}");
        fs::remove_dir_all(place.at("again")).unwrap();
    }
}

/// Truncates a result of a pass, and removes all that was computed from the passes.
fn damage_passes(units: &Path) {
    let mut damaged = 0;
    for unit in fs::read_dir(units).unwrap().map(|unit| unit.unwrap().path()) {
        let content = fs::read(&unit).unwrap();
        let line = content.split(|byte| *byte == b'\n').next().unwrap();
        let header: serde_json::Value = serde_json::from_slice(line).unwrap();
        let name = header["unit"].as_str().unwrap();
        match (name.contains(": windows "), damaged) {
            (false, _) => fs::remove_file(&unit).unwrap(),
            (true, 0) => {
                fs::write(&unit, &content[..content.len() - 5]).unwrap();
                damaged += 1;
            }
            (true, _) => {}
        }
    }
    assert_eq!(damaged, 1);
}

#[test]
fn an_evaluation_is_divided() {
    let place = Place::tiny();
    succeed(&place.words("quantize MODEL --recipe rtn-int4-g32", "int4"));
    let figures = |more: &[&str]| {
        let arguments = ["eval", "int4", "--reference", "model", "--tokens", "windows.json:w", "--json"];
        let output = command().args(arguments).args(more).current_dir(place.0.path()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let mut report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report.as_object_mut().unwrap().remove("seconds");
        report
    };
    let alone = figures(&[]);
    for workers in ["1", "3"] {
        assert_eq!(figures(&["--workers", workers]), alone);
        assert!(!place.at("eval.job").exists());
    }
    let named = figures(&["--job", "job", "--per-window", "windows.out"]);
    assert_eq!(named, alone);
    assert_eq!(figures(&["--job", "job"]), alone);
    assert_eq!(fs::read_dir(place.at("job/units")).unwrap().count(), 4);
}

#[test]
fn items_of_tasks_are_divided() {
    let place = Place::tiny();
    let report = |more: &[&str]| {
        let arguments = ["eval", "demo", "--task", "cloze", "--reference", "demo", "--json"];
        let output = command().args(arguments).args(more).current_dir(place.0.path()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let mut report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report.as_object_mut().unwrap().remove("seconds");
        report
    };
    let alone = report(&["--per-item", "alone.jsonl"]);
    assert_eq!(report(&["--workers", "3", "--per-item", "three.jsonl"]), alone);
    assert!(fs::read(place.at("alone.jsonl")).unwrap() == fs::read(place.at("three.jsonl")).unwrap());
}

#[test]
fn candidates_of_a_fit_are_divided() {
    let place = Place::tiny();
    let tokens = format!("--tokens {}:w", place.at("windows.json").display());
    let methods = "--method rtn,gptq WINDOWS --schemes int4-g32,int8-g32 --budget 6bpw";
    let line = format!("fit MODEL {methods} {tokens}");
    succeed(&place.words(&line, "alone"));
    for workers in [1, 3] {
        let out = format!("w{workers}");
        let done = mantissa(&divided(place.words(&line, &out), workers));
        assert!(done.status.success() && !stderr(&done).contains("ended early"), "{}", stderr(&done));
        assert!(bytes(&place.at("alone")) == bytes(&place.at(&out)), "{workers} workers");
        assert!(!place.at(&format!("{out}.job")).exists());
    }
    let limited =
        [place.words(&line, "limited"), ["--time-limit", "1", "--workers", "2"].map(str::to_owned).to_vec()];
    assert!(fail(2, &limited.concat()).contains("--time-limit: expected none with --workers or --job"));
}

#[test]
fn a_conversion_is_divided() {
    let place = Place::tiny();
    succeed(&place.words("quantize MODEL --recipe rtn-int4-g32", "model-int4"));
    let line = format!("convert {} --format gptq", place.at("model-int4").display());
    succeed(&place.words(&line, "alone"));
    let three = mantissa(&divided(place.words(&line, "three"), 3));
    assert!(three.status.success() && !stderr(&three).contains("ended early"), "{}", stderr(&three));
    assert!(bytes(&place.at("alone")) == bytes(&place.at("three")));
}

/// One of two workers, and then the one that writes, are killed at random moments; whoever comes later goes on.
#[test]
fn killed_workers_change_no_byte() {
    let place =
        Place::new(&["--hidden", "128", "--layers", "3", "--ffn", "256", "--heads", "4", "--vocab", "64"]);
    let line = "quantize MODEL --recipe gptq-int4-g32 WINDOWS --verify=false";
    let begin = Instant::now();
    succeed(&place.words(line, "alone"));
    let (alone, expected) = (begin.elapsed(), bytes(&place.at("alone")));
    for trial in sampled(0..20, 4) {
        let _ = fs::remove_dir_all(place.at("out"));
        let _ = fs::remove_dir_all(place.at("job"));
        let words =
            [place.words(line, "out"), vec!["--job".to_owned(), text(&place.at("job")).to_owned()]].concat();
        let mut writer = place.start(&words);
        let record = place.at("job/job.json");
        let begin = Instant::now();
        while !record.exists() {
            assert!(begin.elapsed() < Duration::from_secs(60) && writer.try_wait().unwrap().is_none());
            sleep(Duration::from_millis(1));
        }
        let (mut first, second) = (place.worker("job"), place.worker("job"));
        let moment =
            |salt: u32| alone.mul_f64(f64::from(random_u32(u64::from(salt), trial)) / f64::from(u32::MAX));
        sleep(moment(5));
        first.kill().unwrap();
        sleep(moment(6).mul_f64(0.5));
        writer.kill().unwrap();
        first.wait().unwrap();
        writer.wait().unwrap();
        succeeds(second);
        let report = mantissa(&[words, vec!["--json".to_owned()]].concat());
        assert!(report.status.success(), "{}", stderr(&report));
        assert!(bytes(&place.at("out")) == expected, "trial {trial}");
    }
}

#[test]
fn copies_of_the_model_agree_and_other_inputs_are_refused() {
    let place = Place::tiny();
    let line = "quantize MODEL --recipe rtn-int4-g32";
    let words = |out: &str| [place.words(line, out), ["--job", "job"].map(str::to_owned).to_vec()].concat();
    succeeds(place.start(&words("out")));
    // A copy has other times and other inodes.
    fs::rename(place.at("model"), place.at("moved")).unwrap();
    fs::create_dir(place.at("model")).unwrap();
    for (name, content) in bytes(&place.at("moved")) {
        fs::write(place.at("model").join(name), content).unwrap();
    }
    let report = command().args(["worker", "job", "--json"]).current_dir(place.0.path()).output().unwrap();
    assert!(report.status.success(), "{}", stderr(&report));
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["computed"], 0);
    // Elsewhere its relative paths would name other files.
    let said = stderr(&command().args(["worker", text(&place.at("job"))]).output().unwrap());
    assert!(said.contains("current folder: expected") && said.contains("; fix: cd "), "{said}");
    let weights = place.at("model/model.safetensors");
    let mut content = fs::read(&weights).unwrap();
    *content.last_mut().unwrap() ^= 1;
    fs::write(&weights, content).unwrap();
    let refused = command().args(["worker", "job"]).current_dir(place.0.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr(&refused).contains("model.safetensors: expected the file that the job was made for"),
        "{}",
        stderr(&refused)
    );
    let other = place.start(&words("other")).wait_with_output().unwrap();
    assert_eq!(other.status.code(), Some(2));
    assert!(
        stderr(&other).contains("job.json: job: expected this job with these inputs"),
        "{}",
        stderr(&other)
    );
}

/// A result whose bytes and digest were changed together, as a faulty machine makes them.
#[test]
fn an_audit_finds_a_faulty_worker() {
    let place = Place::tiny();
    let words = place.words("quantize MODEL --recipe rtn-int4-g32 --job job", "out");
    succeeds(place.start(&words));
    let audit = || {
        command()
            .args(["worker", "job", "--audit", "100%", "--json"])
            .current_dir(place.0.path())
            .output()
            .unwrap()
    };
    let report = audit();
    assert!(report.status.success(), "{}", stderr(&report));
    let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!((&report["computed"], &report["audited"]), (&0.into(), &14.into()));
    let units: Vec<_> =
        fs::read_dir(place.at("job/units")).unwrap().map(|unit| unit.unwrap().path()).collect();
    // Every layer was exchanged.
    assert!(units.len() == 14 && units.iter().all(|unit| fs::metadata(unit).unwrap().len() > 1000));
    let unit = &units[0];
    let content = fs::read(unit).unwrap();
    let end = content.iter().position(|byte| *byte == b'\n').unwrap();
    let mut header: serde_json::Value = serde_json::from_slice(&content[..end]).unwrap();
    let mut result = content[end + 1..].to_vec();
    let middle = result.len() / 2;
    result[middle] ^= 1;
    header["result"]["sha256"] = mantissa_store::FileDigest::of(&result).hex().into();
    fs::write(unit, [header.to_string().as_bytes(), b"\n", &result].concat()).unwrap();
    let found = audit();
    assert_eq!(found.status.code(), Some(3));
    let said = stderr(&found);
    for part in [
        "expected equal results",
        header["unit"].as_str().unwrap(),
        header["worker"].as_str().unwrap(),
        "; fix: ",
    ] {
        assert!(said.contains(part), "{said}");
    }
    // A result that is only damaged is computed again, and the output stays right.
    fs::write(unit, &content[..end + 1 + middle]).unwrap();
    let expected = bytes(&place.at("out"));
    fs::remove_dir_all(place.at("out")).unwrap();
    succeeds(place.start(&words));
    assert!(bytes(&place.at("out")) == expected);
}

#[test]
fn units_are_computed_by_number_and_by_rank() {
    let place = Place::tiny();
    let line = "quantize MODEL --recipe rtn-int4-g32 --job job --workers 2 --engine slurm --json";
    let script = command().args(place.words(line, "out")).current_dir(place.0.path()).output().unwrap();
    let script: serde_json::Value = serde_json::from_slice(&script.stdout).unwrap();
    assert_eq!(script["units"], 14);
    let worker = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut command = command();
        command.args(["worker", "job", "--json"]).args(arguments).envs(variables.iter().copied());
        let output = command.current_dir(place.0.path()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        (report["computed"].as_u64().unwrap(), report["rank"].as_u64())
    };
    assert_eq!(worker(&["--unit", "3"], &[]), (1, None));
    assert_eq!(worker(&["--unit", "3"], &[]), (0, None));
    assert_eq!(worker(&["--units", "2..5"], &[]), (2, None));
    assert_eq!(worker(&[], &[("PMI_RANK", "1"), ("PMI_SIZE", "2")]), (11, Some(1)));
    succeeds(place.start(&place.words("quantize MODEL --recipe rtn-int4-g32 --job job", "out")));
    succeed(&place.words("quantize MODEL --recipe rtn-int4-g32", "alone"));
    assert!(bytes(&place.at("out")) == bytes(&place.at("alone")));
    let line = "quantize MODEL --recipe gptq-int4-g32 WINDOWS --job job-gptq --workers 2 --engine mpi";
    succeeds(place.start(&place.words(line, "gptq")));
    let refused =
        command().args(["worker", "job-gptq", "--unit", "0"]).current_dir(place.0.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("layers of a calibrated recipe wait"), "{}", stderr(&refused));
}

/// The scripts of MPI without MPI: their two commands, started by a shell.
#[test]
fn the_lines_of_a_script_do_the_job() {
    let place = Place::tiny();
    let tokens = format!("--tokens {}:w", place.at("windows.json").display());
    let fit = format!("fit MODEL --schemes int3-g32,int4-g32 --budget 4bpw {tokens}");
    for (i, line) in ["quantize MODEL --recipe rtn-int4-g32", fit.as_str()].into_iter().enumerate() {
        let (out, alone) = (format!("out-{i}"), format!("alone-{i}"));
        let given = ["--workers", "3", "--engine", "mpi"].map(str::to_owned).to_vec();
        let words = [place.words(line, &out), given].concat();
        let output = command().args(&words).current_dir(place.0.path()).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        let exec = script.lines().find_map(|line| line.strip_prefix("exec mpiexec -n 1 "));
        let exec =
            exec.unwrap_or_else(|| panic!("{line}: {script} {}", String::from_utf8_lossy(&output.stderr)));
        let (writer, workers) = exec.split_once(" : -n 2 ").unwrap();
        let shell = |line: &str| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", line]).current_dir(place.0.path());
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let all = [workers, workers, writer].map(shell);
        all.into_iter().for_each(succeeds);
        succeed(&place.words(line, &alone));
        assert!(bytes(&place.at(&out)) == bytes(&place.at(&alone)), "{line}");
    }
}

#[test]
fn what_is_no_job_is_refused() {
    let place = Place::tiny();
    let at = |name: &str| text(&place.at(name)).to_owned();
    assert!(fail(2, &["worker", &at("none")]).contains("expected the folder of a job"));
    assert!(fail(2, &["worker", &at("model")]).contains("expected the folder of a job"));
    fs::create_dir_all(place.at("job")).unwrap();
    for record in ["", "[]", "{\"job\": {}}", "{"] {
        fs::write(place.at("job/job.json"), record).unwrap();
        assert!(fail(2, &["worker", &at("job")]).contains("job.json"), "{record}");
    }
    let line = "quantize MODEL --recipe rtn-int4-g32 --engine slurm";
    assert!(fail(2, &place.words(line, "o")).contains("--workers: expected at least 2"));
    let line = "quantize MODEL --recipe rtn-int4-g32 --workers 2 --job";
    let words = [place.words(line, "o"), vec![]].concat();
    let at = words.iter().position(|word| word == "--job").unwrap();
    let mut words = words;
    words.insert(at + 1, text(&place.at("model")).to_owned());
    assert!(fail(2, &words).contains("expected nothing, or the folder of this job"));
    let audit = mantissa(&["worker", "job", "--audit", "2"]);
    assert!(stderr(&audit).contains("expected a percentage"), "{}", stderr(&audit));
}
