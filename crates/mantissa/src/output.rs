//! Text output: sizes, counts, numbers.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use anyhow::Result;
pub use mantissa_jobs::{bytes, count, counted, number as number_of, parse_bytes};
use mantissa_quant::Outcome;
use mantissa_store::convention::Container;

use crate::error::StdoutError;
pub use crate::table::{Align, Table, command, labelled, paragraph};
use crate::terminal::Escaping;

/// Makes a sentence of a clause: with a capital and a full stop.
pub fn sentence(clause: &str) -> String {
    let mut letters = clause.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}

/// Writes text for people to standard output: misleading characters are escaped, endless lines are cut.
///
/// # Errors
/// [`StdoutError`]; a broken pipe counts as success at exit.
pub fn to_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = Escaping::new(BufWriter::new(io::stdout().lock()));
    let written = write(&mut out).and_then(|()| out.flush());
    Ok(written.map_err(StdoutError)?)
}

/// Writes to standard output without a change: for programs, or text of this program alone.
///
/// # Errors
/// As [`to_stdout`].
pub fn to_stdout_unchanged(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let written = write(&mut out).and_then(|()| out.flush());
    Ok(written.map_err(StdoutError)?)
}

/// Formats a number with about `digits` significant digits; `-` if absent.
pub fn number(value: Option<f64>, digits: usize) -> String {
    match value {
        None => "-".into(),
        Some(v) if v == 0.0 || !v.is_finite() => format!("{v}"),
        Some(v) => {
            let exponent = v.abs().log10().floor() as i32;
            if (-4..7).contains(&exponent) {
                let decimals = (digits as i32 - 1 - exponent).max(0) as usize;
                let text = format!("{v:.decimals$}");
                if text.contains('.') {
                    text.trim_end_matches('0').trim_end_matches('.').into()
                } else {
                    text
                }
            } else {
                format!("{v:.*e}", digits.saturating_sub(1))
            }
        }
    }
}

/// Formats a shape: `[4096, 4096]`.
pub fn shape(dimensions: &[usize]) -> String {
    format!("{dimensions:?}")
}

/// Returns the path that opens an output: the folder or file, or the first file of a split one.
pub(crate) fn written<'a>(out: &'a Path, container: Container, outcome: &'a Outcome) -> &'a Path {
    if container.is_one_file() { &outcome.committed.path } else { out }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_digits() {
        let cases = [
            (0.0, "0"),
            (448.0, "448"),
            (1.953125e-3, "0.001953"),
            (6.5504e4, "65504"),
            (3.4e38, "3.400e38"),
        ];
        for (value, text) in cases {
            assert_eq!(number(Some(value), 4), text);
        }
        assert_eq!(number(None, 4), "-");
    }
}
