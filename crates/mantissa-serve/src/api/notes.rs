//! Notes about a response: what the request named and the server does otherwise, without changing what was asked for.
//! They stand in a header of the response and once in the log.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use axum::http::HeaderValue;

/// Header of a response with its notes.
pub(crate) const HEADER: &str = "x-mantissa-note";

/// Notes that are remembered as logged; those beyond are logged each time.
const REMEMBERED: usize = 256;

/// Longest note in characters.
const LONGEST: usize = 300;

tokio::task_local! {
    static NOTES: RefCell<Vec<String>>;
}

/// Adds a note to the response at work. Outside of the task of a request it is lost.
pub(crate) fn note(text: impl Into<String>) {
    let text = text.into();
    let _ = NOTES.try_with(|notes| notes.borrow_mut().push(text));
}

/// Runs `work`, which makes a response, and returns it with its notes.
pub(crate) async fn with_notes<T>(work: impl Future<Output = T>) -> (T, Vec<String>) {
    let noted = async {
        let made = work.await;
        (made, NOTES.with(RefCell::take))
    };
    NOTES.scope(RefCell::default(), noted).await
}

/// Makes the value of the header: printable ASCII.
pub(crate) fn header(notes: &[String]) -> Option<HeaderValue> {
    let shown = |c: char| if c == ' ' || c.is_ascii_graphic() { c } else { '?' };
    let text: String = notes.join("; ").chars().take(LONGEST).map(shown).collect();
    HeaderValue::from_str(&text).ok().filter(|value| !value.is_empty())
}

/// Notes that were logged.
#[derive(Debug, Default)]
pub(crate) struct Logged(Mutex<HashSet<String>>);

impl Logged {
    /// True if `note` was not logged before.
    pub(crate) fn is_new(&self, note: &str) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() >= REMEMBERED {
            return !logged.contains(note);
        }
        logged.insert(note.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_printable_and_logged_once() {
        let notes = ["model: \u{1b}[2Jä is\nserved".to_owned(), "b".to_owned()];
        let value = header(&notes).map(|value| value.to_str().unwrap_or_default().to_owned());
        assert_eq!(value.as_deref(), Some("model: ?[2J? is?served; b"));
        assert_eq!(header(&[]), None);
        let logged = Logged::default();
        assert!(logged.is_new("a") && !logged.is_new("a") && logged.is_new("b"));
    }
}
