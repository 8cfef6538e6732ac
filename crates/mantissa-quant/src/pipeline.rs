//! The pipeline: a dense model in, a verified quantized model out, one layer in memory.
//!
//! Layers are read, quantized, packed and written one by one; everything else is copied in pieces. The output appears only
//! when it is complete. Nothing in it depends on threads, time or machine, nor on how often the run was interrupted: what
//! is done is written to a [`crate::journal`], from which the next run with the same plan goes on.
//!
//! The output is finished in a work folder beside its place, opened and verified there, and only then published.
//!
//! Where a run ends early, its work folder stays if resuming can help: after a kill, an interruption, and an error of the
//! environment (disk full, I/O, memory), provided that a unit of work is done. After an error in source or recipe it is
//! removed. A work folder of another plan for the same output is left where it is.

pub(crate) mod stacks;

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_store::convention::{Container, ModelFiles, gptq, modelopt, onnx};
use mantissa_store::{
    Checksum, Committed, Dtype, Error, ErrorClass, FiniteScan, Manifest, Output, ShardPlan, ShardedWriter,
    Staging, TensorMeta, disk, refuse_overlap,
};
use serde_json::{Map, Value, json};

use crate::assess;
use crate::cache_scales;
use crate::convert;
use crate::error::{QuantError, Result, Unfinished};
use crate::fold::{self, Folded};
use crate::gguf;
use crate::journal::{self, Journal, Start};
use crate::layers::Layers;
use crate::plan::Plan;
use crate::quality::{Found, QUALITY_NAME, Quality, SourceHashes, TensorReport};
use crate::report::LayerReport;
use crate::transform::{self, Prepared};
use crate::verify::Verification;

/// Bytes copied at a time.
pub(crate) const COPY: usize = 1 << 20;

/// Files beside the weights that belong to a model and are copied: everything small that is not weights.
const MAX_SIDECAR: u64 = 256 << 20;

/// Where a run stands.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Units of work done, of [`Plan::work_bytes`].
    pub done: u64,
    /// What is being worked on.
    pub tensor: &'a str,
    /// Once that is done and the output is evaluated: tokens, of [`crate::Evaluation::work`].
    pub tokens: Option<u64>,
}

impl Progress<'_> {
    /// Everything is written, and the source not yet hashed to its end.
    pub(crate) fn hashing(plan: &Plan) -> Self {
        Progress { done: plan.work_bytes(), tensor: "hash of the source", tokens: None }
    }
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Outcome {
    /// What the output is and what it lost.
    pub quality: Quality,
    /// The output folder.
    pub committed: Committed,
    /// Copied tensors and layers that were taken over from an unfinished run.
    pub resumed: usize,
    /// How long it took to make the one file of weights durable, after all of it was written. `None` of a folder, of which
    /// every tensor is made durable as soon as it is written.
    pub synced: Option<Duration>,
    /// Verification before the output was put in place, where the plan asks for it, and how long it took.
    pub verification: Option<(Verification, Duration)>,
}

