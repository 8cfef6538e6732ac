//! Verification of an artifact, with [`mantissa_verify`] as the second reader.
//!
//! The rows of a weight are checked on several threads; faults come in the order of the rows whatever their number.
//!
//! 1. The manifest's hashes; those of `quality.json` against them, and, where the source is given, against its files.
//! 2. Every quantized weight decoded independently and by the ordinary reader: equal bit for bit.
//! 3. Against the source, where given: every weight within the scheme's bound and with the recorded error, every other
//!    tensor equal byte for byte.
//! 4. Logits of the model as read ordinarily and as decoded independently: equal within 1e-4 of the largest.
//! 5. Where the text is given: the recorded figures, measured again.
//!
//! A GGUF file has its manifest and `quality.json` beside it. Its container is read a second time as well, and compared: names,
//! types, shapes, places. There every tensor counts as a weight, its bound is taken from the range of its block in the source,
//! and the model that the metadata describe is compared with the source's.

mod gguf;
mod gguf_parts;
mod independent;
pub(crate) mod load;
mod manifest;
pub(crate) mod memory;
mod reference;
mod trellis;
pub(crate) mod verification;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use mantissa_eval::Sequence;
use mantissa_kernels::map_reduce_fixed;
use mantissa_model::{
    Batch, Buffers, CacheInF32, Decoder, LinearInfo, ModelConfig, WeightSource, check_kv_levels,
    linear_weight,
};
use mantissa_num::stored::{Extra, Map, Transforms};
use mantissa_num::{Code, Format, Quantized};
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::gguf::GgmlType;
use mantissa_store::{ErrorClass, Manifest};
use mantissa_verify::gguf::BlockType;

pub use independent::decode;
use independent::{CheckpointTensors, Independent, expert};
pub use load::load_check;
use manifest::check_manifest;
pub use memory::{stored_by_module, verify_bytes};
use reference::source_weight;
pub use verification::Verification;

use crate::config::model_config;
use crate::dequantize::Dequantizer;
use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::fold::record::Record;
use crate::fold::{Folded, Folds};
use crate::quality::check;
use crate::report::LayerReport;
use crate::rtn;
use crate::source::{DenseError, DenseTensor, PANEL, Scratch, WeightReader};
use crate::stacks::stack_of;

/// Models up to this many parameters have their logits compared: two copies are held in memory as f32.
pub(crate) const MAX_LOGIT_PARAMETERS: u64 = 64 << 20;

/// Bytes compared at a time: they stay in a core's cache.
const COMPARED: u64 = 1 << 19;

/// Tokens of the logit comparison.
const LOGIT_TOKENS: usize = 32;

/// What an artifact is verified against.
#[derive(Clone, Copy, Debug, Default)]
pub struct Against<'a> {
    /// The dense model that it was made from.
    pub reference: Option<&'a Path>,
    /// Whether what `quality.json` records of it is checked, its hashes and the error of every layer. A caller that has just
    /// written that leaves it out.
    pub recorded: bool,
    /// The windows that the recorded figures were measured on.
    pub text: Option<&'a [Sequence]>,
}

/// Verifies the model folder or GGUF file `artifact`, against the dense model `reference` where one is given. Where the method
/// rounds to nearest, an error past the scheme's bound is a fault. The result does not depend on `threads`.
///
/// # Errors
/// [`QuantError`] for what cannot be read at all, unless hashes have shown already that it is damaged; what can be read and
/// is wrong is a fault of the [`Verification`].
pub fn verify(artifact: &Path, reference: Option<&Path>, threads: usize) -> Result<Verification> {
    let against = Against { reference, recorded: true, text: None };
    verify_against(artifact, &against, threads, &|_| ControlFlow::Continue(()))
}

/// [`verify`] against whatever there is. `progress` is told the tokens of [`Against::text`] that were run, and may end it.
///
/// # Errors
/// As [`verify`]; [`QuantError::OtherText`] for windows that are not those of the recorded figures.
pub fn verify_against(
    artifact: &Path,
    against: &Against<'_>,
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
) -> Result<Verification> {
    let mut found = Verification::default();
    let manifest = check_manifest(artifact, &mut found)?;
    let damaged = !found.faults.is_empty();
    match check_model(artifact, against, manifest.as_ref(), threads, progress, &mut found) {
        Err(error) if error.class() == ErrorClass::Input && damaged => {
            found.faults.push(error.to_string());
        }
        result => result?,
    }
    found.ok = found.faults.is_empty();
    Ok(found)
}

