//! A run that ends early, by interruption, error or kill, resumes to the same bytes as an undisturbed run.
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crate::common::{calibration, files, model, names_in};
use mantissa_quant::{Options, Outcome, Plan, QuantError, Recipe, Start, run};
use mantissa_store::convention::{ModelFiles, native};
use mantissa_store::failpoint::{Failing, Operation, failing};
use mantissa_store::{Dtype, ErrorClass, JOURNAL_NAME, MANIFEST_NAME};
use rustix::io::Errno;
use tempfile::TempDir;

const RECIPE: &str = "rtn-nvfp4";

/// Number of units: 7 copied tensors (embedding, head, norms) and 14 layers.
const UNITS: usize = 21;

fn options() -> Options {
    // Several files, so that some are complete when a run ends.
    Options { threads: 1, max_shard_bytes: 30_000, ..Options::default() }
}

/// Runs for `steps` steps, or to the end.
fn quantize(
    source: &Path,
    recipe: &str,
    out: &Path,
    start: Start,
    steps: usize,
) -> Result<Outcome, QuantError> {
    let source = ModelFiles::open(source)?;
    let plan = Plan::new(&source, Recipe::load(recipe)?, options())?;
    let mut left = steps;
    run(
        &plan,
        &source,
        &mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true),
        start,
        &mut |_| {
            left = left.saturating_sub(1);
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )
}

fn whole(source: &Path, out: &Path) -> Result<Outcome, QuantError> {
    quantize(source, RECIPE, out, Start::Resume, usize::MAX)
}

/// Returns the work folder beside `out`.
fn left_beside(out: &Path) -> Option<std::path::PathBuf> {
    let parent = out.parent().unwrap();
    let partial = |name: &String| {
        name.starts_with(&format!(".{}.mantissa-partial", out.file_name().unwrap().display()))
    };
    names_in(parent).into_iter().find(partial).map(|name| parent.join(name))
}

#[test]
fn a_run_interrupted_after_every_step_ends_in_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 1);
    let (expected, out) = (temp.path().join("expected"), temp.path().join("out"));
    whole(&source, &expected).unwrap();
    let mut interruptions = 0;
    loop {
        match quantize(&source, RECIPE, &out, Start::Resume, interruptions + 1) {
            Ok(outcome) => {
                assert_eq!(outcome.resumed, UNITS);
                break;
            }
            Err(error) => {
                assert!(error.is_interruption() && error.class() == ErrorClass::Environment, "{error}");
                interruptions += 1;
                let done = interruptions.min(UNITS);
                assert!(matches!(error, QuantError::Unfinished(ref u) if u.done == done), "{error}");
                assert!(!out.exists());
            }
        }
    }
    // After the last unit, the two files of the source are hashed in one step each.
    assert_eq!(interruptions, UNITS + 2);
    assert_eq!(files(&out), files(&expected));
    assert_eq!(left_beside(&out), None);
}

/// Methods that calibrate need the states after finished layers, which are then read from the output.
#[test]
fn calibrated_layers_resume_to_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 6);
    let opened = ModelFiles::open(&source).unwrap();
    let ordered = temp.path().join("ordered.toml");
    let text = "method = \"gptq\"\nweights = \"int4-g32\"\nformat = \"gptq\"\n[gptq]\ngroups = \"current\"\n";
    fs::write(&ordered, text).unwrap();
    for (recipe, container) in [
        ("gptq-int4-g32-asym", None),
        ("gptq-nvfp4", None),
        ("gptaq-int4-g32", None),
        ("gptq-int3-g16", Some(native::CONTAINER)),
        ("gptq-int3-g16+kv-nuq3-10%,pre-rope", None),
        (ordered.to_str().unwrap(), None),
        ("spqr-int3-g16", None),
        ("qtip-trellis4", None),
    ] {
        let with = Options { container, calibration: Some(calibration()), ..options() };
        let plan = Plan::new(&opened, Recipe::load(recipe).unwrap(), with).unwrap();
        let attempt = |out: &Path, steps: usize| {
            let mut left = steps;
            run(
                &plan,
                &opened,
                &mantissa_store::Output::of_job(out, mantissa_store::JobKey::of("test"), true),
                Start::Resume,
                &mut |_| {
                    left = left.saturating_sub(1);
                    if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                },
            )
        };
        let (expected, out) = (temp.path().join("expected"), temp.path().join("out"));
        attempt(&expected, usize::MAX).unwrap();
        let (mut interruptions, mut taken_over) = (0, 0);
        // Steps are tensors, layers, and the calibration windows in between.
        for steps in (3..).step_by(4) {
            match attempt(&out, steps) {
                Ok(outcome) => {
                    taken_over = outcome.resumed;
                    break;
                }
                Err(error) => assert!(error.is_interruption(), "{error}"),
            }
            interruptions += 1;
        }
        assert!(interruptions > 8 && taken_over > 14, "{recipe}: {interruptions} {taken_over}");
        assert_eq!(files(&out), files(&expected), "{recipe}");
        fs::remove_dir_all(&out).unwrap();
        fs::remove_dir_all(&expected).unwrap();
    }
}

