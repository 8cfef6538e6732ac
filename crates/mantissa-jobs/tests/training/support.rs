//! Host of the tests: records what a job shows, and asks it to stop after a number of units.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use mantissa_jobs::{Allowed, Gauge, Host, Job, Polling, Progress, Unit};

/// What a job showed.
#[derive(Debug, Default)]
pub struct Record {
    pub notes: Mutex<Vec<String>>,
    pub warnings: Mutex<Vec<String>>,
    pub pollings: Mutex<Vec<Polling>>,
    pub messages: Mutex<Vec<Option<String>>>,
    pub done: Mutex<Vec<u64>>,
    stops: AtomicBool,
}

/// Progress that records, and asks for a stop once `stop_at` units of a stretch with status are done.
struct Recorder {
    record: Arc<Record>,
    stop_at: Option<u64>,
}

struct Recording {
    record: Arc<Record>,
    stop_at: Option<u64>,
}

impl Progress for Recorder {
    fn start(&self, _: u64, _: Unit, status: bool) -> Box<dyn Gauge> {
        let stop_at = self.stop_at.filter(|_| status);
        Box::new(Recording { record: Arc::clone(&self.record), stop_at })
    }

    fn note(&self, text: &str) {
        self.record.notes.lock().unwrap().push(text.to_owned());
    }

    fn warn(&self, text: &str) {
        self.record.warnings.lock().unwrap().push(text.to_owned());
    }

    fn stops(&self) -> bool {
        self.record.stops.load(Ordering::SeqCst)
    }

    fn polling(&self, polling: Polling) {
        self.record.pollings.lock().unwrap().push(polling);
    }

    fn keep_message(&self, message: Option<String>) {
        self.record.messages.lock().unwrap().push(message);
    }
}

impl Gauge for Recording {
    fn message(&self, _: &str) {}

    fn status(&self, _: &str) {}

    fn begin_at(&self, n: u64) {
        self.record.done.lock().unwrap().push(n);
    }

    fn set(&self, n: u64) {
        self.record.done.lock().unwrap().push(n);
        if self.stop_at.is_some_and(|at| n >= at) {
            self.record.stops.store(true, Ordering::SeqCst);
        }
    }

    fn add(&self, _: u64) {}

    fn note(&self, text: &str) {
        self.record.notes.lock().unwrap().push(text.to_owned());
    }

    fn finish(&self) {}
}

/// Makes a host for `job`, which asks for a stop after `stop_at` units.
pub fn host(job: &impl Job, stop_at: Option<u64>) -> (Host, Arc<Record>) {
    let permits = job.paths().check("test", false).unwrap();
    let record = Arc::new(Record::default());
    let recorder = Recorder { record: Arc::clone(&record), stop_at };
    let allowed = Allowed { threads: 2, ..Allowed::default() };
    (Host::new(allowed, permits, Box::new(recorder)), record)
}
