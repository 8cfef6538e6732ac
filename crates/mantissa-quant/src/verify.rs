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
pub(crate) mod logits;
mod manifest;
pub(crate) mod memory;
mod reference;
mod trellis;
pub(crate) mod verification;
mod weights;
mod worst;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use mantissa_eval::Sequence;
use mantissa_kernels::map_reduce_fixed;
use mantissa_model::{CacheInF32, LinearInfo, ModelConfig, check_kv_levels};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{ErrorClass, Manifest};

use independent::Independent;
pub use independent::decode;
pub use load::load_check;
use logits::{compare_logits, compare_readers};
use manifest::check_manifest;
pub use memory::{stored_by_module, verify_bytes};
pub use verification::Verification;
use weights::WeightCheck;

use crate::config::model_config;
use crate::error::Result;
use crate::fold::record::Record;
use crate::fold::{Folded, Folds};
use crate::quality::check;
use crate::report::LayerReport;
use crate::rtn;
use crate::stacks::stack_of;

/// Bytes compared at a time: they stay in a core's cache.
const COMPARED: u64 = 1 << 19;

/// Reference, records and text that an artifact is verified against.
#[derive(Clone, Copy, Debug, Default)]
pub struct Against<'a> {
    /// The dense model that it was made from.
    pub reference: Option<&'a Path>,
    /// True if the records of `quality.json` are checked, its hashes and the error of every layer. A caller that has just
    /// written that leaves it out.
    pub recorded: bool,
    /// The windows that the recorded figures were measured on.
    pub text: Option<&'a [Sequence]>,
}

/// Verifies the model folder or GGUF file `artifact`, against the dense model `reference` where one is given. Where the method
/// rounds to nearest, an error past the scheme's bound is a fault. The result does not depend on `threads`.
///
/// # Errors
/// [`QuantError`](crate::QuantError) for what cannot be read at all, unless hashes have shown already that it is damaged; what can be read and
/// is wrong is a fault of the [`Verification`].
pub fn verify(artifact: &Path, reference: Option<&Path>, threads: usize) -> Result<Verification> {
    let against = Against { reference, recorded: true, text: None };
    verify_against(artifact, &against, threads, &|_| ControlFlow::Continue(()))
}

/// [`verify`] against whatever there is. `progress` is told the tokens of [`Against::text`] that were run, and may end it.
///
/// # Errors
/// As [`verify`]; [`QuantError::OtherText`](crate::QuantError::OtherText) for windows that are not those of the recorded figures.
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
            found.notes.push(format!("{unjudged} weights are not RTN: error reported, bound not checked"));
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
