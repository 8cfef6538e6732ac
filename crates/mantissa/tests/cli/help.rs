//! Help pages, completions, man pages.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::support::{command, fail, mantissa, root, sampled, stderr, succeed, whole};

/// Returns what the binary prints in a terminal of this width.
fn printed(columns: &str, arguments: &[&str]) -> String {
    let output = command().env("COLUMNS", columns).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the names of the commands in the help.
fn names() -> Vec<String> {
    let help = printed("80", &["--help"]);
    let list = help.split("\nCommon options:").next().unwrap();
    let names = list.lines().filter_map(|line| line.strip_prefix("  ")?.split_once("  "));
    let names: Vec<String> = names.map(|(name, _)| name.to_owned()).filter(|name| name != "help").collect();
    assert!(names.len() >= 20 && names.contains(&"quantize".to_owned()), "{names:?}");
    names
}

/// Returns the lines of the lists of commands and flags.
fn entries(help: &str) -> Vec<&str> {
    let lists = help.split("\nUsage: ").nth(1).unwrap().split("\nEXAMPLES\n").next().unwrap();
    let lists = lists.split_once("\n\n").unwrap().1;
    lists.lines().filter(|line| line.starts_with(' ')).collect()
}

#[test]
fn commands_and_flags_take_one_line_each() {
    let mut pages = vec![(String::from("mantissa"), printed("80", &["-h"]))];
    pages.extend(names().into_iter().map(|name| (name.clone(), printed("80", &[&name, "-h"]))));
    for (name, page) in pages {
        for line in page.lines() {
            assert!(line.chars().count() <= 80, "{name}: {line}");
        }
        for line in entries(&page) {
            assert!(line.starts_with("  ") && !line.starts_with("   "), "{name}: {line}");
            assert!(line[2..].contains("  "), "{name}: no text: {line}");
        }
    }
}

#[test]
fn advanced_flags_are_in_the_complete_help_alone() {
    let [short, long, all] = ["-h", "--help", "--help-all"].map(|flag| printed("80", &["quantize", flag]));
    assert!(!short.contains("--hold-out") && !long.contains("--hold-out"), "{long}");
    assert!(short.contains("--help-all") && short.contains("--recipe <RECIPE>"), "{short}");
    assert!(!short.contains("resumes bit-exactly") && long.contains("resumes bit-exactly"), "{long}");
    assert!(all.contains("--hold-out <N>") && all.contains("[possible values: f32, bf16]"), "{all}");
    for heading in ["Arguments", "Recipe", "Output", "Calibration", "Evaluation", "Common options"] {
        assert!(short.contains(&format!("\n{heading}:\n")), "{heading}: {short}");
    }
    assert!(all.lines().all(|line| line.chars().count() <= 80), "{all}");
    // Every flag that the parser knows is in the complete help.
    let completions = succeed(&["completions", "fish"]);
    let of_quantize =
        completions.lines().filter(|line| line.contains("__fish_mantissa_using_subcommand quantize"));
    let flags = of_quantize.filter_map(|line| line.split(" -l ").nth(1)?.split(' ').next());
    let flags: BTreeSet<&str> = flags.collect();
    assert!(flags.len() > 25, "{flags:?}");
    for flag in flags {
        assert!(all.contains(&format!("--{flag}")), "{flag}: {all}");
    }
}

#[test]
fn help_is_a_command_too() {
    assert_eq!(succeed(&["help", "quantize"]), succeed(&["quantize", "--help"]));
    assert_eq!(succeed(&["help", "quantize", "--help-all"]), succeed(&["quantize", "--help-all"]));
    assert_eq!(succeed(&["help"]), succeed(&["--help"]));
    assert_eq!(succeed(&["help", "--help"]), succeed(&["--help"]));
    assert_eq!(mantissa(&["help", "quantise"]).status.code(), Some(2));
}

/// Returns the examples of a command, continued lines joined.
fn examples(name: &str) -> Vec<String> {
    let help = printed("100", &[name, "--help"]);
    let examples = help.split("\nEXAMPLES\n").nth(1).expect(name).split("\n\n").next().unwrap();
    let examples = examples.replace("\\\n", " ");
    examples.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn every_command_has_an_example_that_runs_on_the_demo() {
    let dir = TempDir::new().unwrap();
    let story = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    fs::write(dir.path().join("story.txt"), story.chars().take(12_000).collect::<String>()).unwrap();
    // What other examples make goes first.
    let mut order = names();
    order.sort_by_key(|name| !["quantize", "demo", "completions"].contains(&name.as_str()));
    // A server runs until it is stopped: `serve.rs`. A download needs a hub: `pull.rs`.
    for name in order.iter().filter(|name| !["train", "serve", "pull"].contains(&name.as_str())) {
        let inputs = ["path/to", "weights.safetensors", "stories.txt", "runs/", "~/"];
        // The whole demo has tests of its own.
        let runs =
            |line: &String| !inputs.iter().any(|input| line.contains(input)) && line != "mantissa demo";
        let lines: Vec<String> = examples(name).into_iter().filter(runs).collect();
        assert!(!lines.is_empty(), "{name} has no example that runs on the demo");
        // `choose.rs` runs this one, which takes longest, as it is.
        let runs = |line: &String| whole() || line != "mantissa quantize demo --for vllm";
        let lines = lines.into_iter().filter(runs);
        // Other examples read what those of quantize write.
        let step = if name == "quantize" { 1 } else { 12 };
        sampled(lines, step).for_each(|line| shell(&line, dir.path()));
    }
}

/// Runs a line in `dir` with the binary on the path.
fn shell(line: &str, dir: &Path) {
    let folder = Path::new(env!("CARGO_BIN_EXE_mantissa")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let mut shell = Command::new("sh");
    let output =
        shell.args(["-ec", line]).current_dir(dir).env("PATH", path).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
}

#[test]
fn completions_are_scripts_of_their_shells() {
    for (shell, marks) in [
        ("bash", ["_mantissa()", "--recipe"]),
        ("zsh", ["#compdef mantissa", "--recipe"]),
        ("fish", ["complete -c mantissa", "-l recipe"]),
    ] {
        let script = succeed(&["completions", shell]);
        assert!(marks.iter().all(|mark| script.contains(mark)), "{shell}: {script}");
        assert!(!script.contains("synth"), "hidden commands are not completed");
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("script"), script).unwrap();
        let checked = Command::new(shell).args(["-n", "script"]).current_dir(dir.path()).output();
        match checked {
            Ok(output) => assert!(output.status.success(), "{shell}: {}", stderr(&output)),
            Err(_) => println!("skipped: no {shell}"),
        }
    }
}

#[test]
fn every_command_has_a_man_page() {
    let whole = succeed(&["man"]);
    for name in names() {
        let page = succeed(&["man", &name]);
        assert!(page.contains(&format!(".TH mantissa-{name} 1")) && page.contains(".SH EXAMPLES"), "{page}");
        assert!(whole.contains(&format!("mantissa\\-{name}(1)")), "{name} is not in mantissa.1: {whole}");
    }
    let page = succeed(&["man", "quantize"]);
    assert!(page.contains("hold\\-out") && page.contains("Treat warnings as errors"), "{page}");
    assert!(fail(2, &["man", "synth"]).contains("quantize"));
}
