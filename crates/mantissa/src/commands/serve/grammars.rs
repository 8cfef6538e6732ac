//! The processes that hold the grammars of constrained replies: this program, started with a name of its own.

use std::ffi::OsString;

use mantissa_serve::grammar::{Confinement, fork_server};

use crate::error::Exit;
use crate::program;

/// Name of the fork server as the first argument. It is no command: its standard input is a socket of the server.
const NAME: &str = "grammar-process";

/// Starts processes of this program.
pub(super) fn confinement() -> Confinement {
    Confinement::processes(|| {
        let mut command = program::command()?;
        command.arg(NAME);
        Ok(command)
    })
}

/// Runs the fork server, if that is what the `arguments` of this process ask for. The process must have a single thread.
pub fn grammar_process(arguments: &[OsString]) -> Option<Exit> {
    (arguments.get(1)? == NAME).then(|| match fork_server() {
        Ok(()) => Exit::Done,
        Err(_) => Exit::Environment,
    })
}
