//! Every top-level field of a report is listed in docs/reference/json.md.

use std::fs;
use std::path::Path;

use crate::support::strict_json;
use crate::{output_in, root};

/// Sections of the page, with the command whose report they list; in this order, as later ones read outputs of earlier ones.
const REPORTS: [(&[&str], &str); 30] = [
    (&["plan"], "plan demo --hardware h100"),
    (&["plan"], "plan demo --hardware h100 --train"),
    (&["explain"], "explain w4a16 demo --hardware h100"),
    (
        &["quality.json", "quantize, convert and fit"],
        "quantize demo --recipe rtn-int4-g128 --out q --text sample.txt",
    ),
    (&["quality.json", "quantize, convert and fit"], "convert q --format gptq --out q-gptq --task cloze"),
    (&["eval"], "eval q --reference demo --text sample.txt --kv int8-head"),
    (&["eval"], "eval q --reference demo --task cloze"),
    (
        &["worker", "scripts of --engine"],
        "quantize demo --recipe rtn-int4-g128 --out w --job w.job --workers 2 --engine slurm",
    ),
    (&["worker", "scripts of --engine"], "worker w.job --units 0..2"),
    (&["rebuild"], "rebuild q/quality.json --source demo --out again"),
    (&["run"], "run q -p Once -n 4"),
    (&["dry runs"], "run q -p Once -n 4 --dry-run"),
    (&["dry runs"], "eval q --reference demo --text sample.txt --dry-run"),
    (&["dry runs"], "serve q --dry-run"),
    (&["bench"], "bench q --prompt 16 --gen 4 --reps 1 --explain"),
    (&["compare"], "compare demo q --recipe rtn-int8-channel --text sample.txt --context 64"),
    (&["diff"], "diff q demo -p Once -n 4"),
    (&["inspect"], "inspect q"),
    (&["verify"], "verify q --reference demo"),
    (&["lint"], "lint q --for vllm"),
    (&["doctor"], "doctor q --reference demo"),
    (&["diagnose"], "diagnose q --reference demo --text sample.txt"),
    (&["quality.json", "quantize, convert and fit"], "fit demo --budget 4.5bpw --text sample.txt --out f"),
    (&["recipes"], "recipes"),
    (&["recipes"], "recipes gptq-int4-g128"),
    (&["schemes"], "schemes"),
    (&["schemes"], "schemes int4-g128"),
    (&["schemes"], "schemes turbo4"),
    (
        &["train, finetune and distill"],
        "finetune demo --data sample.txt --steps 1 --length 32 --batch 1 --merge --out tuned",
    ),
    (&["cast"], "cast q/model.safetensors --scheme int8-channel --out c.safetensors"),
];

/// Other commands with a report, which like those above repeat no key.
const OTHERS: [&str; 9] = [
    "explain 0.1 --as int4-g32",
    "tokenizer sample.txt --vocab 300 --out words",
    "quantize demo --recipe rtn-int4-g128 --dry-run --out never",
    "imatrix demo --calibration sample.txt --length 32 --samples 2 --out i.gguf",
    "quantize demo --recipe rtn-int8-channel+kv-fp8-e4m3-tensor@static --calibration sample.txt --length 32 --out kv",
    "recalibrate kv --calibration sample.txt --length 32 --out kv-2",
    "report kv",
    "train --show-policy bf16",
    "finetune demo --data sample.txt --steps 1 --length 32 --dry-run --out never",
];

#[test]
fn every_field_of_a_report_is_listed() {
    let page = fs::read_to_string(root().join("docs/reference/json.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    fs::write(dir.path().join("sample.txt"), stories.chars().take(4000).collect::<String>()).unwrap();
    let mut missing = Vec::new();
    for (sections, command) in REPORTS {
        let listed: String = sections.iter().map(|section| body(&page, section)).collect();
        for field in fields(dir.path(), command) {
            let whole = listed.contains(&format!("`{field}`")) || listed.contains(&format!("`{field}."));
            if !whole {
                missing.push(format!("{command}: {field}"));
            }
        }
    }
    OTHERS.iter().for_each(|command| drop(fields(dir.path(), command)));
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

/// The text below a heading of the second level.
fn body<'a>(page: &'a str, section: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n## {section}\n")).expect(section);
    rest.split("\n## ").next().unwrap()
}

fn fields(dir: &Path, command: &str) -> Vec<String> {
    let arguments: Vec<_> = command.split(' ').chain(["--json"]).collect();
    let report =
        strict_json::parse(output_in(dir, &arguments)).unwrap_or_else(|error| panic!("{command}: {error}"));
    report.as_object().unwrap().keys().cloned().collect()
}
