//! Arguments of a command, which run.

use anyhow::Result;
use mantissa_store::Paths;

use crate::context::Context;
use crate::help::Group;

/// Arguments of a command.
pub trait Execute {
    /// Group of the command in the help.
    const GROUP: Group;
    /// True if the command obeys the memory ceiling.
    const CEILING: bool = true;
    /// True if the same command resumes a run that was stopped.
    const TRAINS: bool = false;

    /// Adds the paths that the command reads and writes, for checks before it runs.
    ///
    /// # Errors
    /// Arguments or settings that do not determine them.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        let _ = paths;
        Ok(())
    }

    /// Runs the command.
    ///
    /// # Errors
    /// As the command; [`exit_of`](crate::error::exit_of) turns each into an exit code.
    fn run(&self, context: &Context) -> Result<()>;
}
