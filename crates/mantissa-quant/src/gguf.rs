//! A quantized model as one GGUF file that llama.cpp runs: what each tensor becomes, the metadata, and the writing.
//!
//! Linear layers take the recipe's scheme; where its blocks do not divide a row, f16, which is noted. The embedding and the
//! head are f16 unless a rule of the recipe names them, norms and other vectors f32, as llama.cpp requires.

mod architecture;
mod parameters;
mod publish;
mod stream;
mod ternary;

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, LinearKind, ModelConfig, Role, StoredAs, TensorInfo};
use mantissa_num::{Code, CodecId, Format, Rule, Scheme, minifloat};
use mantissa_store::convention::gguf::{self, Architecture, Place, RowOrder, block_type};
use mantissa_store::convention::{LinearPlan, ModelFiles};
use mantissa_store::gguf::{GgmlType, GgufSplitWriter, GgufTensorSpec, Storage, Value, split};
use mantissa_store::{Committed, Dtype, Error, FileDigest, Manifest, TensorSpec, refuse_overlap};

use crate::assess;
use crate::convert;
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::fold::Folded;
use crate::importance::Importance;
use crate::layers::{Layers, refuse_overflow};
use crate::pipeline::{self, Outcome, Progress, work_of};
use crate::plan::{Options, Plan, PlannedLinear};
use crate::quality::{self, Digests, QUALITY_NAME, Quality, SourceHashes, TensorReport};
use crate::recipe::{Part, Recipe, smaller};
use crate::report::LayerReport;
use crate::rtn;
use crate::source::{DenseError, DenseTensor, Source, Tail, require_finite};

/// Elements cast between two writes: panels of all threads.
const CAST: usize = 1 << 21;

use architecture::{family_metadata, rope_factors, rope_metadata, sizes};
use parameters::{Adding, JoinedCast};
pub(crate) use parameters::{dense_name, heads, linear_of, parameters};
use publish::Output;
pub(crate) use ternary::quantize as quantize_ternary;

/// Everything of the file that the plan of the linear layers does not say.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    metadata: Vec<(String, Value)>,
    tensors: Vec<GgufTensorSpec>,
    casts: Vec<Cast>,
    joined: Vec<JoinedCast>,
    architecture: Architecture,
    order: RowOrder,
    /// Of each, the tensor's name.
    rope_factors: Vec<(&'static str, Vec<f32>)>,
    pub(crate) notes: Vec<String>,
}

/// A tensor that is not a quantized linear layer.
#[derive(Clone, Debug)]
struct Cast {
    info: TensorInfo,
    place: Place,
    scheme: Scheme,
}

/// Replaces schemes whose blocks do not divide a row by f16; gives the modules, each with the reason.
/// What becomes several tensors is no layer here.
pub(crate) fn fall_back(config: &ModelConfig, linears: &mut [PlannedLinear]) -> Vec<(String, String)> {
    let mut fallbacks = Vec::new();
    for PlannedLinear { info, scheme } in linears {
        if info.kind == LinearKind::KvB {
            *scheme = None;
        }
        let Some(wanted) = scheme.as_mut() else { continue };
        let block = block_type(&wanted.format).map_or(1, |ty| ty.block().0);
        if !info.cols.is_multiple_of(block) {
            let (cols, instead) = (info.cols, fitting_in(config, wanted, info.cols));
            let why = format!("{instead} instead of {wanted}: rows of {cols} are not multiples of {block}");
            fallbacks.push((info.module.clone(), why));
            *wanted = instead;
        }
    }
    fallbacks
}

/// What stands in for a scheme whose blocks do not divide rows of `cols`: blocks of 32 where those do, or f16.
fn fitting_in(config: &ModelConfig, wanted: &Scheme, cols: usize) -> Scheme {
    let ternary = wanted.format.codec().and_then(|codec| ternary::smaller(config.model_type, codec.id));
    match ternary.filter(|codec| cols.is_multiple_of(codec.codec().elements)) {
        Some(codec) => Scheme::codec(codec),
        None => fitting(wanted, cols),
    }
}

/// The same of a tensor that is no layer.
fn fitting(wanted: &Scheme, cols: usize) -> Scheme {
    let fits = |codec: &CodecId| cols.is_multiple_of(codec.codec().elements);
    let codec = match wanted.format {
        Format::Codec(codec) => Some(codec).filter(fits).or_else(|| smaller(codec).filter(fits)),
        _ => None,
    };
    codec.map_or_else(|| plain(minifloat::F16), Scheme::codec)
}