fn check_model(
    artifact: &Path,
    against: &Against<'_>,
    manifest: Option<&Manifest>,
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    found: &mut Verification,
) -> Result<()> {
    let files = ModelFiles::open(artifact)?;
    let source = against.reference.map(ModelFiles::open).transpose()?;
    let quality = check::read(artifact, found);
    if let Some(quality) = &quality {
        check::weights(quality, &files, manifest, found)?;
        if let Some(source) = source.as_ref().filter(|_| against.recorded) {
            check::source(quality, source, found)?;
        }
    }
    if files.gguf().is_some() {
        let bounded = quality.as_ref().is_some_and(|quality| quality.method == rtn::NAME);
        gguf::check(&files, source.as_ref(), bounded, threads, found)?;
    } else {
        let recorded = check::errors(quality.as_ref());
        check_weights(&files, source.as_ref(), &recorded, against.recorded, threads, found)?;
    }
    match (&quality, against.text) {
        (Some(quality), Some(text)) => {
            check::figures(quality, &files, source.as_ref(), text, threads, progress, found)?;
        }
        (None, Some(_)) => found.notes.push("no figures are recorded: none were checked".into()),
        _ => {}
    }
    Ok(())
}

/// Steps 2 to 4. `recorded` says by module what method chose the codes and what error it left; with `errors` that is checked.
fn check_weights(
    files: &ModelFiles,
    source: Option<&ModelFiles>,
    recorded: &BTreeMap<&str, &LayerReport>,
    errors: bool,
    threads: usize,
    found: &mut Verification,
) -> Result<()> {
    let config = model_config(files)?;
    let folds = match (source, Record::read(files.dir())?) {
        (Some(source), Some(record)) => record.folds(source, &model_config(source)?)?,
        _ => Folds::default(),
    };
    let source = source.map(|source| Folded::new(source, &folds));
    let source = source.as_ref();
    let mut unjudged = 0;
    let stacked = |info: &LinearInfo| stack_of(info).is_some() && !info.is_by_rows(files);
    let linears = config.decoder_linears().filter(|info| info.is_by_rows(files) || stacked(info));
    for info in linears {
        let recorded = recorded.get(info.module.as_str()).copied();
        let check = WeightCheck { files, source, info: &info, recorded, errors };
        let before = found.weights;
        check.run(threads, found)?;
        unjudged += usize::from(found.weights > before && !check.bounded());
    }
    if let Some(source) = source {
        if unjudged > 0 {
            found.notes.push(format!(
                "{unjudged} weights are not said to be rounded to nearest: their errors are reported, not judged"
            ));
        }
        check_copied(files, source, &config, threads, found)?;
        if folds != Folds::default() {
            let what = "logits of the source and of the source as it is folded";
            let folded = model_config(source.files())?;
            compare_logits(source.files(), source, &folded, what, found)?;
        }
    }
    if files.kv_policy().is_none() {
        return compare_readers(files, &Independent::new(files), &config, found);
    }
    // A level that is as near as another one is taken by either, which the rounding of sums decides: weights are compared without.
    check_kv_levels(files, &config)?;
    let independent = Independent::new(files);
    compare_readers(&CacheInF32(files), &CacheInF32(&independent), &config, found)
}

struct WeightCheck<'a> {
    files: &'a ModelFiles,
    source: Option<&'a Folded<'a>>,
    info: &'a LinearInfo,
    /// What `quality.json` says of it.
    recorded: Option<&'a LayerReport>,
    /// Whether the recorded error is checked.
    errors: bool,
}

/// A weight as the ordinary reader has it.
struct Coded<'a> {
    q: &'a Quantized,
    /// The column of the weight at each column of its codes, where they differ.
    order: Option<&'a [u32]>,
    /// What is added to the values of the codes.
    extras: &'a [Extra],
}

/// What some rows showed.
#[derive(Default)]
struct Rows {
    /// The first element that the two readers decode differently.
    difference: Option<String>,
    worst: Worst,
    error: ErrorStats,
}

