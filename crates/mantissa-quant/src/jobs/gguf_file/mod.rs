//! Output as one GGUF file, or several if split.

mod publish;
mod stream;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, Role, StoredAs, TensorInfo};
use mantissa_num::Scheme;
use mantissa_store::convention::gguf::{self, Joined, JoinedPart, Moved};
use mantissa_store::convention::{LinearPlan, ModelFiles};
use mantissa_store::gguf::{GgufSplitWriter, GgufTensorSpec, Value, split};
use mantissa_store::{Committed, Error, FileDigest, Gguf, Manifest};
use serde_json::Map;

use super::describe::Contents;
use super::task::{Destination, Published, Task};
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::fold::Folded;
use crate::gguf::{fault, heads, linear_of, values};
use crate::importance::Importance;
use crate::layers::Layers;
use crate::measure::hashes::SourceHashes;
use crate::plan::{Cast, JoinedCast, Layout};
use crate::plan::{Plan, Use, WeightJob, work_of};
use crate::progress::{Progress, Tell};
use crate::quality::{QUALITY_NAME, Quality, TensorReport};
use crate::range;
use crate::report::LayerReport;
use crate::rtn;
use crate::source::{DenseError, DenseTensor, Tail, WeightReader, require_finite};

use publish::Output;

/// Number of elements cast between writes, for all threads.
const CAST: usize = 1 << 21;

/// GGUF files being written.
pub(super) struct GgufFiles<'a> {
    layout: &'a Layout,
    output: Output,
    /// Tensors of each file.
    parts: Vec<Vec<GgufTensorSpec>>,
    /// Time to sync the weights to disk.
    synced: Duration,
    /// Manifest, once sealed.
    manifest: Manifest,
}

impl<'a> GgufFiles<'a> {
    /// Starts the files of the plan's layout.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn begin(task: &Task<'_>, layout: &'a Layout) -> Result<Self> {
        let parts = split(&layout.tensors, task.plan.options.max_gguf_bytes);
        let output = Output::begin(task.out, parts.len())?;
        Ok(GgufFiles {
            layout,
            output,
            parts,
            synced: Duration::ZERO,
            manifest: Manifest::new(BTreeMap::new(), Map::new()),
        })
    }
}

impl Destination for GgufFiles<'_> {
    fn fill(&mut self, task: &Task<'_>, progress: &mut Tell<'_>) -> Result<Contents> {
        let Task { plan, source, .. } = *task;
        let GgufFiles { layout, output, parts, .. } = self;
        SourceHashes::beside(source, plan.threads(), |hashes| {
            let importance = importance(plan, source, progress)?;
            let metadata: Vec<_> = layout
                .metadata
                .iter()
                .cloned()
                .chain(importance.iter().flat_map(|i| imatrix_metadata(i)))
                .collect();
            let mut writer = GgufSplitWriter::create(&output.staged(), &metadata, parts)?;
            if plan.threads() > 1 {
                writer.hash_beside();
            }
            let importance = importance.as_deref();
            let mut run = Run { plan, source, layout, importance, writer, progress: &mut *progress, done: 0 };
            let (layers, tensors) = run.fill()?;
            // Timed separately: this is the disk's time, and may be much longer than the work.
            let begin = Instant::now();
            run.writer.sync()?;
            self.synced = begin.elapsed();
            let digests = run.writer.finish()?;
            let source = hashes.wait(&mut || progress(Progress::hashing(plan.work_bytes())))?;
            let weights = output.names().into_iter().zip(digests).collect();
            Ok(Contents { layers, tables: Vec::new(), tensors, source, weights, notes: Vec::new() })
        })
    }

    fn staged(&self) -> PathBuf {
        self.output.staged().into_iter().next().unwrap_or_default()
    }

    fn seal(&mut self, quality: &Quality, run: Map<String, serde_json::Value>) -> Result<()> {
        let text = quality.to_json()?;
        let mut files = quality.hashes.weights.clone();
        let name = self.output.names().into_iter().next().unwrap_or_default();
        files.insert(format!("{name}.{QUALITY_NAME}"), FileDigest::of(text.as_bytes()));
        let manifest = Manifest::new(files, run);
        self.output.seal(text.as_bytes(), manifest.to_json().as_bytes())?;
        self.manifest = manifest;
        Ok(())
    }

    fn publish(self) -> Result<Published> {
        let path = self.output.first();
        let leftover = self.output.publish()?;
        let committed = Committed { path, manifest: self.manifest, leftover };
        Ok(Published { committed, resumed: 0, synced: Some(self.synced) })
    }
}

