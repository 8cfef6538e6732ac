//! Exit codes, JSON, help, streams.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use crate::support::{command, fail, json, mantissa, stderr, succeed, text, write_x};

const COMMANDS: [&str; 4] = ["inspect", "cast", "schemes", "synth"];

#[test]
fn help_of_every_command_has_examples() {
    for name in COMMANDS {
        let help = succeed(&[name, "--help"]);
        assert!(help.contains("EXAMPLES\n  mantissa "), "{help}");
        assert!(help.contains("--json") && help.contains("--threads"), "{help}");
    }
    assert!(!succeed(&["--help"]).contains("synth"), "hidden");
    assert!(succeed(&["--version"]).starts_with("mantissa "));
}

#[test]
fn usage_errors_exit_2_with_one_line() {
    for arguments in [
        &["inspekt", "x"][..],
        &["inspect"],
        &["schemes", "--threads", "0"],
        &["schemes", "--memory", "12Q"],
        &["schemes", "--nonsense"],
        &["cast", "x", "--scheme", "int4-g32"],
    ] {
        let line = fail(2, arguments);
        assert!(line.contains("--help"), "{line}");
    }
    assert_eq!(mantissa::<&str>(&[]).status.code(), Some(2));
}

#[test]
fn a_missing_model_exits_2_and_is_named() {
    let line = fail(2, &["inspect", "no/such/model", "--json"]);
    assert!(line.contains("no/such/model"), "{line}");
    for command in ["run", "serve", "inspect", "verify"] {
        let line = fail(2, &[command, "llama3"]);
        assert!(line.contains("a model folder, or a .gguf or .safetensors file"), "{line}");
        assert!(line.contains("mantissa pull ORG/llama3"), "{line}");
    }
}

/// Flags and commands of other programs name what stands for them, and no tip to pass a flag as a value.
#[test]
fn other_programs_flags_lead_here() {
    for (arguments, here) in [
        (&["quantize", "demo", "--scheme", "W4A16"][..], "--scheme is here --recipe NAME"),
        (&["run", "demo", "-p", "a", "-ngl", "99"], "-ngl is here the processor"),
        (&["finetune", "demo", "--qlora"], "--qlora is here --adapter qlora, the default"),
        (&["train", "--config", "a.toml"], "mantissa train run.toml"),
        (&["chat", "demo"], "chat is here mantissa run MODEL --interactive"),
        (&["list"], "mantissa pull puts them"),
    ] {
        let line = fail(2, arguments);
        assert!(line.contains(here) && !line.contains("to pass") && !line.contains("tip:"), "{line}");
    }
    let line = fail(2, &["quantize", "demo", "--recipee", "nf4"]);
    assert!(line.contains("similar argument exists: '--recipe'"), "{line}");
}

#[test]
fn json_goes_to_stdout_without_text_or_to_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("report.json");
    let direct = json(&["schemes", "--json"]);
    let printed = succeed(&["schemes", &format!("--json={}", text(&file))]);
    assert!(printed.starts_with("scheme "), "{printed}");
    let written: serde_json::Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(written, direct);
    assert!(
        written["schemes"]
            .as_array()
            .unwrap()
            .iter()
            .any(|s| s["name"] == "nvfp4" && s["bits_per_weight"] == 4.5 + 32.0 / 16_777_216.0)
    );
    fail(3, &["schemes", "--json=/proc/no/report.json"]);
    fail(2, &["schemes", "--json="]);
}

#[test]
fn a_reader_that_stops_is_no_error() {
    let mut child = command().arg("schemes").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let status = child.wait().unwrap();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!((status.code(), errors.as_str()), (Some(0), ""));
}

#[test]
fn a_full_disk_behind_stdout_exits_3() {
    let Ok(full) = fs::OpenOptions::new().write(true).open("/dev/full") else {
        println!("skipped: no /dev/full");
        return;
    };
    let output = command().arg("schemes").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(stderr(&output).starts_with("error: standard output"), "{}", stderr(&output));
}

#[test]
fn a_bad_instruction_set_is_named() {
    let output = command().arg("schemes").env("MANTISSA_ISA", "mmx").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("mmx"), "{}", stderr(&output));
}

#[test]
fn memory_that_does_not_suffice_is_refused_before_work() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    write_x(&input, &[4, 64], &[1.0; 256]);
    let line =
        fail(3, &["cast", text(&input), "--scheme", "int4-g32", "--out", text(&out), "--memory", "1M"]);
    assert!(line.contains("at most 1.00 MB of memory (--memory)"), "{line}");
    assert!(!out.exists());
}

#[test]
fn hostile_files_exit_2_and_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good.safetensors");
    write_x(&good, &[4, 64], &[1.0; 256]);
    let bytes = fs::read(&good).unwrap();
    let hostile = dir.path().join("hostile.safetensors");
    // Truncations through length, header and data, then a length of 2^64 - 1 and one beyond the file.
    let mut cases: Vec<Vec<u8>> = [0, 7, 8, 40, bytes.len() - 1].map(|n| bytes[..n].to_vec()).into();
    cases.push([[0xff; 8].as_slice(), &bytes[8..]].concat());
    cases.push([bytes.len().to_le_bytes().as_slice(), &bytes[8..]].concat());
    for case in cases {
        fs::write(&hostile, case).unwrap();
        let out = dir.path().join("out.safetensors");
        for arguments in [
            vec!["inspect", text(&hostile), "--stats"],
            vec!["cast", text(&hostile), "--scheme", "int8-channel", "--out", text(&out)],
        ] {
            let line = fail(2, &arguments);
            assert!(line.contains("hostile.safetensors"), "{line}");
            assert!(!out.exists());
        }
    }
}