impl WeightCheck<'_> {
    /// Whether an error past the scheme's bound is a fault: where the weight was rounded to nearest.
    fn bounded(&self) -> bool {
        self.recorded.is_some_and(|layer| layer.method == rtn::NAME)
    }

    fn run(&self, threads: usize, found: &mut Verification) -> Result<()> {
        let LinearInfo { module, rows, cols, .. } = self.info;
        let linear = linear_weight(self.files, &LinearInfo { bias: false, ..self.info.clone() })?;
        let Weight::Quantized(q) = &linear.weight else {
            return if linear.transforms.is_empty() { Ok(()) } else { self.trellis(&linear, found) };
        };
        let order = match column_order(&linear.transforms) {
            Ok(order) => order,
            Err(what) => {
                found.notes.push(format!("{module}: {what} around its codes: it was not decoded twice"));
                return Ok(());
            }
        };
        found.weights += 1;
        let stored = CheckpointTensors(self.files);
        let ours = match stack_of(self.info).filter(|_| !self.info.is_by_rows(self.files)) {
            Some(stack) => mantissa_verify::open_stacked(&stored, &expert(stack), *rows, *cols)?,
            None => mantissa_verify::open(&stored, module, *rows, *cols)?,
        };
        let weight = |source| source_weight(self.files.dir(), source, self.info, &linear.transforms);
        let source = self.source.map(weight).transpose()?;
        let grain = (PANEL / (*cols).max(1)).max(1);
        let coded = Coded { q, order, extras: &linear.transforms.extras };
        let check = |range: Range<usize>| self.rows(range, &coded, &ours, source.as_ref());
        let all = map_reduce_fixed(threads, *rows, grain, check, Ok(Rows::default()), |all, part| {
            let (mut all, part): (Rows, Rows) = (all?, part?);
            all.difference = all.difference.or(part.difference);
            all.worst.take(part.worst);
            all.error.merge(&part.error);
            Ok::<_, QuantError>(all)
        })?;
        found.faults.extend(all.difference);
        if source.is_some() {
            found.compared += 1;
            found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(all.worst.ratio));
            if let Some(recorded) = self.recorded.filter(|_| self.errors) {
                found.faults.extend(check::error_fault(module, &recorded.error, &all.error.report()));
            }
            if self.bounded() && all.worst.ratio > 1.0 {
                found.faults.push(all.worst.text(module));
            }
        }
        Ok(())
    }

    fn rows(
        &self,
        rows: Range<usize>,
        &Coded { q, order, extras }: &Coded<'_>,
        stored: &mantissa_verify::Weight,
        source: Option<&DenseTensor<'_>>,
    ) -> Result<Rows> {
        let cols = self.info.cols;
        let mut scratch = Scratch::default();
        let w = match source {
            Some(source) => {
                let range = rows.start * cols..rows.end * cols;
                Some(source.elements(range, &mut scratch).map_err(|error| self.error(error))?)
            }
            None => None,
        };
        let bound = q.format.error_bound();
        let mut found = Rows::default();
        let mut dequantizer = Dequantizer::new(q);
        let (mut ours, mut theirs, mut sorted) = (vec![0.0; cols], vec![0.0; cols], Vec::new());
        for (i, row) in rows.enumerate() {
            stored.row(row, &mut ours);
            in_order(&mut ours, order, &mut sorted);
            dequantizer.row(row, &mut theirs);
            extras.iter().for_each(|extra| add_row(extra, row, &mut theirs));
            if found.difference.is_none() {
                found.difference = self.difference(row, &ours, &theirs);
            }
            if let Some(w) = w {
                let mut permuted;
                let mut w = &w[i * cols..][..cols];
                if order.is_some() {
                    permuted = w.to_vec();
                    in_order(&mut permuted, order, &mut sorted);
                    w = &permuted;
                }
                match block_type(&q.format) {
                    Some(ty) => gguf::worst_of_row((ty, 1.0, false), row, w, &ours, &mut found.worst),
                    None => worst_error(q, bound, row, w, &ours, &mut found.worst),
                }
                if self.errors {
                    found.error.merge(&ErrorStats::of_values(w, &ours));
                }
            }
        }
        Ok(found)
    }

    fn difference(&self, row: usize, ours: &[f32], theirs: &[f32]) -> Option<String> {
        // NaN is rare: a whole row is compared before an element is looked for.
        if ours.iter().zip(theirs).fold(true, |same, (a, b)| same & (a == b)) {
            return None;
        }
        let col = ours.iter().zip(theirs).position(|(a, b)| a != b && !(a.is_nan() && b.is_nan()))?;
        let (module, a, b) = (&self.info.module, ours[col], theirs[col]);
        Some(format!("{module}: element [{row}, {col}]: independent reader {a:e}, ordinary reader {b:e}"))
    }

    fn error(&self, error: DenseError) -> QuantError {
        match error {
            DenseError::Store(error) => error.into(),
            DenseError::Tensor(error) => {
                let (path, tensor) = (self.files.dir().to_owned(), self.info.module.clone());
                QuantError::Tensor { path, tensor, error }
            }
        }
    }
}