/// Returns the importance matrix for searched blocks: given, or computed on the calibration text.
pub(super) fn importance<'a>(
    plan: &'a Plan,
    source: &ModelFiles,
    progress: &mut Tell<'_>,
) -> Result<Option<Cow<'a, Importance>>> {
    let Some(set) = plan.text_for(Use::Importance) else {
        return Ok(plan.options.importance.as_ref().map(Cow::Borrowed));
    };
    let mut tick = |_| progress(Progress { done: 0, tensor: "importance", tokens: None, items: None });
    let found = Importance::collect(source, &plan.config, set, plan.limits(), &mut tick)?;
    Ok(Some(Cow::Owned(found)))
}

/// Returns the metadata that llama.cpp's quantizer writes about an importance matrix.
fn imatrix_metadata(importance: &Importance) -> Vec<(String, Value)> {
    let count = Value::U32(u32::try_from(importance.entries.len()).unwrap_or(u32::MAX));
    let mut all = vec![("quantize.imatrix.file".to_owned(), Value::String(importance.name.clone()))];
    let dataset = importance.datasets.first().cloned();
    all.extend(dataset.map(|text| ("quantize.imatrix.dataset".to_owned(), Value::String(text))));
    all.push(("quantize.imatrix.entries_count".to_owned(), count));
    all.push(("quantize.imatrix.chunks_count".to_owned(), Value::U32(importance.chunks)));
    all
}

/// State of writing the tensors.
struct Run<'a, 'p> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    layout: &'a Layout,
    importance: Option<&'a Importance>,
    writer: GgufSplitWriter,
    progress: &'p mut Tell<'p>,
    done: u64,
}

impl Run<'_, '_> {
    fn fill(&mut self) -> Result<(Vec<LayerReport>, Vec<TensorReport>)> {
        let mut tensors = Vec::new();
        for cast in &self.layout.casts {
            let (work, report) = self.write_cast(cast)?;
            tensors.push(report);
            // The name in the source, by which the remaining time leaves out what is copied.
            let known = self.source.checkpoint().get(&cast.info.name).is_some();
            self.advance(work, if known { &cast.info.name } else { &cast.place.tensor })?;
        }
        for cast in &self.layout.joined {
            let (work, report) = self.write_joined(cast)?;
            let name = report.tensor.clone();
            tensors.push(report);
            self.advance(work, &name)?;
        }
        // GGUF files have no journal, so no layer is ever read back.
        let none =
            || Err(Error::NoTensor { path: self.source.dir().to_owned(), tensor: String::new() }.into());
        let plain = Folded::plain(self.source);
        let mut layers = Layers::new(self.plan, &plain, Box::new(none)).with_importance(self.importance);
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized().chain(self.plan.quantized_tables()) {
            reports.push(match self.plan.streamed(info, scheme) {
                Some(codec) => self.stream_layer(&mut layers, info, (scheme, codec))?,
                None => self.write_layer(&mut layers, info, scheme)?,
            });
            self.advance(work_of(info), &info.module)?;
        }
        for (name, factors) in &self.layout.rope_factors {
            let bytes: Vec<u8> = factors.iter().flat_map(|f| f.to_le_bytes()).collect();
            self.writer.write(name, &bytes)?;
        }
        for (info, stored) in &self.layout.integers {
            let values = self.source.integers(&info.name, &info.shape)?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.writer.write(stored, &bytes)?;
        }
        for spec in &self.layout.unread {
            let len = usize::try_from(spec.byte_len().unwrap_or(0)).unwrap_or(0);
            self.writer.write(&spec.name, &vec![0; len])?;
        }
        self.write_carried()?;
        Ok((reports, tensors))
    }

