//! Kills, signals, full disks and concurrent writers: the old output stays whole, and the same command
//! resumes to the same bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use mantissa_num::round::random_u32;
use tempfile::TempDir;

use crate::support::{command, fail, json, mantissa, sampled, stderr, succeed, text, whole};

/// Model of 4.2 million parameters, whose quantization takes a few tenths of a second.
fn model(dir: &Path) -> PathBuf {
    synth(
        dir,
        "model",
        &["--hidden", "256", "--layers", "4", "--ffn", "768", "--heads", "8", "--vocab", "4096"],
    )
}

fn synth(dir: &Path, name: &str, sizes: &[&str]) -> PathBuf {
    let out = dir.join(name);
    succeed(&[&["synth", "--out", text(&out), "--preset", "tiny"], sizes].concat());
    out
}

/// Arguments of a quantization into several files, so that some are complete when it is killed.
fn arguments<'a>(model: &'a Path, out: &'a Path) -> Vec<&'a str> {
    let (model, out) = (text(model), text(out));
    vec![
        "quantize",
        model,
        "--recipe",
        "rtn-nf4",
        "--out",
        out,
        "--max-shard-size",
        "900k",
        "--verify=false",
        "--overwrite",
        "--json",
    ]
}

fn start<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> Child {
    command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Returns names and contents of a folder's files, without subfolders.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = fs::read(dir.join(&name)).unwrap();
        (name, bytes)
    };
    names_in(dir).into_iter().filter(|name| dir.join(name).is_file()).map(read).collect()
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

fn strays(dir: &Path) -> Vec<String> {
    names_in(dir).into_iter().filter(|name| name.contains(".mantissa-")).collect()
}

/// Sends a signal, named without SIG.
fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits for a condition; false after a minute or when the child has ended.
fn wait_until(child: &mut Child, holds: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(60) {
        if holds() {
            return true;
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
        sleep(Duration::from_millis(1));
    }
    false
}

/// Returns the journal lines next to the output, without the key.
fn units_done(dir: &Path) -> usize {
    let partial = names_in(dir).into_iter().find(|name| name.contains(".mantissa-partial"));
    let journal = partial.and_then(|name| fs::read(dir.join(name).join(".mantissa-journal")).ok());
    journal.map_or(0, |bytes| bytes.iter().filter(|&&b| b == b'\n').count().saturating_sub(1))
}

fn end(child: Child) -> Output {
    child.wait_with_output().unwrap()
}

#[test]
fn killed_at_fifty_moments_and_gone_on_with() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let expected = temp.path().join("expected");
    let trials = if whole() { 50 } else { 16 };
    let begin = Instant::now();
    succeed(&arguments(&model, &expected));
    let whole = begin.elapsed();
    let expected = files(&expected);
    let (dir, mut resumed) = (temp.path().join("outputs"), 0);
    fs::create_dir(&dir).unwrap();
    let out = dir.join("out");
    for trial in 0..trials {
        let mut child = start(&arguments(&model, &out));
        sleep(whole.mul_f64(f64::from(random_u32(3, trial)) / f64::from(u32::MAX)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!out.exists() || files(&out) == expected, "a kill leaves an output that is whole, or none");
        let report = json(&arguments(&model, &out));
        resumed += usize::from(report["resumed"].as_u64().unwrap() > 0);
        assert!(files(&out) == expected, "trial {trial}");
        assert_eq!(names_in(&dir), ["out"], "trial {trial}");
        fs::remove_dir_all(&out).unwrap();
    }
    println!("{resumed} of {trials} kills left work to resume");
    assert!(resumed >= trials as usize / 16, "{resumed}");
}

#[test]
fn signals_end_a_quantization_in_order() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let expected = temp.path().join("expected");
    succeed(&arguments(&model, &expected));
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let out = dir.join(name);
        let mut child = start(&arguments(&model, &out));
        assert!(
            wait_until(&mut child, || units_done(&dir) >= 12),
            "the run has ended before it could be stopped"
        );
        let begin = Instant::now();
        signal(&child, name);
        let output = end(child);
        assert!(begin.elapsed() < Duration::from_secs(5));
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let line = stderr(&output);
        assert!(line.contains("rerun the same command to resume"), "{line}");
        assert_eq!(strays(&dir).len(), 1, "the staging folder and no lock");
        let report = json(&arguments(&model, &out));
        assert!(report["resumed"].as_u64().unwrap() >= 12, "{report}");
        assert!(files(&out) == files(&expected));
        assert_eq!(strays(&dir), [""; 0]);
    }
}

