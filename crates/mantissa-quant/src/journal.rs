//! Journal of an unfinished run, from which the next run resumes bit-exactly.
//!
//! The journal is in the work folder beside the output, which survives a killed process. Its first line is a key: a
//! hash of everything that determines the output. One line follows for every unit of work (copied tensor or quantized
//! layer), with the checksum of each tensor written and the layer's report. An evaluation and every task have a line too. A run with
//! the same key reuses the units whose checksums match and computes the rest. A run with another key starts over.
//!
//! A line follows its data. Every [`BATCH`] bytes both are synced to disk, data first. After a power cut a line may
//! lack its data, which the checksum shows.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Error, FileDigest, Output, ShardedWriter, Staging};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::Result;
use crate::plan::Plan;
use crate::quality::TaskScore;
use crate::quality::{Figures, TokenSet};
use crate::report::LayerReport;

/// Bytes written between syncs.
const BATCH: u64 = 256 << 20;

/// Choice between resuming an unfinished run and starting over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// Resumes a run of the same plan on the same source.
    #[default]
    Resume,
    /// Never resumes: removes the unfinished run.
    Restart,
}

/// A finished unit of work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Unit {
    /// Copied tensor, or module of a quantized layer.
    name: String,
    /// Checksums of the written tensors, in hexadecimal.
    tensors: Vec<(String, String)>,
    /// Report of a quantized layer.
    pub(crate) report: Option<LayerReport>,
}

/// A finished evaluation. Its line follows the lines of all units.
#[derive(Debug, Serialize, Deserialize)]
struct Evaluated {
    figures: Figures,
}

/// A finished task. Its line follows the line of the evaluation.
#[derive(Debug, Serialize, Deserialize)]
struct Scored {
    scored: TaskScore,
}

/// Journal of a run, with the lines of an earlier run.
#[derive(Debug)]
pub(crate) struct Journal {
    lines: mantissa_store::Journal,
    left: BTreeMap<String, Unit>,
    evaluated: Vec<Figures>,
    scored: Vec<TaskScore>,
    recovered: usize,
    done: usize,
    unsynced: u64,
}

impl Journal {
    /// Starts the output folder `out`, or resumes a run with the same `key`.
    pub(crate) fn begin(out: &Output, key: &str, start: Start) -> Result<(Staging, Self)> {
        let mut lines = Vec::new();
        let (mut staging, resumed) = Staging::resume(out, key, &mut |left| {
            lines = mantissa_store::Journal::read(left).unwrap_or_default();
            start == Start::Resume && lines.first().is_some_and(|first| first == key)
        })?;
        let journal = if resumed {
            let units = lines.iter().skip(1).filter_map(|line| serde_json::from_str::<Unit>(line).ok());
            let left = units.map(|unit| (unit.name.clone(), unit)).collect();
            let evaluated =
                lines.iter().skip(1).filter_map(|line| serde_json::from_str::<Evaluated>(line).ok());
            let evaluated = evaluated.map(|line| line.figures).collect();
            let scored = lines.iter().skip(1).filter_map(|line| serde_json::from_str::<Scored>(line).ok());
            let scored = scored.map(|line| line.scored).collect();
            let lines = mantissa_store::Journal::reopen(staging.work())?;
            Journal { evaluated, scored, ..Journal::new(lines, left) }
        } else {
            let mut lines = mantissa_store::Journal::create(staging.work())?;
            lines.append(key)?;
            Journal::new(lines, BTreeMap::new())
        };
        staging.keep(true);
        Ok((staging, journal))
    }

    fn new(lines: mantissa_store::Journal, left: BTreeMap<String, Unit>) -> Self {
        let (evaluated, scored) = (Vec::new(), Vec::new());
        Journal { lines, left, evaluated, scored, recovered: 0, done: 0, unsynced: 0 }
    }

    /// Returns the number of units reused from an earlier run.
    pub(crate) fn recovered(&self) -> usize {
        self.recovered
    }

