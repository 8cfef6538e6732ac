//! The end of the process on a signal: the thread that ends it removes what is unfinished, and all others stop changing files.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// True once the process is being ended.
static ENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// True for the thread that ends the process.
    static ENDER: Cell<bool> = const { Cell::new(false) };
}

/// Begins to end the process: from now on this thread alone changes files.
pub(crate) fn begin() {
    ENDER.set(true);
    ENDING.store(true, Ordering::SeqCst);
}

/// Blocks this thread for ever if the process is ending: a file made now would be left behind.
pub(crate) fn stop_if_ending() {
    while ENDING.load(Ordering::SeqCst) && !ENDER.get() {
        thread::park();
    }
}
