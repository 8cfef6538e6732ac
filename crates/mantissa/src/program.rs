//! How this program starts itself: some work runs in a process of its own, under limits.

use std::ffi::OsString;
use std::io;
use std::process::Command;
use std::sync::OnceLock;

/// Words that start this program, if they are not its file.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// Makes `words`, a file and its first arguments, what starts this program: an interpreter has it as a module. The first
/// call counts.
pub fn starts_with(words: Vec<OsString>) {
    let _ = WORDS.set(words);
}

/// Returns the words that start this program: its file, and first arguments if an interpreter has it as a module.
///
/// # Errors
/// The file of this program is not known.
pub fn words() -> io::Result<Vec<String>> {
    let command = command()?;
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    Ok(words.map(|word| word.to_string_lossy().into_owned()).collect())
}

/// Returns the command that starts this program, to be completed by arguments.
///
/// # Errors
/// The file of this program is not known.
pub fn command() -> io::Result<Command> {
    match WORDS.get().and_then(|words| words.split_first()) {
        Some((file, first)) => {
            let mut command = Command::new(file);
            command.args(first);
            Ok(command)
        }
        None => Ok(Command::new(std::env::current_exe()?)),
    }
}