/// Carries out `plan` into the folder `out`. `progress` is told of every step and may end the run: between two steps, with
/// everything done so far made durable.
///
/// # Errors
/// [`QuantError::Store`] for files, [`QuantError::Tensor`] for values that a scheme cannot hold,
/// [`QuantError::Interrupted`] where `progress` ends the run; in [`QuantError::Unfinished`] where something is kept;
/// [`QuantError::Gate`] where the output loses more than [`Plan::evaluation`] allows. The old content of `out`, if any, is then still in place.
pub fn run(
    plan: &Plan,
    source: &ModelFiles,
    out: &Output,
    start: Start,
    progress: &mut (dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send),
) -> Result<Outcome> {
    if let Some(layout) = &plan.gguf {
        return gguf::run(plan, layout, source, out, progress);
    }
    refuse_overlap(source.dir(), out.path())?;
    let config = plan.output_config(source)?;
    let shards = ShardPlan::new(plan.specs.clone(), plan.options.max_shard_bytes)?;
    let key = journal::key(plan, source)?;
    let (mut staging, mut journal) = Journal::begin(out, &key, start)?;
    sweep(staging.path(), &shards)?;
    let (dir, names) = (staging.path().to_owned(), shards.shards().iter().map(|s| s.file_name.clone()));
    let names: Vec<_> = names.collect();
    let stored = || Ok(ModelFiles::unfinished(&dir, names.iter().map(String::as_str), config.clone())?);
    let mut tick = |stage: &str| {
        let tensor = format!("{}: {stage}", plan.recipe.method_name());
        progress(Progress { done: 0, tensor: &tensor, tokens: None })
    };
    let filled = transform::prepare(plan, source, &mut tick).and_then(|prepared| {
        let folded = Folded::new(source, &prepared.folds);
        let layers = Layers::new(plan, &folded, Box::new(&stored)).prepared(&prepared);
        let writer = ShardedWriter::resume(staging.path(), shards, plan.metadata());
        let job =
            Job { plan, source, folded: &folded, prepared: &prepared, config: &config, stored: &stored };
        job.fill(&mut staging, &mut journal, writer, layers, progress)
    });
    let sealed = filled.and_then(|quality| {
        convert::prove(plan, source, staging.path())?;
        assess::gate(plan, &quality, out.path(), Some(staging.work()))?;
        staging.seal(run_fields(plan, source)?)?;
        let verification = assess::sealed(plan, &quality, staging.path(), out.path())?;
        Ok((quality, verification))
    });
    match sealed {
        Ok((quality, verification)) => {
            let kept = staging.work().to_owned();
            let committed = staging.publish().map_err(|e| unfinished(e.into(), &kept, journal.done()))?;
            let resumed = journal.recovered();
            Ok(Outcome { quality, committed, resumed, synced: None, verification })
        }
        // The next run with the same plan may be allowed to lose more.
        Err(error @ QuantError::Gate(_)) => Err(error),
        Err(error) => {
            let keep = error.class() == ErrorClass::Environment && journal.done() > 0;
            staging.keep(keep);
            Err(if keep { unfinished(error, staging.work(), journal.done()) } else { error })
        }
    }
}

fn unfinished(error: QuantError, kept: &Path, done: usize) -> QuantError {
    // A failure of the last step, which nothing can be taken over from, leaves no folder.
    if !kept.exists() {
        return error;
    }
    QuantError::Unfinished(Box::new(Unfinished { error, kept: kept.to_owned(), done }))
}

/// Removes from an adopted folder whatever a resumed run does not go on with: everything but its weight files
/// is written anew, and what else lies there is not of this run.
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

/// What a run works from.
struct Job<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    /// The source as it is quantized.
    folded: &'a Folded<'a>,
    prepared: &'a Prepared,
    /// The output's.
    config: &'a Value,
    /// Opens the output as far as it is written.
    stored: &'a dyn Fn() -> Result<ModelFiles>,
}