    /// Returns the number of finished units, reused ones included.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Returns the unit `name` of an earlier run if its bytes match the checksums.
    pub(crate) fn recover(&mut self, name: &str, writer: &mut ShardedWriter) -> Result<Option<Unit>> {
        let Some(unit) = self.left.remove(name) else { return Ok(None) };
        let parsed = unit.tensors.iter().map(|(tensor, sum)| Some((tensor.clone(), parse(sum)?)));
        let Some(tensors) = parsed.collect::<Option<Vec<_>>>() else { return Ok(None) };
        if !writer.recover(&tensors)? {
            return Ok(None);
        }
        self.recovered += 1;
        self.done += 1;
        Ok(Some(unit))
    }

    /// Records the finished unit `name`: checksums of its tensors, `bytes` in all, and its report.
    pub(crate) fn record(
        &mut self,
        name: &str,
        tensors: Vec<(String, u64)>,
        bytes: u64,
        report: Option<&LayerReport>,
        writer: &ShardedWriter,
    ) -> Result<()> {
        let tensors = tensors.into_iter().map(|(tensor, sum)| (tensor, format!("{sum:016x}"))).collect();
        let unit = Unit { name: name.to_owned(), tensors, report: report.cloned() };
        self.lines.append(&json!(unit).to_string())?;
        self.done += 1;
        self.unsynced += bytes;
        if self.unsynced >= BATCH { self.sync(writer) } else { Ok(()) }
    }

    /// Returns figures that an earlier run measured on the same windows. Key and checksums match, so its output has the
    /// same bytes.
    pub(crate) fn figures(&self, text: &TokenSet) -> Option<Figures> {
        let same = self.evaluated.iter().rfind(|figures| figures.text.sha256 == text.sha256)?;
        Some(Figures { text: text.clone(), ..same.clone() })
    }

    /// Records an evaluation.
    pub(crate) fn record_figures(&mut self, figures: &Figures) -> Result<()> {
        self.lines.append(&json!(Evaluated { figures: figures.clone() }).to_string())?;
        Ok(self.lines.sync()?)
    }

    /// Returns the scores on tasks that an earlier run recorded. Key and checksums match, so its output has the same bytes.
    pub(crate) fn scores(&self) -> &[TaskScore] {
        &self.scored
    }

    /// Records the score on a task.
    pub(crate) fn record_score(&mut self, score: &TaskScore) -> Result<()> {
        self.lines.append(&json!(Scored { scored: score.clone() }).to_string())?;
        Ok(self.lines.sync()?)
    }

    /// Syncs all finished work to disk.
    pub(crate) fn sync(&mut self, writer: &ShardedWriter) -> Result<()> {
        writer.sync()?;
        self.lines.sync()?;
        self.unsynced = 0;
        Ok(())
    }
}

fn parse(checksum: &str) -> Option<u64> {
    u64::from_str_radix(checksum, 16).ok()
}

/// Hashes everything that determines the output: version, plan without its threads, and source. Of the source it hashes
/// names, shapes and offsets of tensors, config, and length and times of weight files. The inode's change time is
/// included: no copying tool can set it back.
///
/// # Errors
/// A file of the source cannot be examined.
pub fn key(plan: &Plan, source: &ModelFiles) -> Result<String> {
    let files = source.checkpoint().files().map(file_identity).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<_> = source.checkpoint().tensors().collect();
    let Plan { job, container, linears, specs, copied, notes, options, .. } = plan;
    let decided = (job, container, linears, specs, copied, notes, options.rounding, options.max_shard_bytes);
    let text = options.calibration.as_ref().map(|set| &set.windows);
    let windows = (text, &options.held_out, options.products, options.route_all_experts);
    let config = source.config().map(ToString::to_string);
    let text =
        format!("{} {decided:?} {windows:?} {tensors:?} {config:?} {files:?}", env!("CARGO_PKG_VERSION"));
    Ok(format!("mantissa quantize 1 {}", FileDigest::of(text.as_bytes()).hex()))
}

/// Name, length, and times of modification and change in seconds and nanoseconds.
type FileIdentity = (String, u64, [i64; 4]);

fn file_identity(path: &Path) -> Result<FileIdentity> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let io = |error| Error::Io { path: path.to_owned(), operation: "look up", error };
    let found = fs::metadata(path).map_err(io)?;
    Ok((name, found.len(), [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()]))
}