/// Arguments of a quantization into one GGUF file.
fn to_gguf<'a>(model: &'a Path, scheme: &'a str, out: &'a Path) -> Vec<&'a str> {
    let (model, out) = (text(model), text(out));
    vec![
        "quantize",
        model,
        "--recipe",
        scheme,
        "--format",
        "gguf",
        "--out",
        out,
        "--verify=false",
        "--overwrite",
        "--quiet",
    ]
}

const GGUF_FILES: [&str; 3] = ["m.gguf", "m.gguf.mantissa-manifest.json", "m.gguf.quality.json"];

#[test]
fn a_gguf_file_stays_whole_under_kills() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let dirs = ["old", "new", "outputs"].map(|name| temp.path().join(name));
    for (dir, scheme) in dirs.iter().zip(["rtn-q4_0", "rtn-q8_0", "rtn-q4_0"]) {
        fs::create_dir(dir).unwrap();
        succeed(&to_gguf(&model, scheme, &dir.join("m.gguf")));
    }
    let [old, new] = [&dirs[0], &dirs[1]].map(|dir| files(dir));
    let dir = &dirs[2];
    let out = dir.join("m.gguf");
    let trials = if whole() { 25 } else { 8 };
    let begin = Instant::now();
    succeed(&to_gguf(&model, "rtn-q4_0", &out));
    let whole = begin.elapsed();
    let mut unfinished = 0;
    for trial in 0..trials {
        let mut child = start(&to_gguf(&model, "rtn-q8_0", &out));
        sleep(whole.mul_f64(1.2 * f64::from(random_u32(5, trial)) / f64::from(u32::MAX)));
        child.kill().unwrap();
        child.wait().unwrap();
        // The next start removes files and locks of dead processes.
        let found: Vec<_> =
            files(dir).into_iter().filter(|(name, _)| GGUF_FILES.contains(&name.as_str())).collect();
        // The file is published first, then its quality.json, then the manifest.
        let bare = found.len() < 3 && found.iter().all(|(name, _)| !name.ends_with("manifest.json"));
        let is = |whole: &[(String, Vec<u8>)]| {
            found == whole || (bare && found[0] == whole[0] && found.iter().all(|file| whole.contains(file)))
        };
        assert!(is(&old) || is(&new), "trial {trial}");
        unfinished += usize::from(found[0] == old[0]);
        succeed(&to_gguf(&model, "rtn-q8_0", &out));
        assert!(files(dir) == new, "trial {trial}: {:?}", names_in(dir));
        succeed(&to_gguf(&model, "rtn-q4_0", &out));
        assert!(files(dir) == old, "trial {trial}");
    }
    println!("{unfinished} of {trials} kills came before the end");
    assert!(unfinished >= trials as usize / 8, "{unfinished}");
}

#[test]
fn signals_leave_the_old_gguf_file_and_nothing_else() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("m.gguf");
    succeed(&to_gguf(&model, "rtn-q4_0", &out));
    let old = files(&dir);
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let mut child = start(&to_gguf(&model, "rtn-q8_0", &out));
        let begun = || names_in(&dir).iter().any(|name| name.starts_with(".m.gguf.mantissa-partial"));
        assert!(wait_until(&mut child, begun), "the run has ended before it could be stopped");
        signal(&child, name);
        let output = end(child);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(!stderr(&output).contains("to resume"), "{}", stderr(&output));
        assert!(files(&dir) == old, "{:?}", names_in(&dir));
    }
}

#[test]
fn a_second_signal_ends_at_once_and_loses_nothing() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let expected = temp.path().join("expected");
    succeed(&arguments(&model, &expected));
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("out");
    let mut child = start(&arguments(&model, &out));
    assert!(wait_until(&mut child, || units_done(&dir) >= 12));
    // Both signals are pending when the process continues, so the second arrives before the first is handled.
    signal(&child, "STOP");
    signal(&child, "INT");
    signal(&child, "TERM");
    signal(&child, "CONT");
    let code = end(child).status.code();
    assert!(matches!(code, Some(130 | 143)), "{code:?}");
    assert!(json(&arguments(&model, &out))["resumed"].as_u64().unwrap() > 0);
    assert!(files(&out) == files(&expected));
}

