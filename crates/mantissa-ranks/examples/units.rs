//! Times what a unit costs besides its work: `units FOLDER [COUNT]` claims COUNT units without work and stores their results,
//! then looks for results that are all there, as a worker does that comes late.
#![allow(clippy::print_stdout)]

use std::path::PathBuf;
use std::time::Instant;

use mantissa_ranks::{JobFolder, Part, RankError, Team, Unit};
use serde_json::json;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("expected FOLDER, got nothing")?);
    let count: usize = arguments.next().map_or(Ok(10_000), |count| count.parse())?;
    let job = json!({ "job": "empty units", "version": 1 });
    let folder = JobFolder::create(&folder, (job.clone(), &job), &[], &mut || true)?;
    let units: Vec<Unit> = (0..count).map(|unit| format!("unit {unit}")).collect();
    let mut compute = |_| Ok::<_, RankError>(Vec::new());
    let team = Team::join(folder.units(), Part::default());
    let begin = Instant::now();
    team.complete(&units, &mut compute, &mut |_| Ok(()))?;
    let each = begin.elapsed().as_secs_f64() / count as f64;
    println!("{count} empty units: {:.3} ms each, claimed, synced and stored", 1e3 * each);
    let late = Team::join(folder.units(), Part::default());
    let begin = Instant::now();
    late.complete(&units, &mut compute, &mut |_| Ok(()))?;
    println!("{count} finished units: listed in {:.3} s", begin.elapsed().as_secs_f64());
    folder.remove()?;
    Ok(())
}
