//! Hostile files and numbers through the binary: documented verdicts, bounded time and memory.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{fail, root, shared, stderr, succeed, text};

/// Address space and time allowed for a verdict on a hostile file. `ulimit` counts in KiB.
const ADDRESS_SPACE: u64 = 1_000_000_000 / 1024;
const TIME: Duration = Duration::from_secs(2);

/// Runs the binary with limited address space; fails if it is slow or does not end orderly.
pub fn confined(arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let script = format!("ulimit -v {ADDRESS_SPACE}; exec \"$0\" \"$@\"");
    let started = Instant::now();
    let output =
        command.args(["-c", &script, env!("CARGO_BIN_EXE_mantissa")]).args(arguments).output().unwrap();
    let took = started.elapsed();
    assert!(took < TIME, "{arguments:?}: {took:?}");
    let said = stderr(&output);
    assert!(matches!(output.status.code(), Some(0..=3)), "{arguments:?}: {:?} {said}", output.status);
    assert!(!said.contains("internal") && !said.contains("panicked"), "{arguments:?}: {said}");
    output
}

/// Checks every file listed in the folder's `EXPECT.tsv`.
fn judged(folder: &Path) -> usize {
    let expected = fs::read_to_string(folder.join("EXPECT.tsv")).unwrap();
    let mut files = 0;
    for line in expected.lines().skip(1) {
        let (name, verdict) = line.split_once('\t').unwrap();
        let path = folder.join(name);
        for extra in [&[][..], &["--stats", "--tensors", "--json"]] {
            let output = confined(&[&["inspect", text(&path)], extra].concat());
            let allowed: &[i32] = match verdict {
                "accept" => &[0],
                "reject" => &[2],
                _ => &[0, 2],
            };
            let said = stderr(&output);
            assert!(output.status.code().is_some_and(|code| allowed.contains(&code)), "{name}: {said}");
            if output.status.code() == Some(2) {
                assert!(
                    said.contains(name) && said.contains("expected ") && said.contains(", got "),
                    "{said}"
                );
                assert_eq!(said.lines().count(), 1, "{said}");
            }
        }
        files += 1;
    }
    files
}

#[test]
fn committed_hostile_files_are_judged_as_expected() {
    assert_eq!(judged(&root().join("tests/data/hostile")), 32);
}

#[test]
fn collected_hostile_files_are_judged_as_expected() {
    let Some(folder) = shared("reference/hostile-files") else { return };
    assert!(judged(&folder) >= 33);
}

/// The one file of the collection that is too large to commit.
#[test]
fn a_header_nested_a_hundred_thousand_deep_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep.safetensors");
    let header = ["{\"a\":", &"[".repeat(100_000), &"]".repeat(100_000), "}"].concat();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(&path, bytes).unwrap();
    let output = confined(&["inspect", text(&path)]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

/// Copies a tiny model with one edit of its config.
fn model(dir: &Path, edit: impl Fn(&mut Value)) -> String {
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    for name in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(name), dir.join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    edit(&mut config);
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    text(dir).to_owned()
}

#[test]
fn contexts_are_checked_by_arithmetic_before_anything_is_allocated() {
    let temp = tempfile::tempdir().unwrap();
    let story = temp.path().join("t.txt");
    fs::write(&story, "the cat sat on the mat\n".repeat(40)).unwrap();
    let plain = model(temp.path(), |_| {});
    let eval =
        |context: &str| ["eval", &plain, "--text", text(&story), "--context", context].map(str::to_owned);
    for context in ["0", "1", "1000000000", "18446744073709551615"] {
        let line = fail(2, &eval(context));
        assert!(line.contains("--context") && line.contains(&format!("got {context}")), "{line}");
    }
    let line = fail(2, &eval("18446744073709551616"));
    assert!(line.contains("--context"), "{line}");
    let steps = ["--stride", "18446744073709551615"].map(str::to_owned);
    assert!(fail(2, &[&eval("8")[..], &steps].concat()).contains("--stride"));
    succeed(&eval("8"));
    // A huge number of new tokens is cut to the context, with a warning.
    let output = crate::support::mantissa(&["run", &plain, "-p", "the cat", "-n", "18446744073709551615"]);
    assert!(
        output.status.success() && stderr(&output).contains("the model's context of"),
        "{}",
        stderr(&output)
    );

    for n in [0u64, 1 << 40] {
        let broken = model(temp.path(), |config| config["max_position_embeddings"] = json!(n));
        let line = fail(2, &["run", &broken, "-p", "x"]);
        assert!(line.contains("max_position_embeddings") && line.contains(&format!("got {n}")), "{line}");
    }
}

#[test]
fn a_cache_beyond_memory_is_reported_in_bytes() {
    let temp = tempfile::tempdir().unwrap();
    let long = model(temp.path(), |config| config["max_position_embeddings"] = json!(1_000_000_000));
    let started = Instant::now();
    let line = fail(3, &["run", &long, "-p", "the cat", "-n", "999999000"]);
    // 2 layers with keys and values of 2 heads of 8 in f32, for 10^9 tokens: 256 GB, plus position tables.
    assert!(line.contains("got a need of") && line.contains("available"), "{line}");
    assert!(line.contains(" GB") || line.contains(" TB"), "{line}");
    assert!(started.elapsed() < TIME, "{:?}", started.elapsed());
}

#[test]
fn texts_that_are_no_utf8_or_too_long_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let plain = model(temp.path(), |_| {});
    let story = temp.path().join("t.txt");
    fs::write(&story, b"the cat\xff sat").unwrap();
    let line = fail(2, &["eval", &plain, "--text", text(&story)]);
    assert!(line.contains("invalid UTF-8 at byte 7"), "{line}");
    fs::write(&story, vec![b'a'; 9 << 20]).unwrap();
    let line = fail(2, &["eval", &plain, "--text", text(&story)]);
    assert!(
        line.contains("at most 8388608 bytes") && line.contains("got 9437184") && line.contains("--split"),
        "{line}"
    );
}

