//! Candidate schemes as they are named: whole, or integers that take the default group of the model.

use std::fmt;
use std::str::FromStr;

use mantissa_num::{ParseError, Scheme};

/// Groups of default schemes: the first that divides every row, else the second.
pub(super) const GROUPS: [usize; 2] = [128, 32];

/// Candidate scheme.
#[derive(Clone, Debug, PartialEq)]
pub struct CandidateScheme {
    /// The scheme; with the first of [`GROUPS`] where none is named.
    pub(super) scheme: Scheme,
    /// Element and signedness around the group, of integers that are named without a granularity.
    without_group: Option<(String, String)>,
}

impl CandidateScheme {
    /// Returns the scheme, with `group` where none is named.
    ///
    /// # Errors
    /// A group that the grammar does not have.
    pub(super) fn with_group(&self, group: usize) -> Result<Scheme, ParseError> {
        match &self.without_group {
            Some((element, rest)) => format!("{element}-g{group}{rest}").parse(),
            None => Ok(self.scheme.clone()),
        }
    }

    /// True if the scheme is named without its group.
    pub(super) fn takes_group(&self) -> bool {
        self.without_group.is_some()
    }
}

impl From<Scheme> for CandidateScheme {
    fn from(scheme: Scheme) -> Self {
        CandidateScheme { scheme, without_group: None }
    }
}

impl FromStr for CandidateScheme {
    type Err = ParseError;

    /// Parses a scheme, or one of integers without a granularity, such as `int4` or `int4-asym`.
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let error = match text.parse::<Scheme>() {
            Ok(scheme) => return Ok(scheme.into()),
            Err(error) => error,
        };
        let end = text.find(['-', ':']).unwrap_or(text.len());
        let (element, rest) = text.split_at(end);
        if element.to_ascii_lowercase().strip_prefix("int").is_none() {
            return Err(error);
        }
        let grouped = format!("{element}-g{}{rest}", GROUPS[0]).parse();
        let scheme = grouped.map_err(|_: ParseError| error)?;
        Ok(CandidateScheme { scheme, without_group: Some((element.to_owned(), rest.to_owned())) })
    }
}

impl fmt::Display for CandidateScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.without_group {
            Some((element, rest)) => write!(f, "{element}{rest}"),
            None => self.scheme.fmt(f),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_the_group_of_the_model() {
        for (text, group, expected) in [
            ("int4", 128, "int4-g128"),
            ("int4", 32, "int4-g32"),
            ("int4-asym", 32, "int4-g32-asym"),
            ("int8-g32", 128, "int8-g32"),
            ("int8-channel", 128, "int8-channel"),
            ("mxfp4", 128, "mxfp4"),
        ] {
            let candidate: CandidateScheme = text.parse().unwrap();
            let found = candidate.with_group(group).unwrap();
            assert_eq!(found, expected.parse().unwrap(), "{text}");
            assert_eq!(candidate.to_string().parse::<CandidateScheme>().unwrap(), candidate);
            assert_eq!(candidate.takes_group(), text != expected, "{text}");
        }
        for text in ["int4-g", "int99", "integer", "fp4-e9m1", "int4-g128-", ""] {
            let error = text.parse::<CandidateScheme>().unwrap_err().to_string();
            assert_eq!(error, text.parse::<Scheme>().unwrap_err().to_string(), "{text}");
        }
    }
}