/// The column of the weight at each column of its codes, where they differ and nothing else stands around the codes.
fn column_order(transforms: &Transforms) -> std::result::Result<Option<&[u32]>, &'static str> {
    match (transforms.before.as_slice(), transforms.after.as_slice(), transforms.extras.as_slice()) {
        ([], [], []) => Ok(None),
        ([Map::Perm(order)], [], []) => Ok(Some(order)),
        // Of a rotated input: the codes are of the weight that reads it so, as the source is folded.
        ([Map::Hadamard(_)], [], []) => Ok(None),
        // Single weights, which both decoders add.
        ([], [], [Extra::Sparse { .. }]) => Ok(None),
        _ => Err("maps and extras"),
    }
}

/// Adds the single weights of a row to the values of its codes.
fn add_row(extra: &Extra, row: usize, out: &mut [f32]) {
    let Extra::Sparse { starts, index, values } = extra else { return };
    let span = starts[row] as usize..starts[row + 1] as usize;
    index[span.clone()].iter().zip(&values[span]).for_each(|(&i, v)| out[i as usize] += v);
}

/// Brings a row of the weight into the order of its codes.
fn in_order(row: &mut [f32], order: Option<&[u32]>, sorted: &mut Vec<f32>) {
    let Some(order) = order else { return };
    sorted.clear();
    sorted.extend(order.iter().map(|&from| row[from as usize]));
    row.copy_from_slice(sorted);
}

/// The type of a codec's blocks.
fn block_type(format: &Format) -> Option<BlockType> {
    match format {
        Format::Codec(id) => GgmlType::of_codec(*id).and_then(|ty| BlockType::from_name(ty.name)),
        _ => None,
    }
}

/// The element furthest from its source.
#[derive(Clone, Copy, Default)]
struct Worst {
    /// Error in units of the bound.
    ratio: f64,
    row: usize,
    col: usize,
    source: f32,
    decoded: f32,
}

impl Worst {
    fn take(&mut self, other: Worst) {
        if other.ratio > self.ratio {
            *self = other;
        }
    }

    fn text(&self, module: &str) -> String {
        let Worst { ratio, row, col, source, decoded } = self;
        format!(
            "{module}: element [{row}, {col}]: source {source:e}, stored {decoded:e}, {ratio:.3} × the bound"
        )
    }
}

/// The largest `|w - ŵ|` of a row in units of what nearest rounding under any rule may miss, `bound` steps.
fn worst_error(q: &Quantized, bound: f32, row: usize, w: &[f32], decoded: &[f32], worst: &mut Worst) {
    // A scale that a narrow code rounded down clips by as much as it was rounded: 1/16 for E4M3, 1/256 for bf16.
    let slack = q.format.scale().map_or(0.0, |s| if s.code == Code::F32 { 1e-6 } else { 0.0625 });
    for (block, start, end) in q.format.blocks().runs(q.cols, row) {
        let (_, inner, tail) = q.block_decoder(block).parts();
        let step = f64::from((bound * inner * tail.unwrap_or(1.0)).abs()) * 1.0001;
        let nested = nested_slack(q, block, bound);
        let allowed = |w: f32| step + f64::from(w.abs()) * slack + nested;
        let error = |w: f32, decoded: f32| (f64::from(w) - f64::from(decoded)).abs();
        let (w, decoded) = (&w[start..end], &decoded[start..end]);
        // Most blocks hold nothing worse than what was seen, which a multiplication shows; only the others divide.
        let known = worst.ratio * (1.0 - 1e-12);
        let within = |w, decoded| error(w, decoded) <= known * allowed(w);
        if w.iter().zip(decoded).fold(true, |all, (&w, &decoded)| all & within(w, decoded)) {
            continue;
        }
        for (i, (&source, &decoded)) in w.iter().zip(decoded).enumerate() {
            let error = error(source, decoded);
            let ratio = if error == 0.0 { 0.0 } else { error / allowed(source) };
            let ratio = if ratio.is_nan() { f64::INFINITY } else { ratio };
            worst.take(Worst { ratio, row, col: start + i, source, decoded });
        }
    }
}

