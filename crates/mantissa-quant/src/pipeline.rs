//! The pipeline: a dense model in, a verified quantized model out, one layer in memory.
//!
//! Layers are read, quantized, packed and written one by one; everything else is copied in pieces. The output appears only
//! when it is complete. Nothing in it depends on threads, time or machine, nor on how often the run was interrupted: what
//! is done is written to a [`crate::journal`], from which the next run with the same plan goes on.
//!
//! Where a run ends early, its staging folder stays if going on can help: after a kill, an interruption, and an error of the
//! environment (disk full, I/O, memory), provided that a unit of work is done. After an error in source or recipe it is
//! removed, and so is whatever another run has left for the same output.

use std::ops::ControlFlow;
use std::path::Path;

use mantissa_model::{FusedGroup, LinearInfo};
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{
    Checksum, Committed, Error, ErrorClass, FiniteScan, ShardPlan, ShardedWriter, Staging, TensorMeta,
    refuse_overlap,
};
use serde_json::{Map, Value, json};

use crate::error::{QuantError, Result, Unfinished};
use crate::gguf;
use crate::journal::{self, Journal, Start};
use crate::plan::Plan;
use crate::report::{LayerReport, Report};
use crate::rtn;
use crate::source::{self, DenseError, DenseTensor};

/// Name of the error report beside the weights.
pub const REPORT_NAME: &str = "mantissa-report.json";

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
}

/// What a run leaves behind.
#[derive(Debug)]
pub struct Outcome {
    /// Errors by layer.
    pub report: Report,
    /// The output folder.
    pub committed: Committed,
    /// Copied tensors and layers that were taken over from an unfinished run.
    pub resumed: usize,
}

