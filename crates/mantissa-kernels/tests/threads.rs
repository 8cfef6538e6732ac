//! Threads of a process that was forked: what its parent's pool held does not hold it up.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread::{ThreadId, current};
use std::time::{Duration, Instant};

use mantissa_kernels::{available_threads, for_each, renew_threads};

/// Threads that take part in work, which waits for `wanted` of them for a while.
fn taking_part(wanted: usize) -> BTreeSet<String> {
    let (seen, begin) = (Mutex::new(BTreeSet::new()), Instant::now());
    let show = |id: ThreadId| format!("{id:?}");
    for_each(wanted, 0..wanted, |_| {
        seen.lock().unwrap().insert(show(current().id()));
        while seen.lock().unwrap().len() < wanted && begin.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
    });
    seen.into_inner().unwrap()
}

#[test]
fn a_renewed_pool_has_threads_of_its_own() {
    let wanted = available_threads().clamp(1, 4);
    let before = taking_part(wanted);
    assert_eq!(before.len(), wanted);
    let mine = format!("{:?}", current().id());
    // More often than there are pools: the last one goes on.
    for fork in 0..12 {
        renew_threads();
        let after = taking_part(wanted);
        assert_eq!(after.len(), wanted, "fork {fork}");
        if fork < 7 {
            assert!(after.iter().all(|id| *id == mine || !before.contains(id)), "fork {fork}");
        }
    }
}
