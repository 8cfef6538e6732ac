//! Verification of an artifact, with [`mantissa_verify`] as the independent reader.
//!
//! 1. Compares files with the manifest's hashes, and the hashes in `quality.json` with them and with the source's
//!    files.
//! 2. Decodes every quantized weight with the independent and the ordinary reader: equal bit for bit.
//! 3. With the source: every weight is within the scheme's bound, keeps the source's signal and has the recorded error;
//!    all other tensors are equal byte for byte.
//! 4. Compares the logits of both readers: equal within 1e-4 of the largest.
//! 5. With the evaluation text: measures the recorded figures again.
//!
//! A GGUF file has its manifest and `quality.json` beside it. Its container is also read twice and compared: names,
//! types, shapes, offsets. Every tensor counts as a weight, and its bound follows from the range of its block in the
//! source. The model that the metadata describe is compared with the source's.
//!
//! Rows of a weight are checked on several threads. Faults come in the order of rows for any number of threads.

mod gguf;
mod gguf_parts;
mod independent;
pub(crate) mod logits;
mod manifest;
pub(crate) mod memory;
mod recorded;
mod reference;
mod signal;
mod trellis;
mod weights;
mod worst;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};
use std::path::Path;

use mantissa_eval::Sequence;
use mantissa_kernels::map_reduce_fixed;
use mantissa_model::{CacheInF32, LinearInfo, ModelConfig, check_kv_levels, load_config};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{ErrorClass, Manifest};

pub use crate::load::load_check;
pub use crate::quality::Verification;
use independent::Independent;
pub use independent::decode;
use logits::{compare_logits, compare_readers};
use manifest::check_manifest;
pub use memory::{stored_by_module, verify_bytes};
use weights::WeightCheck;

use crate::error::Result;
use crate::fold::{Folded, Folds};
use crate::plan::rounds_each;
use crate::quality::TRAINED;
use crate::report::LayerReport;
use crate::stacks::stack_of;
use crate::tables;
use crate::transform::record::Record;
use crate::unused;
use crate::{as_in_gguf, dense_source, dequantized_source};

/// Bytes compared at a time; they fit a core's cache.
const COMPARED: u64 = 1 << 19;

/// Reference, records and text that an artifact is verified against.
#[derive(Clone, Copy, Debug, Default)]
pub struct Against<'a> {
    /// Source: the dense model that the artifact was made from.
    pub reference: Option<&'a Path>,
    /// True if the source hashes and layer errors in `quality.json` are checked. False for a caller that has just
    /// written them.
    pub recorded: bool,
    /// Windows of the recorded figures, to measure them again.
    pub text: Option<&'a [Sequence]>,
}

/// Verifies the model folder or GGUF file `artifact`, against the dense model `reference` if one is given. If the
/// method is RTN, an error beyond the scheme's bound is a fault. The result does not depend on `threads`.
///
/// # Errors
/// [`QuantError`](crate::QuantError) for files that cannot be read, unless hashes already show damage. A readable but
/// wrong file is a fault of the [`Verification`].
pub fn verify(artifact: &Path, reference: Option<&Path>, threads: usize) -> Result<Verification> {
    let against = Against { reference, recorded: true, text: None };
    verify_against(artifact, &against, threads, &|_| ControlFlow::Continue(()))
}

/// Verifies against reference, records and text. `progress` gets the tokens of [`Against::text`] that were run; `Break`
/// interrupts it.
///
/// # Errors
/// Errors of [`verify`]; [`QuantError::OtherText`](crate::QuantError::OtherText) if the recorded figures
/// come from other windows.
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
        // A damaged file may fail anywhere; its hash has already reported it.
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
    let quality = recorded::read(artifact, found);
    let dequantized = quality.as_ref().is_some_and(|quality| quality.source_format.is_some());
    let source = against.reference.map(|path| reference_files(path, dequantized)).transpose()?;
    let source = match source {
        Some(source) if files.gguf().is_some() => Some(as_in_gguf(source)?),
        source => source,
    };
    if let Some(quality) = &quality {
        recorded::weights(quality, &files, manifest, found)?;
        if let Some(source) = source.as_ref().filter(|_| against.recorded) {
            recorded::source(quality, source, found)?;
        }
    }
    if files.gguf().is_some() {
        let bounded = quality.as_ref().is_some_and(|quality| rounds_each(&quality.method));
        gguf::check(&files, source.as_ref(), bounded, threads, found)?;
    } else {
        let recorded = recorded::errors(quality.as_ref());
        let tensors = quality.iter().flat_map(|quality| &quality.tensors);
        let trained =
            tensors.filter(|tensor| tensor.scheme.ends_with(TRAINED)).map(|tensor| tensor.tensor.as_str());
        let recorded = (&recorded, &trained.collect::<BTreeSet<_>>());
        check_weights(&files, source.as_ref(), recorded, against.recorded, threads, found)?;
    }
    match (&quality, against.text) {
        (Some(quality), Some(text)) => {
            recorded::figures(quality, &files, source.as_ref(), text, threads, progress, found)?;
        }
        (None, Some(_)) => found.notes.push("no quality.json: no figures to check".into()),
        _ => {}
    }
    Ok(())
}

/// Opens the source. An unquantized GGUF file is read as the dense checkpoint that jobs read, if it has no parts that
/// only its own reader joins; a quantized model is `dequantized` if the artifact was quantized from it.
fn reference_files(path: &Path, dequantized: bool) -> Result<ModelFiles> {
    if dequantized {
        return dequantized_source(ModelFiles::open(path)?);
    }
    match dense_source(ModelFiles::open(path)?) {
        Err(error) if error.class() == ErrorClass::Input => Ok(ModelFiles::open(path)?),
        opened => opened,
    }
}

