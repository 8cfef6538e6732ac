//! Verification of an artifact, by a reader that shares no code with the writer beyond the layout tables.
//!
//! 1. The manifest's hashes.
//! 2. Every quantized weight decoded independently ([`independent`]) and by the ordinary reader: equal bit for bit.
//! 3. Against the source, where given: every weight within the scheme's bound, every other tensor equal byte for byte.
//! 4. Logits of the model as read ordinarily and as decoded independently: equal within 1e-4 of the largest.

pub mod independent;

use std::path::{Path, PathBuf};

use mantissa_model::{Batch, Buffers, Decoder, LinearInfo, ModelConfig};
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::{MANIFEST_NAME, verify_manifest};
use serde::Serialize;

use crate::error::{QuantError, Result};
use crate::plan::model_config;

/// Models up to this many parameters have their logits compared: two copies are held in memory as f32.
const MAX_LOGIT_PARAMETERS: u64 = 64 << 20;

/// Tokens of the logit comparison.
const LOGIT_TOKENS: usize = 32;

/// What was checked and what was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Verification {
    /// Whether everything held.
    pub ok: bool,
    /// Files whose hash was checked; 0 without a manifest.
    pub files: usize,
    /// Quantized weights decoded.
    pub weights: usize,
    /// Tensors compared with the source.
    pub compared: usize,
    /// Largest error against the source in units of the scheme's bound (at most 1 for round-to-nearest).
    pub max_error_in_bounds: Option<f64>,
    /// Largest difference of logits; absent where they were not compared.
    pub max_logit_difference: Option<f32>,
    /// What did not hold.
    pub faults: Vec<String>,
    /// What was not checked, and why.
    pub notes: Vec<String>,
}

/// Verifies the model folder `dir`, against the dense model `reference` where one is given. `bounded` says that the method
/// rounds to nearest, so that an error past the scheme's bound is a fault.
///
/// # Errors
/// [`QuantError`] for what cannot be read at all; what can be read and is wrong is a fault of the [`Verification`].
pub fn verify(dir: &Path, reference: Option<&Path>) -> Result<Verification> {
    let mut found = Verification::default();
    check_hashes(dir, &mut found)?;
    let files = ModelFiles::open(dir)?;
    let config = model_config(&files)?;
    let source = reference.map(ModelFiles::open).transpose()?;
    let bounded = rounds_to_nearest(dir);
    if !bounded && source.is_some() {
        found.notes.push(
            "the artifact does not say that it was rounded to nearest: errors are reported, not judged"
                .into(),
        );
    }
    for info in config.linears() {
        check_weight(&files, source.as_ref(), &info, bounded, &mut found)?;
    }
    if let Some(source) = &source {
        check_copied(&files, source, &config, &mut found)?;
    }
    check_logits(&files, &config, &mut found)?;
    found.ok = found.faults.is_empty();
    Ok(found)
}

fn check_hashes(dir: &Path, found: &mut Verification) -> Result<()> {
    if !dir.join(MANIFEST_NAME).exists() {
        found.notes.push(format!("no {MANIFEST_NAME}: hashes were not checked"));
        return Ok(());
    }
    let manifest = mantissa_store::Manifest::read(dir)?;
    found.files = manifest.files.len();
    for mismatch in verify_manifest(dir)? {
        match mismatch {
            mantissa_store::Mismatch::Unlisted { .. } => found.notes.push(mismatch.to_string()),
            _ => found.faults.push(mismatch.to_string()),
        }
    }
    Ok(())
}

/// Whether the report beside the weights says so.
fn rounds_to_nearest(dir: &Path) -> bool {
    let report = std::fs::read(dir.join(crate::REPORT_NAME)).ok();
    let report: Option<crate::Report> = report.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    report.is_some_and(|r| r.method == "rtn")
}

fn check_weight(
    files: &ModelFiles,
    source: Option<&ModelFiles>,
    info: &LinearInfo,
    bounded: bool,
    found: &mut Verification,
) -> Result<()> {
    let linear = files.linear(&info.module, info.rows, info.cols, false)?;
    let Weight::Quantized(q) = &linear.weight else { return Ok(()) };
    found.weights += 1;
    let ours = independent::decode(files, &info.module, info.rows, info.cols)?;
    let mut row = vec![0.0; info.cols];
    for (r, ours) in ours.chunks_exact(info.cols).enumerate() {
        q.dequantize_rows(r..r + 1, &mut row);
        let differs = ours.iter().zip(&row).position(|(a, b)| a != b && !(a.is_nan() && b.is_nan()));
        if let Some(c) = differs {
            let (a, b) = (ours[c], row[c]);
            let what = format!(
                "{}: element [{r}, {c}]: independent reader {a:e}, ordinary reader {b:e}",
                info.module
            );
            found.faults.push(what);
            break;
        }
    }
    let Some(source) = source else { return Ok(()) };
    let w = source_weight(files.dir(), source, info)?;
    let worst = worst_error(q, &w, &ours);
    found.compared += 1;
    found.max_error_in_bounds = Some(found.max_error_in_bounds.unwrap_or(0.0).max(worst.ratio));
    if bounded && worst.ratio > 1.0 {
        let Worst { ratio, row, col } = worst;
        let (w, value) = (w[row * info.cols + col], ours[row * info.cols + col]);
        let what = format!(
            "{}: element [{row}, {col}]: source {w:e}, stored {value:e}, {ratio:.3} × the bound",
            info.module
        );
        found.faults.push(what);
    }
    Ok(())
}

