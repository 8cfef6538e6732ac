//! The process's threads: started at first use, shared by all callers, never stopped.
//!
//! A caller opens a *region*: a function that every thread that joins calls once, and that takes pieces of work from
//! a cursor of its own until none are left. The caller calls it too, and then waits only for helpers that have
//! joined. So a helper that the system has not scheduled yet costs nothing, a nested call from a helper cannot
//! deadlock, and concurrent callers share the threads: whoever is free joins the first region that wants help.
//!
//! An idle helper spins, then yields, then sleeps, so that regions in quick succession need no system call and an
//! idle process takes no processor time.

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Regions that are open at once; further callers run alone.
const REGIONS: usize = 64;
/// Largest number of helpers.
const MOST: usize = 255;
/// Rounds of an idle helper with the processor's spin hint, then of yielding to other threads.
const SPINS: u32 = 1 << 9;
const YIELDS: u32 = 1 << 7;

/// One wanted helper in [`Region::state`]; the bits below count the helpers that have joined.
const WANTED: u32 = 1 << 16;
const JOINED: u32 = WANTED - 1;

/// Pools of a process and of those that it was forked from: threads do not cross a fork.
static POOLS: [Pool; GENERATIONS] = [const { Pool::new() }; GENERATIONS];

/// Forks behind which a process still gets a pool of its own; beyond it callers do the work alone.
const GENERATIONS: usize = 8;

/// Number of forks that [`renew`] was told of.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

fn pool() -> &'static Pool {
    &POOLS[GENERATION.load(Ordering::Relaxed).min(GENERATIONS - 1)]
}

/// Begins a new pool, in a process that was forked: the threads of the last one are not here.
pub fn renew() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// Threads that the machine offers to this process (at least 1).
pub fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Calls `work` on up to `threads` threads, including the caller's, and propagates the first panic.
///
/// Helpers call `work` only if they are free before the caller's own call returns.
pub(crate) fn run<F: Fn() + Sync>(threads: usize, work: &F) {
    let helpers = threads.saturating_sub(1).min(MOST);
    let region = if helpers > 0 { pool().claim() } else { None };
    let Some(region) = region else { return work() };
    pool().hire(helpers);
    let open = Open { region, helpers };
    region.open(helpers, work);
    pool().call(helpers);
    work();
    let fault = open.close();
    if let Some(payload) = fault {
        resume_unwind(payload);
    }
}

/// A panic's payload.
type Payload = Box<dyn Any + Send>;

struct Pool {
    regions: [Region; REGIONS],
    /// One past the last region ever claimed.
    used: AtomicUsize,
    /// Number of regions opened so far: a helper that saw it before it found no work need not look again until it
    /// changes.
    opened: AtomicUsize,
    spinning: AtomicUsize,
    asleep: AtomicUsize,
    bed: Mutex<()>,
    wake: Condvar,
    /// Helpers that the open regions want.
    demand: AtomicUsize,
    hired: AtomicUsize,
    /// Processors that the system offers; 0 until asked.
    hiring: Mutex<usize>,
}

/// A function that helpers may call. Aligned so that regions of two callers share no cache line.
#[repr(align(128))]
struct Region {
    claimed: AtomicBool,
    /// Helpers wanted and joined: see [`WANTED`].
    state: AtomicU32,
    task: UnsafeCell<Task>,
    /// Payload of the first helper that panicked.
    fault: Mutex<Option<Payload>>,
    /// True while the caller sleeps until its helpers are done.
    waiting: AtomicBool,
    done: Condvar,
}

/// A pointer to a caller's closure, and the function that calls it.
#[derive(Clone, Copy)]
struct Task {
    work: *const (),
    call: unsafe fn(*const ()),
}

// SAFETY: `task` is written only by the caller that claimed the region, while no helper is wanted or joined, and read
// only by helpers that have joined, which `state` orders after the write. The closure behind it is `Sync`.
unsafe impl Sync for Region {}

impl Region {
    const fn new() -> Self {
        Region {
            claimed: AtomicBool::new(false),
            state: AtomicU32::new(0),
            task: UnsafeCell::new(Task { work: std::ptr::null(), call: nothing }),
            fault: Mutex::new(None),
            waiting: AtomicBool::new(false),
            done: Condvar::new(),
        }
    }

    /// Publishes `work` for `helpers` helpers. The region must be claimed by the caller, who closes it before `work`
    /// ends.
    fn open<F: Fn() + Sync>(&self, helpers: usize, work: &F) {
        let task = Task { work: std::ptr::from_ref(work).cast(), call: call::<F> };
        // SAFETY: the region is claimed and its state is 0, so nobody else reads or writes the task.
        unsafe { *self.task.get() = task };
        self.state.store(helpers as u32 * WANTED, Ordering::SeqCst);
    }

