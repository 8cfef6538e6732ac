//! Limits on the source of a template: its size, and the depth of what the engine would recurse into.

use super::{ChatError, MAX_TEMPLATE};

/// Longest tag, `{{ … }}` or `{% … %}`, in bytes: an expression of that many operators is a tree as deep.
const MAX_TAG: usize = 8 << 10;

/// Largest number of `elif` branches of a template; the engine parses each inside the one before.
const MAX_ELIF: usize = 1000;

/// Checks the limits and removes the `{% generation %}` tags, which only training needs.
///
/// # Errors
/// [`ChatError::Limit`]. The engine's parser limits the nesting of blocks and parentheses to 150.
pub(super) fn prepare(template: &str) -> Result<String, ChatError> {
    let limit = |found: String, allowed: String| Err(ChatError::Limit { found, allowed });
    if template.len() > MAX_TEMPLATE {
        return limit(format!("a template of {} bytes", template.len()), format!("up to {MAX_TEMPLATE}"));
    }
    let (mut out, mut rest, mut elifs) = (String::with_capacity(template.len()), template, 0);
    while let Some((before, open, after)) = next_tag(rest) {
        let inside = after.find(open.close).map_or(after, |end| &after[..end]);
        if open.nests && inside.len() > MAX_TAG {
            return limit(format!("a tag of {} bytes", inside.len()), format!("up to {MAX_TAG}"));
        }
        let word = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        elifs += usize::from(word.starts_with("elif"));
        out.push_str(before);
        out.push_str(open.mark);
        match word {
            "generation" if open.mark == "{%" => out.push_str(&inside.replace(word, "if true")),
            "endgeneration" if open.mark == "{%" => out.push_str(&inside.replace(word, "endif")),
            _ => out.push_str(inside),
        }
        rest = &after[inside.len()..];
    }
    if elifs > MAX_ELIF {
        return limit(format!("{elifs} elif branches"), format!("up to {MAX_ELIF}"));
    }
    out.push_str(rest);
    Ok(out)
}

struct Open {
    mark: &'static str,
    close: &'static str,
    /// True if the engine parses the content.
    nests: bool,
}

const TAGS: [Open; 3] = [
    Open { mark: "{{", close: "}}", nests: true },
    Open { mark: "{%", close: "%}", nests: true },
    Open { mark: "{#", close: "#}", nests: false },
];

/// Splits off the text before the next tag, the tag, and what follows its mark. Reads no byte twice.
fn next_tag(text: &str) -> Option<(&str, &'static Open, &str)> {
    text.match_indices('{').find_map(|(at, _)| {
        let tag = TAGS.iter().find(|tag| text[at..].starts_with(tag.mark))?;
        Some((&text[..at], tag, &text[at + tag.mark.len()..]))
    })
}