impl Layout {
    /// # Errors
    /// What of the model GGUF or llama.cpp cannot say, by its field.
    pub(crate) fn new(
        source: &ModelFiles,
        recipe: &Recipe,
        config: &ModelConfig,
        linears: &[PlannedLinear],
        options: &Options,
    ) -> Result<Self> {
        let architecture = architecture::architecture(source, config)?;
        let mut layout = Layout {
            metadata: Vec::new(),
            tensors: Vec::new(),
            casts: Vec::new(),
            joined: Vec::new(),
            architecture,
            order: architecture.row_order(config.num_attention_heads, config.num_key_value_heads),
            rope_factors: rope_factors(&config.rope, config.rotary_dim),
            notes: architecture::notes(architecture, config),
        };
        let planned = linears.iter().map(|linear| (linear.info.module.as_str(), linear)).collect();
        let stacks = HashMap::new();
        let mut adding = Adding { source, recipe, options, planned, experts: experts(config), stacks };
        for info in parameters(config) {
            if let Some(joined) = architecture.joined(&info.name) {
                layout.add_joined(&adding, config, info, joined)?;
                continue;
            }
            let scheme = layout.table_scheme(recipe, config, options, &info);
            layout.add(&mut adding, config, info, scheme)?;
        }
        for (name, factors) in &layout.rope_factors {
            layout.tensors.push(GgufTensorSpec::new(*name, GgmlType::F32, [factors.len()]));
        }
        let ty = block_type(&recipe.weights.format).unwrap_or(GgmlType::F16);
        let quantized = layout.tensors.iter().any(|t| !matches!(t.ty.storage, Storage::Plain(_)));
        let name = source.dir().file_name().and_then(|name| name.to_str());
        let number = recipe.file_type.map(|ty| ty.number).or_else(|| ty.file_type());
        layout.metadata = gguf::metadata(architecture, name, &sizes(config), number, quantized);
        layout.metadata.extend(family_metadata(architecture, config));
        layout.metadata.extend(rope_metadata(source, architecture, &config.rope)?);
        layout.put_tokenizer(source, config)?;
        Ok(layout)
    }

    /// The tensors of the file as bytes under their names, blocks as rows of bytes.
    pub(crate) fn specs(&self) -> Vec<TensorSpec> {
        self.tensors.iter().map(GgufTensorSpec::as_stored).collect()
    }

    fn add(
        &mut self,
        adding: &mut Adding<'_>,
        config: &ModelConfig,
        info: TensorInfo,
        of_type: Option<Scheme>,
    ) -> Result<()> {
        let Adding { source, recipe, planned, .. } = adding;
        let source = *source;
        let place = self.architecture.place(&info.name).ok_or_else(|| {
            fault(source, &info.name, "this tensor", "a tensor that llama.cpp knows by name")
        })?;
        let planned = planned.get(info.name.trim_end_matches(".weight")).copied();
        if let (Role::Linear { .. }, Some(scheme)) =
            (info.role, planned.and_then(|linear| linear.scheme.as_ref()))
        {
            let ty = block_type(&scheme.format).unwrap_or(GgmlType::F32);
            let factor = ternary::factor_beside(config.model_type, recipe, scheme);
            if factor && ty != GgmlType::NVFP4 && self.architecture != Architecture::Bitnet {
                let allowed = "a scheme whose scales lie in its blocks: only bitnet has factors beside them";
                return Err(fault(source, &info.name, scheme.to_string(), allowed));
            }
            return adding.declare(&mut self.tensors, &place, ty, &info, factor);
        }
        let scheme = of_type.map_or_else(|| cast_scheme(source, recipe, config, &info), Ok)?;
        let ty = block_type(&scheme.format).filter(|ty| {
            let cols = info.shape.last().copied().unwrap_or(1);
            ty.row_bytes(cols).is_some() && !scheme.has_outer_scale()
        });
        let ty = ty.ok_or_else(|| {
            fault(
                source,
                &info.name,
                scheme.to_string(),
                "a type of GGUF whose blocks divide a row, such as f16 or q8_0",
            )
        })?;
        adding.declare(&mut self.tensors, &place, ty, &info, false)?;
        self.casts.push(Cast { info, place, scheme });
        Ok(())
    }

