//! Commands that another program calls in its own process.

use std::ffi::OsString;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mantissa::{Exit, Failed, call};
use mantissa_jobs::{Gauge, Progress, Silent, Unit};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{json, text};

fn called(arguments: &[&str]) -> Result<Value, Failed> {
    let words = ["mantissa"].iter().chain(arguments).map(OsString::from).collect();
    call(words, Box::new(Silent)).map(|report| serde_json::from_str(&report).unwrap())
}

#[test]
fn a_call_has_the_report_of_the_program() {
    for arguments in
        [&["inspect", "demo"][..], &["plan", "--params", "8B", "--hardware", "h100"], &["recipes"]]
    {
        let printed = json(&[arguments, &["--json", "--quiet"]].concat());
        let ours = called(arguments).unwrap();
        assert_eq!(ours, printed, "{arguments:?}");
    }
}

#[test]
fn a_call_that_fails_has_the_exit_code_and_message_of_the_program() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("o");
    for (arguments, exit, words) in [
        (&["inspect", "no/such/model"][..], Exit::Input, "no/such/model"),
        (&["inspect", "demo", "--statz"], Exit::Input, "--stats"),
        (
            &["quantize", "demo", "--recipe", "rtn-int2-g32", "--out", text(&out), "--max-kl", "1e-9"],
            Exit::Gate,
            "KL",
        ),
        (&["inspect", "demo", "--memory", "1M"], Exit::Environment, "--memory"),
    ] {
        let failed = called(arguments).unwrap_err();
        assert_eq!(failed.exit, exit, "{arguments:?}: {}", failed.message);
        assert!(failed.message.contains(words), "{}", failed.message);
        assert!(!failed.message.starts_with("error"), "{}", failed.message);
    }
    // What ran before a gate failed is reported.
    let gated =
        ["eval", "demo", "--text", "default", "--limit", "64", "--max-kl", "0", "--reference", "demo"];
    let refused = called(&[&gated[..], &["--kv", "int2-head"]].concat()).unwrap_err();
    let report: Value = serde_json::from_str(&refused.report).unwrap();
    assert!(refused.exit == Exit::Gate && report["kl"].as_f64().unwrap() > 0.0, "{refused:?}");
}

/// Stops the work after some questions.
struct Stops(Arc<AtomicUsize>);

impl Progress for Stops {
    fn start(&self, _: u64, _: Unit, _: bool) -> Box<dyn Gauge> {
        Box::new(Silent)
    }

    fn note(&self, _: &str) {}

    fn warn(&self, _: &str) {}

    fn stops(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) >= 3
    }
}

#[test]
fn a_call_that_is_stopped_resumes() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("o");
    let arguments = ["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&out)];
    let words = ["mantissa"].iter().chain(&arguments).map(OsString::from).collect();
    let asked = Arc::new(AtomicUsize::new(0));
    let stopped = call(words, Box::new(Stops(Arc::clone(&asked)))).unwrap_err();
    assert_eq!(stopped.exit, Exit::Interrupted, "{}", stopped.message);
    assert!(asked.load(Ordering::Relaxed) > 3 && !out.exists());
    let report = called(&arguments).unwrap();
    assert!(report["verification"]["ok"].as_bool().unwrap() && out.exists());
}
