//! Patterns of modules.

use std::fmt;

/// Module name in which `*` matches any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(pub(super) String);

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Glob {
    /// Makes the pattern of `text`: the name of a module, in which `*` matches any characters.
    ///
    /// # Errors
    /// The kind of text that is no pattern: nothing, or a regular expression.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "" => Err("nothing"),
            text if text.starts_with("re:") => Err("a regular expression"),
            _ => Ok(Glob(text.to_owned())),
        }
    }

    /// Makes the text of the pattern that matches as a regular expression, `re:` before it, does; `None` if it needs more than
    /// `.*`.
    pub fn of_expression(text: &str) -> Option<String> {
        let text = text.strip_prefix("re:")?;
        let text = text.strip_prefix('^').unwrap_or(text);
        let text = text.strip_suffix('$').unwrap_or(text);
        let text = text.replace(".*", "*").replace("\\.", ".");
        let plain = !text.is_empty() && !text.contains(|c: char| r"[](){}|+?\^$".contains(c));
        plain.then_some(text)
    }

    /// True if this is the full name `module`.
    pub fn is(&self, module: &str) -> bool {
        self.0 == module
    }

    /// True if it is a full name, without a `*`.
    pub(crate) fn is_name(&self) -> bool {
        !self.0.contains('*')
    }

    /// True if `module` matches.
    pub fn matches(&self, module: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| module.strip_prefix(first)) else { return false };
        let mut open = false; // true if a `*` precedes the rest
        for part in parts {
            open = true;
            match rest.find(part) {
                // The last part must reach the end: prefer its last occurrence.
                Some(_) if rest.ends_with(part) && !self.0.ends_with('*') && self.0.ends_with(part) => {
                    let at = rest.rfind(part).unwrap_or(0);
                    rest = &rest[at + part.len()..];
                }
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
        rest.is_empty() || (open && self.0.ends_with('*'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simple_expressions_have_a_pattern() {
        let of = |text: &str| Glob::of_expression(text);
        assert_eq!(of("re:.*layers.0.*down_proj").as_deref(), Some("*layers.0*down_proj"));
        assert_eq!(of(r"re:^model\.layers\.1\..*$").as_deref(), Some("model.layers.1.*"));
        assert_eq!(
            (of(r"re:.*\.(q|k)_proj"), of("re:"), of(r"re:layers\.\d+"), of("*.k")),
            (None, None, None, None)
        );
    }

    #[test]
    fn globs_match_whole_names() {
        let matches = |glob: &str, name: &str| Glob(glob.into()).matches(name);
        let down = "model.layers.10.mlp.down_proj";
        assert!(matches("*.down_proj", down) && matches("model.layers.10.*", down) && matches("*", down));
        assert!(matches("model.layers.*.mlp.*", down) && matches(down, down) && matches("*mlp*", down));
        assert!(
            !matches("model.layers.1.*", down) && !matches("down_proj", down) && !matches("*.down", down)
        );
        assert!(!matches("*.up_proj", down) && !matches("", down));
        // The last part is matched at the end, not at its first occurrence.
        assert!(matches("*a", "banana") && !matches("*an", "banana"));
    }
}
