//! Comparison of `quality.json` with the files.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use mantissa_eval::Sequence;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Manifest, hash_file};

use crate::error::{QuantError, Result};
use crate::error_stats::ErrorReport;
use crate::measure::hashes;
use crate::quality::{Digests, Figures, QUALITY_NAME, Quality, TokenSet, Verification};

/// Relative tolerance of error figures; the sums are split differently.
const ERROR_TOLERANCE: f64 = 1e-6;

impl Quality {
    /// Compares the files of `source` with the recorded digests of the model that was quantized. Returns what differs.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn faults_of_source(&self, source: &ModelFiles) -> Result<Vec<String>> {
        let mut found = Verification::default();
        self::source(self, source, &mut found)?;
        Ok(found.faults)
    }
}

/// Reads the `quality.json` of the artifact. If it is missing or unusable, `found` says so.
pub(crate) fn read(artifact: &Path, found: &mut Verification) -> Option<Quality> {
    match Quality::read(artifact) {
        Ok(Some(quality)) => Some(quality),
        Ok(None) => {
            found.notes.push(format!(
                "no {QUALITY_NAME} next to the weights: source hashes and figures not checked"
            ));
            None
        }
        Err(error) => {
            found.faults.push(error.to_string());
            None
        }
    }
}

/// Compares the recorded digests of the weight files with the manifest's, which were compared with the files. Without a
/// manifest, compares them with the files.
///
/// # Errors
/// A file exists and cannot be read.
pub(crate) fn weights(
    quality: &Quality,
    files: &ModelFiles,
    manifest: Option<&Manifest>,
    found: &mut Verification,
) -> Result<()> {
    let mut actual = Digests::new();
    for path in files.checkpoint().files() {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let listed = manifest.and_then(|m| m.files.get(&name)).copied();
        actual.insert(name, listed.map_or_else(|| hash_file(path), Ok)?);
    }
    // A single file may have been renamed; only its digest must match.
    if files.gguf().is_some() && actual.len() == 1 && quality.hashes.weights.len() == 1 {
        let pairs = actual.iter().zip(quality.hashes.weights.values());
        found.faults.extend(pairs.filter_map(|((name, digest), recorded)| {
            differs("hashes.weights", name, Some(recorded), Some(digest))
        }));
        return Ok(());
    }
    for (name, digest) in &actual {
        let recorded = quality.hashes.weights.get(name);
        found.faults.extend(differs("hashes.weights", name, recorded, Some(digest)));
    }
    // Besides weight files only their index is recorded.
    for (name, recorded) in quality.hashes.weights.iter().filter(|(name, _)| !actual.contains_key(*name)) {
        let listed = manifest.and_then(|m| m.files.get(name));
        if manifest.is_some() || !name.ends_with(".index.json") {
            found.faults.extend(differs("hashes.weights", name, Some(recorded), listed));
        }
    }
    Ok(())
}

/// Compares the recorded digests of the source with the files of `source`.
///
/// # Errors
/// A file exists and cannot be read.
pub(crate) fn source(quality: &Quality, source: &ModelFiles, found: &mut Verification) -> Result<()> {
    let actual = hashes::of_source(source)?;
    found.source_files = actual.len();
    let names: std::collections::BTreeSet<_> = actual.keys().chain(quality.hashes.source.keys()).collect();
    for name in names {
        let recorded = quality.hashes.source.get(name);
        found.faults.extend(differs("hashes.source", name, recorded, actual.get(name)));
    }
    Ok(())
}

/// Returns a fault if two digests differ.
fn differs(
    field: &str,
    name: &str,
    recorded: Option<&FileDigest>,
    actual: Option<&FileDigest>,
) -> Option<String> {
    let text = |digest: Option<&FileDigest>| digest.map_or_else(|| "no file".to_owned(), FileDigest::hex);
    let recorded_text = recorded.map_or_else(|| "nothing".to_owned(), FileDigest::hex);
    (recorded != actual).then(|| {
        format!("{name}: expected SHA-256 {recorded_text} ({QUALITY_NAME}, {field}), got {}", text(actual))
    })
}

/// Returns the recorded reports of layers, by module.
pub(crate) fn errors(quality: Option<&Quality>) -> BTreeMap<&str, &crate::LayerReport> {
    let all = quality.into_iter().flat_map(|q| q.layers.iter().chain(&q.tables));
    all.map(|layer| (layer.module.as_str(), layer)).collect()
}

/// Returns a fault if the recorded error of a layer differs from the measured one.
pub(crate) fn error_fault(module: &str, recorded: &ErrorReport, again: &ErrorReport) -> Option<String> {
    // Formats that store the global scale as its reciprocal differ by a unit in the last place.
    if recorded.mse == 0.0 && again.relative_error <= f64::from(f32::EPSILON) {
        return None;
    }
    let near = |a: f64, b: f64| (a - b).abs() <= ERROR_TOLERANCE * a.abs().max(b.abs());
    let pairs = [
        ("mse", recorded.mse, again.mse),
        ("sqnr_db", recorded.sqnr_db.unwrap_or(f64::MAX), again.sqnr_db.unwrap_or(f64::MAX)),
        ("relative_error", recorded.relative_error, again.relative_error),
        ("max_abs_error", recorded.max_abs_error, again.max_abs_error),
    ];
    let (name, recorded, again) = pairs.into_iter().find(|&(_, a, b)| !near(a, b))?;
    Some(format!("{module}: expected {name} {recorded:e} ({QUALITY_NAME}), got {again:e}"))
}

/// Measures the recorded figures again on `sequences`: all of them against `source`, or without a source only the loss.
///
/// # Errors
/// [`QuantError::OtherText`] if the figures were measured on other windows; errors of [`Figures::measure`].
pub(crate) fn figures(
    quality: &Quality,
    artifact: &ModelFiles,
    source: Option<&ModelFiles>,
    sequences: &[Sequence],
    threads: usize,
    progress: &(dyn Fn(u64) -> ControlFlow<()> + Sync),
    found: &mut Verification,
) -> Result<()> {
    let Some(recorded) = &quality.evaluation else {
        found.notes.push(format!("{QUALITY_NAME} has no evaluation: no figures to check"));
        return Ok(());
    };
    let text = TokenSet::new(&recorded.text.name, sequences);
    if text != recorded.text {
        let path = artifact.dir().to_owned();
        let (recorded, got) = (Box::new(recorded.text.clone()), Box::new(text));
        return Err(QuantError::OtherText { path, recorded, got });
    }
    let again = match source {
        Some(source) => Figures::measure(artifact, source, &text, sequences, threads, progress)?,
        None => {
            found.notes.push("no source given: only loss and perplexity were measured again".into());
            recorded.loss_again(artifact, sequences, threads, progress)?
        }
    };
    let bounds = recorded.bounded(quality.activations.is_some());
    for (recorded, again) in bounds.into_iter().zip(again.bounded(false)) {
        let (name, value, within) = (recorded.name, recorded.value, recorded.within);
        let holds = (again.value - value).abs() <= within || (again.value.is_nan() && value.is_nan());
        if !holds {
            let got = again.value;
            found.faults.push(format!(
                "evaluation.{name}: expected {value} ± {within:.1e} ({QUALITY_NAME}), got {got}"
            ));
        }
    }
    found.figures = Some(again);
    Ok(())
}
