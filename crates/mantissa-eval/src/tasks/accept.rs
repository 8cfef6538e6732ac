//! Rules that compare a generated text with its targets.

use serde_json::Value;

/// Rule of a match. White space around both texts is ignored by every rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accept {
    /// The text is a target.
    #[default]
    Exact,
    /// The text begins with a target.
    Starts,
    /// The text contains a target.
    Contains,
    /// The text is a JSON value equal to a target's, whatever its spacing and order of keys; without a target, any JSON
    /// value.
    Json,
}

impl Accept {
    /// Rules with the names they have in a task file.
    pub const ALL: [(&'static str, Accept); 4] = [
        ("exact", Accept::Exact),
        ("starts", Accept::Starts),
        ("contains", Accept::Contains),
        ("json", Accept::Json),
    ];

    /// Returns the rule of this name.
    pub fn named(name: &str) -> Option<Self> {
        Accept::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, rule)| rule)
    }

    /// True if the rule can do without a target.
    pub fn needs_no_target(self) -> bool {
        self == Accept::Json
    }

    /// True if `text` is accepted for one of `targets`.
    pub fn accepts(self, text: &str, targets: &[String]) -> bool {
        let text = text.trim();
        let json = |text: &str| serde_json::from_str::<Value>(text).ok();
        if targets.is_empty() {
            return self.needs_no_target() && json(text).is_some();
        }
        targets.iter().map(|target| target.trim()).any(|target| match self {
            Accept::Exact => text == target,
            Accept::Starts => text.starts_with(target),
            Accept::Contains => text.contains(target),
            Accept::Json => json(text).is_some_and(|found| json(target) == Some(found)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_accept_what_they_say() {
        let targets = ["42".to_owned(), "forty-two".to_owned()];
        let accepted = |text| Accept::ALL.map(|(_, rule)| rule.accepts(text, &targets));
        assert_eq!(accepted(" 42\n"), [true, true, true, true]);
        assert_eq!(accepted("42 apples"), [false, true, true, false]);
        assert_eq!(accepted("it is forty-two"), [false, false, true, false]);
        assert_eq!(accepted("41"), [false; 4]);
        let object = [r#"{"a": 1, "b": [2]}"#.to_owned()];
        assert!(Accept::Json.accepts(r#"{"b":[2],"a":1}"#, &object));
        assert!(!Accept::Json.accepts(r#"{"b":[2]}"#, &object));
        assert!(Accept::Json.accepts("[1]", &[]) && !Accept::Json.accepts("[1", &[]));
        assert!(!Accept::Exact.accepts("", &[]), "nothing to compare with");
        assert!(Accept::ALL.iter().all(|(name, rule)| Accept::named(name) == Some(*rule)));
    }
}
