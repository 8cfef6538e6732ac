//! Text tables that fit the terminal, and wrapped text.

use std::io::{self, Write};

use console::Term;

/// Columns of output that goes to no terminal.
const PIPED: usize = 120;

/// Fewest columns that output is laid out for.
const LEAST: usize = 40;

/// Fewest columns of a wrapped last column, and of a shortened first one.
const CELL: usize = 16;

/// Space between columns.
const GAP: usize = 2;

/// Returns the width of text output in columns: `COLUMNS`, or the terminal's; `otherwise` without either.
pub fn columns_or(otherwise: usize) -> usize {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let terminal = || Term::stdout().size_checked().map(|(_, columns)| usize::from(columns));
    set.or_else(terminal).filter(|&columns| columns > 0).unwrap_or(otherwise).max(LEAST)
}

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left, for text.
    Left,
    /// Right, for numbers.
    Right,
}

/// Table with aligned columns.
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
    /// Headings of columns to leave out where the table is too wide, least important first.
    optional: Vec<&'static str>,
}

/// Says which columns are left out, and how to see them.
fn hidden(names: &[&str]) -> String {
    let (noun, them) = if names.len() == 1 { ("column", "it") } else { ("columns", "them") };
    format!("({noun} hidden: {}; to see {them}, widen the terminal or set COLUMNS)", names.join(", "))
}

impl Table {
    /// Starts a table with these headings.
    pub fn new(columns: impl Into<Vec<(&'static str, Align)>>) -> Self {
        Table { columns: columns.into(), rows: Vec::new(), optional: Vec::new() }
    }

    /// Names the columns to leave out where the table is too wide, least important first. Columns of one name
    /// go together.
    pub fn optional(mut self, headings: impl Into<Vec<&'static str>>) -> Self {
        self.optional = headings.into();
        self
    }

    /// Appends a row; cells beyond the headings are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().take(self.columns.len()).collect());
    }

    /// Returns the headings with their alignment.
    pub fn columns(&self) -> &[(&'static str, Align)] {
        &self.columns
    }

    /// Returns the rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Writes headings and rows within the width of the terminal, with two spaces between columns and none at
    /// line ends.
    ///
    /// # Errors
    /// As `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        self.write_within(out, columns_or(PIPED))
    }

    /// Writes the table in `width` columns. Where it is wider, optional columns are hidden and named in a
    /// last line; then the last column is wrapped if it is text, or the first one shortened.
    ///
    /// # Errors
    /// As `out`.
    pub fn write_within(&self, out: &mut dyn Write, width: usize) -> io::Result<()> {
        let mut widths = self.widths();
        let (kept, left_out) = self.kept(&widths, width);
        let over = total(&kept, &widths).saturating_sub(width);
        let (first, last) = (kept.first().copied().unwrap_or(0), kept.last().copied().unwrap_or(0));
        let narrowed = if self.is_text(last) && widths[last] >= over + CELL { last } else { first };
        if over > 0 && self.is_text(narrowed) {
            widths[narrowed] = widths[narrowed].saturating_sub(over).max(CELL);
        }
        let headings: Vec<String> = self.columns.iter().map(|(name, _)| (*name).to_owned()).collect();
        for row in std::iter::once(&headings).chain(&self.rows) {
            self.write_row(out, row, &kept, &widths)?;
        }
        match left_out.as_slice() {
            [] => Ok(()),
            names => {
                let lines = wrap(&hidden(names), width);
                lines.iter().try_for_each(|line| writeln!(out, "{line}"))
            }
        }
    }

    /// Returns the columns that are shown in `width`, and the headings of the others.
    fn kept(&self, widths: &[usize], width: usize) -> (Vec<usize>, Vec<&'static str>) {
        let mut kept: Vec<usize> = (0..self.columns.len()).collect();
        let mut left_out = Vec::new();
        for &name in &self.optional {
            // A last column of text can be wrapped, so that it needs less.
            let spare = match kept.last() {
                Some(&last) if self.is_text(last) && kept.len() > 1 => widths[last].saturating_sub(2 * CELL),
                _ => 0,
            };
            if total(&kept, widths).saturating_sub(spare) <= width {
                break;
            }
            let before = kept.len();
            kept.retain(|&column| self.columns[column].0 != name);
            if kept.len() < before {
                left_out.push(name);
            }
        }
        (kept, left_out)
    }

