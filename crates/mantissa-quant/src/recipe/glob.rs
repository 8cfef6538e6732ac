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

    /// True if this is the full name `module`.
    pub fn is(&self, module: &str) -> bool {
        self.0 == module
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