#[test]
fn other_commands_leave_nothing_when_they_are_stopped() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("out");
    let sizes = ["--hidden", "1024", "--layers", "16", "--heads", "16", "--ffn", "4096", "--vocab", "32000"];
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let synth =
            [&["synth", "--out", text(&out), "--preset", "tiny", "--threads", "1"], &sizes[..]].concat();
        let mut child = start(&synth);
        assert!(wait_until(&mut child, || strays(&dir).len() == 2));
        signal(&child, name);
        let output = end(child);
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
        assert_eq!(names_in(&dir), [""; 0]);
    }
}

#[test]
fn the_second_of_two_writers_learns_the_first_ones_process() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("out");
    let mut first = start(&arguments(&model, &out));
    assert!(wait_until(&mut first, || units_done(&dir) >= 1));
    signal(&first, "STOP");
    // The share of the parameters is printed before work, unless --quiet.
    let line = fail(3, &[&arguments(&model, &out)[..], &["--quiet"]].concat());
    assert!(line.contains(&format!("process {} ", first.id())), "{line}");
    signal(&first, "CONT");
    let output = end(first);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(names_in(&dir), ["out"]);
}

#[test]
fn outputs_that_cannot_be_written_are_refused() {
    let temp = TempDir::new().unwrap();
    let model = synth(temp.path(), "model", &[]);
    let before = files(&model);
    let quantize = |out: &Path| {
        let arguments =
            ["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(out), "--verify=false"];
        mantissa(&arguments)
    };
    let refused = |out: &Path, code, says: &str| {
        let output = quantize(out);
        assert_eq!(output.status.code(), Some(code), "{}: {}", out.display(), stderr(&output));
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    };
    refused(&model, 2, "is the input");
    refused(&model.join("inside"), 2, "lies inside");
    let link = temp.path().join("link");
    std::os::unix::fs::symlink("model", &link).unwrap();
    refused(&link, 2, "is the input");
    let file = temp.path().join("file");
    fs::write(&file, "text").unwrap();
    refused(&file, 2, "got a file");
    refused(&file.join("below"), 3, "file");
    let dangling = temp.path().join("dangling");
    std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
    refused(&dangling, 3, "resolve link");
    assert!(
        quantize(Path::new("/proc/mantissa")).status.code() == Some(3),
        "a file system that takes no folders"
    );
    // A link to another folder stays a link.
    let (real, link) = (temp.path().join("real"), temp.path().join("other-link"));
    fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink("real", &link).unwrap();
    assert!(quantize(&link).status.success());
    assert!(real.join("config.json").exists() && fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(files(&model) == before && fs::read(&file).unwrap() == b"text");
    assert_eq!(strays(temp.path()), [""; 0]);
}

/// Limits the size of written files, raising the limit until the run succeeds.
#[test]
fn a_limit_on_the_length_of_files() {
    let temp = TempDir::new().unwrap();
    let model = synth(temp.path(), "model", &[]);
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let out = dir.join("out");
    let quantize = |recipe: &str, shell: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{shell} exec \"$0\" \"$@\""), env!("CARGO_BIN_EXE_mantissa")]);
        command.args([
            "quantize",
            text(&model),
            "--recipe",
            recipe,
            "--out",
            text(&out),
            "--verify=false",
            "--overwrite",
            "--quiet",
        ]);
        command.output().unwrap()
    };
    assert!(quantize("rtn-int8-channel", "").status.success());
    let old = files(&out);
    let mut failures = 0;
    for blocks in (0..2000).step_by(24) {
        let output = quantize("rtn-int4-g32", &format!("trap '' XFSZ; ulimit -f {blocks};"));
        if output.status.success() {
            break;
        }
        failures += 1;
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        assert!(stderr(&output).contains(text(&dir)), "names no path: {}", stderr(&output));
        assert!(files(&out) == old, "limit {blocks}");
    }
    assert!((3..80).contains(&failures), "{failures}");
    assert_ne!(files(&out), old);
    assert_eq!(names_in(&dir), ["out"]);
}

