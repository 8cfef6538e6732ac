//! Workers on the units of one job.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use mantissa_store::{FileDigest, disk};

use crate::error::{RankError, Result};
use crate::folder::UnitFolder;
use crate::launch::Rank;
use crate::lease::{Heart, Lease, Seen, Worker};
use crate::result::UnitResult;

/// Shortest and longest time between two looks for results of others.
const LOOK: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(250)];

/// Unit of a job: its name, unique in the job, says what is computed.
pub type Unit = String;

/// This process among those that work on one job: alone, or with others through a folder.
#[derive(Clone, Debug, Default)]
pub struct Team(Option<Arc<Shared>>);

/// Share of the work of one worker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    /// Rank that a launcher gave.
    pub rank: Option<Rank>,
    /// Numbers of the units that it computes, without waiting for others; `None` for all that are left.
    pub only: Option<Range<usize>>,
    /// Part of the finished units of others that is computed again and compared, from 0 to 1.
    pub audit: f64,
}

/// Folder that is shared, and what this process did.
struct Shared {
    units: UnitFolder,
    part: Part,
    heart: Heart,
    seen: Mutex<Seen>,
    counts: Mutex<Counts>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("units", &self.units).field("part", &self.part).finish_non_exhaustive()
    }
}

/// Units that this process computed, and those that it computed again to compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    computed: usize,
    audited: usize,
}

impl Team {
    /// Returns the team of a process that works alone.
    pub fn alone() -> Self {
        Self::default()
    }

    /// Joins those who work on `units`.
    pub fn join(units: UnitFolder, part: Part) -> Self {
        let (heart, seen, counts) = (Heart::default(), Mutex::default(), Mutex::default());
        Team(Some(Arc::new(Shared { units, part, heart, seen, counts })))
    }

    /// True if this process computes only units with given numbers.
    pub fn is_partial(&self) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.part.only.is_some())
    }

    /// True if other processes may work on the same job.
    pub fn is_shared(&self) -> bool {
        self.0.is_some()
    }

    /// Number of units that this process computed.
    pub fn computed(&self) -> usize {
        self.count(|counts| counts.computed)
    }

    /// Number of finished units that this process computed again, with equal results.
    pub fn audited(&self) -> usize {
        self.count(|counts| counts.audited)
    }

    fn count(&self, of: impl Fn(Counts) -> usize) -> usize {
        self.0.as_ref().map_or(0, |shared| of(*shared.counts.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Computes the units that nobody has computed or computes, until each has a result: those of this rank first, then
    /// those that others have left. Independent units only. `tick` is called between units and while others work, with
    /// the number of units that are finished.
    ///
    /// # Errors
    /// Errors of `compute` and `tick`; I/O; [`RankError::Disagrees`].
    pub fn complete<E: From<RankError>>(
        &self,
        units: &[Unit],
        compute: &mut dyn FnMut(usize) -> Result<Vec<u8>, E>,
        tick: &mut dyn FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(shared) = &self.0 else { return Ok(()) };
        if let Some(only) = shared.part.only.clone().filter(|only| only.start >= units.len()) {
            return Err(RankError::NoUnit { number: only.start, count: units.len() }.into());
        }
        let mut left = shared.part.order(units.len());
        let mut pause = LOOK[0];
        loop {
            let finished = shared.units.results()?;
            left.retain(|&unit| !finished.contains(&shared.units.result(&units[unit])));
            if left.is_empty() {
                break;
            }
            tick(units.len() - left.len())?;
            let mut claimed = 0;
            for unit in left.clone() {
                if shared.one(&units[unit], &mut || compute(unit))? {
                    claimed += 1;
                    tick(units.len() - left.len() + claimed)?;
                }
            }
            pause = if claimed > 0 { LOOK[0] } else { (2 * pause).min(LOOK[1]) };
            if claimed == 0 {
                sleep(pause);
            }
        }
        shared.compare(units, compute, tick)
    }

    /// Returns the result of a finished unit; `None` for a process that works alone, and if the unit has none or a damaged
    /// one.
    ///
    /// # Errors
    /// I/O.
    pub fn result(&self, unit: &str) -> Result<Option<Vec<u8>>> {
        let Some(shared) = &self.0 else { return Ok(None) };
        Ok(UnitResult::read(&shared.units.result(unit), unit)?.map(|found| found.bytes))
    }

    /// Returns a folder for files of this process that are no results, which is removed with the folder of the job; `None` for a
    /// process that works alone.
    ///
    /// # Errors
    /// I/O.
    pub fn scratch(&self) -> Result<Option<PathBuf>> {
        self.0.as_ref().map(|shared| shared.units.scratch()).transpose()
    }

    /// True if the unit has a result, which may be damaged.
    pub fn has(&self, unit: &str) -> bool {
        self.0.as_ref().is_some_and(|shared| shared.units.result(unit).is_file())
    }

    /// Removes the results of units that no worker needs any more. One that is far behind computes them again.
    pub fn remove(&self, units: &[Unit]) {
        let Some(shared) = &self.0 else { return };
        for unit in units {
            // A result that stays takes space until the folder is removed.
            let _ = disk::remove_file_if_there(&shared.units.result(unit));
        }
    }

    /// Stores a result that was computed because the one in the folder was damaged.
    ///
    /// # Errors
    /// As [`complete`](Self::complete).
    pub fn replace(&self, unit: &str, bytes: Vec<u8>) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |shared| shared.store(unit, bytes))
    }
}

