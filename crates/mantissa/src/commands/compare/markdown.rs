//! Section of a model card, in Markdown.

use std::path::{Path, PathBuf};

use mantissa_jobs::{CompareReport, CompareRow, default_text};

use super::{BITS, conclusion, kl_text, measured_on, share, sizes};
use crate::output::{bytes, sentence};

/// Makes the section: one table with a column of KL for each text, and how it was measured.
pub(super) fn section(report: &CompareReport) -> String {
    let report = &with_short_names(report);
    let several = report.texts.len() > 1;
    let mut head = vec!["candidate".to_owned(), "bits/weight".to_owned(), "size".to_owned()];
    head.extend(
        report.texts.iter().map(|text| if several { format!("KL, {}", text.text) } else { "KL".to_owned() }),
    );
    head.extend(["top-1", "loads in"].map(str::to_owned));
    let numbers = head.len() - 3;
    let mut lines = vec!["## Quantization".to_owned(), String::new(), line(&head)];
    lines.push(format!("|---{}|---|", "|--:".repeat(numbers + 1)));
    let dense = report.bits.map_or_else(|| "-".to_owned(), |bits| format!("{bits:.2}"));
    let mut cells = vec![report.model.display().to_string(), dense, bytes(report.bytes)];
    cells.extend(report.texts.iter().map(|_| "0".to_owned()));
    cells.extend([String::new(), String::new()]);
    lines.push(line(&cells));
    lines.extend(report.rows.iter().map(|row| line(&cells_of(report, row))));
    lines.push(String::new());
    lines.push(escaped(&sentence(BITS)));
    lines.extend(calibrations(report).iter().map(|line| escaped(&sentence(line))));
    lines.push(escaped(&sentence(&measured_on(report))));
    lines.push(escaped(&sentence(&conclusion(report))));
    lines.extend(report.note.as_ref().map(|note| escaped(&sentence(note))));
    let tool = concat!("Measured by mantissa ", env!("CARGO_PKG_VERSION"), " (`mantissa compare`).");
    lines.push(tool.to_owned());
    lines.join("\n") + "\n"
}

/// Returns the report with the last part of paths on this machine as names, which is all that a reader elsewhere can use. Where
/// two would be the same, both stay whole.
fn with_short_names(report: &CompareReport) -> CompareReport {
    let mut short = report.clone();
    let name = |path: &Path| match path.canonicalize() {
        Ok(whole) => whole.file_name().map_or_else(|| whole.clone(), PathBuf::from),
        Err(_) if path.is_absolute() => path.file_name().map_or_else(|| path.to_owned(), PathBuf::from),
        // A name on the hub.
        Err(_) => path.to_owned(),
    };
    short.model = name(&report.model);
    let renamed: Vec<(String, String)> = report
        .rows
        .iter()
        .filter(|row| row.quantize_seconds.is_none())
        .map(|row| (row.name.clone(), name(Path::new(&row.name)).display().to_string()))
        .collect();
    let taken = |new: &str| {
        let unchanged =
            report.rows.iter().filter(|row| row.quantize_seconds.is_some() && row.name == new).count();
        unchanged + renamed.iter().filter(|(_, other)| other == new).count() > 1
    };
    let shortened = |whole: &mut String| {
        if let Some((_, new)) = renamed.iter().find(|(old, new)| old == whole && !taken(new)) {
            whole.clone_from(new);
        }
    };
    short.rows.iter_mut().for_each(|row| shortened(&mut row.name));
    let pairs = short.pairs.iter_mut();
    pairs
        .flat_map(|pair| [&mut pair.a, &mut pair.b].into_iter().chain(pair.better.as_mut()))
        .for_each(shortened);
    short
}

/// Says what the candidates were calibrated on, one line for each text: `calibrated on calib.txt, 16 × 256 tokens: gptq-int4-g128`.
fn calibrations(report: &CompareReport) -> Vec<String> {
    let mut lines: Vec<(String, Vec<&str>)> = Vec::new();
    for row in &report.rows {
        let Some(set) = &row.calibration else { continue };
        let amount = match (set.tokens.checked_rem(set.windows as u64), set.windows) {
            (_, 1) => format!("1 window of {} tokens", set.tokens),
            (Some(0), windows) => format!("{windows} × {} tokens", set.tokens / windows as u64),
            (_, windows) => format!("{} tokens in {windows} windows", set.tokens),
        };
        let text = format!("{}, {amount}", default_text::shown(&set.name));
        match lines.iter_mut().find(|(known, _)| *known == text) {
            Some((_, names)) => names.push(&row.name),
            None => lines.push((text, vec![&row.name])),
        }
    }
    lines.into_iter().map(|(text, names)| format!("calibrated on {text}: {}", names.join(", "))).collect()
}

fn cells_of(report: &CompareReport, row: &CompareRow) -> Vec<String> {
    let [bits, size] = sizes(row);
    let mut cells = vec![row.name.clone(), bits, size];
    match &row.error {
        Some(error) => {
            cells.push(format!("failed: {error}"));
            cells.extend(report.texts.iter().skip(1).map(|_| String::new()));
        }
        None => cells.extend(row.texts.iter().map(|text| kl_text(Some(text.kl), Some(text.kl_se)))),
    }
    cells.extend([share(row.top1), row.loads_in.join(", ")]);
    cells
}

fn line(cells: &[String]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| escaped(cell)).collect();
    format!("| {} |", cells.join(" | "))
}

/// Escapes what Markdown would read as a cell, a tag or a mark, and lines of a name.
fn escaped(text: &str) -> String {
    let text = mantissa_jobs::escape::line(text);
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '|' | '\\' | '`' | '*' | '_' | '[' | ']' => safe.extend(['\\', c]),
            '<' => safe.push_str("&lt;"),
            '&' => safe.push_str("&amp;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_break_the_table() {
        assert_eq!(escaped("a|b\nc<d>_e"), "a\\|b c&lt;d>\\_e");
        assert_eq!(line(&["a|b".into(), "c".into()]), "| a\\|b | c |");
        assert_eq!((sentence("kL: x"), sentence("")), ("KL: x.".to_owned(), String::new()));
    }
}
