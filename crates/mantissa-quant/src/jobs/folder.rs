//! Output folder in the Hugging Face layout.
//!
//! Layers are read, quantized, packed and written one by one; all other tensors are copied in pieces. The output does
//! not depend on threads, time, machine or interruptions. Every finished unit is recorded in a [`crate::journal`], from
//! which the next run with the same plan resumes.
//!
//! If a run ends early with at least one finished unit, its work folder is kept if resuming can help: after a kill, an
//! interruption, or an error of the environment (disk full, I/O, memory). After an error in source or recipe it is
//! removed. Work folders of other plans for the same output are not touched.

mod stacks;
mod tuned;

use std::path::{Path, PathBuf};

use mantissa_model::{LinearInfo, LinearKind};
use mantissa_num::Scheme;
use mantissa_store::convention::{Experts, ModelFiles};
use mantissa_store::{
    Checksum, Dtype, Error, ErrorClass, FiniteScan, ShardPlan, ShardedWriter, Staging, TensorMeta, disk,
};
use serde_json::{Map, Value};

use super::describe::Contents;
use super::task::{Destination, Published, Task};
use crate::cache_scales;
use crate::error::{QuantError, Result, Unfinished};
use crate::fold::Folded;
use crate::journal::{self, Journal, Start};
use crate::layers::Layers;
use crate::measure::hashes::SourceHashes;
use crate::plan::{Plan, WeightJob, work_of};
use crate::progress::{Progress, RESUMED, Tell};
use crate::quality::{QUALITY_NAME, Quality, TensorReport};
use crate::report::LayerReport;
use crate::sidecars::{copy_sidecars, write_json, write_tokenizer};
use crate::tables;
use crate::transform::{self, Prepared};

/// Bytes copied at a time.
const COPY: usize = 1 << 20;

/// A folder being written.
pub(super) struct Folder {
    staging: Staging,
    journal: Journal,
    shards: ShardPlan,
    /// `config.json` of the output.
    config: Value,
    /// Result of the transform, once the weights are written.
    prepared: Prepared,
}

impl Folder {
    /// Starts the work folder, or resumes the work folder of an unfinished run with the same plan.
    ///
    /// # Errors
    /// The source changed or cannot be examined; I/O.
    pub(super) fn begin(task: &Task<'_>, start: Start) -> Result<Self> {
        let Task { plan, source, out, .. } = *task;
        let config = plan.output_config(source)?;
        let shards = ShardPlan::new(plan.specs.clone(), plan.options.max_shard_bytes)?;
        let key = journal::key(plan, source)?;
        let (staging, journal) = Journal::begin(out, &key, start)?;
        sweep(staging.path(), &shards)?;
        Ok(Folder { staging, journal, shards, config, prepared: Prepared::default() })
    }

    /// Writes the weights.
    fn write_weights(
        &mut self,
        task: &Task<'_>,
        prepared: &Prepared,
        progress: &mut Tell<'_>,
    ) -> Result<Contents> {
        let Task { plan, source, .. } = *task;
        let folded = Folded::new(source, &prepared.folds);
        let Folder { staging, journal, shards, config, .. } = self;
        let names: Vec<_> = shards.shards().iter().map(|shard| shard.file_name.as_str()).collect();
        let stored = || Ok(ModelFiles::unfinished(staging.path(), names.iter().copied(), config.clone())?);
        let layers = Layers::new(plan, &folded, Box::new(&stored)).prepared(prepared).given(task.shared);
        let mut writer = ShardedWriter::resume(staging.path(), shards.clone(), plan.metadata());
        SourceHashes::beside(source, plan.threads(), |hashes| {
            // The source is hashed on another thread meanwhile.
            let (folded, writing) = (&folded, &mut writer);
            let mut run =
                Run { plan, folded, layers, writer: writing, journal, progress: &mut *progress, done: 0 };
            run.copy_tensors()?;
            run.write_dense()?;
            let layers = run.quantize_layers()?;
            let tables = run.quantize_tables()?;
            run.write_cache_scales(&stored)?;
            drop(run);
            let weights = writer.finish()?.into_iter().collect();
            let tensors = plan.copied.iter().map(|meta| TensorReport::kept(meta, folded)).collect();
            let source = hashes.wait(&mut || progress(Progress::hashing(plan.work_bytes())))?;
            Ok(Contents { layers, tables, tensors, source, weights, notes: Vec::new() })
        })
    }