impl Part {
    /// Returns the numbers of `units` that this worker computes, in its order.
    fn order(&self, units: usize) -> Vec<usize> {
        if let Some(Range { start, end }) = self.only.clone() {
            return (start..end.min(units)).collect();
        }
        let first = self.rank.map_or_else(|| own_start(units), |rank| rank.first_of(units));
        (first..units).chain(0..first.min(units)).collect()
    }
}

/// Divides the numbers below `count` into at most `most` ranges of neighbours, of one length but for the last.
pub fn ranges(count: usize, most: usize) -> Vec<Range<usize>> {
    let each = count.div_ceil(most.max(1)).max(1);
    (0..count).step_by(each).map(|first| first..count.min(first + each)).collect()
}

/// Start of a process without a rank among `units`: processes of one machine begin apart.
fn own_start(units: usize) -> usize {
    let digest = FileDigest::of(Worker::this().name().as_bytes());
    let word = digest.sha256.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    (word % units.max(1) as u64) as usize
}

/// Makes the result of this process.
fn own_result(bytes: Vec<u8>) -> UnitResult {
    UnitResult { worker: Worker::this().name(), digest: FileDigest::of(&bytes), bytes }
}

impl Shared {
    /// Computes `unit` if nobody else computes or has computed it; true if this process did.
    fn one<E: From<RankError>>(
        &self,
        unit: &str,
        compute: &mut dyn FnMut() -> Result<Vec<u8>, E>,
    ) -> Result<bool, E> {
        let path = self.units.result(unit);
        if path.is_file() {
            return Ok(false);
        }
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = Lease::take(&self.units.lease(unit), &mut seen, &self.heart)?;
        drop(seen);
        let Some(_lease) = lease else { return Ok(false) };
        // Another worker may have finished it between the two looks.
        if path.is_file() {
            return Ok(false);
        }
        self.store(unit, compute()?)?;
        self.counts.lock().unwrap_or_else(PoisonError::into_inner).computed += 1;
        Ok(true)
    }

    fn store(&self, unit: &str, bytes: Vec<u8>) -> Result<()> {
        own_result(bytes).write(&self.units.result(unit), unit)
    }

    /// Computes a part of the units of others again, and compares.
    fn compare<E: From<RankError>>(
        &self,
        units: &[Unit],
        compute: &mut dyn FnMut(usize) -> Result<Vec<u8>, E>,
        tick: &mut dyn FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        for (number, unit) in units.iter().enumerate().filter(|(_, unit)| self.is_audited(unit)) {
            let path = self.units.result(unit);
            let Some(stored) = UnitResult::read(&path, unit)? else { continue };
            if stored.worker == Worker::this().name() {
                continue;
            }
            let again = own_result(compute(number)?);
            if again.digest != stored.digest {
                return Err(again.disagreement(&path, unit, &stored).into());
            }
            self.counts.lock().unwrap_or_else(PoisonError::into_inner).audited += 1;
            tick(units.len())?;
        }
        Ok(())
    }