    /// Joins and calls the work, if helpers are wanted. Returns false if they are not.
    fn help(&self) -> bool {
        let join = |state: u32| (state >= WANTED).then(|| state - WANTED + 1);
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, join).is_err() {
            return false;
        }
        // SAFETY: having joined, this thread reads the task after it was written; the caller keeps it and the closure
        // until this thread has left. `call` was made for the closure's type.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe {
            let task = *self.task.get();
            (task.call)(task.work);
        }));
        if let Err(payload) = result {
            lock(&self.fault).get_or_insert(payload);
        }
        // The caller may be about to sleep: either it sees this thread leave, or this thread sees that it waits. The
        // region is static, so it may be touched after that.
        if self.state.fetch_sub(1, Ordering::SeqCst) == 1 && self.waiting.load(Ordering::SeqCst) {
            drop(lock(&self.fault));
            self.done.notify_all();
        }
        true
    }

    /// Waits until the helpers that have joined are done.
    fn wait(&self) {
        let busy = || self.state.load(Ordering::SeqCst) & JOINED > 0;
        for round in 0..SPINS + YIELDS {
            if !busy() {
                return;
            }
            pause(round);
        }
        let mut fault = lock(&self.fault);
        self.waiting.store(true, Ordering::SeqCst);
        while busy() {
            fault = self.done.wait(fault).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::SeqCst);
    }
}

/// Calls the closure behind `work`.
///
/// # Safety
/// `work` points to a live `F`.
unsafe fn call<F: Fn() + Sync>(work: *const ()) {
    // SAFETY: the contract of this function.
    (unsafe { &*work.cast::<F>() })();
}

/// The task of a region that was never opened; it is never called.
unsafe fn nothing(_: *const ()) {}

/// An open region. Dropping it closes it, also if the caller's own call panics.
struct Open {
    region: &'static Region,
    helpers: usize,
}

impl Open {
    /// Closes the region and returns the payload of a helper's panic.
    fn close(self) -> Option<Payload> {
        self.finish();
        let fault = lock(&self.region.fault).take();
        drop(self);
        fault
    }

    /// Lets nobody join any more, and waits for those that have.
    fn finish(&self) {
        self.region.state.fetch_and(JOINED, Ordering::SeqCst);
        self.region.wait();
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.finish();
        *lock(&self.region.fault) = None;
        pool().demand.fetch_sub(self.helpers, Ordering::Relaxed);
        self.region.claimed.store(false, Ordering::Release);
    }
}

impl Pool {
    const fn new() -> Self {
        Pool {
            regions: [const { Region::new() }; REGIONS],
            used: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
            spinning: AtomicUsize::new(0),
            asleep: AtomicUsize::new(0),
            bed: Mutex::new(()),
            wake: Condvar::new(),
            demand: AtomicUsize::new(0),
            hired: AtomicUsize::new(0),
            hiring: Mutex::new(0),
        }
    }

    /// Claims a region; `None` if all are open.
    fn claim(&self) -> Option<&Region> {
        let free = |region: &&Region| {
            !region.claimed.load(Ordering::Relaxed) && !region.claimed.swap(true, Ordering::Acquire)
        };
        let (index, region) = self.regions.iter().enumerate().find(|(_, region)| free(region))?;
        self.used.fetch_max(index + 1, Ordering::Relaxed);
        Some(region)
    }