/// NaN or infinity in a weight: every command that would compute with it names tensor, count and first index.
#[test]
fn weights_that_are_no_numbers_are_named_by_every_command() {
    let temp = tempfile::tempdir().unwrap();
    let (folder, out) = (temp.path().join("m"), temp.path().join("out"));
    fs::create_dir(&folder).unwrap();
    let broken = model(&folder, |_| {});
    let path = folder.join("model.safetensors");
    let name = "model.layers.1.self_attn.o_proj.weight";
    let mut bytes = fs::read(&path).unwrap();
    let file = mantissa_store::SafeTensors::open(&path).unwrap();
    let at = file.get(name).unwrap().offset as usize;
    bytes[at + 4 * 33..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    bytes[at + 4 * 70..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, "[[1, 2, 3, 4]]").unwrap();
    for arguments in [
        &["run", &broken, "-p", "the cat", "-n", "2"][..],
        &["eval", &broken, "--tokens", text(&tokens)],
        // The share of the parameters is printed before work, unless --quiet.
        &["quantize", &broken, "--recipe", "rtn-int4-g8", "--out", text(&out), "--quiet"],
        &["quantize", &broken, "--recipe", "rtn-nf4", "--out", text(&out), "--quiet"],
    ] {
        let line = fail(2, arguments);
        let says = format!(
            "tensor \"{name}\": expected finite values, got 2 non-finite values, the first (inf) at element 33"
        );
        assert!(line.contains(&says), "{arguments:?}: {line}");
        assert!(!out.exists());
    }
    // `inspect` still works, so that users can find out.
    let report = crate::support::json(&["inspect", &broken, "--stats", "--json"]);
    let tensors = report["tensors"].as_array().unwrap();
    let stats = &tensors.iter().find(|t| t["name"] == name).unwrap()["stats"];
    assert_eq!((&stats["nan"], &stats["inf"]), (&json!(1), &json!(1)));
}

/// Every test named in `docs/reference/hostile-input.md` exists.
#[test]
fn every_test_that_the_documentation_names_exists() {
    let mut sources = String::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                sources.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    let table = fs::read_to_string(root().join("docs/reference/hostile-input.md")).unwrap();
    let mut cases = Vec::new();
    for row in table
        .lines()
        .filter(|row| row.starts_with("| ") && row[2..].starts_with(|c: char| c.is_ascii_digit()))
    {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        cases.push(cells[0].parse::<u32>().unwrap());
        let names: Vec<&str> = cells[3].split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty() || cells[0] == "36", "case {} names no test", cells[0]);
        for name in names {
            assert!(sources.contains(&format!("fn {name}(")), "case {}: no test `{name}`", cells[0]);
        }
    }
    assert_eq!(cases, (1..=70).collect::<Vec<_>>());
}
