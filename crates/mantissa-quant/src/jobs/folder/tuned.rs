//! Training of scales and norms, after all layers were written.
//!
//! The trained values replace the method's in new files, which then take the place of the old ones. A run that ends
//! before that resumes with the quantized layers, and trains from the start.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_methods::e2e;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Error, FileDigest, SafeTensors, SafetensorsWriter, TensorSpec, disk};

use super::Folder;
use crate::e2e::{Tuned, tune};
use crate::error::Result;
use crate::fold::Folded;
use crate::jobs::describe::Contents;
use crate::jobs::task::Task;
use crate::progress::{Progress, Tell};
use crate::quality::TRAINED;
use crate::tensors::write_changed;
use crate::transform::Prepared;

impl Folder {
    /// Trains the written model, if the plan says so.
    pub(super) fn tune(
        &mut self,
        task: &Task<'_>,
        prepared: &Prepared,
        found: &mut Contents,
        progress: &mut Tell<'_>,
    ) -> Result<()> {
        let Some(options) = task.plan.job.tuning() else { return Ok(()) };
        let folded = Folded::new(task.source, &prepared.folds);
        let names: Vec<_> = self.shards.shards().iter().map(|shard| shard.file_name.clone()).collect();
        let stored = ModelFiles::unfinished(
            self.staging.path(),
            names.iter().map(String::as_str),
            self.config.clone(),
        )?;
        let done = task.plan.work_bytes();
        let mut tick = |stage: &str| {
            progress(Progress { done, tensor: &format!("{}: {stage}", e2e::NAME), tokens: None, items: None })
        };
        let tuned = tune(task.plan, options, (task.source, &folded, &stored), &mut tick)?;
        drop(stored);
        for name in names {
            let path = self.staging.path().join(&name);
            if let Some(digest) = rewrite(&path, &tuned.tensors)? {
                found.weights.insert(name, digest);
            }
        }
        record(&tuned, found);
        Ok(())
    }
}

/// Writes the changed tensors of a weight file. Returns its new digest; `None` if it has none of them.
fn rewrite(path: &Path, changed: &BTreeMap<String, Vec<u8>>) -> Result<Option<FileDigest>> {
    let from = SafeTensors::open(path)?;
    if from.tensors().iter().all(|meta| !changed.contains_key(&meta.name)) {
        return Ok(None);
    }
    let next = path.with_extension("trained");
    let specs = from.tensors().iter().map(|meta| TensorSpec::new(&meta.name, meta.dtype, meta.shape.clone()));
    let mut writer = SafetensorsWriter::create(&next, specs.collect(), from.metadata().clone())?;
    write_changed(&mut writer, &from, from.tensors().iter(), changed)?;
    let digest = writer.finish()?;
    let io = |error| Error::Io { path: path.to_owned(), operation: "replace", error };
    disk::rename(&next, path).map_err(io)?;
    Ok(Some(digest))
}

/// Updates the reports of the layers and of other trained tensors.
fn record(tuned: &Tuned, found: &mut Contents) {
    let [before, after] = tuned.kl;
    found.notes.push(match after < before {
        true => format!("{}: KL {before:.4} → {after:.4} nats/token on held-out windows", e2e::NAME),
        false => {
            format!("{}: no better than KL {before:.4} on held-out windows: nothing was changed", e2e::NAME)
        }
    });
    if !tuned.fixed.is_empty() {
        let (count, first) = (tuned.fixed.len(), &tuned.fixed[0]);
        found.notes.push(format!(
            "{}: scales of {count} layers are not trained in their format: {first} …",
            e2e::NAME
        ));
    }
    for layer in &mut found.layers {
        let Some(error) = tuned.errors.get(&layer.module) else { continue };
        layer.method = format!("{}+{}", layer.method, e2e::NAME);
        layer.error = *error;
        // Measured before the training.
        (layer.output_error, layer.judged) = (None, None);
    }
    let trained = found.tensors.iter_mut().filter(|tensor| tuned.tensors.contains_key(&tensor.tensor));
    trained.for_each(|tensor| tensor.scheme += TRAINED);
}