/// Carries out `plan` into the folder `out`. `progress` is told of every step and may end the run: between two steps, with
/// everything done so far made durable.
///
/// # Errors
/// [`QuantError::Store`] for files, [`QuantError::Tensor`] for values that a scheme cannot hold,
/// [`QuantError::Interrupted`] where `progress` ends the run; in [`QuantError::Unfinished`] where something is kept. The
/// old content of `out`, if any, is then still in place.
pub fn run(
    plan: &Plan,
    source: &ModelFiles,
    out: &Path,
    start: Start,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Outcome> {
    if let Some(layout) = &plan.gguf {
        return gguf::run(plan, layout, source, out, progress);
    }
    refuse_overlap(source.dir(), out)?;
    let shards = ShardPlan::new(plan.specs.clone(), plan.options.max_shard_bytes)?;
    let key = journal::key(plan, source)?;
    let (mut staging, mut journal) = Journal::begin(out, &key, start)?;
    sweep(staging.path(), &shards)?;
    let writer = ShardedWriter::resume(staging.path(), shards, plan.metadata());
    match fill(plan, source, &mut staging, &mut journal, writer, progress) {
        Ok(report) => {
            let kept = staging.path().to_owned();
            let committed =
                staging.commit(run_fields(plan)).map_err(|e| unfinished(e.into(), &kept, journal.done()))?;
            Ok(Outcome { report, committed, resumed: journal.recovered() })
        }
        Err(error) => {
            let keep = error.class() == ErrorClass::Environment && journal.done() > 0;
            staging.keep(keep);
            Err(if keep { unfinished(error, staging.path(), journal.done()) } else { error })
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

/// Removes from an adopted folder whatever a resumed run does not go on with: everything but its weight files and journal
/// is written anew, and what else lies there is not of this run.
fn sweep(dir: &Path, shards: &ShardPlan) -> Result<()> {
    let io = |path: &Path, error| Error::Io { path: path.to_owned(), operation: "clean up", error };
    for entry in std::fs::read_dir(dir).map_err(|e| io(dir, e))? {
        let path = entry.map_err(|e| io(dir, e))?.path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        let ours =
            name == mantissa_store::JOURNAL_NAME || shards.shards().iter().any(|s| s.file_name == name);
        if !ours {
            let removed =
                if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.map_err(|e| io(&path, e))?;
        }
    }
    Ok(())
}

/// Writes everything but the manifest.
fn fill(
    plan: &Plan,
    source: &ModelFiles,
    staging: &mut Staging,
    journal: &mut Journal,
    mut writer: ShardedWriter,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Report> {
    let layers = Layers::new(plan, source);
    let mut run = Run { plan, source, layers, writer: &mut writer, journal, progress, done: 0 };
    run.copy_tensors()?;
    let layers = run.quantize_layers()?;
    for (file, digest) in writer.finish()? {
        staging.record(file, digest);
    }
    let report = Report::new(plan, layers);
    write_json(staging, "config.json", &plan.output_config(source)?)?;
    write_json(staging, REPORT_NAME, &json!(report))?;
    copy_sidecars(source.dir(), staging)?;
    Ok(report)
}

struct Run<'a, 'p> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    layers: Layers<'a>,
    writer: &'a mut ShardedWriter,
    journal: &'a mut Journal,
    progress: &'p mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    done: u64,
}

impl Run<'_, '_> {
    fn advance(&mut self, work: u64, tensor: &str) -> Result<()> {
        self.done += work;
        if (self.progress)(Progress { done: self.done, tensor }).is_continue() {
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
                None => self.copy_tensor(meta, &mut buffer)?,
            }
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
            self.source.checkpoint().read_range(&meta.name, at, &mut buffer[..n])?;
            self.writer.write_range(&meta.name, at, &buffer[..n])?;
            checksum.update(&buffer[..n]);
            numbers.update(&buffer[..n]);
            at += n as u64;
            if at == meta.len {
                numbers.finish(self.source.dir(), &meta.name)?;
                let written = vec![(meta.name.clone(), checksum.finish())];
                self.journal.record(&meta.name, written, meta.len, None, self.writer)?;
            }
            self.advance(n as u64, &meta.name)?;
        }
        Ok(())
    }

    fn quantize_layers(&mut self) -> Result<Vec<LayerReport>> {
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized() {
            let recovered = self.journal.recover(&info.module, self.writer)?;
            if let Some(report) = recovered.and_then(|unit| unit.report) {
                reports.push(report);
                self.advance(work_of(info), &info.module)?;
                continue;
            }
            reports.push(self.quantize_layer(info, scheme)?);
            self.advance(work_of(info), &info.module)?;
        }
        Ok(reports)
    }

    fn quantize_layer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<LayerReport> {
        let (tensors, report) = self.layers.quantize(info, scheme)?;
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

/// The tensors that a layer becomes, by name, and its error.
type QuantizedLayer = (Vec<(String, Vec<u8>)>, LayerReport);

/// The layers of a plan, quantized one after another.
pub(crate) struct Layers<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    /// The tensor-wide scale of the last group. Fused partners follow each other, so that one is enough.
    shared: Option<((usize, FusedGroup), Option<f32>)>,
}

impl<'a> Layers<'a> {
    pub(crate) fn new(plan: &'a Plan, source: &'a ModelFiles) -> Self {
        Layers { plan, source, shared: None }
    }

    /// Reads a layer and quantizes it into the tensors of the plan's container.
    pub(crate) fn quantize(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<QuantizedLayer> {
        let outer = self.outer(info, scheme)?;
        let (w, threads) = (self.open(info)?, self.plan.options.threads);
        let quantized = rtn::quantize_source(scheme, &w, info.rows, info.cols, outer, threads);
        let (q, stats) = quantized.map_err(|error| self.dense_error(info, error))?;
        let plan = self.plan.linear_plan(info, scheme);
        let tensors = self.plan.container.tensors(&plan, &q);
        let tensors = tensors.map_err(|e| self.tensor_error_text(info, e.to_string()))?;
        Ok((tensors, LayerReport::new(info, scheme, stats.report())))
    }

    /// The tensor-wide scale that a layer shares with its fused partners, where it has one.
    fn outer(&mut self, info: &LinearInfo, scheme: &Scheme) -> Result<Option<f32>> {
        let Some(group) = info.kind.fused().filter(|_| scheme.has_outer_scale()) else { return Ok(None) };
        if let Some((key, outer)) = self.shared
            && key == (info.layer, group)
        {
            return Ok(outer);
        }
        let outer = self.shared_outer(info.layer, group, scheme)?;
        self.shared = Some(((info.layer, group), outer));
        Ok(outer)
    }

    /// The tensor-wide scale of fused partners. vLLM runs q, k and v (gate and up) as one matrix with one global scale.
    fn shared_outer(&self, layer: usize, group: FusedGroup, scheme: &Scheme) -> Result<Option<f32>> {
        let mut amaxes = Vec::new();
        for (info, partner) in self.plan.quantized() {
            if info.layer == layer && info.kind.fused() == Some(group) && partner.format == scheme.format {
                let (len, threads) = (info.rows * info.cols, self.plan.options.threads);
                let amax = source::amax(&self.open(info)?, len, threads);
                amaxes.push(amax.map_err(|error| self.dense_error(info, error))?);
            }
        }
        Ok(rtn::shared_outer_scale(scheme, amaxes))
    }

    fn open(&self, info: &LinearInfo) -> Result<DenseTensor<'_>> {
        let name = format!("{}.weight", info.module);
        Ok(DenseTensor::open(self.source, &name, &[info.rows, info.cols])?)
    }

    fn dense_error(&self, info: &LinearInfo, error: DenseError) -> QuantError {
        match error {
            // A panel knows of its own elements; the message is about the whole tensor.
            DenseError::Store(error @ Error::NonFinite { .. }) => {
                let whole = source::require_finite(self.source, &format!("{}.weight", info.module));
                whole.err().unwrap_or(error).into()
            }
            DenseError::Store(error) => error.into(),
            DenseError::Tensor(error) => {
                let (path, tensor) = (self.source.dir().to_owned(), format!("{}.weight", info.module));
                QuantError::Tensor { path, tensor, error }
            }
        }
    }

    fn tensor_error_text(&self, info: &LinearInfo, what: String) -> QuantError {
        Error::field(self.source.dir(), &info.module, what, "a scheme that the container holds", "").into()
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
fn copy_sidecars(from: &Path, staging: &mut Staging) -> Result<()> {
    const WEIGHTS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "h5", "msgpack"];
    let io = |error| Error::Io { path: from.to_owned(), operation: "list folder", error };
    let entries = std::fs::read_dir(from).map_err(io)?;
    let mut paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    for path in paths {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let ours = name.ends_with(".index.json") || name.starts_with("mantissa-") || name == "config.json";
        let small = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_SIDECAR);
        if ours || !small || name.starts_with('.') || WEIGHTS.contains(&extension) {
            continue;
        }
        staging.copy(&path, name)?;
    }
    Ok(())
}

/// What the manifest says of the run.
pub(crate) fn run_fields(plan: &Plan) -> Map<String, Value> {
    let fields = json!({
        "command": "quantize",
        "recipe": plan.recipe.name,
        "method": plan.recipe.method.name(),
        "weights": plan.recipe.weights.to_string(),
        "activations": plan.recipe.activations.as_ref().map(ToString::to_string),
        "container": plan.container.name(),
    });
    match fields {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
