//! Building blocks of the HTML pages that commands write: one file without scripts and without network, readable in light and
//! dark and on a phone. [`Page`] holds [`Html`]; [`table`] makes it of a [`Table`], [`LineChart`] and [`Scatter`] of numbers.
//!
//! Text enters markup in one place, [`Html::text`], which escapes it.

mod axis;
mod line;
mod page;
mod scatter;

pub use axis::Axis;
pub use line::{LineChart, Series};
pub use page::Page;
pub use scatter::{Point, Scatter};

use crate::output::{Align, Table};

/// Markup in which every text is escaped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Html(String);

impl Html {
    /// `text` as it is read.
    pub fn text(text: &str) -> Self {
        let mut html = Html::default();
        html.escape(text);
        html
    }

    /// An element with attributes, whose values are escaped, around `content`.
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

    /// A paragraph.
    pub fn paragraph(text: &str) -> Self {
        Html::element("p", &[], [Html::text(text)])
    }

    /// A heading below a page's title.
    pub fn heading(text: &str) -> Self {
        Html::element("h2", &[], [Html::text(text)])
    }

    /// Text in lines of its own, such as a file's.
    pub fn preformatted(text: &str) -> Self {
        Html::element("pre", &[], [Html::text(text)])
    }

    /// `content` that is shown when its summary is clicked.
    pub fn details(summary: &str, content: impl IntoIterator<Item = Html>) -> Self {
        let mut html = Html::element("summary", &[], [Html::text(summary)]);
        content.into_iter().for_each(|inner| html.push(inner));
        Html::element("details", &[], [html])
    }

    /// Charts beside each other, as many as fit.
    pub fn grid(charts: impl IntoIterator<Item = Html>) -> Self {
        Html::element("div", &[("class", "grid")], charts)
    }

    /// Appends more.
    pub fn push(&mut self, more: Html) {
        self.0 += &more.0;
    }

    /// The markup.
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
                // Not allowed in HTML, and of no use in a report; neither are the marks that turn the direction of text.
                '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => self.0.push('\u{fffd}'),
                c if c.is_control() && !matches!(c, '\n' | '\t') => self.0.push('\u{fffd}'),
                c => self.0.push(c),
            }
        }
    }
}

/// A table, which scrolls sideways where it is too wide.
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