    /// True for a part of the units that depends on their names alone, so that an audit can be repeated.
    fn is_audited(&self, unit: &str) -> bool {
        let digest = FileDigest::of_pieces(["audit ", unit]);
        let word = digest.sha256.first_chunk::<4>().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        f64::from(word) < self.part.audit * f64::from(u32::MAX)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::folder::JobFolder;

    fn folder(path: &Path) -> UnitFolder {
        let job = serde_json::json!({ "job": "test", "version": 1 });
        JobFolder::create(path, (job.clone(), &job), &[], &mut || true).unwrap().units()
    }

    fn team(path: &Path, index: usize, audit: f64) -> Team {
        let rank = Some(Rank { index, count: Some(4), launcher: "test" });
        Team::join(folder(path), Part { rank, audit, only: None })
    }

    fn units(count: usize) -> Vec<Unit> {
        (0..count).map(|i| format!("unit {i}")).collect()
    }

    #[test]
    fn each_unit_is_computed_once_by_one_of_four() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("job");
        folder(&path);
        let (names, computed) = (units(40), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for index in 0..4 {
                let (names, computed, path) = (&names, &computed, &path);
                scope.spawn(move || {
                    let team = team(path, index, 0.0);
                    let mut compute = |unit: usize| {
                        computed.fetch_add(1, Ordering::Relaxed);
                        Ok::<_, RankError>(vec![unit as u8; unit])
                    };
                    team.complete(names, &mut compute, &mut |_| Ok(())).unwrap();
                    for (unit, name) in names.iter().enumerate() {
                        assert_eq!(team.result(name).unwrap().unwrap(), vec![unit as u8; unit]);
                    }
                });
            }
        });
        assert_eq!(computed.into_inner(), 40);
        let left = std::fs::read_dir(path.join("units")).unwrap();
        assert_eq!(
            left.map(|entry| entry.unwrap().path()).filter(|p| p.extension().unwrap() != "unit").count(),
            0
        );
    }

    #[test]
    fn an_audit_finds_a_result_that_is_consistent_and_wrong() {
        let place = tempfile::tempdir().unwrap();
        let (names, path) = (units(8), place.path().join("job"));
        let first = team(&path, 0, 0.0);
        let mut compute = |unit: usize| Ok::<_, RankError>(vec![unit as u8; 3]);
        first.complete(&names, &mut compute, &mut |_| Ok(())).unwrap();
        assert_eq!(first.computed(), 8);
        // Results of this very process are not compared.
        let auditor = team(&path, 1, 1.0);
        auditor.complete(&names, &mut compute, &mut |_| Ok(())).unwrap();
        assert_eq!(auditor.audited(), 0);
        let other = |unit: usize, bytes: &[u8]| {
            let file = folder(&path).result(&names[unit]);
            std::fs::remove_file(&file).unwrap();
            let result = UnitResult {
                worker: "node-b:7".into(),
                digest: FileDigest::of(bytes),
                bytes: bytes.to_vec(),
            };
            result.write(&file, &names[unit]).unwrap();
        };
        other(2, &[2, 2, 2]);
        auditor.complete(&names, &mut compute, &mut |_| Ok(())).unwrap();
        assert_eq!(auditor.audited(), 1);
        other(5, &[5, 5, 4]);
        let said = auditor.complete(&names, &mut compute, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(said.contains("unit 5") && said.contains("node-b:7"), "{said}");
    }

    #[test]
    fn a_worker_computes_the_units_that_it_is_given() {
        let place = tempfile::tempdir().unwrap();
        let (names, path) = (units(5), place.path().join("job"));
        let compute = |team: &Team| {
            let mut compute = |unit: usize| Ok::<_, RankError>(vec![unit as u8]);
            team.complete(&names, &mut compute, &mut |_| Ok(())).unwrap();
            team.computed()
        };
        let only = |only| Team::join(folder(&path), Part { only: Some(only), ..Part::default() });
        assert_eq!(compute(&only(3..4)), 1);
        assert_eq!(compute(&only(3..9)), 1);
        let mut none = |_| -> Result<Vec<u8>> { panic!("computed") };
        let said = only(7..9).complete(&names, &mut none, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(said.contains("expected a number below 5, got 7"), "{said}");
        assert_eq!((0..5).filter(|unit| team(&path, 0, 0.0).has(&names[*unit])).count(), 2);
        assert_eq!(compute(&team(&path, 0, 0.0)), 3);
    }

    #[test]
    fn damage_is_missing_and_replaced() {
        let place = tempfile::tempdir().unwrap();
        let (names, path) = (units(1), place.path().join("job"));
        let team = team(&path, 0, 0.0);
        let mut compute = |_| Ok::<_, RankError>(b"result".to_vec());
        team.complete(&names, &mut compute, &mut |_| Ok(())).unwrap();
        let file = folder(&path).result(&names[0]);
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert!(team.has(&names[0]));
        assert_eq!(team.result(&names[0]).unwrap(), None);
        team.replace(&names[0], b"result".to_vec()).unwrap();
        assert_eq!(team.result(&names[0]).unwrap().unwrap(), b"result");
    }

    #[test]
    fn ranges_have_no_gap() {
        for (count, most) in [(0, 4), (1, 32), (31, 32), (32, 32), (33, 32), (128, 32), (1000, 64), (5, 0)] {
            let found = ranges(count, most);
            assert!(found.len() <= most.max(1), "{count}");
            assert!(found.into_iter().flatten().eq(0..count), "{count}");
        }
    }

    #[test]
    fn alone_nothing_is_shared() {
        let alone = Team::alone();
        let mut compute = |_| -> Result<Vec<u8>> { panic!("computed") };
        alone.complete(&units(3), &mut compute, &mut |_| Ok(())).unwrap();
        assert!(!alone.is_shared() && alone.result("unit 0").unwrap().is_none() && !alone.has("unit 0"));
    }
}