    /// What a file type makes of embedding and head, where no rule of the recipe names them.
    fn table_scheme(
        &mut self,
        recipe: &Recipe,
        config: &ModelConfig,
        options: &Options,
        info: &TensorInfo,
    ) -> Option<Scheme> {
        recipe.rule_of(info.name.trim_end_matches(".weight")).is_none().then_some(())?;
        let part = match info.role {
            Role::Embedding if !config.tie_word_embeddings => Part::Embedding,
            Role::Embedding | Role::Head => Part::Head,
            _ => return None,
        };
        let wanted = Scheme::codec(recipe.file_type?.choose(config, part, options.has_importance()));
        let cols = info.shape.last().copied().unwrap_or(1);
        let scheme = fitting(&wanted, cols);
        if scheme != wanted {
            let name = &info.name;
            self.notes.push(format!(
                "{name}: {scheme} instead of {wanted}: rows of {cols} are not multiples of its blocks"
            ));
        }
        Some(scheme)
    }

    fn put_tokenizer(&mut self, source: &ModelFiles, config: &ModelConfig) -> Result<()> {
        let exported = mantissa_model::tokenizer::gguf::export(source.dir(), config.vocab_size)?;
        self.metadata.extend(exported.metadata);
        self.notes.extend(exported.notes);
        let eos = "tokenizer.ggml.eos_token_id".to_owned();
        if let (Some(&id), false) =
            (config.eos_token_ids.first(), self.metadata.iter().any(|(key, _)| *key == eos))
        {
            self.metadata.push((eos, Value::U32(id)));
        }
        Ok(())
    }
}

/// Experts of a layer that has them.
fn experts(config: &ModelConfig) -> usize {
    config.experts.as_ref().map_or(0, |experts| usize::from(experts.count))
}

fn fault(source: &ModelFiles, field: &str, found: impl Into<String>, allowed: &str) -> QuantError {
    Error::field(&source.config_path(), field, found, allowed, "write it in another container").into()
}

/// The scheme of a tensor that is not quantized as a layer.
fn cast_scheme(
    source: &ModelFiles,
    recipe: &Recipe,
    config: &ModelConfig,
    info: &TensorInfo,
) -> Result<Scheme> {
    if info.shape.len() < 2 {
        return Ok(Scheme::new(Format::plain(Code::F32), Rule::Amax));
    }
    let module = info.name.trim_end_matches(".weight");
    match (info.role, recipe.rule_of(module)) {
        // llama.cpp multiplies by routers in f32 only, and takes positions so.
        (Role::Side { .. } | Role::Positions, _) => Ok(Scheme::new(Format::plain(Code::F32), Rule::Amax)),
        (Role::Embedding | Role::Head, None) => Ok(match block_type(&recipe.weights.format) {
            Some(GgmlType::F32) => Scheme::new(Format::plain(Code::F32), Rule::Amax),
            Some(GgmlType::BF16) => plain(minifloat::BF16),
            _ => plain(minifloat::F16),
        }),
        (Role::Embedding | Role::Head, Some(rule)) if rule.weights.is_some() => {
            Ok(rule.weights.clone().unwrap_or_else(|| plain(minifloat::F16)))
        }
        _ => source_scheme(source, &dense_name(config, info)),
    }
}

fn source_scheme(source: &ModelFiles, name: &str) -> Result<Scheme> {
    let meta = source.checkpoint().get(name);
    let meta =
        meta.ok_or_else(|| Error::NoTensor { path: source.dir().to_owned(), tensor: name.to_owned() })?;
    Ok(match meta.dtype {
        Dtype::F16 => plain(minifloat::F16),
        Dtype::BF16 => plain(minifloat::BF16),
        _ => Scheme::new(Format::plain(Code::F32), Rule::Amax),
    })
}

fn plain(float: minifloat::MiniFloat) -> Scheme {
    Scheme::new(Format::plain(Code::Float(float)), Rule::Amax)
}

