//! The pipeline: a dense model in, a verified quantized model out, one layer in memory.
//!
//! Layers are read, quantized, packed and written one by one; everything else is copied in pieces. The output appears only
//! when it is complete. Nothing in it depends on threads, time or machine.

use std::path::Path;

use mantissa_kernels::kernels;
use mantissa_model::{FusedGroup, LinearInfo};
use mantissa_num::Scheme;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Committed, Error, ShardPlan, ShardedWriter, Staging, TensorMeta, refuse_overlap};
use serde_json::{Map, Value, json};

use crate::error::{QuantError, Result};
use crate::gguf;
use crate::plan::Plan;
use crate::report::{LayerReport, Report};
use crate::rtn;

/// Name of the error report beside the weights.
pub const REPORT_NAME: &str = "mantissa-report.json";

/// Bytes copied at a time.
const COPY: usize = 8 << 20;

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
}

/// Carries out `plan` into the folder `out`.
///
/// # Errors
/// [`QuantError::Store`] for files, [`QuantError::Tensor`] for values that a scheme cannot hold. The old content of `out`,
/// if any, is then still in place.
pub fn run(
    plan: &Plan,
    source: &ModelFiles,
    out: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome> {
    if let Some(layout) = &plan.gguf {
        return gguf::run(plan, layout, source, out, progress);
    }
    refuse_overlap(source.dir(), out)?;
    let mut staging = Staging::begin(out)?;
    let shards = ShardPlan::new(plan.specs.clone(), plan.options.max_shard_bytes)?;
    let mut writer = ShardedWriter::new(staging.path(), shards, plan.metadata());
    let mut run = Run::new(plan, source, &mut writer, progress);
    run.copy_tensors()?;
    let layers = run.quantize_layers()?;
    for (file, digest) in writer.finish()? {
        staging.record(file, digest);
    }
    let report = Report::new(plan, layers);
    write_json(&staging.path().join("config.json"), &plan.output_config(source)?)?;
    write_json(&staging.path().join(REPORT_NAME), &json!(report))?;
    copy_sidecars(source.dir(), staging.path())?;
    let committed = staging.commit(run_fields(plan))?;
    Ok(Outcome { report, committed })
}

/// Takes tensors by name, as the container names them.
pub(crate) trait Sink {
    /// A whole tensor.
    fn write(&mut self, name: &str, bytes: &[u8]) -> mantissa_store::Result<()>;
    /// A part of a tensor.
    fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> mantissa_store::Result<()>;
}

impl Sink for ShardedWriter {
    fn write(&mut self, name: &str, bytes: &[u8]) -> mantissa_store::Result<()> {
        ShardedWriter::write(self, name, bytes)
    }

    fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> mantissa_store::Result<()> {
        ShardedWriter::write_range(self, name, byte_offset, bytes)
    }
}

/// A run under way.
pub(crate) struct Run<'a, 'p> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    writer: &'a mut dyn Sink,
    progress: &'p mut dyn FnMut(Progress<'_>),
    done: u64,
}

