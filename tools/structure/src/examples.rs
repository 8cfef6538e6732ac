//! Examples in doc comments of a crate whose manifest says that it has none to run.

use crate::source::SourceFile;

/// Lines of `file` that open an example which a test run would compile.
pub fn examples(file: &SourceFile) -> Vec<usize> {
    let mut open = false;
    let mut found = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        let line = line.trim_start();
        let Some(doc) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else { continue };
        let Some(kind) = doc.trim().strip_prefix("```") else { continue };
        // Without a kind, or with `rust`, `no_run`, …, a block is compiled; `text`, `toml` and other languages are not.
        let runs = kind.split(',').all(|word| {
            let word = word.trim();
            word.is_empty() || ["rust", "no_run", "should_panic", "compile_fail"].contains(&word)
        });
        if !open && runs {
            found.push(number + 1);
        }
        open = !open;
    }
    found
}