#[test]
fn only_the_same_plan_resumes() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 2);
    let begun = |name: &str| {
        let out = temp.path().join(name);
        quantize(&source, RECIPE, &out, Start::Resume, 10).unwrap_err();
        assert!(left_beside(&out).is_some());
        out
    };
    assert_eq!(whole(&source, &begun("same")).unwrap().resumed, 10);
    let out = begun("restarted");
    let restarted = quantize(&source, RECIPE, &out, Start::Restart, usize::MAX).unwrap();
    assert_eq!((restarted.resumed, left_beside(&out)), (0, None));
    let out = begun("other-recipe");
    let other = quantize(&source, "rtn-nf4", &out, Start::Resume, usize::MAX).unwrap();
    assert_eq!(other.resumed, 0);
    assert!(left_beside(&out).is_some(), "the work of another plan is left");
    // The same bytes written again are another source, because only the files' times show whether they changed.
    let out = begun("source-written-again");
    let weights = source.join("model.safetensors");
    fs::write(&weights, fs::read(&weights).unwrap()).unwrap();
    assert_eq!(whole(&source, &out).unwrap().resumed, 0);
}

#[test]
fn damaged_units_are_repeated() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 3);
    let expected = temp.path().join("expected");
    whole(&source, &expected).unwrap();
    type Damage<'a> = &'a dyn Fn(&Path);
    // First weight file in the staged output.
    let weights = |dir: &Path| dir.join("new").join(&names_in(&dir.join("new"))[0]);
    let damages: [(&str, Damage<'_>); 6] = [
        ("a byte of a tensor", &|dir| {
            let path = weights(dir);
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.len() - 7;
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
        }),
        ("a file cut short", &|dir| {
            let path = weights(dir);
            fs::write(&path, &fs::read(&path).unwrap()[..900]).unwrap();
        }),
        ("a file gone", &|dir| fs::remove_file(weights(dir)).unwrap()),
        ("a torn line", &|dir| {
            let bytes = fs::read(dir.join(JOURNAL_NAME)).unwrap();
            fs::write(dir.join(JOURNAL_NAME), &bytes[..bytes.len() - 40]).unwrap();
        }),
        ("a line of nonsense", &|dir| {
            let mut bytes = fs::read(dir.join(JOURNAL_NAME)).unwrap();
            let at = bytes.len() / 2;
            bytes[at] = 0xff;
            fs::write(dir.join(JOURNAL_NAME), bytes).unwrap();
        }),
        ("other files", &|dir| {
            fs::write(dir.join("new/config.json"), "{}").unwrap();
            fs::write(dir.join("new/stray.safetensors"), "").unwrap();
        }),
    ];
    for (name, damage) in damages {
        let out = temp.path().join("out");
        quantize(&source, RECIPE, &out, Start::Resume, 15).unwrap_err();
        damage(&left_beside(&out).unwrap());
        let outcome = whole(&source, &out).unwrap();
        assert!((1..=15).contains(&outcome.resumed), "{name}: {}", outcome.resumed);
        assert_eq!(files(&out), files(&expected), "{name}");
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn an_error_in_the_source_leaves_nothing() {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::F32, 4);
    let weights = source.join("model.safetensors");
    let meta = mantissa_store::SafeTensors::open(&weights).unwrap();
    let at = meta.get("model.layers.1.mlp.up_proj.weight").unwrap().offset as usize;
    let mut bytes = fs::read(&weights).unwrap();
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, bytes).unwrap();
    let out = temp.path().join("out");
    let error = whole(&source, &out).unwrap_err();
    assert!(
        error.to_string().contains("up_proj.weight\": expected finite values, got 1 non-finite"),
        "{error}"
    );
    assert!(left_beside(&out).is_none() && !out.exists());
}

