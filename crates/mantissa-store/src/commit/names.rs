//! Names of work folders and of the folders in them.

/// Name of the folder within a work folder that holds what is to be published.
pub(super) const NEW: &str = "new";

/// Name of the folder within a work folder that holds what was replaced.
pub(super) const OLD: &str = "old";

/// Purpose of the work folders of this module, in their names.
pub(super) const PURPOSE: &str = "partial";