/// File system of 1 MiB in its own mount namespace.
#[test]
fn a_full_file_system() {
    let temp = TempDir::new().unwrap();
    let mount = temp.path().join("small");
    fs::create_dir(&mount).unwrap();
    let in_small = |script: &str| {
        let script = format!("mount -t tmpfs -o size=1m none \"$1\" && cd \"$1\" && {script}");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script, env!("CARGO_BIN_EXE_mantissa"), text(&mount)]);
        command.arg(text(&temp.path().join("model"))).env("LC_ALL", "C").output()
    };
    match in_small("true") {
        Ok(output) if output.status.success() => {}
        _ => {
            println!("skipped: no file system can be mounted here");
            return;
        }
    }
    // 0.15 MB of embedding and 0.25 MB of nf4 layers, in files of 0.2 MB: the second does not fit next to the
    // filler.
    synth(temp.path(), "model", &["--hidden", "128", "--ffn", "256", "--vocab", "600", "--layers", "3"]);
    let script = "
        run() { \"$0\" quantize \"$2\" --recipe \"$1\" --out out --max-shard-size 200k --verify=false --overwrite --json; }
        mkdir kept && \"$0\" synth --preset tiny --out out >/dev/null && cp -r out kept/old
        head -c 400000 /dev/zero > filler
        run nf4 \"$2\" >/dev/null; echo \"code $?\"
        diff -r out kept/old && echo 'old intact'
        ls -A | tr '\\n' ' '; echo
        rm -r filler kept
        run nf4 \"$2\" | tr -d ' \\n' | grep -o '\"resumed\":[0-9]*'
        ls -A | tr '\\n' ' '; echo";
    let output = in_small(script).unwrap();
    let (found, said) = (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output));
    let lines: Vec<_> = found.lines().collect();
    assert_eq!(lines[..2], ["code 3", "old intact"], "{found}{said}");
    assert!(said.contains("free disk space") && said.contains("safetensors"), "{said}");
    let resumed: usize = lines[3].rsplit(':').next().unwrap().parse().unwrap();
    assert!(
        resumed > 0 && lines[2].contains("mantissa-partial") && !lines[2].contains("lock"),
        "{found}{said}"
    );
    assert_eq!(lines[4].trim(), "out", "{found}");
}

/// Calibrated methods, killed ten times at seeded moments and resumed each time, give the bytes of an
/// undisturbed run.
#[test]
fn ten_kills_change_no_byte_of_a_calibrated_method() {
    let temp = TempDir::new().unwrap();
    let sizes = ["--hidden", "64", "--layers", "3", "--ffn", "192", "--heads", "4", "--vocab", "256"];
    let model = synth(temp.path(), "model", &sizes);
    let windows = temp.path().join("w.json");
    let tokens: Vec<Vec<u32>> =
        (0..12).map(|w| (0..64).map(|i| random_u32(17, 64 * w + i) % 256).collect()).collect();
    fs::write(&windows, serde_json::json!(tokens).to_string()).unwrap();
    let learned = temp.path().join("learned.toml");
    let table =
        "method = \"autoround\"\nweights = \"int4-g32\"\n[autoround]\niterations = 40\nbatch_tokens = 128\n";
    fs::write(&learned, table).unwrap();
    let dir = temp.path().join("outputs");
    fs::create_dir(&dir).unwrap();
    let (most, least) = if whole() { (10, 3) } else { (4, 0) };
    let mut left_by_all = 0;
    for (seed, recipe) in
        ["gptq-int4-g32", "awq-int4-g32-asym", text(&learned), "rotate-gptq-int4-g32"].into_iter().enumerate()
    {
        let arguments = |out: &Path| -> Vec<String> {
            let all =
                ["quantize", text(&model), "--recipe", recipe, "--format", "native", "--out", text(out)];
            let more =
                ["--calibration-tokens", text(&windows), "--hold-out", "2", "--threads", "1", "--json"];
            let shards = ["--max-shard-size", "100k", "--quiet"];
            all.iter().chain(&more).chain(&shards).map(|argument| (*argument).to_owned()).collect()
        };
        let (expected, out) = (temp.path().join(format!("expected-{seed}")), dir.join("out"));
        let begin = Instant::now();
        succeed(&arguments(&expected));
        let whole = begin.elapsed();
        let (mut kills, mut left) = (0, 0);
        for trial in 0..1000 {
            if kills == most {
                break;
            }
            let mut child = start(&arguments(&out));
            let share = f64::from(random_u32(40 + seed as u64, trial)) / f64::from(u32::MAX);
            sleep(whole.mul_f64(share));
            child.kill().unwrap();
            // A run that had finished starts anew.
            match child.wait().unwrap().success() {
                true => fs::remove_dir_all(&out).unwrap(),
                false => kills += 1,
            }
            assert!(!out.exists() || files(&out) == files(&expected), "{recipe}: whole, or none");
            left += usize::from(units_done(&dir) > 0);
        }
        assert!(kills == most && left >= least, "{recipe}: {kills} kills, of which {left} left something");
        left_by_all += left;
        // The last kill may have come after the output was in place.
        let report = json(&arguments(&out));
        let complete = report["already_complete"] == true;
        assert!(complete || report["verification"]["ok"] == true, "{recipe}: {report}");
        assert!(files(&out) == files(&expected), "{recipe}");
        assert_eq!(names_in(&dir), ["out"], "{recipe}");
        fs::remove_dir_all(&out).unwrap();
    }
    assert!(left_by_all > 0, "no kill left anything to resume");
}

