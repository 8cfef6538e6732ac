//! Orderly stops: the first SIGINT or SIGTERM ends the process within [`GRACE`], the second at once.
//!
//! A command that can be gone on with works [`orderly`]: it looks at [`received`] between two steps, writes down what it has
//! done, and returns. Every other command is ended where it stands, after its unfinished outputs have been removed.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::error::{Exit, print_error};

/// Time that orderly work has to come to its end.
const GRACE: Duration = Duration::from_secs(4);

/// The first signal; 0 before it.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// Whether someone will act on [`received`].
static ORDERLY: AtomicBool = AtomicBool::new(false);

/// What stays behind where the process ends here, for the message of the end.
static LEFT: Mutex<Option<String>> = Mutex::new(None);

/// While it lives, whoever ends the process is told of what stays behind.
#[must_use]
pub struct Leaving(());

/// Has the message of an end that is not orderly say `what` stays behind, as long as the result lives.
pub fn leaving(what: String) -> Leaving {
    *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = Some(what);
    Leaving(())
}

impl Drop for Leaving {
    fn drop(&mut self) {
        *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Begins to listen.
///
/// # Errors
/// The system allows no handler or no thread.
pub fn watch() -> io::Result<()> {
    let again = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order, so that the signal that sets the flag does not act on it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&again))?;
        flag::register(signal, Arc::clone(&again))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let stop_on_first = move || signals.forever().next().into_iter().for_each(stop);
    thread::Builder::new().name("signals".into()).stack_size(128 << 10).spawn(stop_on_first)?;
    Ok(())
}

/// How the process is to end because of a signal, if one has come.
pub fn received() -> Option<Exit> {
    exit_of(RECEIVED.load(Ordering::SeqCst))
}

/// Runs `work`, which looks at [`received`] and returns `stopped` errors because of it. Until such an error has ended the
/// process by the ordinary way out, or [`GRACE`] is over, nothing else ends it.
pub fn orderly<T, E>(work: impl FnOnce() -> Result<T, E>, stopped: impl FnOnce(&E) -> bool) -> Result<T, E> {
    ORDERLY.store(true, Ordering::SeqCst);
    let result = work();
    if !result.as_ref().is_err_and(stopped) {
        ORDERLY.store(false, Ordering::SeqCst);
    }
    result
}

fn exit_of(signal: i32) -> Option<Exit> {
    match signal {
        SIGINT => Some(Exit::Interrupted),
        SIGTERM => Some(Exit::Terminated),
        _ => None,
    }
}

fn stop(signal: i32) {
    let Some(exit) = exit_of(signal) else { return };
    let start = Instant::now();
    RECEIVED.store(signal, Ordering::SeqCst);
    while ORDERLY.load(Ordering::SeqCst) && start.elapsed() < GRACE {
        thread::sleep(Duration::from_millis(10));
    }
    mantissa_store::abandon_unpublished();
    let name = if signal == SIGINT { "SIGINT" } else { "SIGTERM" };
    let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner).take();
    let left = left.map_or_else(String::new, |what| format!("; {what}"));
    print_error(&format!("found {name}, allowed to run to the end; stopped{left}"));
    signal_hook::low_level::exit(exit as i32);
}
