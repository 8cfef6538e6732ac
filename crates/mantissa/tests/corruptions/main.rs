//! Damaged models of every format: seeded corruptions of tensors, file and config. Each is opened, every
//! weight decoded, and the model run once. The result must be a typed error that names the tensor, field or
//! file or, if nothing can reveal the damage, finite logits. Never a panic, a gigabyte or a second.
//!
//! A line in [`subjects::all`] adds a format.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod damage;
mod gguf;
mod subjects;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use mantissa_model::{Batch, Buffers, Decoder, LoadError};
use mantissa_quant::QuantError;
use mantissa_quant::verify::load_check;
use mantissa_store::ErrorClass;
use mantissa_store::convention::ModelFiles;

/// Required outcome for a damaged model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// An error.
    Error,
    /// An error or finite logits: the change could be intended.
    Either,
    /// An error or, in blocks that are not checked, a failure at run time.
    NotNumbers,
}

/// Address space of the process: no damaged file of 100 kB may request more.
const MOST_BYTES: u64 = 2 << 30;

/// CPU time limit per model.
const MOST_TIME: Duration = Duration::from_secs(2);

/// Minimum number of corruptions per format; most must be errors.
const LEAST: usize = 30;

/// Opens a model, decodes its weights and runs it on a few tokens; returns true if all logits are finite.
fn exercise(path: &Path) -> Result<bool, LoadError> {
    let files = ModelFiles::open(path)?;
    let _ = files.notes();
    let decoder = Decoder::load(&files)?;
    let config = decoder.config();
    let tokens: Vec<u32> = (0..5).map(|i| i % config.vocab_size as u32).collect();
    let mut buffers = Buffers::plan(config, tokens.len(), tokens.len()).map_err(|e| panic!("{e}")).unwrap();
    let mut logits = vec![0.0; tokens.len() * config.vocab_size];
    let batch = Batch { tokens: &tokens, lens: &[tokens.len()] };
    let mut hidden = decoder.forward(&batch, &mut buffers).unwrap();
    hidden.logits(0..tokens.len(), &mut logits).unwrap();
    Ok(logits.iter().all(|v| v.is_finite()))
}

/// Returns the reason why the outcome is not the required one.
fn complaint(path: &Path, expect: Expect, mentions: &[String]) -> Option<String> {
    let start = cpu_time();
    let outcome = catch_unwind(AssertUnwindSafe(|| exercise(path)));
    let time = cpu_time() - start;
    if time > MOST_TIME {
        return Some(format!("took {time:?}"));
    }
    match outcome {
        Err(_) => Some("panicked".to_owned()),
        Ok(Ok(false)) if expect != Expect::NotNumbers => Some("logits that are no numbers".to_owned()),
        Ok(Ok(true)) if expect == Expect::Error => Some("was not seen".to_owned()),
        Ok(Ok(_)) => refused(path),
        Ok(Err(error)) => {
            let text = error.to_string();
            if error.class() != ErrorClass::Input {
                return Some(format!("no error of the input: {text}"));
            }
            let named = mentions.iter().any(|name| text.contains(name));
            (!named || text.len() > 2000).then(|| format!("names none of {mentions:?}: {text}"))
        }
    }
}

/// Returns the reason why the header check refuses a model that runs, if it does. No tokenizer is needed
/// here.
fn refused(path: &Path) -> Option<String> {
    match load_check(path) {
        Ok(()) | Err(QuantError::Tokenizer(_)) => None,
        Err(error) => Some(format!("runs, and is refused by its headers: {error}")),
    }
}

/// CPU time of this thread, on which everything here runs.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

fn limit_memory() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::As);
    limit.current = Some(limit.current.unwrap_or(u64::MAX).min(MOST_BYTES));
    setrlimit(Resource::As, limit).unwrap();
}

/// Panics are caught and counted; their messages would hide the others.
fn quiet() {
    limit_memory();
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
}

#[test]
fn damage_of_every_convention_is_seen_or_harmless() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let mut complaints = Vec::new();
    for subject in subjects::all() {
        subject.write(dir.path());
        let good = exercise(dir.path());
        if !matches!(good, Ok(true)) {
            complaints.push(format!("{}: undamaged: {good:?}", subject.name));
            continue;
        }
        complaints.extend(refused(dir.path()).map(|what| format!("{}: undamaged: {what}", subject.name)));
        let damaged = damage::of(&subject);
        let errors = damaged.iter().filter(|case| case.expect == Expect::Error).count();
        assert!(
            damaged.len() >= LEAST && errors * 3 >= LEAST * 2,
            "{}: {errors} of {}",
            subject.name,
            damaged.len()
        );
        println!("{:24} {:4} corruptions, {errors} of which must be errors", subject.name, damaged.len());
        for case in damaged {
            case.subject.write(dir.path());
            if let Some(what) = complaint(dir.path(), case.expect, &case.mentions) {
                complaints.push(format!("{}: {}: {what}", subject.name, case.what));
            }
        }
    }
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

#[test]
fn damage_of_gguf_is_seen_or_harmless() {
    quiet();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let cases = gguf::cases(&path);
    let errors = cases.iter().filter(|case| case.expect == Expect::Error).count();
    assert!(cases.len() >= LEAST && errors * 3 >= LEAST * 2, "{errors} of {}", cases.len());
    let mut complaints = Vec::new();
    for case in cases {
        std::fs::write(&path, &case.bytes).unwrap();
        if let Some(what) = complaint(&path, case.expect, &["model.gguf".to_owned()]) {
            complaints.push(format!("{}: {what}", case.what));
        }
    }
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}