/// An interrupted `fit` names the work folder it leaves; the same command then finishes as if undisturbed.
#[test]
fn an_interrupted_fit_names_what_it_keeps() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let (out, tokens) = (temp.path().join("out"), temp.path().join("t.json"));
    let windows: Vec<Vec<u32>> = (0..12).map(|i| (0..60).map(|j| (i * 7 + j * 13) % 256).collect()).collect();
    fs::write(&tokens, format!("{windows:?}")).unwrap();
    let fit = ["fit", text(&model), "--schemes", "int4-g32,int8-g32", "--budget", "8bpw", "--tokens"];
    let fit = [&fit[..], &[text(&tokens), "--out", text(&out), "--quiet"]].concat();
    let works = || strays(temp.path()).into_iter().filter(|name| name.starts_with(".out.mantissa-fit-"));
    let begun = || works().any(|name| temp.path().join(name).join("rtn-int4-g32").exists());
    let mut child = start(&fit);
    assert!(wait_until(&mut child, begun), "it was too quick");
    signal(&child, "INT");
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", stderr(&ended));
    let work = works().next().expect("the work folder is kept");
    assert!(stderr(&ended).contains(&work), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("rerun the same command to resume"), "{}", stderr(&ended));
    succeed(&fit);
    assert!(out.exists());
    assert_eq!(strays(temp.path()), [""; 0]);
}

/// Whatever a recipe names, another process finds the key of the killed job again: nothing is left beside the output.
#[test]
fn a_killed_job_with_methods_by_layer_or_with_searched_scales_is_taken_over() {
    let temp = TempDir::new().unwrap();
    let model = model(temp.path());
    let at = |name: &str| temp.path().join(name);
    let windows: Vec<Vec<u32>> = (0..4).map(|i| (0..32).map(|j| (i * 7 + j * 13) % 256).collect()).collect();
    fs::write(at("t.json"), format!("{windows:?}")).unwrap();
    let mixed = at("mixed.toml");
    let layers = "[[layers]]\nmodules = [\"*.down_proj\"]\nmethod = \"rtn-mse\"\nweights = \"int8-g32\"\n";
    fs::write(&mixed, format!("method = \"gptq\"\nweights = \"int4-g32\"\n\n{layers}")).unwrap();
    for recipe in sampled([text(&mixed), "scalesweep-gptaq-nvfp4", "rotate-gptq-int4-g32"], 2) {
        let (out, tokens) = (at("out"), at("t.json"));
        let job = ["quantize", text(&model), "--recipe", recipe, "--calibration-tokens", text(&tokens)];
        let job = [&job[..], &["--out", text(&out), "--verify=false", "--quiet"]].concat();
        let mut child = start(&job);
        assert!(wait_until(&mut child, || units_done(temp.path()) > 0), "{recipe}: it was too quick");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!strays(temp.path()).is_empty(), "{recipe}: the work folder");
        succeed(&job);
        assert_eq!(strays(temp.path()), [""; 0], "{recipe}");
        fs::remove_dir_all(&out).unwrap();
    }
}