    /// Starts helpers, until the open regions have as many as they want or there is one for each processor.
    fn hire(&'static self, helpers: usize) {
        let demand = self.demand.fetch_add(helpers, Ordering::Relaxed) + helpers;
        if self.hired.load(Ordering::Relaxed) >= demand.min(MOST) {
            return;
        }
        let mut processors = lock(&self.hiring);
        if *processors == 0 {
            *processors = available_threads();
        }
        let target = demand.min(helpers.max(*processors - 1)).min(MOST);
        for index in self.hired.load(Ordering::Relaxed)..target {
            let spins = index + 1 < *processors;
            let thread = thread::Builder::new().name(format!("worker {index}"));
            // If the system refuses more threads, the existing ones do the work.
            if thread.spawn(move || self.work(spins)).is_err() {
                break;
            }
            self.hired.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Wakes helpers, as many as are wanted and not awake anyway.
    fn call(&self, helpers: usize) {
        self.opened.fetch_add(1, Ordering::SeqCst);
        let wanted = helpers.saturating_sub(self.spinning.load(Ordering::SeqCst));
        let asleep = self.asleep.load(Ordering::SeqCst);
        if wanted == 0 || asleep == 0 {
            return;
        }
        // A helper that counts as asleep holds the lock until it waits.
        drop(lock(&self.bed));
        (0..wanted.min(asleep)).for_each(|_| self.wake.notify_one());
    }

    /// Runs a helper. `spins` is false for helpers beyond the number of processors, which sleep at once.
    fn work(&self, spins: bool) -> ! {
        loop {
            let seen = self.opened.load(Ordering::SeqCst);
            let used = self.used.load(Ordering::Relaxed);
            let helped = self.regions[..used].iter().any(Region::help);
            if !(helped || spins && self.spin(seen)) {
                self.sleep(seen);
            }
        }
    }

    /// Waits for a region to be opened after `seen`, for a short time. Returns false if none was.
    fn spin(&self, seen: usize) -> bool {
        self.spinning.fetch_add(1, Ordering::SeqCst);
        let opened = (0..SPINS + YIELDS).any(|round| {
            pause(round);
            self.opened.load(Ordering::Relaxed) != seen
        });
        self.spinning.fetch_sub(1, Ordering::SeqCst);
        opened
    }

    /// Sleeps until a region is opened after `seen`.
    fn sleep(&self, seen: usize) {
        let mut bed = lock(&self.bed);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        // A caller either sees that this thread is asleep, or is seen to have opened a region.
        while self.opened.load(Ordering::SeqCst) == seen {
            bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Waits a moment, in round `round` of [`SPINS`] and [`YIELDS`].
fn pause(round: u32) {
    match round < SPINS {
        true => spin_loop(),
        false => thread::yield_now(),
    }
}

/// Locks; what a lock guards here is consistent also after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Adds 1 to each of `counts`, piece by piece.
    fn count(threads: usize, counts: &[AtomicUsize]) {
        let cursor = AtomicUsize::new(0);
        run(threads, &|| {
            while let Some(count) = counts.get(cursor.fetch_add(1, Ordering::Relaxed)) {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    fn counts(n: usize) -> Vec<AtomicUsize> {
        (0..n).map(|_| AtomicUsize::new(0)).collect()
    }

    fn all(counts: &[AtomicUsize], expected: usize) -> bool {
        counts.iter().all(|count| count.load(Ordering::Relaxed) == expected)
    }

    /// Regions in quick succession and with pauses in which helpers fall asleep: each does all of its work.
    #[test]
    fn no_region_is_lost() {
        let pieces = counts(3);
        let rounds = 100_000;
        for round in 0..rounds {
            count(2 + round % 3, &pieces);
            if round % 5000 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        assert!(all(&pieces, rounds));
    }

    #[test]
    fn concurrent_callers_share_the_threads() {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let pieces = counts(50);
                    (0..5000).for_each(|_| count(3, &pieces));
                    assert!(all(&pieces, 5000));
                });
            }
        });
    }

    #[test]
    fn nested_regions_finish() {
        let pieces = counts(16);
        let cursor = AtomicUsize::new(0);
        let outer = 64;
        run(4, &|| {
            while cursor.fetch_add(1, Ordering::Relaxed) < outer {
                count(4, &pieces);
            }
        });
        assert!(all(&pieces, outer));
    }

    #[test]
    fn helpers_join_a_region_that_lasts() {
        let (joined, start) = (AtomicUsize::new(0), Instant::now());
        run(3, &|| {
            joined.fetch_add(1, Ordering::SeqCst);
            while joined.load(Ordering::SeqCst) < 3 && start.elapsed() < Duration::from_secs(30) {
                thread::yield_now();
            }
        });
        assert_eq!(joined.load(Ordering::SeqCst), 3);
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_caller() {
        let caller = thread::current().id();
        for _ in 0..20 {
            let joined = AtomicBool::new(false);
            let work = || {
                if thread::current().id() != caller {
                    joined.store(true, Ordering::SeqCst);
                    panic!("in a helper");
                }
                let start = Instant::now();
                while !joined.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(30) {
                    thread::yield_now();
                }
            };
            let payload = catch_unwind(AssertUnwindSafe(|| run(2, &work))).unwrap_err();
            assert_eq!(payload.downcast_ref::<&str>(), Some(&"in a helper"));
        }
        let pieces = counts(10);
        count(2, &pieces);
        assert!(all(&pieces, 1));
    }

    #[test]
    fn a_panic_of_the_caller_waits_for_its_helpers() {
        let caller = thread::current().id();
        let (joined, left) = (AtomicBool::new(false), AtomicBool::new(false));
        let work = || {
            if thread::current().id() == caller {
                let start = Instant::now();
                while !joined.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(30) {
                    thread::yield_now();
                }
                panic!("in the caller");
            }
            joined.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(50));
            left.store(true, Ordering::SeqCst);
        };
        assert!(catch_unwind(AssertUnwindSafe(|| run(2, &work))).is_err());
        assert!(left.load(Ordering::SeqCst));
    }
}
