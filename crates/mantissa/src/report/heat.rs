//! Heat maps as tables: the value is in the cell, the shade only helps to find it.

use super::{Html, scrolling};

/// Number of shades.
const SHADES: usize = 10;

/// Value of a cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Value that sets the shade.
    pub value: f64,
    /// Text of the cell.
    pub text: String,
    /// Text on hover.
    pub title: String,
}

/// Table of shaded cells.
#[derive(Clone, Debug, PartialEq)]
pub struct Heat<'a> {
    /// Content of the table, for those to whom it is read.
    pub label: &'a str,
    /// Heading of the column of row names.
    pub corner: &'a str,
    /// Short name and full name of each column.
    pub columns: Vec<(String, String)>,
    /// Name and cells of each row; a row has as many cells as there are columns.
    pub rows: Vec<(String, Vec<Option<Cell>>)>,
    /// True if the largest value has a frame.
    pub framed: bool,
}

impl Heat<'_> {
    /// Renders the table; `None` if it has no cell.
    pub fn html(&self) -> Option<Html> {
        let values = || self.rows.iter().flat_map(|(_, cells)| cells.iter().flatten()).map(|cell| cell.value);
        values().next()?;
        let finite = || values().filter(|value| value.is_finite());
        let range = (finite().fold(f64::INFINITY, f64::min), finite().fold(f64::NEG_INFINITY, f64::max));
        let column = |(short, full): &(String, String)| {
            Html::element("th", &[("scope", "col"), ("title", full)], [Html::text(short)])
        };
        let corner = Html::element("th", &[("scope", "col")], [Html::text(self.corner)]);
        let head = [corner].into_iter().chain(self.columns.iter().map(column));
        let head = Html::element("thead", &[], [Html::element("tr", &[], head)]);
        let rows = self.rows.iter().map(|(name, cells)| self.row(name, cells, range));
        let table = Html::element("table", &[("class", "heat")], [head, Html::element("tbody", &[], rows)]);
        Some(scrolling(self.label, table))
    }

    fn row(&self, name: &str, cells: &[Option<Cell>], range: (f64, f64)) -> Html {
        let name = Html::element("th", &[("scope", "row")], [Html::text(name)]);
        let cell = |cell: &Option<Cell>| match cell {
            None => Html::element("td", &[], []),
            Some(cell) => {
                let largest = self.framed && cell.value == range.1 && range.0 < range.1;
                let frame = if largest { " largest" } else { "" };
                let class = format!("h{}{frame}", shade(cell.value, range));
                let attributes = [("class", &class[..]), ("title", &cell.title)];
                Html::element("td", &attributes, [Html::text(&cell.text)])
            }
        };
        Html::element("tr", &[], [name].into_iter().chain(cells.iter().map(cell)))
    }
}

/// Least width of the range of shades, as a share of the largest value: smaller differences are hardly seen.
const LEAST_RANGE: f64 = 0.02;

/// Returns the shade of `value` within `range`: 0 is the lightest. A value that is not a number or infinite has the darkest,
/// minus infinity the lightest.
fn shade(value: f64, (low, high): (f64, f64)) -> usize {
    let width = (high - low).max(LEAST_RANGE * high.abs()).max(f64::MIN_POSITIVE);
    let share = (value - low) / width;
    if value == f64::NEG_INFINITY {
        return 0;
    }
    if value.is_finite() { ((share * SHADES as f64) as usize).min(SHADES - 1) } else { SHADES - 1 }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn shades_follow_the_values() {
        assert_eq!([2.0, 5.0, 8.0].map(|v| shade(v, (2.0, 8.0))), [0, 5, 9]);
        assert_eq!([3.6, 4.0, 4.6].map(|v| shade(v, (3.6, 4.6))), [0, 4, 9], "the range shown");
        assert_eq!([4.0, 4.004].map(|v| shade(v, (4.0, 4.004))), [0, 0], "nearly equal");
        assert_eq!(shade(4.0, (4.0, 4.0)), 0);
        for value in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert!(shade(value, (0.0, 1.0)) < SHADES);
        }
    }

    #[test]
    fn cells_hold_their_values_and_headings_their_scope() {
        let cell = |value: f64| Some(Cell { value, text: format!("{value}"), title: format!("<q> {value}") });
        let heat = Heat {
            label: "error by layer",
            corner: "layer",
            columns: vec![("q".into(), "self_attn.q_proj".into()), ("k".into(), "self_attn.k_proj".into())],
            rows: vec![("0".into(), vec![cell(0.1), cell(0.2)]), ("1".into(), vec![cell(0.4), None])],
            framed: true,
        };
        let html = heat.html().unwrap();
        let html = html.as_str();
        assert_eq!((html.matches("scope=\"col\"").count(), html.matches("scope=\"row\"").count()), (3, 2));
        assert!(
            html.contains("<td class=\"h9 largest\" title=\"&lt;q&gt; 0.4\">0.4</td><td></td>"),
            "{html}"
        );
        assert!(html.contains("aria-label=\"error by layer\""), "{html}");
        assert_eq!(html.matches("largest").count(), 1, "{html}");
        assert_eq!(Heat { rows: Vec::new(), ..heat }.html(), None);
    }
}
