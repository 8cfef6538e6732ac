//! Line charts.

use super::axis::{Axis, Frame, Key, colour, figure};
use super::mark::dashes;
use super::{Html, figures};

/// Intervals of the horizontal axis that keep only their lowest and highest point: more would not be visible.
const PIECES: usize = 300;

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

    /// True if every finite value is 0, or there is none.
    pub fn is_zero(&self) -> bool {
        self.points.iter().all(|(_, y)| *y == 0.0 || !y.is_finite())
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
    /// Draws the lines that have a point; `None` if no line has one.
    pub fn html(&self) -> Option<Html> {
        let shows = |point: &(f64, f64)| self.x.shows(point.0) && self.y.shows(point.1);
        let shown: Vec<_> = self.series.iter().filter(|series| series.points.iter().any(shows)).collect();
        if shown.is_empty() {
            return None;
        }
        let points = shown.iter().flat_map(|series| series.points.iter().copied());
        let frame = Frame::new(self.x, self.y, points);
        let (mut inner, mut keys, mut label) =
            (frame.draw(), Vec::new(), format!("{}, line chart.", self.title));
        let mut strong = 0;
        for (i, series) in shown.into_iter().enumerate() {
            let class = class(series, i, strong);
            strong += usize::from(!series.faint);
            inner.push(drawn(&frame, series, &class));
            keys.push(Key::new(sample(&class), &series.name));
            label += &self.said(series);
        }
        Some(figure(self.title, "img", &label, keys, [inner]))
    }

    /// Describes a line: its ends and its extremes.
    fn said(&self, series: &Series) -> String {
        let shown = || series.points.iter().filter(|(x, y)| self.x.shows(*x) && self.y.shows(*y));
        let by_height = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let ends =
            (shown().next(), shown().next_back(), shown().min_by(by_height), shown().max_by(by_height));
        let (Some(first), Some(last), Some(low), Some(high)) = ends else { return String::new() };
        let name = if series.name == self.title { String::new() } else { format!("{}: ", series.name) };
        let y = if self.y.label.is_empty() { String::new() } else { format!(" {}", self.y.label) };
        format!(
            " {name}{}{y} at {} {}, {} at {}; lowest {}, highest {}.",
            figures(first.1),
            self.x.label,
            figures(first.0),
            figures(last.1),
            figures(last.0),
            figures(low.1),
            figures(high.1)
        )
    }
}

/// Returns the classes of line `i`, which is number `strong` of those at full strength: their dashes differ.
fn class(series: &Series, i: usize, strong: usize) -> String {
    if series.faint { format!("{} faint", colour(i)) } else { format!("{} {}", colour(i), dashes(strong)) }
}

/// Draws a line's sample for the legend.
fn sample(class: &str) -> Html {
    Html::element("path", &[("class", &format!("line {class}")), ("d", "M0 6L24 6")], [])
}

fn drawn(frame: &Frame, series: &Series, class: &str) -> Html {
    let mut path = String::new();
    let mut alone = Html::default();
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
            alone.push(Html::element("circle", &[("class", class), ("cx", &x), ("cy", &y), ("r", "2")], []));
        }
    }
    let mut html = Html::element("path", &[("class", &format!("line {class}")), ("d", &path)], []);
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Option<String> {
        let series = vec![Series::new("a", points.clone()), Series::new("<b>", points).faint()];
        let chart = LineChart { title: "t", x: Axis::linear("step"), y: Axis::log("loss"), series };
        Some(chart.html()?.as_str().to_owned())
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
        ])
        .unwrap();
        let path = html.split(" d=\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap_or_default();
        assert_eq!((path.matches('M').count(), path.matches('L').count()), (3, 2), "{path}");
        assert_eq!(html.matches("<circle").count(), 2, "a point between gaps is seen");
        assert!(html.contains("&lt;b&gt;") && !html.contains("NaN"), "{html}");
        assert!(html.contains("a: 2 loss at step 1, 3 at 7; lowest 2, highest 3."), "{html}");
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
    fn there_is_no_empty_chart() {
        assert_eq!(chart(Vec::new()), None);
        assert_eq!(chart(vec![(1.0, f64::NAN), (2.0, 0.0)]), None, "no value has a place on a log axis");
        let series = vec![Series::new("present", vec![(1.0, 2.0)]), Series::new("absent", Vec::new())];
        let chart = LineChart { title: "t", x: Axis::linear("step"), y: Axis::log("loss"), series };
        let html = chart.html().unwrap();
        assert!(!html.as_str().contains("absent"), "the legend lists lines without points: {html:?}");
    }

    #[test]
    fn lines_differ_by_more_than_color() {
        let points = vec![(1.0, 1.0), (2.0, 2.0)];
        let series = ["a", "b", "c"].map(|name| Series::new(name, points.clone())).to_vec();
        let chart = LineChart { title: "t", x: Axis::linear("step"), y: Axis::linear("y"), series };
        let html = chart.html().unwrap();
        for class in ["line s0 d0", "line s1 d1", "line s2 d2"] {
            assert_eq!(html.as_str().matches(class).count(), 2, "line and legend: {class}");
        }
    }
}