    fn is_text(&self, column: usize) -> bool {
        self.columns.get(column).is_some_and(|(_, align)| *align == Align::Left)
    }

    fn widths(&self) -> Vec<usize> {
        let column =
            |i: usize| self.rows.iter().filter_map(move |row| row.get(i)).map(|cell| width(cell)).max();
        self.columns
            .iter()
            .enumerate()
            .map(|(i, (name, _))| width(name).max(column(i).unwrap_or(0)))
            .collect()
    }

    /// Writes one row; a last cell wider than its column continues on further lines.
    fn write_row(
        &self,
        out: &mut dyn Write,
        row: &[String],
        kept: &[usize],
        widths: &[usize],
    ) -> io::Result<()> {
        let empty = String::new();
        let mut line = String::new();
        for (place, &column) in kept.iter().enumerate() {
            let (cell, width) = (row.get(column).unwrap_or(&empty), widths[column]);
            let start = self::width(&line);
            if place + 1 == kept.len() && place > 0 && self.is_text(column) {
                let mut parts = wrap(cell, width).into_iter();
                line += &parts.next().unwrap_or_default();
                writeln!(out, "{}", line.trim_end())?;
                return parts.try_for_each(|part| writeln!(out, "{:start$}{part}", ""));
            }
            let cell = shortened(cell, width);
            line += &match self.columns[column].1 {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            };
            line += &" ".repeat(GAP);
        }
        writeln!(out, "{}", line.trim_end())
    }
}

/// Returns the number of characters of `text`.
fn width(text: &str) -> usize {
    text.chars().count()
}

/// Returns the width of a table with the `kept` columns.
fn total(kept: &[usize], widths: &[usize]) -> usize {
    kept.iter().map(|&column| widths[column] + GAP).sum::<usize>().saturating_sub(GAP)
}

/// Cuts the beginning of a text that has more than `most` characters: the end of a tensor name says most.
pub fn shortened(text: &str, most: usize) -> String {
    match width(text).checked_sub(most) {
        None | Some(0) => text.to_owned(),
        Some(over) => std::iter::once('…').chain(text.chars().skip(over + 1)).collect(),
    }
}

/// Returns the bytes of a path up to its last separator within `most` characters, if the whole is longer.
fn cut_of_path(word: &str, most: usize) -> Option<usize> {
    let (end, _) = word.char_indices().nth(most)?;
    word[..end].rfind('/').map(|at| at + 1)
}

/// Breaks a text into lines of at most `width` characters between words, and long paths after a `/`; keeps its own line
/// breaks, and the indent of a line. Another longer word has a line of its own.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        if self::width(paragraph) <= width {
            lines.push(paragraph.trim_end().to_owned());
            continue;
        }
        let indent = &paragraph[..paragraph.len() - paragraph.trim_start().len()];
        let mut line = indent.to_owned();
        for mut word in paragraph.split_whitespace() {
            let room = width.saturating_sub(indent.len());
            while let Some(cut) = cut_of_path(word, room) {
                if line.len() > indent.len() {
                    lines.push(std::mem::replace(&mut line, indent.to_owned()));
                }
                lines.push(format!("{indent}{}", &word[..cut]));
                word = &word[cut..];
            }
            let begun = line.len() > indent.len();
            if begun && self::width(&line) + 1 + self::width(word) > width {
                lines.push(std::mem::replace(&mut line, indent.to_owned()));
            } else if begun {
                line.push(' ');
            }
            line += word;
        }
        lines.push(line);
    }
    lines
}

/// Writes a text wrapped to the width of the terminal; further lines are indented by `indent` columns.
///
/// # Errors
/// As `out`.
pub fn paragraph(out: &mut dyn Write, indent: usize, text: &str) -> io::Result<()> {
    let mut lines = wrap(text, columns_or(PIPED).saturating_sub(indent)).into_iter();
    writeln!(out, "{}", lines.next().unwrap_or_default())?;
    lines.try_for_each(|line| writeln!(out, "{:indent$}{line}", ""))
}

