//! Fault of a policy table.

/// A key that cannot be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableFault {
    /// Key, below `[precision]`.
    pub key: String,
    /// Value found.
    pub found: String,
    /// Accepted values.
    pub allowed: String,
}

pub(super) type Faulty<T> = Result<T, TableFault>;

pub(super) fn fault<T>(key: &str, found: impl ToString, allowed: &str) -> Faulty<T> {
    Err(TableFault { key: key.to_owned(), found: found.to_string(), allowed: allowed.to_owned() })
}