    /// Writes the files beside the weights.
    fn describe(&mut self, task: &Task<'_>, prepared: &Prepared) -> Result<()> {
        let Task { plan, source, .. } = *task;
        let Folder { staging, config, .. } = self;
        write_json(staging, "config.json", config)?;
        if let Some((name, content)) = plan.side_config(config)? {
            write_json(staging, name, &content)?;
        }
        if let Some(record) = &prepared.record {
            staging.write(transform::record::FILE_NAME, &record.to_json()?)?;
        }
        let finished = || ModelFiles::open(staging.path());
        if let Some((name, bytes)) = plan.container.companion(&finished)? {
            staging.write(name, &bytes)?;
        }
        match source.gguf() {
            None => copy_sidecars(source.dir(), staging)?,
            Some(model) => write_tokenizer(model, staging)?,
        }
        Ok(())
    }
}

impl Destination for Folder {
    fn fill(&mut self, task: &Task<'_>, progress: &mut Tell<'_>) -> Result<Contents> {
        let plan = task.plan;
        let mut tick = |stage: &str| {
            let tensor = format!("{}: {stage}", plan.job.method_name());
            progress(Progress { done: 0, tensor: &tensor, tokens: None, items: None })
        };
        let own = match task.shared {
            Some(_) => Prepared::default(),
            None => transform::prepare(plan, task.source, &mut tick)?,
        };
        let prepared = task.shared.map_or(&own, |shared| shared.prepared);
        let mut found = self.write_weights(task, prepared, progress)?;
        self.tune(task, prepared, &mut found, progress)?;
        for (file, digest) in &found.weights {
            self.staging.record(file, *digest);
        }
        self.describe(task, prepared)?;
        self.prepared = own;
        Ok(found)
    }

    fn staged(&self) -> PathBuf {
        self.staging.path().to_owned()
    }

    fn prepared(&self) -> Option<&Prepared> {
        Some(&self.prepared)
    }

    fn leave(mut self, keep: bool) {
        self.staging.keep(keep && self.journal.done() > 0);
    }

    fn journal(&mut self) -> Option<&mut Journal> {
        Some(&mut self.journal)
    }

    fn kept(&self) -> Option<&Path> {
        Some(self.staging.work())
    }

    fn seal(&mut self, quality: &Quality, run: Map<String, Value>) -> Result<()> {
        self.staging.write(QUALITY_NAME, quality.to_json()?.as_bytes())?;
        Ok(self.staging.seal(run)?)
    }

    fn publish(self) -> Result<Published> {
        let (kept, done) = (self.staging.work().to_owned(), self.journal.done());
        let committed = self.staging.publish().map_err(|error| unfinished(error.into(), &kept, done))?;
        Ok(Published { committed, resumed: self.journal.recovered(), synced: None })
    }

    fn abandon(mut self, error: QuantError) -> QuantError {
        // Kept: the next run with the same plan may have a higher limit.
        if matches!(error, QuantError::Gate(_)) {
            return error;
        }
        let keep = error.class() == ErrorClass::Environment && self.journal.done() > 0;
        self.staging.keep(keep);
        if keep { unfinished(error, self.staging.work(), self.journal.done()) } else { error }
    }
}

fn unfinished(error: QuantError, kept: &Path, done: usize) -> QuantError {
    // The last step can fail after the folder was moved; then nothing can be resumed.
    if !kept.exists() {
        return error;
    }
    QuantError::Unfinished(Box::new(Unfinished { error, kept: kept.to_owned(), done }))
}

