//! Commands called by another program, such as a Python interpreter: arguments to a JSON report, without signals and output.

use std::ffi::OsString;

use mantissa_jobs::{Progress, embedded};

use crate::app::{self, Failed};
use crate::program;

/// Runs the command that `arguments` name after the program's own name, and returns its JSON report; empty for a command
/// that has none. `progress` shows what the command does, and may ask it to stop.
///
/// # Errors
/// [`Failed`] for arguments or inputs that cannot be used, I/O, a quality gate, or a stop.
pub fn call(arguments: Vec<OsString>, progress: Box<dyn Progress>) -> Result<String, Failed> {
    app::call(arguments, progress)
}

/// Makes `words`, a file and its first arguments, what starts this program in a process of its own. The first call counts.
pub fn starts_with(words: Vec<OsString>) {
    program::starts_with(words);
}

/// Removes the embedded model where it was unpacked. To be called when the process ends.
pub fn remove_embedded() {
    embedded::remove();
}

/// Forgets where the embedded model was unpacked, in a process that was forked: the folder is the parent's.
pub fn leave_embedded() {
    embedded::leave();
}
