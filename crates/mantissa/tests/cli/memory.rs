//! Memory is refused before it is taken, in words, and running out of it is an error like any other.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{fail, json, root, stderr, succeed, text};

fn synth(dir: &Path, name: &str, sizes: &[&str]) -> PathBuf {
    let out = dir.join(name);
    succeed(&[&["synth", "--out", text(&out), "--preset", "tiny"], sizes].concat());
    out
}

#[test]
fn a_ceiling_below_the_prediction_refuses_the_work() {
    let temp = TempDir::new().unwrap();
    let model = synth(temp.path(), "m", &["--hidden", "512", "--ffn", "2048", "--heads", "8"]);
    let out = temp.path().join("out");
    let quantize = ["quantize", text(&model), "--recipe", "rtn-int4-g128", "--out", text(&out)];
    let plan = json(&[&quantize[..], &["--dry-run", "--json"]].concat());
    let (peak, stage) =
        (plan["predicted_peak_memory"].as_u64().unwrap(), plan["peak_stage"].as_str().unwrap());
    let sum: u64 = plan["peak_buffers"].as_object().unwrap().values().map(|b| b.as_u64().unwrap()).sum();
    assert!(peak == sum && peak > 2_000_000 && !stage.is_empty(), "{plan}");
    let line = fail(3, &[&quantize[..], &["--memory", "2M"]].concat());
    assert!(line.contains("needs") && line.contains("--memory allows 2.00 MB"), "{line}");
    assert!(!out.exists());
    let enough = (peak + peak / 10 + 1).to_string();
    succeed(&[&quantize[..], &["--memory", &enough]].concat());
}

#[test]
fn a_context_that_no_memory_holds_is_refused_before_it_is_planned() {
    let temp = TempDir::new().unwrap();
    let Some(tokenizer) = tokenizer() else { return };
    let model = synth(temp.path(), "m", &["--vocab", "512", "--context", "1000000000"]);
    std::fs::copy(tokenizer.join("tokenizer.json"), model.join("tokenizer.json")).unwrap();
    let line = fail(3, &["run", text(&model), "-p", "Once", "-n", "999999000"]);
    assert!(line.contains("needs") && line.contains("available"), "{line}");
    // 10^9 tokens of 2 layers with keys and values of 2 heads of 16 in f32: 512 GB.
    assert!(line.contains("TB") || line.contains(" GB"), "{line}");
    let line = fail(3, &["run", text(&model), "-p", "Once", "-n", "1000", "--memory", "100k"]);
    assert!(line.contains("--memory allows 100 kB"), "{line}");
}

fn tokenizer() -> Option<PathBuf> {
    let folder = root().join("../shared/models/stories260K");
    if !folder.is_dir() {
        println!("skipped: {} is not there", folder.display());
        return None;
    }
    Some(folder)
}

/// Under every limit of the address space a command works or says in one line that it cannot.
#[test]
fn every_limit_of_the_address_space_ends_in_success_or_an_error() {
    let temp = TempDir::new().unwrap();
    let sizes = [
        "--hidden", "512", "--ffn", "2048", "--heads", "8", "--layers", "4", "--vocab", "8000", "--dtype",
        "f32",
    ];
    let model = synth(temp.path(), "m", &sizes);
    let tokens = temp.path().join("tokens.json");
    std::fs::write(&tokens, serde_json::json!([(0..64).collect::<Vec<_>>()]).to_string()).unwrap();
    let out = temp.path().join("out");
    let commands: [&[&str]; 3] = [
        &["inspect", text(&model), "--stats", "--threads", "2"],
        &["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--threads", "2", "--quiet"],
        &["eval", text(&model), "--tokens", text(&tokens), "--threads", "2"],
    ];
    for arguments in commands {
        let starts = |mib: u32| limited(mib, &["schemes"]).status.success();
        let floor = (8..512).step_by(4).find(|&mib| starts(mib)).unwrap();
        let (mut refused, mut worked) = (0, 0);
        let mut mib = floor;
        while worked < 3 {
            assert!(mib < 4096, "never works: {arguments:?}");
            let output = limited(mib, arguments);
            match output.status.code() {
                Some(0) => worked += 1,
                Some(3) => refused += 1,
                code => panic!("{arguments:?} in {mib} MiB: {code:?} {}", stderr(&output)),
            }
            let said = stderr(&output);
            assert!(
                !said.contains("internal") && !said.contains("memory allocation of"),
                "{mib} MiB: {said}"
            );
            mib += 6;
        }
        println!("{}: refused {refused} times from {floor} MiB on, then worked", arguments[0]);
    }
}

/// Runs the binary in an address space of so many MiB.
fn limited(mib: u32, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {}; exec \"$0\" \"$@\"", mib * 1024);
    command.args(["-c", &script, env!("CARGO_BIN_EXE_mantissa")]).args(arguments);
    command.output().unwrap()
}
