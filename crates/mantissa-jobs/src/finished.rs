//! Finished outputs: a job whose output is complete and unchanged needs no work.

use std::path::{Path, PathBuf};

use mantissa_quant::{Outcome, Plan, Quality};
use mantissa_store::convention::ModelFiles;
use mantissa_store::error::OutputFault;
use mantissa_store::gguf::is_part_of;
use mantissa_store::target::has_siblings;
use mantissa_store::{Committed, Error, Manifest, Shown, disk, manifest_path};

use crate::error::Result;
use crate::host::Host;
use crate::hub::is_first_part;

/// Finds the finished output at `out` of the job that `plan` plans; `None` if the job has work to do, as always where it is
/// to be done `anew`.
///
/// An output is that of the job if it carries the job's mark (the same command line, inputs of the same identity), or if
/// its `quality.json` records the same job, source, texts and limits by their hashes. Then its files are compared with the
/// hashes of its manifest.
///
/// # Errors
/// An output that another job wrote, with what differs; files that cannot be read.
pub fn output_of_plan(
    plan: &Plan,
    source: &ModelFiles,
    out: &Path,
    anew: bool,
    host: &Host,
) -> Result<Option<Outcome>> {
    let refused = host.is_refused(out);
    let found = if anew || host.replaces() { None } else { Found::at(out) };
    let what = if out.is_dir() { "a folder" } else { "a file" };
    let fault = match found {
        None if !refused => return Ok(None),
        None => OutputFault::Exists { what },
        Some(found) if !refused => {
            // What a killed run left beside its output, the job removes when it runs as always.
            let is_finished = !has_siblings(out) && host.wrote(out)? && found.damage()?.is_none();
            return Ok(is_finished.then(|| found.outcome()));
        }
        Some(found) => {
            let difference = match found.damage()? {
                Some(damage) => Some(damage),
                None => plan.difference(&found.quality, source)?,
            };
            match difference {
                None => return Ok(Some(found.outcome())),
                Some(why) => OutputFault::Differs { what, why },
            }
        }
    };
    Err(Error::Output { path: out.to_owned(), fault }.into())
}

/// Finds the finished output at `out` of the job that `host` runs, by its mark alone; `None` if the job has work to do.
/// `others` are further outputs, which must be complete as well.
///
/// # Errors
/// Files that cannot be read.
pub fn output_of_job(out: &Path, others: &[&Path], host: &Host) -> Result<Option<Outcome>> {
    if host.replaces() || host.is_refused(out) || has_siblings(out) || !host.wrote(out)? {
        return Ok(None);
    }
    for other in others {
        if !host.wrote(other)? {
            return Ok(None);
        }
    }
    let Some(found) = Found::at(out) else { return Ok(None) };
    Ok(if found.damage()?.is_none() { Some(found.outcome()) } else { None })
}

/// Output with its manifest and its quality.
struct Found {
    /// Folder, or GGUF file: the first of a split model.
    model: PathBuf,
    manifest: Manifest,
    quality: Quality,
}

impl Found {
    /// Reads what describes the output at `out`; `None` if there is no finished output.
    fn at(out: &Path) -> Option<Self> {
        let model = opened(out)?;
        // What is no finished output, or a damaged one, is no answer; the writer refuses or replaces it.
        let manifest = Manifest::read_file(&manifest_path(&model)).ok()?;
        let quality = Quality::read_at(&model).ok()?;
        Some(Found { model, manifest, quality })
    }

    /// Names the first file that is not as the manifest lists it.
    fn damage(&self) -> Result<Option<String>> {
        let mismatches = match self.model.is_dir() {
            true => mantissa_store::verify_manifest(&self.model)?,
            false => {
                let mut found: Vec<_> = self.manifest.altered().into_iter().collect();
                found.extend(self.manifest.compare(disk::folder_of(&self.model))?);
                found
            }
        };
        Ok(mismatches.first().map(|mismatch| Shown(&mismatch.to_string()).to_string()))
    }

    fn outcome(self) -> Outcome {
        let committed = Committed { path: self.model, manifest: self.manifest, leftover: None };
        Outcome { quality: self.quality, committed, resumed: 0, synced: None, verification: None }
    }
}

/// Returns the path that opens the output at `out`: itself, or the first part of a split GGUF model.
fn opened(out: &Path) -> Option<PathBuf> {
    if out.is_dir() || out.is_file() {
        return Some(out.to_owned());
    }
    let own = out.file_name()?.to_str().filter(|name| name.ends_with(".gguf"))?;
    let entries = std::fs::read_dir(disk::folder_of(out)).ok()?.flatten().map(|entry| entry.path());
    let is_part = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        is_part_of(own, &name) && is_first_part(&name)
    };
    entries.into_iter().find(is_part)
}