/// Removes everything but the plan's weight files from a resumed folder. All other files are written again, and unknown
/// ones do not belong to this run.
fn sweep(dir: &Path, shards: &ShardPlan) -> Result<()> {
    let io = |path: &Path, error| Error::Io { path: path.to_owned(), operation: "clean up", error };
    for entry in std::fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let path = entry.map_err(|e| io(dir, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let ours = shards.shards().iter().any(|s| s.file_name == name);
        if !ours {
            disk::remove_all(&path).map_err(|e| io(&path, e))?;
        }
    }
    Ok(())
}

/// State of writing the weights.
struct Run<'a, 'p> {
    plan: &'a Plan,
    folded: &'a Folded<'a>,
    layers: Layers<'a>,
    writer: &'a mut ShardedWriter,
    journal: &'a mut Journal,
    progress: &'p mut Tell<'p>,
    done: u64,
}

impl Run<'_, '_> {
    fn advance(&mut self, work: u64, tensor: &str) -> Result<()> {
        self.done += work;
        let continues =
            (self.progress)(Progress { done: self.done, tensor, tokens: None, items: None }).is_continue();
        self.sync_if_interrupted(if continues { Ok(()) } else { Err(QuantError::Interrupted) })
    }

    /// Syncs finished work to disk if `result` is an interruption.
    fn sync_if_interrupted<T>(&mut self, result: Result<T>) -> Result<T> {
        if matches!(result, Err(QuantError::Interrupted)) {
            self.journal.sync(self.writer)?;
        }
        result
    }

    fn copy_tensors(&mut self) -> Result<()> {
        let mut buffer = vec![0; COPY];
        for meta in &self.plan.copied {
            match self.journal.recover(&meta.name, self.writer)? {
                Some(_) => self.advance(meta.len, &meta.name)?,
                None if self.folded.changes(&meta.name) => {
                    self.write_folded(&meta.name, &meta.shape, meta.dtype)?;
                    self.advance(meta.len, &meta.name)?;
                }
                None => self.copy_tensor(meta, &mut buffer)?,
            }
        }
        let Some((head, embedding)) = &self.plan.untied else { return Ok(()) };
        let quantized = |(info, _): (&LinearInfo, &Scheme)| info.kind == LinearKind::Head;
        if self.plan.quantized_tables().any(quantized) {
            return Ok(());
        }
        // An untied head is not among the source's tensors: it is made from the embedding.
        let Some(meta) = self.folded.files().checkpoint().get(embedding).cloned() else { return Ok(()) };
        let copied = self.plan.copied.iter().any(|meta| meta.name == *head);
        if !copied && self.journal.recover(head, self.writer)?.is_none() {
            self.write_folded(head, &meta.shape, meta.dtype)?;
        }
        Ok(())
    }

    /// Writes a tensor that a transform changes or adds.
    fn write_folded(&mut self, name: &str, shape: &[usize], dtype: Dtype) -> Result<()> {
        let bytes = self.folded.bytes(name, shape, dtype)?;
        self.writer.write(name, &bytes)?;
        let written = vec![(name.to_owned(), Checksum::of(&bytes))];
        self.journal.record(name, written, bytes.len() as u64, None, self.writer)
    }

    /// Writes tensors that a conversion renames, reorders or casts.
    fn write_dense(&mut self) -> Result<()> {
        for dense in &self.plan.dense {
            let name = &dense.info.name;
            if self.journal.recover(name, self.writer)?.is_some() {
                continue;
            }
            let bytes = dense.bytes(self.folded.files(), &self.plan.config)?;
            self.writer.write(name, &bytes)?;
            let written = vec![(name.clone(), Checksum::of(&bytes))];
            self.journal.record(name, written, bytes.len() as u64, None, self.writer)?;
            self.advance(0, name)?;
        }
        Ok(())
    }

    fn copy_tensor(&mut self, meta: &TensorMeta, buffer: &mut [u8]) -> Result<()> {
        let mut at = 0;
        let (mut checksum, mut numbers) = (Checksum::default(), FiniteScan::new(meta.dtype));
        if meta.len == 0 {
            self.writer.write(&meta.name, &[])?;
        }
        while at < meta.len {
            let n = usize::try_from(meta.len - at).unwrap_or(usize::MAX).min(buffer.len());
            self.folded.files().checkpoint().read_range(&meta.name, at, &mut buffer[..n])?;
            self.writer.write_range(&meta.name, at, &buffer[..n])?;
            checksum.update(&buffer[..n]);
            numbers.update(&buffer[..n]);
            at += n as u64;
            if at == meta.len {
                // Recorded before the progress call, so that an interruption there does not lose the tensor.
                numbers.finish(self.folded.path(), &meta.name)?;
                let written = vec![(meta.name.clone(), checksum.finish())];
                self.journal.record(&meta.name, written, meta.len, None, self.writer)?;
            }
            self.advance(n as u64, &meta.name)?;
        }
        Ok(())
    }

    fn quantize_layers(&mut self) -> Result<Vec<LayerReport>> {
        if self.plan.container.facts().experts == Experts::Stacked {
            return self.quantize_stacks();
        }
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized() {
            let recovered = self.journal.recover(&info.module, self.writer)?;
            if let Some(report) = recovered.and_then(|unit| unit.report) {
                self.layers.recovered(info)?;
                reports.push(report);
                self.advance(work_of(info), RESUMED)?;
                continue;
            }
            reports.push(self.quantize_layer(info, scheme)?);
            self.advance(work_of(info), &info.module)?;
        }
        Ok(reports)
    }

    /// Quantizes embedding and head, as far as the plan does.
    fn quantize_tables(&mut self) -> Result<Vec<LayerReport>> {
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized_tables() {
            let recovered = self.journal.recover(&info.module, self.writer)?;
            let report = match (recovered.and_then(|unit| unit.report), &self.plan.job) {
                (Some(report), _) => report,
                // A conversion keeps the codes of tables as those of layers.
                (None, WeightJob::Convert { .. }) => self.quantize_layer(info, scheme)?,
                (None, _) => {
                    let (tensors, report) = tables::quantize(self.plan, self.folded, info, scheme)?;
                    let (written, total) = self.write_all(tensors)?;
                    self.journal.record(&info.module, written, total, Some(&report), self.writer)?;
                    report
                }
            };
            reports.push(report);
            self.advance(work_of(info), &info.module)?;
        }
        Ok(reports)
    }

    /// Writes scales or levels of keys and values, calibrated with the stored model.
    fn write_cache_scales(&mut self, stored: &dyn Fn() -> Result<ModelFiles>) -> Result<()> {
        const UNIT: &str = "scales of keys and values";
        let plan = self.plan;
        if !plan.stores_cache_scales() {
            return Ok(());
        }
        if self.journal.recover(UNIT, self.writer)?.is_some() {
            return self.advance(0, UNIT);
        }
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: UNIT, tokens: None, items: None });
        let tensors = cache_scales::tensors(plan, self.folded.files(), stored, &mut tick);
        let tensors = self.sync_if_interrupted(tensors)?;
        let (written, _) = self.write_all(tensors)?;
        self.journal.record(UNIT, written, 0, None, self.writer)?;
        self.advance(0, UNIT)
    }

    /// Writes tensors and returns their checksums and total size in bytes.
    fn write_all(&mut self, tensors: Vec<(String, Vec<u8>)>) -> Result<(Vec<(String, u64)>, u64)> {
        let (mut written, mut total) = (Vec::with_capacity(tensors.len()), 0);
        for (name, bytes) in tensors {
            self.writer.write(&name, &bytes)?;
            total += bytes.len() as u64;
            written.push((name, Checksum::of(&bytes)));
        }
        Ok((written, total))
    }

    fn quantize_layer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<LayerReport> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: &info.module, tokens: None, items: None });
        let quantized = self.layers.quantize(info, scheme, &mut tick);
        let (tensors, report) = self.sync_if_interrupted(quantized)?;
        let (written, total) = self.write_all(tensors)?;
        self.journal.record(&info.module, written, total, Some(&report), self.writer)?;
        Ok(report)
    }
}
