//! Calibration coverage: channels and experts that the calibration never reaches, found before quantization starts.

use std::ops::ControlFlow;
use std::path::Path;

use mantissa_eval::whole;
use mantissa_model::Bos;
use mantissa_quant::{Coverage, Plan, QuantError};
use mantissa_store::TextFile;
use mantissa_store::convention::ModelFiles;

use crate::error::{BadInput, Result};
use crate::host::Host;
use crate::model::load_tokenizer;
use crate::progress::Unit;

/// Measures the coverage of `plan`'s calibration (if any) on `source`, and its distance to `traffic`, an in-domain
/// sample.
///
/// # Errors
/// An unreadable text; errors of running the model.
pub fn find(
    plan: &Plan,
    source: &ModelFiles,
    traffic: Option<&Path>,
    host: &Host,
) -> Result<Option<Coverage>> {
    let progress = host.progress(0, Unit::Items("steps"));
    let mut done = 0;
    let tick = &mut || {
        done += 1;
        progress.message("calibration coverage");
        progress.set(done);
        if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = host.orderly(|| Coverage::find(plan, source, tick), QuantError::is_interruption);
    progress.finish();
    let Some(mut coverage) = found? else { return Ok(None) };
    if let Some(path) = traffic {
        coverage.compare(plan, &[sample(path, source, host)?]);
    }
    Ok(Some(coverage))
}

/// Tokenizes the in-domain sample at `path`.
fn sample(path: &Path, source: &ModelFiles, host: &Host) -> Result<Vec<u32>> {
    let name = path.display().to_string();
    let tokens = host.reading_texts(|| {
        let tokenizer = load_tokenizer(source, host)?;
        let text = whole(TextFile::open(path)?, &name, &tokenizer, host.memory_left())?;
        Ok(tokenizer.encode(&text, Bos::Never)?)
    })?;
    if tokens.is_empty() {
        return Err(BadInput::new(name, "no token", "an in-domain text sample").into());
    }
    Ok(tokens)
}