/// Performs steps 2 to 4. `recorded` has each layer's report, with method and error, `trained` the unquantized tensors
/// that were trained and so differ from the source; `errors` is true if the error is
/// checked.
fn check_weights(
    files: &ModelFiles,
    source: Option<&ModelFiles>,
    (recorded, trained): (&BTreeMap<&str, &LayerReport>, &BTreeSet<&str>),
    errors: bool,
    threads: usize,
    found: &mut Verification,
) -> Result<()> {
    let config = load_config(files)?;
    let source_config = source.map(|source| load_config(source)).transpose()?;
    let mut folds = match (source, Record::read(files.dir())?) {
        (Some(source), Some(record)) => record.folds(source, &load_config(source)?)?,
        _ => Folds::default(),
    };
    source.map_or(Ok(()), |source| tables::untie(&mut folds, &config, source))?;
    let source = source.map(|source| Folded::new(source, &folds));
    let source = source.as_ref();
    let mut unjudged = 0;
    let stacked = |info: &LinearInfo| stack_of(info).is_some() && !info.is_by_rows(files);
    let linears = config.decoder_linears().filter(|info| info.is_by_rows(files) || stacked(info));
    // An unquantized embedding or head is large and has nothing to decode.
    let coded = |info: &LinearInfo| !files.is_dense(&format!("{}.weight", info.module));
    for info in linears.chain(config.tables().into_iter().filter(coded)) {
        let recorded = recorded.get(info.module.as_str()).copied();
        let original =
            source_config.as_ref().map_or_else(|| info.clone(), |source| counterpart(source, &info));
        let check = WeightCheck { files, source, info: &info, original: &original, recorded, errors };
        let before = found.weights;
        check.run(threads, found)?;
        unjudged += usize::from(found.weights > before && !check.bounded());
    }
    if let Some(source) = source {
        if unjudged > 0 {
            found.notes.push(format!(
                "{unjudged} weights are not rounded to nearest: RTN's error bound does not apply to them"
            ));
        }
        check_copied(files, source, &config, trained, threads, found)?;
        if folds != Folds::default() {
            let what = "logits of the source and of the transformed source";
            let folded = load_config(source.files())?;
            compare_logits(source.files(), source, &folded, what, found)?;
        }
    }
    if files.kv_policy().is_none() {
        return compare_readers(files, &Independent::new(files), &config, found);
    }
    // Rounding of sums decides between two equally near levels, so readers may differ. Weights are compared with the
    // cache in f32.
    check_kv_levels(files, &config)?;
    let independent = Independent::new(files);
    compare_readers(&CacheInF32(files), &CacheInF32(&independent), &config, found)
}

/// Returns the layer as a model with the configuration `source` stores it.
fn counterpart(source: &ModelConfig, info: &LinearInfo) -> LinearInfo {
    let original =
        if info.kind.is_table() { source.table(info.kind) } else { source.linear(info.layer, info.kind) };
    // The source may be another model: its shapes are checked when it is read.
    LinearInfo { rows: info.rows, cols: info.cols, bias: info.bias, ..original }
}

/// Checks that tensors other than linear weights were copied byte for byte, or changed as the transform says.
fn check_copied(
    files: &ModelFiles,
    source: &Folded<'_>,
    config: &ModelConfig,
    trained: &BTreeSet<&str>,
    threads: usize,
    found: &mut Verification,
) -> Result<()> {
    if !trained.is_empty() {
        let count = trained.len();
        found
            .notes
            .push(format!("{count} unquantized tensors were trained: they are not compared with the source"));
    }
    let used = config.tensors().into_iter().map(|info| info.name);
    let names = used.chain(unused::tensors(files, config).map(|meta| meta.name.clone()));
    for name in names.filter(|name| !trained.contains(name.as_str())) {
        let (Some(ours), Some(theirs)) = (files.checkpoint().get(&name), source.stored(&name)) else {
            continue;
        };
        if ours.dtype != theirs.dtype || ours.shape != theirs.shape {
            continue; // a quantized layer of the same name; compared as a weight
        }
        found.compared += 1;
        let same = if source.changes(&name) {
            let mut bytes = vec![0; usize::try_from(ours.len).unwrap_or_default()];
            files.checkpoint().read_range(&name, 0, &mut bytes)?;
            bytes == source.bytes(&name, &ours.shape, ours.dtype)?
        } else {
            let named = source.stored_name(&name);
            same_bytes((files, &name), (source.files(), named), ours.len, threads)?
        };
        if !same {
            found.faults.push(format!("{name}: differs from the source"));
        }
    }
    Ok(())
}

/// Compares two tensors of `len` bytes, each given by its model and its name there.
fn same_bytes(
    (a, a_name): (&ModelFiles, &str),
    (b, b_name): (&ModelFiles, &str),
    len: u64,
    threads: usize,
) -> Result<bool> {
    let pieces = usize::try_from(len.div_ceil(COMPARED)).unwrap_or(usize::MAX);
    let compare = |range: Range<usize>| -> Result<bool> {
        let at = range.start as u64 * COMPARED;
        let n = usize::try_from(COMPARED.min(len - at)).unwrap_or_default();
        let mut bytes = (vec![0; n], vec![0; n]);
        a.checkpoint().read_range(a_name, at, &mut bytes.0)?;
        b.checkpoint().read_range(b_name, at, &mut bytes.1)?;
        Ok(bytes.0 == bytes.1)
    };
    map_reduce_fixed(threads, pieces, 1, compare, Ok(true), |all, part| Ok(all? & part?))
}
