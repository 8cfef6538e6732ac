//! Profiles that make all loops slow: link-time optimization takes the level of the crate that is linked for every other
//! crate, and below 2 it vectorizes none of their loops.

use std::path::Path;

/// Levels of `opt-level` without vectorization.
const WITHOUT: [&str; 4] = ["0", "1", "\"s\"", "\"z\""];

/// Finds overrides of the release profile, in the text of the workspace's `Cargo.toml`, for a crate with these contents that is
/// linked to a program or a library of its own.
pub fn slow_link(workspace: &str, name: &str, directory: &Path, manifest: &str) -> Option<String> {
    let is_linked = directory.join("src/main.rs").is_file() || manifest.contains("crate-type");
    let section = format!("[profile.release.package.{name}]");
    let mut lines = workspace.lines().skip_while(|line| line.trim() != section);
    lines.next().filter(|_| is_linked)?;
    let settings = lines.take_while(|line| !line.starts_with('['));
    let mut levels =
        settings.filter_map(|line| line.trim().strip_prefix("opt-level")?.trim().strip_prefix('='));
    let level = levels.find(|level| WITHOUT.contains(&level.trim()))?.trim();
    Some(format!(
        "Cargo.toml: {section}: opt-level {level} of a linked crate, expected 2 or 3: link-time optimization takes it for all crates"
    ))
}