fn source_weight(dir: &Path, source: &ModelFiles, info: &LinearInfo) -> Result<Vec<f32>> {
    let name = format!("{}.weight", info.module);
    if source.is_quantized() || !source.has(&name) {
        return Err(reference_fault(dir, source.dir(), format!("it has no dense tensor {name}")));
    }
    Ok(source.tensor_f32(&name, &[info.rows, info.cols])?)
}

fn reference_fault(model: &Path, reference: &Path, what: String) -> QuantError {
    QuantError::Reference { model: PathBuf::from(model), reference: PathBuf::from(reference), what }
}

struct Worst {
    ratio: f64,
    row: usize,
    col: usize,
}

/// The largest `|w - ŵ|` in units of what nearest rounding under any rule may miss.
fn worst_error(q: &mantissa_num::Quantized, w: &[f32], decoded: &[f32]) -> Worst {
    let mut worst = Worst { ratio: 0.0, row: 0, col: 0 };
    let bound = q.format.error_bound();
    for row in 0..q.rows {
        for (block, start, end) in q.format.blocks().runs(q.cols, row) {
            let scale = if q.scales.is_empty() { 0 } else { q.scales.get(block) };
            // A scale that a narrow code rounded down clips by as much as it was rounded: 1/16 for E4M3, 1/256 for bf16.
            let slack = q
                .format
                .scale()
                .map_or(0.0, |s| if s.code == mantissa_num::Code::F32 { 1e-6 } else { 0.0625 });
            let step = q.format.decoder(scale, 0, q.outer).value(bound).abs();
            for col in start..end {
                let i = row * q.cols + col;
                let error = (f64::from(w[i]) - f64::from(decoded[i])).abs();
                let allowed = f64::from(step) * 1.0001 + f64::from(w[i].abs()) * slack;
                let ratio = if error == 0.0 { 0.0 } else { error / allowed };
                if ratio > worst.ratio || ratio.is_nan() {
                    worst = Worst { ratio: if ratio.is_nan() { f64::INFINITY } else { ratio }, row, col };
                }
            }
        }
    }
    worst
}

/// Tensors that are not linear weights must have been taken over byte for byte.
fn check_copied(
    files: &ModelFiles,
    source: &ModelFiles,
    config: &ModelConfig,
    found: &mut Verification,
) -> Result<()> {
    for info in config.tensors() {
        let (Some(ours), Some(theirs)) =
            (files.checkpoint().get(&info.name), source.checkpoint().get(&info.name))
        else {
            continue;
        };
        if ours.dtype != theirs.dtype || ours.shape != theirs.shape {
            continue; // a quantized layer under its own name; compared as a weight
        }
        found.compared += 1;
        let mut buffers = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let mut at = 0;
        while at < ours.len {
            let n = usize::try_from(ours.len - at).unwrap_or(usize::MAX).min(1 << 20);
            files.checkpoint().read_range(&info.name, at, &mut buffers.0[..n])?;
            source.checkpoint().read_range(&info.name, at, &mut buffers.1[..n])?;
            if buffers.0[..n] != buffers.1[..n] {
                found.faults.push(format!("{}: differs from the source", info.name));
                break;
            }
            at += n as u64;
        }
    }
    Ok(())
}

/// Compares logits on a fixed pseudo-random text.
fn check_logits(files: &ModelFiles, config: &ModelConfig, found: &mut Verification) -> Result<()> {
    if config.parameters() > MAX_LOGIT_PARAMETERS {
        let millions = config.parameters() / 1_000_000;
        found.notes.push(format!("logits were not compared: {millions} million parameters, twice in memory"));
        return Ok(());
    }
    let length = LOGIT_TOKENS.min(config.max_position_embeddings);
    let vocabulary = config.vocab_size as u64;
    let token = |i: usize| (u64::from(mantissa_num::round::random_u32(1, i as u64)) % vocabulary) as u32;
    let tokens: Vec<u32> = (0..length).map(token).collect();
    let ordinary = logits(&Decoder::load(files)?, config, &tokens)?;
    let decoded = independent::Source::new(files);
    let independent = logits(&Decoder::load(&decoded)?, config, &tokens)?;
    let scale = ordinary.iter().fold(0f32, |a, v| a.max(v.abs()));
    let difference = ordinary.iter().zip(&independent).fold(0f32, |a, (x, y)| a.max((x - y).abs()));
    found.max_logit_difference = Some(difference);
    let finite = ordinary.iter().all(|v| v.is_finite());
    if !finite || difference.is_nan() || difference > 1e-4 * scale.max(1.0) {
        let what = if finite { format!("differ by {difference:e}") } else { "are not finite".to_owned() };
        found.faults.push(format!("logits of the ordinary and the independent reader {what}"));
    }
    Ok(())
}

fn logits(decoder: &Decoder, config: &ModelConfig, tokens: &[u32]) -> Result<Vec<f32>> {
    let mut buffers = Buffers::plan(config, tokens.len(), tokens.len())?;
    let mut logits = vec![0.0; tokens.len() * config.vocab_size];
    let mut hidden = decoder.forward(&Batch { tokens, lens: &[tokens.len()] }, &mut buffers)?;
    hidden.logits(0..tokens.len(), &mut logits)?;
    Ok(logits)
}
