//! Scatter charts with labelled points.

use super::axis::{Axis, Frame, HEIGHT, WIDTH, colour};
use super::{Html, axis};

/// Average width and height of a label's letter.
const LETTER: (f64, f64) = (6.2, 13.0);

/// Labelled point.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Horizontal value.
    pub x: f64,
    /// Vertical value.
    pub y: f64,
    /// Label; empty for none.
    pub label: String,
    /// Index into [`Scatter::groups`], which sets the color.
    pub group: usize,
}

/// Scatter chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Scatter<'a> {
    /// Title.
    pub title: &'a str,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Group names in the legend; no legend for one group or none.
    pub groups: &'a [&'a str],
    /// Points to draw.
    pub points: Vec<Point>,
}

/// Rectangle: left, top, right, bottom.
type Area = [f64; 4];

impl Scatter<'_> {
    /// Draws the chart. Labels avoid points and each other as far as possible; every point shows its name and
    /// values on hover.
    pub fn html(&self) -> Html {
        let frame = Frame::new(self.x, self.y, self.points.iter().map(|point| (point.x, point.y)));
        let placed: Vec<_> =
            self.points.iter().filter_map(|point| Some((point, frame.place((point.x, point.y))?))).collect();
        let mut taken: Vec<Area> =
            placed.iter().map(|(_, (x, y))| [x - 4.0, y - 4.0, x + 4.0, y + 4.0]).collect();
        let mut inner = Html::default();
        for (point, (x, y)) in &placed {
            let said = format!("{} ({}, {})", point.label, number(point.x), number(point.y));
            let (cx, cy) = (format!("{x:.1}"), format!("{y:.1}"));
            let class = colour(point.group);
            let attributes = [("class", &class[..]), ("cx", &cx), ("cy", &cy), ("r", "4")];
            inner.push(Html::element(
                "circle",
                &attributes,
                [Html::element("title", &[], [Html::text(&said)])],
            ));
        }
        for (point, at) in placed {
            if point.label.is_empty() {
                continue;
            }
            let area = free_area(at, point.label.chars().count(), &taken);
            inner.push(axis::text((area[0], area[3] - 3.0), "label", &point.label));
            taken.push(area);
        }
        frame.figure(self.title, self.groups, inner)
    }
}

fn number(value: f64) -> String {
    crate::output::number(Some(value), 4)
}

/// Returns the label position with the least overlap, nearest positions first.
fn free_area((x, y): (f64, f64), letters: usize, taken: &[Area]) -> Area {
    let (width, height) = (letters as f64 * LETTER.0, LETTER.1);
    let sides = [
        (7.0, -height / 2.0),
        (-7.0 - width, -height / 2.0),
        (-width / 2.0, -7.0 - height),
        (-width / 2.0, 7.0),
    ];
    let places = [0.0, -14.0, 14.0, -28.0, 28.0].into_iter().flat_map(|shift| {
        sides.map(|(right, down)| {
            let left = (x + right).clamp(0.0, (WIDTH - width).max(0.0));
            let top = (y + down + shift).clamp(0.0, HEIGHT - height);
            [left, top, left + width, top + height]
        })
    });
    let covered = |area: &Area| taken.iter().map(|other| overlap(area, other)).sum::<f64>();
    // `min_by` keeps the first of equal minima.
    places.min_by(|a, b| covered(a).total_cmp(&covered(b))).unwrap_or([x, y, x + width, y + height])
}

fn overlap(a: &Area, b: &Area) -> f64 {
    let side = |i: usize| (a[i + 2].min(b[i + 2]) - a[i].max(b[i])).max(0.0);
    side(0) * side(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_of_close_points_do_not_cover_each_other() {
        let point = |x: f64, y: f64, label: &str| Point { x, y, label: label.into(), group: 0 };
        let points =
            vec![point(4.0, 0.01, "int4-g128"), point(4.0, 0.0101, "nf4"), point(4.02, 0.0099, "<mxfp4>")];
        let scatter =
            Scatter { title: "t", x: Axis::linear("bits"), y: Axis::log("KL"), groups: &[], points };
        let html = scatter.html();
        let html = html.as_str();
        assert_eq!((html.matches("<circle").count(), html.matches("class=\"label\"").count()), (3, 3));
        assert!(html.contains("&lt;mxfp4&gt; (4.02, 0.0099)"), "{html}");
        let mut taken = Vec::new();
        for _ in 0..6 {
            let area = free_area((200.0, 100.0), 9, &taken);
            assert!(taken.iter().all(|other| overlap(&area, other) == 0.0), "{taken:?} {area:?}");
            taken.push(area);
        }
    }

    #[test]
    fn points_that_have_no_place_are_left_out() {
        let points = vec![Point { x: 1.0, y: 0.0, label: String::new(), group: 3 }];
        let scatter = Scatter { title: "t", x: Axis::linear("x"), y: Axis::log("y"), groups: &[], points };
        assert!(!scatter.html().as_str().contains("<circle"));
    }
}