/// Injects a fault into every file operation in turn. After each, the old output is complete, and the next run gives
/// the same bytes.
fn step_over(operation: Operation, errno: Errno, from: impl Fn(u64) -> Failing, stride: u64) {
    let temp = TempDir::new().unwrap();
    let source = model(temp.path(), Dtype::BF16, 5);
    let (old, expected, out) =
        (temp.path().join("old"), temp.path().join("expected"), temp.path().join("out"));
    quantize(&source, "rtn-int8-channel", &old, Start::Resume, usize::MAX).unwrap();
    whole(&source, &expected).unwrap();
    let (old, expected) = (files(&old), files(&expected));
    let plan_of = |files: &ModelFiles| Plan::new(files, Recipe::load(RECIPE).unwrap(), options()).unwrap();
    let opened = ModelFiles::open(&source).unwrap();
    let plan = plan_of(&opened);
    for n in (0..).step_by(stride as usize) {
        if n % (8 * stride) == 0 {
            let _ = fs::remove_dir_all(&out);
            quantize(&source, "rtn-int8-channel", &out, Start::Restart, usize::MAX).unwrap();
        }
        let before = files(&out);
        let work = || {
            run(
                &plan,
                &opened,
                &mantissa_store::Output::of_job(&out, mantissa_store::JobKey::of("test"), true),
                Start::Resume,
                &mut |_| ControlFlow::Continue(()),
            )
        };
        let (result, seen) = failing(operation, from(n), errno, work);
        match result {
            Ok(_) => assert_eq!(files(&out), expected, "{operation:?} {n}"),
            Err(error) => {
                assert_eq!(error.class(), ErrorClass::Environment, "{operation:?} {n}: {error}");
                assert!(error.to_string().contains(temp.path().to_str().unwrap()), "names no path: {error}");
                let found = files(&out);
                assert!(found == before || found == expected, "{operation:?} {n}: {error}");
                assert!(
                    found.iter().any(|(name, _)| name == MANIFEST_NAME)
                        && (found == old || found == expected)
                );
                let kept = matches!(error, QuantError::Unfinished(_));
                assert!(
                    kept || left_beside(&out).is_none_or(|_| found == expected),
                    "{operation:?} {n}: {error}"
                );
                whole(&source, &out).unwrap();
                assert_eq!(files(&out), expected, "gone on with after {operation:?} {n}");
            }
        }
        let strays = || names_in(temp.path()).iter().any(|name| name.contains(".mantissa-"));
        if strays() {
            // Cleaning up failed after the end; the next run does it.
            whole(&source, &out).unwrap();
            assert_eq!(files(&out), expected, "run again after {operation:?} {n}");
        }
        let beside = names_in(temp.path());
        assert!(beside.iter().all(|name| !name.contains(".mantissa-")), "{operation:?} {n}: {beside:?}");
        if seen <= n {
            assert!(n > 60, "{operation:?}: only {n} operations");
            return;
        }
    }
}

#[test]
fn a_disk_that_fills_up_at_any_write() {
    step_over(Operation::Write, Errno::NOSPC, Failing::From, 1);
}

#[test]
fn one_failure_of_any_write() {
    step_over(Operation::Write, Errno::IO, Failing::Once, 1);
}

#[test]
fn one_failure_of_any_read() {
    step_over(Operation::Read, Errno::IO, Failing::Once, 3);
}
