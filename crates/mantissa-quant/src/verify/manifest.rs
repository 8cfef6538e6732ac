//! Comparison of an artifact's files with its manifest.

use std::path::Path;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{
    Error, Manifest, Mismatch, Seal, interrupted_publication, manifest_path, verify_manifest,
};

use crate::error::Result;
use crate::quality::Verification;
use crate::quality::{QUALITY_NAME, SIGNATURE_ENDING, quality_path};

/// Compares the files with the manifest, if there is one, and returns it.
///
/// # Errors
/// The manifest or a file cannot be read.
pub(super) fn check_manifest(artifact: &Path, found: &mut Verification) -> Result<Option<Manifest>> {
    if let Some(work) = interrupted_publication(artifact) {
        found.faults.push(format!(
            "{}: expected a finished publication, got one that was interrupted; fix: rerun the command that wrote it, which completes it from {}",
            name_of(artifact),
            work.display()
        ));
    }
    let path = manifest_path(artifact);
    let manifest = match Manifest::read_file(&path) {
        Err(Error::Missing { .. }) => {
            let note = format!("no {} next to the weights: not checked for damage", name_of(&path));
            found.note_unhashed(note);
            return Ok(None);
        }
        read => read?,
    };
    found.files = manifest.files.len();
    if manifest.seal == Seal::Missing {
        let name = name_of(&path);
        // No fault under --strict: nothing tells an older manifest from one without this field.
        found.notes.push(format!("{name}: no sha256 of its own fields: written by an earlier version"));
    }
    let mismatches =
        if artifact.is_dir() { verify_manifest(artifact)? } else { single(artifact, &manifest)? };
    for mismatch in mismatches {
        match &mismatch {
            // Files that tools leave behind: .gitattributes, .cache of a download.
            // A signature is made after the manifest, and vouches for itself.
            Mismatch::Unlisted { file } if *file == format!("{QUALITY_NAME}{SIGNATURE_ENDING}") => {}
            Mismatch::Unlisted { file } if file.split('/').any(|part| part.starts_with('.')) => {
                found.notes.push(mismatch.to_string());
            }
            Mismatch::Unlisted { .. } => found.note_unhashed(mismatch.to_string()),
            _ => found.faults.push(mismatch.to_string()),
        }
    }
    Ok(Some(manifest))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Compares a single file, or the parts of a split one, and its `quality.json` with the manifest. If all were renamed,
/// the manifest still has the old names.
fn single(artifact: &Path, manifest: &Manifest) -> Result<Vec<Mismatch>> {
    let (mut found, mut listed): (Vec<_>, _) = (manifest.altered().into_iter().collect(), Vec::new());
    let one = manifest.files.keys().filter(|name| !name.ends_with(QUALITY_NAME)).count() == 1;
    for (name, digest) in &manifest.files {
        let path = match name {
            _ if name.ends_with(QUALITY_NAME) => quality_path(artifact),
            _ if one => artifact.to_owned(),
            // Parts of a split model refer to each other by name, so they cannot be renamed.
            name => artifact.with_file_name(name),
        };
        found.extend(Mismatch::of_file(&path, *digest)?);
        listed.push(name_of(&path));
    }
    let parts = match ModelFiles::open(artifact) {
        Ok(files) => files.checkpoint().files().map(name_of).collect(),
        // The next step that opens it reports the reason.
        Err(_) => vec![name_of(artifact)],
    };
    let omitted = parts.into_iter().filter(|part| !listed.contains(part));
    found.extend(omitted.map(|file| Mismatch::Unlisted { file }));
    Ok(found)
}
