//! Experiments on mixed precision: `cargo run --profile ci -p mantissa-train --example experiments -- bench/training
//! [E1 E2 …]`.
//!
//! Each `E*.toml` of the folder is an experiment. It has arms, which change settings of the folder's `base.toml`, and
//! checks of the measured figures, with the published value and the allowed interval. All experiments run unless some
//! are named. A table of each goes to standard output, and its figures as JSON into the folder `record` beside. The
//! exit status is 1 if a check failed, 2 if something could not run.

mod arms;
mod lab;
mod spec;
mod synthetic;
mod verdict;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use lab::Lab;
use spec::Experiment;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(dir) = arguments.next() else {
        eprintln!("error: no folder; usage: experiments DIR [E1 E2 …]");
        return ExitCode::from(2);
    };
    match run(Path::new(&dir), &arguments.collect::<Vec<_>>()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the experiments of `dir` that `names` has, or all; whether every check holds.
fn run(dir: &Path, names: &[String]) -> Result<bool, Box<dyn Error>> {
    let mut lab = Lab::new(dir)?;
    let record = dir.join("../record");
    let mut all = true;
    for (name, file) in experiments(dir, names)? {
        let experiment = Experiment::read(&file)?;
        let start = Instant::now();
        let outcomes = arms::run(&mut lab, &experiment)?;
        let report = verdict::judge(&name, &experiment, &outcomes)?;
        println!(
            "{name}: {} ({:.0} s)\n\n{}",
            experiment.title,
            start.elapsed().as_secs_f64(),
            report.table()
        );
        let path = record.join(format!("training-{name}.json"));
        mantissa_store::write_file_atomic(
            &mantissa_store::Output::owned(&path),
            format!("{:#}\n", report.json()).as_bytes(),
        )?;
        all &= report.holds();
    }
    Ok(all)
}

/// Names and files of the experiments, in the order of their numbers.
fn experiments(dir: &Path, names: &[String]) -> Result<Vec<(String, PathBuf)>, Box<dyn Error>> {
    if !names.is_empty() {
        return Ok(names.iter().map(|name| (name.clone(), dir.join(format!("{name}.toml")))).collect());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| format!("{}: {error}", dir.display()))? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if stem.starts_with('E') && path.extension().is_some_and(|extension| extension == "toml") {
            found.push((stem, path));
        }
    }
    let number = |name: &str| name.trim_matches(char::is_alphabetic).parse::<u32>().unwrap_or(u32::MAX);
    found.sort_by(|(a, _), (b, _)| (number(a), a).cmp(&(number(b), b)));
    Ok(found)
}
