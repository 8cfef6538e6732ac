//! Calls into a library that panics on bad input.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// True while a panic of this thread is to become an error.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`; a panic becomes its message. Nothing is printed: the caller reports the error on one line.
///
/// `f` may leave borrowed data in a state that is memory-safe but half changed; callers drop it or only read from it.
pub(super) fn guarded<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let previous = take_hook();
        set_hook(Box::new(move |info| {
            if !QUIET.get() {
                previous(info);
            }
        }));
    });
    let outer = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(f));
    QUIET.set(outer);
    result.map_err(message)
}

fn message(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn panics_become_messages() {
        assert_eq!(guarded(|| 7), Ok(7));
        assert_eq!(guarded::<()>(|| panic!("broken")), Err("broken".into()));
        assert_eq!(guarded::<()>(|| panic!("broken {}", 2)), Err("broken 2".into()));
        assert!(!QUIET.get());
    }
}