/// What double quantization adds to the error of a block: its scale is a level of the signed dynamic map, whose levels
/// are at most 1/64 apart, of the amax of its run. A scale that is too small clips by as much.
fn nested_slack(q: &Quantized, block: usize, bound: f32) -> f64 {
    let Some(nested) = q.nested() else { return 0.0 };
    f64::from(nested.factor(block)) / 64.0 * f64::from(1.0 + bound)
}

/// Tensors that are not linear weights must have been taken over byte for byte, or as a transform changes them.
fn check_copied(
    files: &ModelFiles,
    source: &Folded<'_>,
    config: &ModelConfig,
    threads: usize,
    found: &mut Verification,
) -> Result<()> {
    for info in config.tensors() {
        let (Some(ours), Some(theirs)) = (files.checkpoint().get(&info.name), source.stored(&info.name))
        else {
            continue;
        };
        if ours.dtype != theirs.dtype || ours.shape != theirs.shape {
            continue; // a quantized layer under its own name; compared as a weight
        }
        found.compared += 1;
        let same = if source.changes(&info.name) {
            let mut bytes = vec![0; usize::try_from(ours.len).unwrap_or_default()];
            files.checkpoint().read_range(&info.name, 0, &mut bytes)?;
            bytes == source.bytes(&info.name, &ours.shape, ours.dtype)?
        } else {
            same_bytes(files, source.files(), &info.name, ours.len, threads)?
        };
        if !same {
            found.faults.push(format!("{}: differs from the source", info.name));
        }
    }
    Ok(())
}

fn same_bytes(a: &ModelFiles, b: &ModelFiles, name: &str, len: u64, threads: usize) -> Result<bool> {
    let pieces = usize::try_from(len.div_ceil(COMPARED)).unwrap_or(usize::MAX);
    let compare = |range: Range<usize>| -> Result<bool> {
        let at = range.start as u64 * COMPARED;
        let n = usize::try_from(COMPARED.min(len - at)).unwrap_or_default();
        let mut bytes = (vec![0; n], vec![0; n]);
        a.checkpoint().read_range(name, at, &mut bytes.0)?;
        b.checkpoint().read_range(name, at, &mut bytes.1)?;
        Ok(bytes.0 == bytes.1)
    };
    map_reduce_fixed(threads, pieces, 1, compare, Ok(true), |all, part| Ok(all? & part?))
}

/// Compares logits of the model as the two readers have it.
fn compare_readers(
    ordinary: &dyn WeightSource,
    independent: &dyn WeightSource,
    config: &ModelConfig,
    found: &mut Verification,
) -> Result<()> {
    let what = "logits of the ordinary and the independent reader";
    found.max_logit_difference = compare_logits(ordinary, independent, config, what, found)?;
    Ok(())
}

/// Compares logits of two models that are to be one, `what` in faults, on a fixed pseudo-random text: their largest difference.
fn compare_logits(
    one: &dyn WeightSource,
    other: &dyn WeightSource,
    config: &ModelConfig,
    what: &str,
    found: &mut Verification,
) -> Result<Option<f32>> {
    if config.parameters() > MAX_LOGIT_PARAMETERS {
        let millions = config.parameters() / 1_000_000;
        found.notes.push(format!("{what} were not compared: {millions} million parameters, twice in memory"));
        return Ok(None);
    }
    let length = LOGIT_TOKENS.min(config.max_position_embeddings);
    let vocabulary = config.vocab_size as u64;
    let token = |i: usize| (u64::from(mantissa_num::round::random_u32(1, i as u64)) % vocabulary) as u32;
    let tokens: Vec<u32> = (0..length).map(token).collect();
    let one = logits(&Decoder::load(one)?, config, &tokens)?;
    let other = logits(&Decoder::load(other)?, config, &tokens)?;
    let scale = one.iter().fold(0f32, |a, v| a.max(v.abs()));
    let difference = one.iter().zip(&other).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
    let finite = one.iter().all(|v| v.is_finite());
    if !finite || difference.is_nan() || difference > 1e-4 * scale.max(1.0) {
        let how = if finite { format!("differ by {difference:e}") } else { "are not finite".to_owned() };
        found.faults.push(format!("{what} {how}"));
    }
    Ok(Some(difference))
}

fn logits(decoder: &Decoder, config: &ModelConfig, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut buffers = Buffers::plan(config, tokens.len(), tokens.len())?;
    let mut logits = vec![0.0; tokens.len() * config.vocab_size];
    let mut hidden = decoder.forward(&Batch { tokens, lens: &[tokens.len()] }, &mut buffers)?;
    hidden.logits(0..tokens.len(), &mut logits)?;
    Ok(logits)
}
