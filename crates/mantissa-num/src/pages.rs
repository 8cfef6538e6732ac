//! Names of documentation pages in messages.

/// Returns the command that shows a page of the documentation, named by its path in the repository, which an installed program does
/// not have: `docs/results/weights.md` is shown by `mantissa help results/weights`.
pub fn page_command(page: &str) -> String {
    let name = page.strip_prefix("docs/").unwrap_or(page);
    format!("mantissa help {}", name.strip_suffix(".md").unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_shown_by_a_command() {
        assert_eq!(page_command("docs/results/weights.md"), "mantissa help results/weights");
        assert_eq!(page_command("glossary"), "mantissa help glossary");
    }
}