impl Job<'_> {
    /// Writes everything but the manifest.
    fn fill(
        &self,
        staging: &mut Staging,
        journal: &mut Journal,
        mut writer: ShardedWriter,
        layers: Layers<'_>,
        progress: &mut (dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send),
    ) -> Result<Quality> {
        let Job { plan, source, folded, prepared, config, stored } = *self;
        let found = SourceHashes::beside(source, plan.threads(), |hashes| {
            let mut run =
                Run { plan, folded, layers, writer: &mut writer, journal, progress: &mut *progress, done: 0 };
            run.copy_tensors()?;
            run.write_dense()?;
            let layers = run.quantize_layers()?;
            run.write_cache_scales(stored)?;
            drop(run);
            let weights = writer.finish()?.into_iter().collect();
            let tensors = plan.copied.iter().map(|meta| TensorReport::kept(meta, folded)).collect();
            let source = hashes.wait(&mut || progress(Progress::hashing(plan)))?;
            Ok(Found { layers, tensors, source, weights })
        })?;
        for (file, digest) in &found.weights {
            staging.record(file, *digest);
        }
        write_json(staging, "config.json", config)?;
        if let Some((name, content)) = plan.side_config(config)? {
            write_json(staging, name, &content)?;
        }
        if let Some(record) = &prepared.record {
            staging.write(fold::FILE_NAME, &record.to_json()?)?;
        }
        if plan.container == Container::Onnx {
            // It says where in the weight files each tensor lies.
            let graph = onnx::graph(&ModelFiles::open(staging.path())?)?;
            staging.write(onnx::FILE_NAME, &graph.unwrap_or_default())?;
        }
        // A GGUF file has nothing beside it that is its own.
        if source.gguf().is_none() {
            copy_sidecars(source.dir(), staging)?;
        }
        let mut quality = Quality::new(plan, source, found);
        quality.evaluation = assess::figures(plan, source, staging.path(), Some(journal), progress)?;
        staging.write(QUALITY_NAME, quality.to_json()?.as_bytes())?;
        Ok(quality)
    }
}

struct Run<'a, 'p> {
    plan: &'a Plan,
    folded: &'a Folded<'a>,
    layers: Layers<'a>,
    writer: &'a mut ShardedWriter,
    journal: &'a mut Journal,
    progress: &'p mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    done: u64,
}

impl Run<'_, '_> {
    fn advance(&mut self, work: u64, tensor: &str) -> Result<()> {
        self.done += work;
        if (self.progress)(Progress { done: self.done, tensor, tokens: None }).is_continue() {
            return Ok(());
        }
        self.journal.sync(self.writer)?;
        Err(QuantError::Interrupted)
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
        let Some((head, embedding)) = self.plan.untied() else { return Ok(()) };
        let Some(meta) = self.folded.files().checkpoint().get(&embedding).cloned() else { return Ok(()) };
        let copied = self.plan.copied.iter().any(|meta| meta.name == head);
        if !copied && self.journal.recover(&head, self.writer)?.is_none() {
            self.write_folded(&head, &meta.shape, meta.dtype)?;
        }
        Ok(())
    }

    /// A tensor that a transform changes, or adds.
    fn write_folded(&mut self, name: &str, shape: &[usize], dtype: Dtype) -> Result<()> {
        let bytes = self.folded.bytes(name, shape, dtype)?;
        self.writer.write(name, &bytes)?;
        let written = vec![(name.to_owned(), Checksum::of(&bytes))];
        self.journal.record(name, written, bytes.len() as u64, None, self.writer)
    }

