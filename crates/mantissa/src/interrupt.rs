//! Orderly stops: the first SIGINT or SIGTERM ends the process within [`GRACE`], the second at once.
//!
//! A resumable command declares it by [`polling`]: it polls [`received`] between two steps, saves its progress
//! and returns. Any other command ends at once, after its unfinished outputs are removed.
//!
//! While an answer is written ([`answering`]), the first SIGINT ends the answer alone, and the second the process. In
//! a conversation with a person ([`asking`]), the first that ends no answer says how to leave.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use mantissa_jobs::Polling;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;

use crate::error::{Exit, print_error};
use crate::terminal;

/// Time for orderly work to end.
const GRACE: Duration = Duration::from_secs(4);

/// First signal; 0 if none.
static RECEIVED: AtomicI32 = AtomicI32::new(0);

/// True if the work polls [`received`].
static ORDERLY: AtomicBool = AtomicBool::new(false);

/// True while the work itself bounds the time to end.
static PATIENT: AtomicBool = AtomicBool::new(false);

/// True after a signal, until [`answering`]: the next one ends the process at once.
static AGAIN: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// True while an answer is written.
static ANSWERING: AtomicBool = AtomicBool::new(false);

/// True if the answer should end.
static CUT: AtomicBool = AtomicBool::new(false);

/// Hint for a person who sends SIGINT in a conversation.
static HINT: Mutex<Option<&'static str>> = Mutex::new(None);

/// True after a SIGINT that ended an answer or gave the hint: the next one ends the process, until a line is read.
static WARNED: AtomicBool = AtomicBool::new(false);

/// Message of an immediate stop, if the command has its own.
static LEFT: Mutex<Option<String>> = Mutex::new(None);

/// Guard that keeps the message of [`leaving`].
#[must_use]
pub struct Leaving(());

/// Makes `message` the message of an immediate stop, for the lifetime of the result.
pub fn leaving(message: String) -> Leaving {
    let leaving = Leaving(());
    leaving.change(message);
    leaving
}

impl Leaving {
    /// Replaces the message.
    pub fn change(&self, message: String) {
        keep_message(Some(message));
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        keep_message(None);
    }
}

/// Sets the message of an immediate stop; `None` names the signal.
pub fn keep_message(message: Option<String>) {
    *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = message;
}

/// Starts listening for signals.
///
/// # Errors
/// The system allows no handler or no thread.
pub fn watch() -> io::Result<()> {
    let again = &*AGAIN;
    for signal in [SIGINT, SIGTERM] {
        // Registered in this order, so that the signal that sets the flag does not act on it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(again))?;
        flag::register(signal, Arc::clone(again))?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let wait = move || {
        for signal in signals.forever() {
            if signal == SIGINT && ANSWERING.load(Ordering::SeqCst) {
                WARNED.store(true, Ordering::SeqCst);
                CUT.store(true, Ordering::SeqCst);
            } else if let Some(hint) =
                hint().filter(|_| signal == SIGINT && !WARNED.swap(true, Ordering::SeqCst))
            {
                AGAIN.store(false, Ordering::SeqCst);
                terminal::ask_again(hint, PROMPT);
            } else {
                return stop(signal);
            }
        }
    };
    thread::Builder::new().name("signals".into()).stack_size(128 << 10).spawn(wait)?;
    Ok(())
}

/// Sign that a line is asked for.
pub const PROMPT: &str = "> ";

/// Guard of a conversation with a person.
#[must_use]
pub struct Asking(());

/// Makes the first SIGINT print `hint` and [`PROMPT`] instead of ending the process, for the lifetime of the result, unless
/// one has just ended an answer.
pub fn asking(hint: &'static str) -> Asking {
    *HINT.lock().unwrap_or_else(PoisonError::into_inner) = Some(hint);
    Asking(())
}

impl Asking {
    /// Takes note of a line of the person: the next SIGINT is a first one again.
    pub fn heard(&self) {
        WARNED.store(false, Ordering::SeqCst);
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        *HINT.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.heard();
    }
}

fn hint() -> Option<&'static str> {
    *HINT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Guard of an answer that SIGINT ends.
#[must_use]
pub struct Answering(());

/// Makes the first SIGINT end an answer instead of the process, for the lifetime of the result.
pub fn answering() -> Answering {
    CUT.store(false, Ordering::SeqCst);
    ANSWERING.store(true, Ordering::SeqCst);
    Answering(())
}

impl Answering {
    /// True if the answer should end.
    pub fn is_cut(&self) -> bool {
        CUT.load(Ordering::SeqCst)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
        // What a later signal ends is the process, in order.
        if received().is_none() {
            AGAIN.store(false, Ordering::SeqCst);
        }
    }
}

/// Returns the exit code for the signal received, if any.
pub fn received() -> Option<Exit> {
    exit_of(RECEIVED.load(Ordering::SeqCst))
}

/// Sets how the work from here on ends after a signal.
pub fn polling(polling: Polling) {
    match polling {
        Polling::Never => {
            ORDERLY.store(false, Ordering::SeqCst);
            PATIENT.store(false, Ordering::SeqCst);
        }
        Polling::Soon => ORDERLY.store(true, Ordering::SeqCst),
        Polling::Saving => {
            PATIENT.store(true, Ordering::SeqCst);
            ORDERLY.store(true, Ordering::SeqCst);
        }
    }
}

/// Waits for the end of the process if a signal is ending it at once. Called when a command has returned: an error that
/// it met meanwhile may come from the stop and must not decide the exit code.
pub fn settle() {
    while received().is_some() && !ORDERLY.load(Ordering::SeqCst) {
        thread::park();
    }
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
    let in_time = || PATIENT.load(Ordering::SeqCst) || start.elapsed() < GRACE;
    while ORDERLY.load(Ordering::SeqCst) && in_time() {
        thread::sleep(Duration::from_millis(10));
    }
    mantissa_store::abandon_unpublished();
    let name = if signal == SIGINT { "SIGINT" } else { "SIGTERM" };
    let left = LEFT.lock().unwrap_or_else(PoisonError::into_inner).take();
    print_error(&left.unwrap_or_else(|| format!("interrupted by {name}")));
    signal_hook::low_level::exit(exit as i32);
}
