//! Text output: summary first, few rows, and nothing wider than the terminal.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use crate::support::{command, left_to_nightly, root, stderr};

/// Returns what the binary prints in `dir` in a terminal of this width.
fn printed(dir: &Path, columns: usize, line: &str) -> String {
    let mut command = command();
    command.current_dir(dir).env("COLUMNS", columns.to_string()).args(line.split(' ')).arg("--quiet");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{line}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// A folder with a text.
fn folder() -> TempDir {
    let dir = TempDir::new().unwrap();
    let story = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    fs::write(dir.path().join("story.txt"), story.chars().take(4000).collect::<String>()).unwrap();
    dir
}

#[test]
fn every_table_fits_eighty_columns() {
    let dir = folder();
    for line in [
        "demo --recipe gptq-int4-g32-asym --recipe rtn-q4_0",
        "quantize demo --recipe gptq-int4-g32-asym --calibration story.txt --length 128 --out q --text story.txt --context 128 --layers",
        "quantize demo --recipe q4_k_m --out demo.gguf --layers",
        "fit demo --budget 4.5bpw --schemes int4-g32,int8-g32,int3-g32 --text story.txt --context 128 --out f --layers",
        "convert q --format gptq --out c",
        "convert q --format native --requantize int3-g32 --out r --layers",
        "verify q --reference demo",
        "eval q --reference demo --text story.txt --context 128 --kv int8-head",
        "doctor q --text story.txt --context 128",
        "inspect q --tensors --stats",
        "recipes",
        "schemes",
    ] {
        // What measures the whole demo takes longest.
        if (line.starts_with("demo ") || line.starts_with("fit ")) && left_to_nightly() {
            continue;
        }
        let text = printed(dir.path(), 80, line);
        for row in text.lines() {
            assert!(row.chars().count() <= 80, "{line}: {} columns: {row}", row.chars().count());
        }
    }
}

#[test]
fn the_summary_comes_first_and_then_the_ten_worst_layers() {
    let dir = folder();
    let quantize = "quantize demo --recipe rtn-int4-g32 --out q";
    let text = printed(dir.path(), 120, quantize);
    let heading = "10 of 35 layers, largest relative error first (--layers lists all):";
    let (summary, table) = text.split_once(heading).expect(&text);
    assert!(summary.contains("bits per weight") && summary.contains("verified: "), "{text}");
    let rows = |table: &str| table.lines().filter(|row| row.contains(" int4-g32")).count();
    assert_eq!((rows(summary), rows(table)), (0, 10), "{text}");
    let errors: Vec<f64> = table
        .lines()
        .filter(|row| row.contains("int4-g32"))
        .map(|row| row.split_whitespace().nth(6).unwrap().parse().unwrap())
        .collect();
    assert!(errors.is_sorted_by(|a, b| a >= b), "{errors:?}");
    // The same command may show more.
    let text = printed(dir.path(), 120, &format!("{quantize} --layers"));
    assert_eq!(rows(text.split_once("35 layers:").expect(&text).1), 35, "{text}");
}

#[test]
fn the_least_important_columns_go_first() {
    if left_to_nightly() {
        return;
    }
    let dir = folder();
    let demo = "demo --recipe rtn-q4_0";
    let heading = |columns| printed(dir.path(), columns, demo).lines().next().unwrap().to_owned();
    let [wide, medium, narrow] = [130, 100, 60].map(heading);
    assert!(wide.contains("ppl") && wide.contains('±'));
    assert!(!medium.contains("ppl") && medium.contains('±'));
    assert!(
        !narrow.contains('±') && ["bits", "size", "KL stories", "KL code"].iter().all(|h| narrow.contains(h))
    );
}
