//! Profiles that make all loops slow: link-time optimization takes the level of the crate that is linked for every other
//! crate, and below 2 it vectorizes none of their loops.

use std::path::Path;

use crate::section;

/// Levels of `opt-level` without vectorization.
const WITHOUT: [&str; 4] = ["0", "1", "\"s\"", "\"z\""];

/// Finds the level of the release profile, in the text of the workspace's `Cargo.toml`, for a crate with these contents that is
/// linked to a program or a library of its own: that of its override, else the profile's.
pub fn slow_link(workspace: &str, directory: &Path, manifest: &str) -> Option<String> {
    if !directory.join("src/main.rs").is_file() && !manifest.contains("crate-type") {
        return None;
    }
    let name = directory.file_name()?.to_string_lossy();
    let headers = [format!("[profile.release.package.{name}]"), "[profile.release]".to_owned()];
    let (header, level) = headers.iter().find_map(|header| Some((header, level(workspace, header)?)))?;
    WITHOUT.contains(&level).then(|| {
        format!(
            "Cargo.toml: {header}: opt-level {level} of the linked crate {name}, expected 2 or 3: link-time optimization takes it for all crates"
        )
    })
}

/// Returns what a section says of `opt-level`.
fn level<'w>(workspace: &'w str, header: &str) -> Option<&'w str> {
    let value = |line: &'w str| line.trim().strip_prefix("opt-level")?.trim().strip_prefix('=');
    let value = section(workspace, header).find_map(value)?;
    Some(value.split('#').next()?.trim())
}