/// Carries out `plan` into the file `out`, or the files that it is split into, and writes its `quality.json` and its manifest beside it. A run that is stopped
/// leaves the old file with both, and begins anew. Only a kill between the renames at the end may leave a file, the old or
/// the new, without them, never with another's; of several files the first is then missing. The next start completes it.
pub(crate) fn run(
    plan: &Plan,
    layout: &Layout,
    source: &ModelFiles,
    out: &mantissa_store::Output,
    progress: &mut (dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send),
) -> Result<Outcome> {
    refuse_overlap(source.dir(), out.path())?;
    let parts = split(&layout.tensors, plan.options.max_gguf_bytes);
    let output = Output::begin(out, parts.len())?;
    let (weights, synced, mut quality) = SourceHashes::beside(source, plan.threads(), |hashes| {
        let importance = importance(plan, source, progress)?;
        let metadata: Vec<_> = layout
            .metadata
            .iter()
            .cloned()
            .chain(importance.iter().flat_map(|i| imatrix_metadata(i)))
            .collect();
        let mut writer = GgufSplitWriter::create(&output.staged(), &metadata, &parts)?;
        if plan.threads() > 1 {
            writer.hash_beside();
        }
        let importance = importance.as_deref();
        let mut run = Run { plan, source, layout, importance, writer, progress: &mut *progress, done: 0 };
        let (layers, tensors) = run.fill()?;
        // By itself, so that its time can be told: it is the disk's, and may be many times that of the work.
        let begin = Instant::now();
        run.writer.sync()?;
        let synced = begin.elapsed();
        let digests = run.writer.finish()?;
        let source_digests = hashes.wait(&mut || progress(Progress::hashing(plan)))?;
        let weights: Digests = output.names().into_iter().zip(digests).collect();
        let found = quality::Found { layers, tensors, source: source_digests, weights: weights.clone() };
        Ok((weights, synced, Quality::new(plan, source, found)))
    })?;
    let staged = output.staged()[0].clone();
    quality.evaluation = assess::figures(plan, source, &staged, None, progress)?;
    convert::prove(plan, source, &staged)?;
    assess::gate(plan, &quality, out.path(), None)?;
    let text = quality.to_json()?;
    let mut files = weights;
    files.insert(format!("{}.{QUALITY_NAME}", output.names()[0]), FileDigest::of(text.as_bytes()));
    let manifest = Manifest::new(files, pipeline::run_fields(plan, source)?);
    output.seal(text.as_bytes(), manifest.to_json().as_bytes())?;
    let verification = assess::sealed(plan, &quality, &staged, out.path())?;
    let path = output.first();
    let leftover = output.publish()?;
    let committed = Committed { path, manifest, leftover };
    Ok(Outcome { quality, committed, resumed: 0, synced: Some(synced), verification })
}

/// What searched blocks are weighed by: as given, or found on the calibration text.
fn importance<'a>(
    plan: &'a Plan,
    source: &ModelFiles,
    progress: &mut (dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send),
) -> Result<Option<Cow<'a, Importance>>> {
    let Some(set) = plan.importance_text() else {
        return Ok(plan.options.importance.as_ref().map(Cow::Borrowed));
    };
    let mut tick = |_| progress(Progress { done: 0, tensor: "importance", tokens: None });
    let found = Importance::collect(source, &plan.config, set, plan.threads(), &mut tick)?;
    Ok(Some(Cow::Owned(found)))
}

/// What llama.cpp's quantizer says of the importance it was given.
fn imatrix_metadata(importance: &Importance) -> Vec<(String, Value)> {
    let count = Value::U32(u32::try_from(importance.entries.len()).unwrap_or(u32::MAX));
    let mut all = vec![("quantize.imatrix.file".to_owned(), Value::String(importance.name.clone()))];
    let dataset = importance.datasets.first().cloned();
    all.extend(dataset.map(|text| ("quantize.imatrix.dataset".to_owned(), Value::String(text))));
    all.push(("quantize.imatrix.entries_count".to_owned(), count));
    all.push(("quantize.imatrix.chunks_count".to_owned(), Value::U32(importance.chunks)));
    all
}

/// A run under way.
struct Run<'a, 'p> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    layout: &'a Layout,
    importance: Option<&'a Importance>,
    writer: GgufSplitWriter,
    progress: &'p mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
    done: u64,
}