/// Writes a command wrapped to the width of the terminal, with `\` at the end of each line but the last, so that a shell
/// reads it as one; a command with quotes is not wrapped.
///
/// # Errors
/// As `out`.
pub fn command(out: &mut dyn Write, indent: usize, text: &str) -> io::Result<()> {
    if text.contains(['\'', '"']) {
        return writeln!(out, "{text}");
    }
    let lines = wrap(text, columns_or(PIPED).saturating_sub(indent + " \\".len()));
    writeln!(out, "{}", lines.join(&format!(" \\\n{:indent$}", "")))
}

/// Columns of the names of figures.
const LABEL: usize = 12;

/// Writes a figure with its name, wrapped to the width of the terminal.
///
/// # Errors
/// As `out`.
pub fn labelled(out: &mut dyn Write, name: &str, text: &str) -> io::Result<()> {
    write!(out, "{name:<LABEL$}")?;
    paragraph(out, LABEL, text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn shown(table: &Table, width: usize) -> String {
        let mut text = Vec::new();
        table.write_within(&mut text, width).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn layers() -> Table {
        let columns = [
            ("layer", Align::Left),
            ("bits", Align::Right),
            ("error", Align::Right),
            ("engines", Align::Left),
        ];
        let mut table = Table::new(columns).optional(["error", "bits"]);
        let cells = ["model.layers.0.self_attn.q_proj", "4.125", "0.0912", "vLLM, SGLang, transformers"];
        table.row(cells.map(str::to_owned));
        table
    }

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new([("name", Align::Left), ("bytes", Align::Right)]);
        table.row(["a".into(), "1".into()]);
        table.row(["längere".into(), "1000000".into()]);
        assert_eq!(shown(&table, 80), "name       bytes\na              1\nlängere  1000000\n");
    }

    #[test]
    fn a_table_has_no_line_wider_than_the_terminal() {
        for width in 48..100 {
            let text = shown(&layers(), width);
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}\n{text}");
            assert!(text.contains("q_proj") && text.contains("transformers"), "{width}\n{text}");
        }
    }

    #[test]
    fn the_least_important_columns_go_first_and_are_named() {
        let whole = shown(&layers(), 74);
        assert!(whole.contains("0.0912") && !whole.contains("hidden"), "{whole}");
        let narrow = shown(&layers(), 70);
        assert!(
            narrow.contains("(column hidden: error; to see it, widen") && narrow.contains("4.125"),
            "{narrow}"
        );
        let narrower = shown(&layers(), 60);
        assert!(narrower.contains("(columns hidden: error, bits;"), "{narrower}");
    }

    #[test]
    fn a_long_last_column_continues_below_itself() {
        let mut table = Table::new([("name", Align::Left), ("rules", Align::Left)]);
        table.row(["mxfp4".to_owned(), "floor ceil even rceil torchao-rceil ct".to_owned()]);
        assert_eq!(
            shown(&table, 30),
            "name   rules\nmxfp4  floor ceil even rceil\n       torchao-rceil ct\n"
        );
    }

    #[test]
    fn long_names_lose_their_beginning() {
        let mut table = Table::new([("layer", Align::Left), ("bits", Align::Right)]);
        table.row(["model.layers.0.self_attn.q_proj".to_owned(), "4.125".to_owned()]);
        let text = shown(&table, 30);
        assert!(text.contains("\n…ers.0.self_attn.q_proj  4.125\n"), "{text}");
    }

    #[test]
    fn text_is_wrapped_between_words() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("a\n\n  indented text", 10), ["a", "", "  indented", "  text"]);
        assert_eq!(wrap("incomprehensible", 4), ["incomprehensible"]);
        assert_eq!(wrap("in a/bc/def.rs", 8), ["in", "a/bc/", "def.rs"]);
        assert_eq!(wrap("", 4), [""]);
    }
}
