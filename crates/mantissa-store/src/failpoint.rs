//! File operations that fail on demand, so that tests can step a fault over every one of them.
//!
//! Every operation of this crate that changes or reads a file runs through `read` or `write`. Nothing outside the
//! process can arm a fault: a test calls [`failing`], and the fault holds for that call and its thread alone. The cost
//! where nothing is armed is one thread-local load beside a system call.

use std::cell::Cell;
use std::io;

/// Operations that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Opening, looking up and reading.
    Read,
    /// Creating, writing, reserving, syncing and renaming.
    Write,
}

/// Which operations of one kind fail, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// This one alone.
    Once(u64),
    /// This one and all after it, as on a full disk.
    From(u64),
}

#[derive(Clone, Copy)]
struct Armed {
    operation: Operation,
    failing: Failing,
    errno: i32,
    seen: u64,
}

thread_local! {
    static ARMED: Cell<Option<Armed>> = const { Cell::new(None) };
}

/// Runs `work` with the operations that `failing` names failing with `errno`; gives its result and the number of
/// operations of that kind that were tried.
pub fn failing<T>(
    operation: Operation,
    failing: Failing,
    errno: rustix::io::Errno,
    work: impl FnOnce() -> T,
) -> (T, u64) {
    let armed = Armed { operation, failing, errno: errno.raw_os_error(), seen: 0 };
    let before = ARMED.replace(Some(armed));
    let result = work();
    let after = ARMED.replace(before);
    (result, after.map_or(0, |armed| armed.seen))
}

pub(crate) fn read<T>(operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    check(Operation::Read)?;
    operation()
}

pub(crate) fn write<T>(operation: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    check(Operation::Write)?;
    operation()
}

fn check(operation: Operation) -> io::Result<()> {
    let Some(mut armed) = ARMED.get().filter(|armed| armed.operation == operation) else { return Ok(()) };
    let at = armed.seen;
    armed.seen += 1;
    ARMED.set(Some(armed));
    let fails = match armed.failing {
        Failing::Once(n) => at == n,
        Failing::From(n) => at >= n,
    };
    if fails { Err(io::Error::from_raw_os_error(armed.errno)) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn the_named_operations_fail_and_no_others() {
        let run = |which| {
            let attempt = || (0..4).map(|_| write(|| Ok(())).is_ok()).collect::<Vec<_>>();
            failing(Operation::Write, which, Errno::NOSPC, attempt)
        };
        assert_eq!(run(Failing::Once(1)), (vec![true, false, true, true], 4));
        assert_eq!(run(Failing::From(2)), (vec![true, true, false, false], 4));
        let (other, seen) =
            failing(Operation::Read, Failing::From(0), Errno::IO, || write(|| Ok(())).is_ok());
        assert_eq!((other, seen), (true, 0));
        assert!(write(|| Ok(())).is_ok() && read(|| Ok(())).is_ok(), "disarmed");
        let full =
            failing(Operation::Write, Failing::Once(0), Errno::NOSPC, || write(|| Ok(()))).0.unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::StorageFull);
    }
}
