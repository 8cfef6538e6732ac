//! Building blocks of HTML reports: one file without scripts or network access, readable in light and dark
//! mode and on a phone. [`Page`] holds [`Html`]; [`table`] renders a [`Table`], [`LineChart`] and [`Scatter`]
//! draw numbers.
//!
//! Text enters the markup in one place, [`Html::text`], which escapes it.

mod axis;
mod line;
mod page;
mod scatter;

pub use axis::Axis;
pub use line::{LineChart, Series};
pub use page::Page;
pub use scatter::{Point, Scatter};

use crate::output::{Align, Table};

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

    /// Makes a section heading.
    pub fn heading(text: &str) -> Self {
        Html::element("h2", &[], [Html::text(text)])
    }

    /// Makes preformatted text, such as a file's content.
    pub fn preformatted(text: &str) -> Self {
        Html::element("pre", &[], [Html::text(text)])
    }

    /// Makes a section that opens on a click on its summary.
    pub fn details(summary: &str, content: impl IntoIterator<Item = Html>) -> Self {
        let mut html = Html::element("summary", &[], [Html::text(summary)]);
        content.into_iter().for_each(|inner| html.push(inner));
        Html::element("details", &[], [html])
    }

    /// Arranges charts side by side, as many as fit.
    pub fn grid(charts: impl IntoIterator<Item = Html>) -> Self {
        Html::element("div", &[("class", "grid")], charts)
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
                // Control characters are invalid in HTML; marks that change text direction could disguise
                // names.
                '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => self.0.push('\u{fffd}'),
                c if c.is_control() && !matches!(c, '\n' | '\t') => self.0.push('\u{fffd}'),
                c => self.0.push(c),
            }
        }
    }
}

/// Renders a table, which scrolls sideways if it is too wide.
pub fn table(table: &Table) -> Html {
    let class = |align: Align| if align == Align::Right { "number" } else { "" };
    let heading = |(name, align): &(&'static str, Align)| {
        Html::element("th", &[("class", class(*align))], [Html::text(name)])
    };
    let cell = |(text, (_, align)): (&String, &(&'static str, Align))| {
        Html::element("td", &[("class", class(*align))], [Html::text(text)])
    };
    let head = Html::element("tr", &[], table.columns().iter().map(heading));
    let rows =
        table.rows().iter().map(|row| Html::element("tr", &[], row.iter().zip(table.columns()).map(cell)));
    let body = Html::element("tbody", &[], rows);
    let table = Html::element("table", &[], [Html::element("thead", &[], [head]), body]);
    Html::element("div", &[("class", "wide")], [table])
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
    fn a_table_keeps_its_sides() {
        let mut t = Table::new([("recipe", Align::Left), ("bits", Align::Right)]);
        t.row(["a<b".to_owned(), "4.125".to_owned()]);
        let html = table(&t);
        assert!(
            html.as_str().contains("<td class=\"\">a&lt;b</td><td class=\"number\">4.125</td>"),
            "{html:?}"
        );
    }
}