impl Run<'_, '_> {
    fn fill(&mut self) -> Result<(Vec<LayerReport>, Vec<TensorReport>)> {
        let mut tensors = Vec::new();
        for cast in &self.layout.casts {
            let (work, report) = self.write_cast(cast)?;
            tensors.push(report);
            self.advance(work, &cast.place.tensor)?;
        }
        for cast in &self.layout.joined {
            let (work, report) = self.write_joined(cast)?;
            let name = report.tensor.clone();
            tensors.push(report);
            self.advance(work, &name)?;
        }
        // A run into one file is never taken over.
        let none =
            || Err(Error::NoTensor { path: self.source.dir().to_owned(), tensor: String::new() }.into());
        let plain = Folded::plain(self.source);
        let mut layers = Layers::new(self.plan, &plain, Box::new(none)).weighed(self.importance);
        let mut reports = Vec::new();
        for (info, scheme) in self.plan.quantized() {
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
        Ok((reports, tensors))
    }

    fn write_layer(
        &mut self,
        layers: &mut Layers<'_>,
        info: &LinearInfo,
        scheme: &Scheme,
    ) -> Result<LayerReport> {
        let (done, progress) = (self.done, &mut *self.progress);
        let mut tick = || progress(Progress { done, tensor: &info.module, tokens: None });
        let (tensors, report) = layers.quantize(info, scheme, &mut tick)?;
        for (name, bytes) in tensors {
            self.write(&format!("{}.weight", info.module), &name, info.rows, &bytes)?;
        }
        Ok(report)
    }

    fn advance(&mut self, work: u64, tensor: &str) -> Result<()> {
        self.done += work;
        match (self.progress)(Progress { done: self.done, tensor, tokens: None }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(QuantError::Interrupted),
        }
    }

    /// Writes tensor `stored`, which has the rows of `name` in Hugging Face order, or is a factor beside them. An expert's are
    /// a part of it.
    fn write(&mut self, name: &str, stored: &str, rows: usize, bytes: &[u8]) -> Result<()> {
        let place = self.layout.architecture.place(name);
        if let Some(expert) = place.and_then(|place| place.expert) {
            return Ok(self.writer.write_range(stored, (expert * bytes.len()) as u64, bytes)?);
        }
        match self.layout.order.of(name).filter(|_| !stored.ends_with(".scale")) {
            Some(moved) => {
                let moved = moved.to_gguf(bytes, bytes.len() / rows.max(1));
                Ok(self.writer.write(stored, &moved)?)
            }
            None => Ok(self.writer.write(stored, bytes)?),
        }
    }

    /// Writes a tensor under its scheme, in panels of rows where no row moves. Gives the bytes read, and the error.
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
            let values = DenseTensor::from(parameters::values(self.source, config, info)?);
            let (bytes, error) = self.cast_bytes(info, scheme, &values, rows, cols)?;
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((2 * (rows * cols) as u64, report(Some(error))));
        }
        let meta = self.source.checkpoint().get(&info.name);
        let meta = meta.ok_or_else(|| Error::NoTensor {
            path: self.source.dir().to_owned(),
            tensor: info.name.clone(),
        })?;
        let in_panels = info.shape.len() == 2
            && meta.shape == info.shape
            && self.layout.order.of(&info.name).is_none()
            && place.expert.is_none();
        if info.shape.len() < 2 {
            let values = self.values(info)?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((meta.len, report(None)));
        }
        if !in_panels {
            let values = DenseTensor::from(self.values(info)?);
            let (bytes, error) = self.cast_bytes(info, scheme, &values, rows, cols)?;
            self.write(&info.name, stored, rows, &bytes)?;
            return Ok((meta.len, report(Some(error))));
        }
        let source = DenseTensor::open(self.source, &info.name, &info.shape)?;
        if let Some(codec) = scheme.format.codec() {
            let module = info.name.trim_end_matches(".weight");
            let linear = LinearPlan::new(module, scheme, None, (rows, cols));
            let error = self.stream_matrix(&linear, codec, &source)?;
            let error = error.map_err(|error| error.of(self.source, &info.name, &info.name))?;
            return Ok((meta.len, report(Some(error))));
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
        Ok((meta.len, report(Some(error))))
    }

    /// The values of a tensor that is brought into memory, all of them numbers.
    fn values(&self, info: &TensorInfo) -> Result<Vec<f32>> {
        let mut values = self.source.tensor_f32(&info.name, &info.shape)?;
        if self.layout.architecture.adds_one(&info.name) {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        if !kernels().amax(&values).is_finite() {
            require_finite(self.source, &info.name)?;
        }
        Ok(values)
    }

    /// The bytes of the first rows of a matrix under its scheme, and their error.
    fn cast_bytes<S>(
        &self,
        info: &TensorInfo,
        scheme: &Scheme,
        values: &S,
        rows: usize,
        cols: usize,
    ) -> Result<(Vec<u8>, ErrorStats)>
    where
        S: Source<Error = DenseError> + ?Sized,
    {
        let threads = self.plan.threads();
        let of_tensor = |error: DenseError| error.of(self.source, &info.name, &info.name);
        let (q, stats) =
            rtn::quantize_source(scheme, values, rows, cols, None, threads).map_err(of_tensor)?;
        if !stats.is_finite() {
            refuse_overflow(scheme, values, rows * cols, threads).map_err(of_tensor)?;
        }
        let linear = LinearPlan::new(info.name.trim_end_matches(".weight"), scheme, None, (rows, cols));
        let tensors = gguf::tensors(&linear, &q)
            .map_err(|e| fault(self.source, &info.name, e.to_string(), "a scheme that GGUF holds"))?;
        Ok((tensors.into_iter().next().map(|(_, bytes)| bytes).unwrap_or_default(), stats))
    }
}
