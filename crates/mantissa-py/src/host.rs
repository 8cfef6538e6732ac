//! Progress of a command as calls of a Python function, and Ctrl-C as a wish to stop.
//!
//! A job runs on a thread of its own, without the interpreter lock. The calling thread waits for it and looks for signals
//! every [`PATIENCE`]; on Ctrl-C it asks the job to stop and returns at once. The job then saves what it has, and the next
//! job waits until it has ended, so that the same call resumes.

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use mantissa_jobs::{Gauge, Progress, Unit, embedded};
use pyo3::prelude::*;

use crate::error::{Raise, internal};

/// Time between two looks for a signal.
const PATIENCE: Duration = Duration::from_millis(50);

/// Jobs that were asked to stop and have not ended yet.
static STOPPING: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

/// Runs a command of the program; returns its report as JSON.
///
/// # Errors
/// KeyboardInterrupt; the exception of the function that shows progress; the error of the command.
#[pyfunction]
pub fn command(py: Python<'_>, arguments: Vec<OsString>, progress: Option<Py<PyAny>>) -> PyResult<String> {
    settle(py)?;
    let stop = Arc::new(AtomicBool::new(false));
    let raised = Arc::new(Mutex::new(None));
    let shown =
        Calls { function: progress.map(Arc::new), stop: Arc::clone(&stop), raised: Arc::clone(&raised) };
    let done = interruptible(py, &stop, move || mantissa::call(arguments, Box::new(shown)));
    match (done, lock(&raised).take()) {
        (Err(_), Some(raised)) => Err(raised),
        (done, _) => done,
    }
}

/// Runs `work` on a thread of its own until it ends or Ctrl-C asks it to.
///
/// # Errors
/// KeyboardInterrupt; the error of the work; `InternalError` for a panic.
pub fn interruptible<R, E>(
    py: Python<'_>,
    stop: &AtomicBool,
    work: impl FnOnce() -> Result<R, E> + Send + 'static,
) -> PyResult<R>
where
    R: Send + 'static,
    E: Raise + Send + 'static,
{
    let (sender, receiver) = channel();
    // Only this thread receives; the mutex tells the compiler so.
    let receiver = Mutex::new(receiver);
    let begun = Builder::new().name("mantissa".to_owned()).spawn(move || {
        // Nobody sees what a panic left behind: the job's values end here.
        let result = catch_unwind(AssertUnwindSafe(work));
        let _ = sender.send(result);
    });
    let thread = begun.map_err(|error| internal(&format!("no thread: {error}")))?;
    let result = match waited(py, &receiver) {
        Ok(result) => result,
        Err(interrupt) => {
            stop.store(true, Ordering::Relaxed);
            stopping().push(thread);
            return Err(interrupt);
        }
    };
    let _ = py.detach(|| thread.join());
    match result {
        Some(Ok(done)) => done.map_err(Raise::raise),
        Some(Err(panic)) => Err(internal(message(&*panic))),
        None => Err(internal("the job ended without a result")),
    }
}

/// Result of a thread that may have panicked.
type Caught<R, E> = std::thread::Result<Result<R, E>>;

/// Waits for the result, which is missing if the thread died; the error is a signal's.
fn waited<R: Send, E: Send>(
    py: Python<'_>,
    receiver: &Mutex<Receiver<Caught<R, E>>>,
) -> PyResult<Option<Caught<R, E>>> {
    loop {
        let received = py.detach(|| {
            ended();
            lock(receiver).recv_timeout(PATIENCE)
        });
        match received {
            Ok(result) => return Ok(Some(result)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
        }
    }
}

/// Waits until earlier jobs that were asked to stop have ended: they save what they have, and hold the locks of their
/// outputs.
///
/// # Errors
/// KeyboardInterrupt while it waits.
#[pyfunction]
pub fn settle(py: Python<'_>) -> PyResult<()> {
    loop {
        ended();
        if stopping().is_empty() {
            return Ok(());
        }
        py.detach(|| std::thread::sleep(PATIENCE));
        py.check_signals()?;
    }
}

/// Joins those of the stopping jobs that have ended.
fn ended() {
    let mut all = stopping();
    let (done, rest): (Vec<_>, Vec<_>) =
        std::mem::take(&mut *all).into_iter().partition(JoinHandle::is_finished);
    *all = rest;
    done.into_iter().for_each(|thread| drop(thread.join()));
}

fn stopping() -> MutexGuard<'static, Vec<JoinHandle<()>>> {
    lock(&STOPPING)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets the threads of the parent, in a process that was forked: they are not here.
#[pyfunction]
pub fn forked() {
    if let Ok(mut all) = STOPPING.try_lock() {
        // A handle of a thread that does not exist must not be joined.
        std::mem::take(&mut *all).into_iter().for_each(std::mem::forget);
    }
    mantissa_kernels::renew_threads();
    embedded::leave();
}

/// Returns the message of a panic.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

/// Progress as calls of a function with `kind`, `text`, `done` and `total`.
#[derive(Clone)]
struct Calls {
    function: Option<Arc<Py<PyAny>>>,
    stop: Arc<AtomicBool>,
    /// First exception of the function.
    raised: Arc<Mutex<Option<PyErr>>>,
}

impl Calls {
    /// Calls the function; an exception in it asks the job to stop.
    fn call(&self, kind: &str, text: &str, done: u64, total: u64) {
        let Some(function) = &self.function else { return };
        let called = Python::attach(|py| function.call1(py, (kind, text, done, total)).map(drop));
        if let Err(raised) = called {
            lock(&self.raised).get_or_insert(raised);
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Progress for Calls {
    fn start(&self, total: u64, unit: Unit, _: bool) -> Box<dyn Gauge> {
        self.call("start", unit.name().trim(), 0, total);
        Box::new(Stretch { calls: self.clone(), total, done: Mutex::new((0, None)) })
    }

    fn note(&self, text: &str) {
        self.call("note", text, 0, 0);
    }

    fn warn(&self, text: &str) {
        self.call("warning", text, 0, 0);
    }

    fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// One stretch of work: units done, and the time of the last call about them.
struct Stretch {
    calls: Calls,
    total: u64,
    done: Mutex<(u64, Option<Instant>)>,
}

impl Stretch {
    fn done(&self) -> MutexGuard<'_, (u64, Option<Instant>)> {
        lock(&self.done)
    }

    /// Changes the units done, and tells them unless the last call was a moment ago.
    fn to(&self, of: impl FnOnce(u64) -> u64) {
        let mut done = self.done();
        done.0 = of(done.0);
        if done.1.is_some_and(|last| last.elapsed() < PATIENCE) {
            return;
        }
        done.1 = Some(Instant::now());
        let now = done.0;
        // The function may take the interpreter lock from a thread that waits for this one.
        drop(done);
        self.calls.call("progress", "", now, self.total);
    }
}

impl Gauge for Stretch {
    fn message(&self, text: &str) {
        let done = self.done().0;
        self.calls.call("message", text, done, self.total);
    }

    fn status(&self, text: &str) {
        let done = self.done().0;
        self.calls.call("status", text, done, self.total);
    }

    fn begin_at(&self, n: u64) {
        self.to(|_| n);
    }

    fn set(&self, n: u64) {
        self.to(|_| n);
    }

    fn add(&self, n: u64) {
        self.to(|done| done + n);
    }

    fn note(&self, text: &str) {
        self.calls.call("note", text, 0, 0);
    }

    fn finish(&self) {
        self.calls.call("finish", "", self.total, self.total);
    }
}
