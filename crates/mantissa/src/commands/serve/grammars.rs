//! The processes that hold the grammars of constrained replies: this program, started with a name of its own.

use std::process::Command;

use mantissa_serve::grammar::{Confinement, fork_server};

use crate::error::Exit;

/// Name of the fork server as the first argument. It is no command: its standard input is a socket of the server.
const NAME: &str = "grammar-process";

/// Starts processes of this program.
pub(super) fn confinement() -> Confinement {
    Confinement::processes(|| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(NAME);
        Ok(command)
    })
}

/// Runs the fork server, if that is what this process was started for. The process must have a single thread.
pub fn grammar_process() -> Option<Exit> {
    (std::env::args_os().nth(1)? == NAME).then(|| match fork_server() {
        Ok(()) => Exit::Done,
        Err(_) => Exit::Environment,
    })
}