impl<'a, 'p> Run<'a, 'p> {
    pub(crate) fn new(
        plan: &'a Plan,
        source: &'a ModelFiles,
        writer: &'a mut dyn Sink,
        progress: &'p mut dyn FnMut(Progress<'_>),
    ) -> Self {
        Run { plan, source, writer, progress, done: 0 }
    }

    /// Where tensors go.
    pub(crate) fn sink(&mut self) -> &mut dyn Sink {
        self.writer
    }

    pub(crate) fn advance(&mut self, work: u64, tensor: &str) {
        self.done += work;
        (self.progress)(Progress { done: self.done, tensor });
    }

    fn copy_tensors(&mut self) -> Result<()> {
        let mut buffer = vec![0; COPY];
        for meta in &self.plan.copied {
            self.copy_tensor(meta, &mut buffer)?;
        }
        Ok(())
    }

    fn copy_tensor(&mut self, meta: &TensorMeta, buffer: &mut [u8]) -> Result<()> {
        let mut at = 0;
        if meta.len == 0 {
            return Ok(self.writer.write(&meta.name, &[])?);
        }
        while at < meta.len {
            let n = usize::try_from(meta.len - at).unwrap_or(usize::MAX).min(buffer.len());
            self.source.checkpoint().read_range(&meta.name, at, &mut buffer[..n])?;
            self.writer.write_range(&meta.name, at, &buffer[..n])?;
            at += n as u64;
            self.advance(n as u64, &meta.name);
        }
        Ok(())
    }

    pub(crate) fn quantize_layers(&mut self) -> Result<Vec<LayerReport>> {
        let mut reports = Vec::new();
        let mut shared: Option<((usize, FusedGroup), Option<f32>)> = None;
        for (info, scheme) in self.plan.quantized() {
            // Fused partners follow each other, so the scale of the last group is enough.
            let outer = match info.kind.fused().filter(|_| scheme.has_outer_scale()) {
                None => None,
                Some(group) => match shared {
                    Some((key, outer)) if key == (info.layer, group) => outer,
                    _ => {
                        let outer = self.shared_outer(info.layer, group, scheme)?;
                        shared = Some(((info.layer, group), outer));
                        outer
                    }
                },
            };
            reports.push(self.quantize_layer(info, scheme, outer)?);
        }
        Ok(reports)
    }

    /// The tensor-wide scale of fused partners. vLLM runs q, k and v (gate and up) as one matrix with one global scale.
    fn shared_outer(&self, layer: usize, group: FusedGroup, scheme: &Scheme) -> Result<Option<f32>> {
        let mut amaxes = Vec::new();
        for (info, partner) in self.plan.quantized() {
            if info.layer == layer && info.kind.fused() == Some(group) && partner.format == scheme.format {
                amaxes.push(kernels().amax(&self.read(info)?));
            }
        }
        Ok(rtn::shared_outer_scale(scheme, amaxes))
    }

    fn quantize_layer(
        &mut self,
        info: &LinearInfo,
        scheme: &Scheme,
        outer: Option<f32>,
    ) -> Result<LayerReport> {
        let w = self.read(info)?;
        let quantized = rtn::quantize(scheme, &w, info.rows, info.cols, outer, self.plan.options.threads);
        let (q, stats) = quantized.map_err(|error| self.tensor_error(info, error))?;
        drop(w);
        let plan = self.plan.linear_plan(info, scheme);
        let tensors = self.plan.container.tensors(&plan, &q);
        let tensors = tensors.map_err(|e| self.tensor_error_text(info, e.to_string()))?;
        for (name, bytes) in tensors {
            self.writer.write(&name, &bytes)?;
        }
        self.advance((info.rows * info.cols) as u64 * 2, &info.module);
        Ok(LayerReport::new(info, scheme, stats.report()))
    }

    fn read(&self, info: &LinearInfo) -> Result<Vec<f32>> {
        let name = format!("{}.weight", info.module);
        Ok(self.source.tensor_f32(&name, &[info.rows, info.cols])?)
    }

    fn tensor_error(&self, info: &LinearInfo, error: mantissa_num::TensorError) -> QuantError {
        let (path, tensor) = (self.source.dir().to_owned(), format!("{}.weight", info.module));
        QuantError::Tensor { path, tensor, error }
    }

    fn tensor_error_text(&self, info: &LinearInfo, what: String) -> QuantError {
        Error::field(self.source.dir(), &info.module, what, "a scheme that the container holds", "").into()
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = format!("{value:#}\n");
    std::fs::write(path, text)
        .map_err(|error| Error::Io { path: path.to_owned(), operation: "write", error }.into())
}

/// Copies tokenizer, generation settings, licence and the like: regular files of the source folder that are neither
/// weights nor written by the pipeline itself. Names are sorted, so that the manifest is the same every time.
fn copy_sidecars(from: &Path, to: &Path) -> Result<()> {
    const WEIGHTS: [&str; 9] = ["safetensors", "bin", "pt", "pth", "ckpt", "gguf", "onnx", "h5", "msgpack"];
    let io = |path: &Path, error| Error::Io { path: path.to_owned(), operation: "copy", error };
    let entries = std::fs::read_dir(from).map_err(|e| io(from, e))?;
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    for path in paths {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { continue };
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        let ours = name.ends_with(".index.json") || name.starts_with("mantissa-") || name == "config.json";
        let small = std::fs::metadata(&path).is_ok_and(|m| m.is_file() && m.len() <= MAX_SIDECAR);
        if ours || !small || name.starts_with('.') || WEIGHTS.contains(&extension) {
            continue;
        }
        std::fs::copy(&path, to.join(name)).map_err(|e| io(&path, e))?;
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
