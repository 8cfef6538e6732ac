//! Line charts.

use super::Html;
use super::axis::{Axis, Frame, colour};

/// Intervals of the horizontal axis that keep only their lowest and highest point: more would not be visible.
const PIECES: usize = 400;

/// Line of a chart.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Points from left to right; non-finite ones, or those below a log axis, are gaps.
    pub points: Vec<(f64, f64)>,
    /// True if drawn thin, behind a smoothed line.
    pub faint: bool,
}

impl Series {
    /// Makes a line of full strength.
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Series { name: name.into(), points, faint: false }
    }

    /// Makes the line faint.
    pub fn faint(self) -> Self {
        Series { faint: true, ..self }
    }
}

/// Lines over a common axis.
#[derive(Clone, Debug, PartialEq)]
pub struct LineChart<'a> {
    /// Title.
    pub title: &'a str,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Lines.
    pub series: Vec<Series>,
}

impl LineChart<'_> {
    /// Draws the chart.
    pub fn html(&self) -> Html {
        let points = self.series.iter().flat_map(|series| series.points.iter().copied());
        let frame = Frame::new(self.x, self.y, points);
        let mut inner = Html::default();
        for (i, series) in self.series.iter().enumerate() {
            inner.push(drawn(&frame, series, i));
        }
        let names: Vec<_> = self.series.iter().map(|series| &series.name[..]).collect();
        frame.figure(self.title, &names, inner)
    }
}

fn drawn(frame: &Frame, series: &Series, index: usize) -> Html {
    let mut path = String::new();
    let mut alone = Html::default();
    let colour = colour(index);
    for run in thinned(&series.points).split(|point| frame.place(*point).is_none()) {
        let places = run.iter().filter_map(|point| frame.place(*point));
        for (i, (x, y)) in places.enumerate() {
            path += &format!("{}{x:.1} {y:.1}", if i == 0 { "M" } else { "L" });
        }
        // A single point is drawn as a dot, since a line needs two.
        if let [point] = run
            && let Some((x, y)) = frame.place(*point)
        {
            let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
            alone.push(Html::element(
                "circle",
                &[("class", &colour), ("cx", &x), ("cy", &y), ("r", "2")],
                [],
            ));
        }
    }
    let class = if series.faint { format!("{colour} faint") } else { colour };
    let mut html = Html::element("path", &[("class", &class), ("d", &path)], []);
    html.push(alone);
    html
}

/// Keeps a few points per interval: the first, the lowest, the highest, and gaps.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= 4 * PIECES {
        return points.to_vec();
    }
    let mut kept = Vec::new();
    for piece in points.chunks(points.len().div_ceil(PIECES)) {
        let finite = || piece.iter().enumerate().filter(|(_, point)| point.1.is_finite());
        let by_height = |a: &(usize, &(f64, f64)), b: &(usize, &(f64, f64))| a.1.1.total_cmp(&b.1.1);
        let gap = piece.iter().position(|point| !point.1.is_finite());
        let ends = [finite().min_by(by_height), finite().max_by(by_height)].map(|end| end.map(|(i, _)| i));
        let mut places: Vec<_> = ends.into_iter().chain([gap, Some(0)]).flatten().collect();
        places.sort_unstable();
        places.dedup();
        kept.extend(places.into_iter().map(|i| piece[i]));
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> String {
        let series = vec![Series::new("a", points.clone()), Series::new("<b>", points).faint()];
        LineChart { title: "t", x: Axis::linear("step"), y: Axis::log("loss"), series }
            .html()
            .as_str()
            .to_owned()
    }

    #[test]
    fn gaps_cut_a_line() {
        let html = chart(vec![
            (1.0, 2.0),
            (2.0, 3.0),
            (3.0, f64::NAN),
            (4.0, 2.0),
            (5.0, 2.5),
            (6.0, -1.0),
            (7.0, 3.0),
        ]);
        let path = html.split("d=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        assert_eq!((path.matches('M').count(), path.matches('L').count()), (3, 2), "{path}");
        assert_eq!(html.matches("<circle").count(), 2, "a point between gaps is seen");
        assert!(html.contains("&lt;b&gt;") && !html.contains("NaN"), "{html}");
    }

    #[test]
    fn a_long_run_keeps_its_peaks() {
        let mut points: Vec<_> = (0..100_000).map(|i| (f64::from(i), 1.0)).collect();
        points[77_777].1 = 9.0;
        points[5].1 = 0.5;
        let kept = thinned(&points);
        assert!(kept.len() < 4 * PIECES, "{}", kept.len());
        assert!(kept.contains(&(77_777.0, 9.0)) && kept.contains(&(5.0, 0.5)));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn an_empty_chart_is_valid() {
        assert!(chart(Vec::new()).contains("</svg>"));
    }
}
