//! Building blocks of HTML reports: one file without scripts or network access, readable in light and dark
//! mode and on a phone. [`Page`] holds [`Html`]; [`table`] renders a [`Table`], [`LineChart`], [`Scatter`],
//! [`Heat`], [`bars()`] and [`gauge()`] draw numbers.
//!
//! Text enters the markup in one place, [`Html::text`], which escapes it.

mod axis;
mod bars;
mod gauge;
mod heat;
mod line;
mod mark;
mod page;
mod scatter;

pub use axis::Axis;
pub use bars::{Bar, bars};
pub use gauge::{Reading, gauge};
pub use heat::{Cell, Heat};
pub use line::{LineChart, Series};
pub use page::Page;
pub use scatter::{Point, Scatter, Style};

use mantissa_eval::verdict::Verdict;
use mantissa_store::shown::misleads;

use crate::output::{Align, Table, number};

/// HTML markup in which every text is escaped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Html(String);

impl Html {
    /// Makes escaped text.
    pub fn text(text: &str) -> Self {
        let mut html = Html::default();
        html.escape(text);
        html
    }

    /// Makes an element around `content`; attribute values are escaped.
    pub fn element(
        tag: &'static str,
        attributes: &[(&'static str, &str)],
        content: impl IntoIterator<Item = Html>,
    ) -> Self {
        let mut html = Html(format!("<{tag}"));
        for (name, value) in attributes {
            html.0 += &format!(" {name}=\"");
            html.escape(value);
            html.0.push('"');
        }
        html.0.push('>');
        content.into_iter().for_each(|inner| html.push(inner));
        html.0 += &format!("</{tag}>");
        html
    }

    /// Makes a paragraph.
    pub fn paragraph(text: &str) -> Self {
        Html::element("p", &[], [Html::text(text)])
    }

    /// Makes the paragraph of the verdict, above everything else.
    pub fn lead(text: &str) -> Self {
        Html::element("p", &[("class", "lead")], [Html::text(text)])
    }

    /// Makes a section heading.
    pub fn heading(text: &str) -> Self {
        Html::element("h2", &[], [Html::text(text)])
    }

    /// Makes a heading within a section.
    pub fn subheading(text: &str) -> Self {
        Html::element("h3", &[], [Html::text(text)])
    }

    /// Makes a list.
    pub fn list(lines: &[String]) -> Self {
        Html::element("ul", &[], lines.iter().map(|line| Html::element("li", &[], [Html::text(line)])))
    }

    /// Makes preformatted text, such as a file's content.
    pub fn preformatted(text: &str) -> Self {
        Html::element("pre", &[("tabindex", "0")], [Html::text(text)])
    }

    /// Makes a section that opens on a click on its summary.
    pub fn details(summary: &str, content: impl IntoIterator<Item = Html>) -> Self {
        let mut html = Html::element("summary", &[], [Html::text(summary)]);
        content.into_iter().for_each(|inner| html.push(inner));
        Html::element("details", &[], [html])
    }

    /// Arranges charts side by side, as many as fit; nothing without charts.
    pub fn grid(charts: impl IntoIterator<Item = Html>) -> Self {
        let charts: Vec<_> = charts.into_iter().collect();
        if charts.is_empty() { Html::default() } else { Html::element("div", &[("class", "grid")], charts) }
    }

    /// Arranges texts side by side, over the whole width.
    pub fn columns(texts: impl IntoIterator<Item = Html>) -> Self {
        Html::element("div", &[("class", "columns")], texts)
    }

    /// Makes a paragraph that stands out from the text around it.
    pub fn caution(text: &str) -> Self {
        Html::element("p", &[("class", "caution")], [Html::text(text)])
    }

    /// Makes the word of a verdict.
    pub fn badge(verdict: Verdict) -> Self {
        let level = Verdict::ALL.iter().position(|other| *other == verdict).unwrap_or_default();
        Html::element("span", &[("class", &format!("badge b{level}"))], [Html::text(verdict.word())])
    }

    /// Appends markup.
    pub fn push(&mut self, more: Html) {
        self.0 += &more.0;
    }

    /// Returns the markup.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn escape(&mut self, text: &str) {
        for c in text.chars() {
            match c {
                '&' => self.0 += "&amp;",
                '<' => self.0 += "&lt;",
                '>' => self.0 += "&gt;",
                '"' => self.0 += "&quot;",
                '\'' => self.0 += "&#39;",
                // Scripts and pictures are joined by these.
                '\n' | '\t' | '\u{200c}' | '\u{200d}' => self.0.push(c),
                // Control characters are invalid in HTML; marks that change text direction could disguise
                // names.
                c if misleads(c) => self.0.push('\u{fffd}'),
                c => self.0.push(c),
            }
        }
    }
}

/// Formats a number in a drawing or its description: three significant digits.
fn figures(value: f64) -> String {
    number(Some(value), 3)
}

/// Wraps a table that scrolls sideways where it is too wide, by touch and by keys.
fn scrolling(label: &str, table: Html) -> Html {
    let attributes = [("class", "wide"), ("role", "region"), ("aria-label", label), ("tabindex", "0")];
    Html::element("div", &attributes, [table])
}

/// Renders a table with its content as the `label`; the first column names the rows.
pub fn table(label: &str, table: &Table) -> Html {
    let attributes = |align: Align, scope: Option<&'static str>| {
        let scope = scope.map(|scope| ("scope", scope));
        scope.into_iter().chain((align == Align::Right).then_some(("class", "number"))).collect::<Vec<_>>()
    };
    let heading = |(name, align): &(&'static str, Align)| {
        Html::element("th", &attributes(*align, Some("col")), [Html::text(name)])
    };
    let cell = |(i, (text, (_, align))): (usize, (&String, &(&'static str, Align)))| {
        let scope = (i == 0).then_some("row");
        Html::element(if i == 0 { "th" } else { "td" }, &attributes(*align, scope), [Html::text(text)])
    };
    let rows = table
        .rows()
        .iter()
        .map(|row| Html::element("tr", &[], row.iter().zip(table.columns()).enumerate().map(cell)));
    let body = Html::element("tbody", &[], rows);
    let head = Html::element("tr", &[], table.columns().iter().map(heading));
    let head = Html::element("thead", &[], [head]);
    scrolling(label, Html::element("table", &[], [head, body]))
}

/// Renders names and values, one pair a line.
pub fn pairs(label: &str, rows: impl IntoIterator<Item = (&'static str, String)>) -> Html {
    let row = |(name, value): (&'static str, String)| {
        let name = Html::element("th", &[("scope", "row")], [Html::text(name)]);
        Html::element("tr", &[], [name, Html::element("td", &[], [Html::text(&value)])])
    };
    let body = Html::element("tbody", &[], rows.into_iter().map(row));
    scrolling(label, Html::element("table", &[("class", "pairs")], [body]))
}

/// Renders names and values in running lines, under the title.
pub fn facts(facts: impl IntoIterator<Item = (&'static str, String)>) -> Html {
    let fact = |(name, value): (&'static str, String)| {
        let name = Html::element("dt", &[], [Html::text(name)]);
        Html::element("div", &[], [name, Html::element("dd", &[], [Html::text(&value)])])
    };
    Html::element("dl", &[("class", "facts")], facts.into_iter().map(fact))
}

/// Renders the main figures as tiles: name, value, and a line below it.
pub fn tiles(tiles: impl IntoIterator<Item = (&'static str, String, String)>) -> Html {
    let tile = |(name, value, below): (&'static str, String, String)| {
        let mut content = vec![
            Html::element("dt", &[], [Html::text(name)]),
            Html::element("dd", &[], [Html::text(&value)]),
        ];
        if !below.is_empty() {
            content.push(Html::element("dd", &[("class", "below")], [Html::text(&below)]));
        }
        Html::element("div", &[], content)
    };
    Html::element("dl", &[("class", "tiles")], tiles.into_iter().map(tile))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        let html = Html::element(
            "p",
            &[("title", "\"><script>")],
            [Html::text("<img src=x onerror='a'> & \u{202e}b\0")],
        );
        assert_eq!(
            html.as_str(),
            "<p title=\"&quot;&gt;&lt;script&gt;\">&lt;img src=x onerror=&#39;a&#39;&gt; &amp; \u{fffd}b\u{fffd}</p>"
        );
    }

    #[test]
    fn a_table_keeps_its_sides_and_names_its_rows_and_columns() {
        let mut t = Table::new([("recipe", Align::Left), ("bits", Align::Right)]);
        t.row(["a<b".to_owned(), "4.125".to_owned()]);
        let html = table("bits of recipes", &t);
        for part in [
            "<th scope=\"col\">recipe</th><th scope=\"col\" class=\"number\">bits</th>",
            "<th scope=\"row\">a&lt;b</th><td class=\"number\">4.125</td>",
            "role=\"region\" aria-label=\"bits of recipes\" tabindex=\"0\"",
        ] {
            assert!(html.as_str().contains(part), "{part}: {html:?}");
        }
        let html = pairs("summary", [("recipe", "a<b".to_owned())]);
        assert!(html.as_str().contains("<th scope=\"row\">recipe</th><td>a&lt;b</td>"), "{html:?}");
    }
}
