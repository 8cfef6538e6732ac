//! Runs every `mantissa …` command of README and docs/guide.
//!
//! Commands are in blocks fenced as `sh`. The blocks of a page run in order, in a folder of their own with the files
//! that the examples assume (`provide`). Comments before a block change that:
//!
//! - `<!-- docs-test: skip REASON -->`: needs something that is not available here;
//! - `<!-- docs-test: exit N -->`: ends with this exit code;
//! - `<!-- docs-test: file NAME -->`: the block is a file that commands of the page read.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::markdown::{Block, Page};
use crate::support::{sampled, whole};
use crate::{guide, root, shown};

/// Result of a page's commands.
#[derive(Default)]
struct Outcome {
    ran: usize,
    skipped: usize,
    failures: Vec<String>,
}

#[test]
fn every_command_of_readme_and_guide_runs() {
    // README is the first page.
    let pages = Mutex::new(sampled(guide(), 8).collect::<Vec<_>>());
    let total = Mutex::new(Outcome::default());
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                while let Some(page) = { pages.lock().unwrap().pop() } {
                    let outcome = run_page(&page);
                    let mut total = total.lock().unwrap();
                    total.ran += outcome.ran;
                    total.skipped += outcome.skipped;
                    total.failures.extend(outcome.failures);
                }
            });
        }
    });
    let total = total.into_inner().unwrap();
    println!("{} commands run, {} skipped", total.ran, total.skipped);
    assert!(total.failures.is_empty(), "{}", total.failures.join("\n"));
    assert!(total.ran >= if whole() { 60 } else { 15 }, "only {} commands were found", total.ran);
    // Each needs what tests do not install: llama.cpp, vLLM, the network (2), a wheel, lm_eval, torch, minisign.
    assert!(total.skipped <= 8, "{} blocks are skipped", total.skipped);
}

fn run_page(page: &Page) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    provide(dir.path());
    let blocks = page.blocks();
    for block in &blocks {
        for name in block.marks.iter().filter_map(|mark| mark.strip_prefix("file ")) {
            fs::write(dir.path().join(name), block.lines.join("\n") + "\n").unwrap();
        }
    }
    let mut outcome = Outcome::default();
    for block in &blocks {
        run_block(page, block, dir.path(), &mut outcome);
    }
    outcome
}

fn run_block(page: &Page, block: &Block, dir: &Path, outcome: &mut Outcome) {
    let at = |line: &str| format!("{}:{}: {line}", shown(&page.path), block.line);
    if block.marks.iter().any(|mark| mark.starts_with("skip ") || mark.starts_with("file ")) {
        outcome.skipped += usize::from(block.marks.iter().any(|mark| mark.starts_with("skip ")));
        return;
    }
    if block.language != "sh" {
        // Output is shown behind a prompt; anything else that looks like a command must be run.
        let unmarked = block.lines.iter().find(|line| line.starts_with("mantissa "));
        outcome
            .failures
            .extend(unmarked.map(|line| at(&format!("{line}: a command in a block that is not sh"))));
        return;
    }
    let exit = block
        .marks
        .iter()
        .find_map(|mark| mark.strip_prefix("exit "))
        .map_or(0, |code| code.parse().unwrap());
    for line in block.lines.iter().filter(|line| !line.is_empty()) {
        let output = if line.starts_with("mantissa serve ") { serve(line, dir) } else { shell(line, dir) };
        if output.0 != Some(exit) {
            outcome.failures.push(at(&format!("{line}: exit {:?}: {}", output.0, output.1)));
        }
        outcome.ran += usize::from(line.starts_with("mantissa "));
    }
}

/// Runs one line in `dir` with the binary on the path; gives exit code and standard error.
fn shell(line: &str, dir: &Path) -> (Option<i32>, String) {
    let binary = Path::new(env!("CARGO_BIN_EXE_mantissa")).parent().unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("sh")
        .args(["-ec", line])
        .current_dir(dir)
        .env("PATH", format!("{}:{path}", binary.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Runs a server in `dir` on a free port until it listens, then ends it by SIGTERM.
fn serve(line: &str, dir: &Path) -> (Option<i32>, String) {
    let words: Vec<&str> = line.split_whitespace().skip(1).chain(["--port", "0"]).collect();
    let mut child = Command::new(env!("CARGO_BIN_EXE_mantissa"))
        .current_dir(dir)
        .args(&words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = String::new();
    let _ = BufReader::new(child.stdout.take().unwrap()).read_line(&mut first);
    if first.starts_with("http://") {
        let sent = Command::new("kill").args(["-s", "TERM", &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Puts into `dir` what the examples take for granted: the embedded model as `MODEL`, and texts.
fn provide(dir: &Path) {
    let demo = root().join("crates/mantissa-jobs/demo");
    fs::create_dir(dir.join("MODEL")).unwrap();
    for file in fs::read_dir(demo.join("model")).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, dir.join("MODEL").join(path.file_name().unwrap())).unwrap();
    }
    let texts = [
        ("text.txt", "calibration.txt", 12_000),
        ("sample.txt", "stories.txt", 6_000),
        ("stories.txt", "stories.txt", 12_000),
        ("prompts.txt", "prose.txt", 4_000),
    ];
    for (name, source, characters) in texts {
        let text = fs::read_to_string(demo.join("text").join(source)).unwrap();
        fs::write(dir.join(name), text.chars().take(characters).collect::<String>()).unwrap();
    }
    let chats = "{\"text\": \"There was a little girl.\"}\n{\"text\": \"She had a red ball.\"}\n";
    fs::write(dir.join("chats.jsonl"), chats).unwrap();
}