    /// Copies the tensors of the source that no parameter of the model is.
    fn write_carried(&mut self) -> Result<()> {
        if self.layout.carried.is_empty() {
            return Ok(());
        }
        // A source that is presented as a dense checkpoint has the model's tensors alone.
        let file = Gguf::open(self.source.dir())?;
        let mut bytes = vec![0; CAST];
        for spec in &self.layout.carried {
            let missing = || Error::NoTensor { path: file.path().to_owned(), tensor: spec.name.clone() };
            let tensor = file.get(&spec.name).filter(|found| found.ty == spec.ty).ok_or_else(missing)?;
            let (len, mut at) = (spec.byte_len().unwrap_or(0), 0);
            while at < len {
                let n = usize::try_from(len - at).unwrap_or(CAST).min(CAST);
                file.read_range(tensor, at, &mut bytes[..n])?;
                self.writer.write_range(&spec.name, at, &bytes[..n])?;
                at += n as u64;
            }
        }
        Ok(())
    }

    fn write_layer(
        &mut self,
        layers: &mut Layers<'_>,
        info: &LinearInfo,
        scheme: &Scheme,
    ) -> Result<LayerReport> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: &info.module, tokens: None, items: None });
        let (tensors, report) = layers.quantize(info, scheme, &mut tick)?;
        for (name, bytes) in tensors {
            self.write(&format!("{}.weight", info.module), &name, info.rows, &bytes)?;
        }
        Ok(report)
    }

    fn advance(&mut self, work: u64, tensor: &str) -> Result<()> {
        self.done += work;
        match (self.progress)(Progress { done: self.done, tensor, tokens: None, items: None }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(QuantError::Interrupted),
        }
    }

    /// Writes tensor `stored`: the rows of `name`, moved from Hugging Face to GGUF order, or its factor. An expert is
    /// written into its part of the tensor.
    fn write(&mut self, name: &str, stored: &str, rows: usize, bytes: &[u8]) -> Result<()> {
        let joined = self.layout.architecture.joined(name, self.layout.order);
        if let Some((joined, parts)) = joined.and_then(|joined| Some((joined.clone(), joined.rows(rows)?))) {
            let row = bytes.len() / rows.max(1);
            for (part, order) in joined.names().iter().zip(parts) {
                let rows = order.iter().flat_map(|at| &bytes[at * row..][..row]);
                self.writer.write(part, &rows.copied().collect::<Vec<u8>>())?;
            }
            return Ok(());
        }
        let place = self.layout.architecture.place(name);
        if let Some(place) = place.as_ref().filter(|place| place.expert.is_some()) {
            let stored = if stored.ends_with(".scale") { stored } else { &place.tensor };
            return Ok(self.writer.write_range(stored, (place.matrix().0 * bytes.len()) as u64, bytes)?);
        }
        // Some architectures have a name of their own for a weight.
        let own = place.filter(|place| place.tensor.ends_with(".weight")).and_then(|place| {
            let part = [".weight", ".scale"].into_iter().find(|part| stored.ends_with(part))?;
            Some(format!("{}{part}", place.tensor.trim_end_matches(".weight")))
        });
        let stored = own.as_deref().unwrap_or(stored);
        let columns = self.layout.order.columns(name).filter(|_| !stored.ends_with(".scale"));
        if let (Some(columns), WeightJob::Convert { .. }) = (columns, &self.plan.job) {
            // Codes that are kept are in the source's order.
            return Ok(self.writer.write(stored, &self.moved_blocks(name, columns, rows, bytes))?);
        }
        match self.layout.order.of(name).filter(|_| !stored.ends_with(".scale")) {
            Some(moved) => {
                let moved = moved.to_gguf(bytes, bytes.len() / rows.max(1));
                Ok(self.writer.write(stored, &moved)?)
            }
            None => Ok(self.writer.write(stored, bytes)?),
        }
    }

    /// Writes a tensor under its scheme, in panels of rows if no row moves. Returns the bytes read, and a report.
    fn write_cast(&mut self, cast: &Cast) -> Result<(u64, TensorReport)> {
        let Cast { info, place, scheme } = cast;
        let stored = &place.tensor;
        let report = |stats: Option<ErrorStats>| TensorReport {
            tensor: info.name.clone(),
            scheme: scheme.to_string(),
            shape: info.shape.clone(),
            error: stats.map(|stats| stats.report()),
        };
        let rows = info.shape.first().copied().unwrap_or(1);
        let cols: usize = info.shape.iter().skip(1).product();
        let config = &self.plan.config;
        if linear_of(config, info).is_some_and(|linear| linear.stored != StoredAs::Rows) {
            // Layers that checkpoints store in another order, or stacked, are loaded whole.
            let values = DenseTensor::from(self.moved(info, values(self.source, config, info)?));
            let (bytes, error) = self.cast_bytes(info, scheme, &values, rows, cols)?;
            self.check_range(info, scheme, &values, (rows, cols), &error)?;
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((2 * (rows * cols) as u64, report(Some(error))));
        }
        // A tensor of a GGUF file has another name there, and may be quantized: it is read whole.
        let meta = self.source.checkpoint().get(&info.name);
        let len = meta.map_or(4 * (rows * cols) as u64, |meta| meta.len);
        let in_panels = info.shape.len() == 2
            && meta.is_some_and(|meta| meta.shape == info.shape)
            && self.layout.order.of(&info.name).is_none()
            && self.layout.order.columns(&info.name).is_none()
            && place.expert.is_none();
        if info.shape.len() < 2 || matches!(info.role, Role::Vector { .. }) {
            // Vectors are small and f32.
            let values = self.values(info)?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((len, report(None)));
        }
        if !in_panels {
            let values = DenseTensor::from(self.moved(info, self.values(info)?));
            let (bytes, error) = self.cast_bytes(info, scheme, &values, rows, cols)?;
            self.check_range(info, scheme, &values, (rows, cols), &error)?;
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((len, report(Some(error))));
        }
        let source = DenseTensor::open(self.source, &info.name, &info.shape)?;
        if let Some(codec) = scheme.format.codec() {
            let module = info.name.trim_end_matches(".weight");
            let linear = LinearPlan::new(module, scheme, None, (rows, cols));
            let error = self.stream_matrix(&linear, codec, &source)?;
            let error = error.map_err(|error| error.of(self.source, &info.name, &info.name))?;
            self.check_range(info, scheme, &source, (rows, cols), &error)?;
            return Ok((len, report(Some(error))));
        }
        let (panel, mut written, mut error) = ((CAST / cols.max(1)).max(1), 0, ErrorStats::default());
        for first in (0..rows).step_by(panel) {
            let rest = Tail { source: &source, first: first * cols };
            let n = panel.min(rows - first);
            let (bytes, stats) = self.cast_bytes(info, scheme, &rest, n, cols)?;
            self.writer.write_range(stored, written, &bytes)?;
            written += bytes.len() as u64;
            error.merge(&stats);
        }
        self.check_range(info, scheme, &source, (rows, cols), &error)?;
        Ok((len, report(Some(error))))
    }

    /// Moves whole blocks in each of `rows` rows.
    fn moved_blocks(&self, name: &str, columns: Moved, rows: usize, bytes: &[u8]) -> Vec<u8> {
        let place = self.layout.architecture.place(name);
        let spec =
            self.layout.tensors.iter().find(|spec| place.as_ref().is_some_and(|at| at.tensor == spec.name));
        let unit = spec.map_or(1, |spec| spec.ty.block().1);
        let row = (bytes.len() / rows.max(1)).max(1);
        bytes.chunks(row).flat_map(|row| columns.to_gguf(row, unit)).collect()
    }

    /// Returns the values of a matrix with its columns in the order of the file.
    fn moved(&self, info: &TensorInfo, values: Vec<f32>) -> Vec<f32> {
        let cols = info.shape.iter().skip(1).product();
        match self.layout.order.columns(&info.name) {
            Some(columns) => columns.columns_to_gguf(&values, cols),
            None => values,
        }
    }

    /// Loads the values of a tensor and requires them to be finite.
    fn values(&self, info: &TensorInfo) -> Result<Vec<f32>> {
        let mut values = self.source.tensor_f32(&info.name, &info.shape)?;
        let stored = self.layout.architecture.stored_as(&info.name);
        values.iter_mut().for_each(|value| *value = stored.to_gguf(*value));
        if !kernels().amax(&values).is_finite() {
            require_finite(self.source, &info.name)?;
        }
        Ok(values)
    }

    /// Writes the parts of a split tensor. Returns the bytes read, and a report.
    fn write_joined(&mut self, cast: &JoinedCast) -> Result<(u64, TensorReport)> {
        let JoinedCast { info, joined, schemes } = cast;
        let (config, source) = (&self.plan.config, self.source);
        let values = values(source, config, info)?;
        let (rows, cols) = (info.shape[0], values.len() / info.shape[0].max(1));
        let parts = joined.split(&values, rows, cols, heads(config)).unwrap_or_default();
        let mut error: Option<ErrorStats> = None;
        for (JoinedPart { name, shape, values }, scheme) in parts.into_iter().zip(schemes) {
            if matches!(joined, Joined::Biases(_)) {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                self.writer.write(&name, &bytes)?;
                continue;
            }
            let cols = shape.last().copied().unwrap_or(1);
            let rows = values.len() / cols.max(1);
            let values = DenseTensor::from(values);
            let (bytes, stats) = self.cast_bytes(info, scheme, &values, rows, cols)?;
            self.check_range(info, scheme, &values, (rows, cols), &stats)?;
            self.writer.write(&name, &bytes)?;
            error.get_or_insert_default().merge(&stats);
        }
        let mut names: Vec<String> = schemes.iter().map(ToString::to_string).collect();
        names.dedup();
        let report = TensorReport {
            tensor: info.name.clone(),
            scheme: names.join(" and "),
            shape: info.shape.clone(),
            error: error.map(|stats| stats.report()),
        };
        Ok((4 * values.len() as u64, report))
    }

    /// Refuses a tensor outside the range of its scheme; `stats` is its error.
    fn check_range<S>(
        &self,
        info: &TensorInfo,
        scheme: &Scheme,
        values: &S,
        shape: (usize, usize),
        stats: &ErrorStats,
    ) -> Result<()>
    where
        S: WeightReader<Error = DenseError> + ?Sized,
    {
        range::check(scheme, values, shape, stats, self.plan.threads())
            .map_err(|error| error.of(self.source, &info.name, &info.name))
    }

    /// Quantizes the first rows of a matrix to its scheme. Returns bytes and error.
    fn cast_bytes<S>(
        &self,
        info: &TensorInfo,
        scheme: &Scheme,
        values: &S,
        rows: usize,
        cols: usize,
    ) -> Result<(Vec<u8>, ErrorStats)>
    where
        S: WeightReader<Error = DenseError> + ?Sized,
    {
        let threads = self.plan.threads();
        let with_name = |error: DenseError| error.of(self.source, &info.name, &info.name);
        let (q, stats) =
            rtn::quantize_source(scheme, values, rows, cols, None, threads).map_err(with_name)?;
        let linear = LinearPlan::new(info.name.trim_end_matches(".weight"), scheme, None, (rows, cols));
        let tensors = gguf::tensors(&linear, &q)
            .map_err(|e| fault(self.source, &info.name, e.to_string(), "a scheme that GGUF holds"))?;
        Ok((tensors.into_iter().next().map(|(_, bytes)| bytes).unwrap_or_default(), stats))
    }
}
