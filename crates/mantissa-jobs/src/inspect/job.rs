//! Inspection of a checkpoint as a job: tensors, schemes, parameters, size, and statistics of values.

use std::path::PathBuf;

use mantissa_advise::subject::bytes_of_weight;
use mantissa_model::{ModelConfig, find_head};
use mantissa_store::{Manifest, Shown};
use serde::{Deserialize, Serialize};

use super::architecture;
use super::inventory::{Entry, Inventory};
use super::model::Model;
use super::report::{InspectReport, assemble};
use super::stats::{self, Stats};
use crate::error::Result;
use crate::host::Host;
use crate::job::{Job, JobOutput};
use crate::memory::PROCESS;
use crate::model::{ModelPath, interrupted};
use crate::progress::Unit;
use crate::text::bytes;

/// Inspection of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inspect {
    /// Model folder, .gguf or .safetensors file.
    pub model: ModelPath,
    /// True to read all weights for statistics of their values.
    pub stats: bool,
}

/// Checkpoint with what its headers say.
struct Headers {
    model: Model,
    config: Option<ModelConfig>,
    inventory: Inventory,
    warnings: Vec<String>,
}

impl Inspect {
    /// Reads headers, and one weight of each kind of quantized layer.
    fn headers(&self, host: &Host) -> Result<Headers> {
        let mut warnings = Vec::new();
        let path = self.model.as_file();
        warnings.extend(interrupted(path));
        let model = Model::open(path, &mut warnings)?;
        let mut config = architecture::config(model.checkpoint(), path, &mut warnings)?;
        if let (Model::Known(files), Some(config)) = (&model, &mut config) {
            find_head(config, files)?;
        }
        host.require_more_memory(&path.display().to_string(), 0)?;
        if let (Model::Known(files), Some(_)) = (&model, &config) {
            // Scales and codes are read to find the scheme of each kind of layer.
            let needs = bytes_of_weight(files).unwrap_or(0);
            host.require_memory("inspect", PROCESS.saturating_add(needs))?;
        }
        let inventory = Inventory::read(&model, config.as_ref(), &mut warnings)?;
        Ok(Headers { model, config, inventory, warnings })
    }
}

impl Job for Inspect {
    const NAME: &'static str = "inspect";
    const VERSION: u32 = 1;
    type Report = InspectReport;

    fn inputs(&self) -> Vec<PathBuf> {
        let file = self.model.as_file().to_owned();
        self.model.inputs().into_iter().chain([file]).collect()
    }

    fn outputs(&self) -> Vec<JobOutput> {
        Vec::new()
    }

    fn memory(&self, host: &Host) -> Result<u64> {
        let Headers { model, inventory, .. } = self.headers(host)?;
        let weight = match &model {
            Model::Known(files) => bytes_of_weight(files).unwrap_or(0),
            Model::Raw(_) => 0,
        };
        let stats = if self.stats { stats_memory(&inventory.entries, host) } else { 0 };
        Ok(PROCESS.saturating_add(weight).max(stats))
    }

    /// Reads headers and, for statistics, all weights. What is wrong with the checkpoint is among the warnings of the
    /// report.
    ///
    /// # Errors
    /// A file that cannot be read or is malformed; too little memory.
    fn run(&self, host: &Host) -> Result<InspectReport> {
        let Headers { model, config, inventory, mut warnings } = self.headers(host)?;
        let mut notes = model.notes();
        if let (Model::Known(files), Some(config)) = (&model, &config) {
            architecture::compare(config, files, &inventory.entries, &mut notes, &mut warnings);
        }
        notes.extend(note_on_cast(&inventory.entries));
        let kv_cache = kv_cache(&model, config.as_ref(), &mut warnings);
        let stats = if self.stats { measure(&model, &inventory.entries, host)? } else { Vec::new() };
        warnings.splice(0..0, model.checkpoint().warnings().iter().cloned());
        let report = assemble(self.model.named(), &model, config.as_ref(), inventory, stats);
        let history = Manifest::history(self.model.as_file())?;
        Ok(InspectReport { kv_cache, history, notes, warnings, ..report })
    }
}

/// Returns a note on a file that `mantissa cast` wrote, whose size is not that of the scheme.
fn note_on_cast(entries: &[Entry]) -> Option<String> {
    let named =
        |suffix: &str| entries.iter().filter(|entry| entry.name.ends_with(suffix)).collect::<Vec<_>>();
    let copies = named(".dequant");
    let first = copies.first()?.name.strip_suffix(".dequant")?;
    let has = |suffix: &str| entries.iter().any(|entry| entry.name.strip_suffix(suffix) == Some(first));
    (has(".codes") || has(".packed")).then(|| {
        let size = bytes(copies.iter().map(|entry| entry.bytes).sum());
        format!("written by mantissa cast: codes in whole bytes beside {size} of F32 copies (.dequant), so bits/weight is that of the file, not of the scheme")
    })
}

/// Returns the KV cache scheme that the checkpoint states; a malformed one is a warning.
fn kv_cache(model: &Model, config: Option<&ModelConfig>, warnings: &mut Vec<String>) -> Option<String> {
    let (Model::Known(files), Some(config)) = (model, config) else { return None };
    match mantissa_quant::stored_kv_scheme(files, config) {
        Ok(found) => {
            let stored = found.map_or_else(Some, |scheme| scheme.map(|scheme| scheme.to_string()));
            stored.or_else(|| files.kv_policy().map(str::to_owned))
        }
        Err(error) => {
            warnings.push(error.to_string());
            None
        }
    }
}

/// Predicts the memory of [`measure`] in bytes.
fn stats_memory(entries: &[Entry], host: &Host) -> u64 {
    entries.iter().map(|entry| stats::memory(entry, host.threads)).max().unwrap_or(0)
}

/// Measures the statistics of each entry.
fn measure(model: &Model, entries: &[Entry], host: &Host) -> Result<Vec<Option<Stats>>> {
    host.require_memory("inspect --stats", stats_memory(entries, host))?;
    let progress = host.progress(entries.iter().map(|entry| entry.bytes).sum(), Unit::Bytes);
    let mut all = Vec::with_capacity(entries.len());
    for entry in entries {
        progress.message(Shown(&entry.name).to_string());
        all.push(stats::of_entry(model, entry, host.threads)?);
        progress.add(entry.bytes);
    }
    progress.finish();
    Ok(all)
}
