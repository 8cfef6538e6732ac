//! API keys and their priorities.

use std::collections::HashSet;

use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::engine::{Caller, Client, MOST_PRIORITY};

/// Most bytes of a key.
const LONGEST: usize = 512;

/// API keys. Only their hashes are kept, and all are compared, so that the time tells nothing of them.
#[derive(Clone, Debug)]
pub struct Keys {
    keys: Vec<([u8; 32], u8)>,
}

/// Line of a key file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, got {found}")]
pub struct KeyError {
    /// Number of the line, from 1.
    pub line: usize,
    /// Lines allowed.
    pub expected: String,
    /// Fault of the line, without the key.
    pub found: String,
}

impl Keys {
    /// Reads the text of a key file: lines `KEY [PRIORITY]`, with a priority from 0, the default, to 9. Empty lines and
    /// those that begin with `#` are skipped.
    ///
    /// # Errors
    /// [`KeyError`]; a file without a key is one.
    pub fn parse(text: &str) -> Result<Self, KeyError> {
        let mut keys = Vec::new();
        let mut seen = HashSet::new();
        for (number, line) in (1..).zip(text.lines()) {
            let fault = |expected: &str, found: &str| KeyError {
                line: number,
                expected: expected.into(),
                found: found.into(),
            };
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let key = words.next().unwrap_or_default();
            let priority = words.next().map_or(Ok(0), str::parse::<u8>);
            let Some(priority) = priority.ok().filter(|p| *p <= MOST_PRIORITY && words.next().is_none())
            else {
                let expected = format!("KEY [PRIORITY] with a priority from 0 to {MOST_PRIORITY}");
                return Err(fault(&expected, "something else"));
            };
            if key.len() > LONGEST || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                let expected = format!("a key of at most {LONGEST} printable ASCII characters");
                return Err(fault(&expected, "another"));
            }
            let hash: [u8; 32] = Sha256::digest(key).into();
            if !seen.insert(hash) {
                return Err(fault("each key once", "one that an earlier line has"));
            }
            keys.push((hash, priority));
        }
        if keys.is_empty() {
            return Err(KeyError { line: 1, expected: "at least one key".into(), found: "none".into() });
        }
        Ok(Keys { keys })
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True if there is no key.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the caller whose key the headers have: `Authorization: Bearer KEY` or `x-api-key: KEY`.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Option<Caller> {
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let given = bearer.or_else(|| headers.get("x-api-key")?.to_str().ok())?;
        let hash: [u8; 32] = Sha256::digest(given).into();
        let (mut found, mut at) = (Choice::from(0), 0u64);
        for (i, (key, _)) in (0u64..).zip(&self.keys) {
            let equal = key.ct_eq(&hash);
            at.conditional_assign(&i, equal);
            found |= equal;
        }
        let at = usize::try_from(at).ok()?;
        bool::from(found).then(|| Caller { client: Client::Key(at), priority: self.keys[at].1 })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn a_key_file_has_priorities_and_comments() {
        let keys = Keys::parse("# keys\n\nalpha 3\nbeta\n").unwrap();
        let caller = |name, value: &str| keys.caller(&headers(name, value));
        let of = |key, priority| Some(Caller { client: Client::Key(key), priority });
        assert_eq!(caller("authorization", "Bearer alpha"), of(0, 3));
        assert_eq!(caller("authorization", "bearer beta"), of(1, 0));
        assert_eq!(caller("x-api-key", "beta"), of(1, 0));
        for (name, value) in [
            ("authorization", "Bearer alph"),
            ("authorization", "alpha"),
            ("x-api-key", ""),
            ("cookie", "alpha"),
        ] {
            assert_eq!(caller(name, value), None, "{name} {value}");
        }
    }

    #[test]
    fn a_line_at_fault_is_named_without_its_key() {
        for (text, line) in
            [("a\nsecret 10", 2), ("a\nsecret x", 2), ("a\na", 2), ("secret 1 2", 1), ("# none", 1), ("", 1)]
        {
            let error = Keys::parse(text).unwrap_err();
            assert_eq!(error.line, line, "{text}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
