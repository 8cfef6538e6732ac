//! Faults of a `tokenizer.json`, before they become an error with a path.

/// A wrong field of a `tokenizer.json`.
pub(super) struct Fault {
    pub(super) field: String,
    pub(super) found: String,
    pub(super) allowed: String,
}

pub(super) fn fault(field: impl Into<String>, found: impl Into<String>, allowed: impl Into<String>) -> Fault {
    Fault { field: field.into(), found: found.into(), allowed: allowed.into() }
}