    /// Tensors that a change of container writes under another name, order or type.
    fn write_dense(&mut self) -> Result<()> {
        for dense in self.plan.conversion.iter().flat_map(|conversion| &conversion.dense) {
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
                numbers.finish(self.folded.path(), &meta.name)?;
                let written = vec![(meta.name.clone(), checksum.finish())];
                self.journal.record(&meta.name, written, meta.len, None, self.writer)?;
            }
            self.advance(n as u64, &meta.name)?;
        }
        Ok(())
    }

    fn quantize_layers(&mut self) -> Result<Vec<LayerReport>> {
        if self.plan.container == Container::Mxfp4 {
            return self.quantize_stacks();
        }
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized() {
            let recovered = self.journal.recover(&info.module, self.writer)?;
            if let Some(report) = recovered.and_then(|unit| unit.report) {
                self.layers.recovered(info)?;
                reports.push(report);
                self.advance(work_of(info), &info.module)?;
                continue;
            }
            reports.push(self.quantize_layer(info, scheme)?);
            self.advance(work_of(info), &info.module)?;
        }
        Ok(reports)
    }

    /// Scales or levels of keys and values, which are found with the model as it is stored.
    fn write_cache_scales(&mut self, stored: &dyn Fn() -> Result<ModelFiles>) -> Result<()> {
        const UNIT: &str = "scales of keys and values";
        let plan = self.plan;
        if !cache_scales::stores(&plan.recipe) {
            return Ok(());
        }
        if self.journal.recover(UNIT, self.writer)?.is_some() {
            return self.advance(0, UNIT);
        }
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: UNIT, tokens: None });
        let tensors = match cache_scales::tensors(plan, self.folded.files(), stored, &mut tick) {
            Err(QuantError::Interrupted) => {
                self.journal.sync(self.writer)?;
                return Err(QuantError::Interrupted);
            }
            tensors => tensors?,
        };
        let mut written = Vec::with_capacity(tensors.len());
        for (name, bytes) in tensors {
            self.writer.write(&name, &bytes)?;
            written.push((name, Checksum::of(&bytes)));
        }
        self.journal.record(UNIT, written, 0, None, self.writer)?;
        self.advance(0, UNIT)
    }

    fn quantize_layer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<LayerReport> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: &info.module, tokens: None });
        let (tensors, report) = match self.layers.quantize(info, scheme, &mut tick) {
            Err(QuantError::Interrupted) => {
                self.journal.sync(self.writer)?;
                return Err(QuantError::Interrupted);
            }
            quantized => quantized?,
        };
        let mut written = Vec::with_capacity(tensors.len());
        let mut total = 0;
        for (name, bytes) in tensors {
            self.writer.write(&name, &bytes)?;
            total += bytes.len() as u64;
            written.push((name, Checksum::of(&bytes)));
        }
        self.journal.record(&info.module, written, total, Some(&report), self.writer)?;
        Ok(report)
    }
}

/// The measure of a layer in [`Plan::work_bytes`].
pub(crate) fn work_of(info: &LinearInfo) -> u64 {
    (info.rows * info.cols) as u64 * 2
}

fn write_json(staging: &mut Staging, file: &str, value: &Value) -> Result<()> {
    Ok(staging.write(file, format!("{value:#}\n").as_bytes())?)
}

/// Copies tokenizer, generation settings, licence and the like: regular files of the source folder that are neither
/// weights nor written by the pipeline itself. Names are sorted, so that the manifest is the same every time.
pub(crate) fn copy_sidecars(from: &Path, staging: &mut Staging) -> Result<()> {
    const WEIGHTS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "h5", "msgpack"];
    let io = |error| Error::Io { path: from.to_owned(), operation: "list folder", error };
    let entries = std::fs::read_dir(from).map_err(io)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let ours = name.ends_with(".index.json")
            || name.starts_with("mantissa-")
            || ["config.json", gptq::FILE_NAME, modelopt::FILE_NAME, QUALITY_NAME].contains(&name)
            // AutoRound's and EXL3's description of how their weights are stored: not how these are.
            || name == "quantization_config.json";
        let small = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_SIDECAR);
        if ours || !small || name.starts_with('.') || WEIGHTS.contains(&extension) {
            continue;
        }
        staging.copy(&path, name)?;
    }
    Ok(())
}

/// What the manifest says of the run that carries out `plan` on `source`, and of those that made `source`.
///
/// # Errors
/// A malformed manifest of `source`.
pub(crate) fn run_fields(plan: &Plan, source: &ModelFiles) -> Result<Map<String, Value>> {
    let fields = json!({
        "command": if plan.conversion.is_some() { "convert" } else { "quantize" },
        "recipe": plan.recipe.label(),
        "method": plan.recipe.method_name(),
        "weights": plan.recipe.weights.to_string(),
        "activations": plan.recipe.activations.as_ref().map(ToString::to_string),
        "kv": plan.recipe.cache(),
        "container": plan.container.name(),
    });
    let fields = fields.as_object().cloned().unwrap_or_default();
    Ok(Manifest::run_after(source.dir(), fields)?)
}
