//! Scatter charts whose Pareto front is labelled; the other points have their names on hover and focus.

use super::axis::{Axis, Frame, HEIGHT, Key, LEFT, LETTER, WIDTH, colour, figure, width_of};
use super::mark::mark;
use super::{Html, axis, figures};

/// Radius of a point.
const RADIUS: f64 = 4.0;
/// Most letters of a name in the drawing.
const NAME: usize = 40;

/// Named point.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// Horizontal value.
    pub x: f64,
    /// Vertical value.
    pub y: f64,
    /// Name.
    pub label: String,
    /// Index into [`Scatter::groups`], which sets color and shape.
    pub group: usize,
}

/// Look of a group's points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Index of the shape: circle, square, triangle, diamond …
    pub shape: usize,
    /// Index of the color: blue, orange, green …
    pub colour: usize,
}

/// Scatter chart; less is better on both axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Scatter<'a> {
    /// Title.
    pub title: &'a str,
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Group names; the legend lists those with points.
    pub groups: &'a [&'a str],
    /// Looks of the groups; a group beyond them has the shape and color of its index.
    pub styles: &'a [Style],
    /// Group whose points are named in the drawing, on the front or not.
    pub named: Option<usize>,
    /// Points to draw.
    pub points: Vec<Point>,
}

/// Rectangle: left, top, right, bottom.
type Area = [f64; 4];

/// Point with its coordinates.
type Placed<'a> = (&'a Point, (f64, f64));

impl Scatter<'_> {
    /// Draws the chart; `None` without a point that both axes show.
    pub fn html(&self) -> Option<Html> {
        let frame = Frame::new(self.x, self.y, self.points.iter().map(|point| (point.x, point.y)));
        let placed: Vec<Placed<'_>> =
            self.points.iter().filter_map(|point| Some((point, frame.place((point.x, point.y))?))).collect();
        if placed.is_empty() {
            return None;
        }
        let front = front(&placed);
        let mut inner = frame.draw();
        inner.push(Html::element("path", &[("class", "front"), ("d", &stairs(&placed, &front))], []));
        let others =
            (0..placed.len()).filter(|i| Some(placed[*i].0.group) == self.named && !front.contains(i));
        let labelled: Vec<usize> = others.chain(front.iter().copied()).collect();
        inner.push(labels(&placed, &labelled));
        for (point, at) in &placed {
            inner.push(self.drawn(point, *at));
        }
        let label = self.said(&placed, &front);
        Some(figure(self.title, "group", &label, self.keys(&placed), [inner]))
    }

    /// Draws a point with the text that it shows on hover and focus.
    fn drawn(&self, point: &Point, (x, y): (f64, f64)) -> Html {
        let name = shortened(&point.label);
        let values = self.values(point);
        let width = width_of(&name).max(width_of(&values));
        let left = (x - width / 2.0).clamp(0.0, (WIDTH - width).max(0.0));
        let top = if y > 3.0 * LETTER.1 { y - 2.0 * LETTER.1 } else { y + 1.5 * LETTER.1 };
        let tip = [axis::text((left, top), "tip", &name), axis::text((left, top + LETTER.1), "tip", &values)];
        let said = format!("{}: {values}", point.label);
        let attributes = [("class", "point"), ("tabindex", "0"), ("role", "img"), ("aria-label", &said)];
        let content = [self.mark(point.group, (x, y))].into_iter().chain(tip);
        Html::element("g", &attributes, content)
    }

    fn mark(&self, group: usize, at: (f64, f64)) -> Html {
        let style = self.styles.get(group).copied().unwrap_or(Style { shape: group, colour: group });
        mark(style.shape, &colour(style.colour), at, RADIUS)
    }

    fn values(&self, point: &Point) -> String {
        let word = |axis: Axis| axis.label.split(' ').next().unwrap_or_default();
        format!("{} {}, {} {}", figures(point.x), word(self.x), word(self.y), figures(point.y))
    }

    /// Describes the chart: number of points, and the front.
    fn said(&self, placed: &[Placed<'_>], front: &[usize]) -> String {
        let best: Vec<_> = front.iter().filter_map(|i| placed.get(*i)).collect();
        let best = best.iter().map(|(point, _)| format!("{} ({})", point.label, self.values(point)));
        let best = best.collect::<Vec<_>>().join("; ");
        let (n, y) = (placed.len(), self.y.label);
        format!("{}: {y} over {} of {n} points. Best at their size: {best}.", self.title, self.x.label)
    }

    /// Makes the legend of the groups that have points.
    fn keys(&self, placed: &[Placed<'_>]) -> Vec<Key> {
        let present = |i: usize| placed.iter().any(|(point, _)| point.group == i);
        let groups = self.groups.iter().enumerate().filter(|(i, _)| present(*i));
        let key = |(i, name): (usize, &&str)| Key::new(self.mark(i, (12.0, 6.0)), name);
        groups.map(key).collect()
    }
}

fn shortened(name: &str) -> String {
    if name.chars().count() <= NAME {
        return name.to_owned();
    }
    name.chars().take(NAME - 1).chain(['…']).collect()
}

/// Returns the indices of the points that no other beats in both values, from left to right.
fn front(placed: &[Placed<'_>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..placed.len()).collect();
    let at = |i: usize| (placed[i].0.x, placed[i].0.y);
    order.sort_by(|a, b| at(*a).0.total_cmp(&at(*b).0).then(at(*a).1.total_cmp(&at(*b).1)));
    let mut lowest = f64::INFINITY;
    order.retain(|i| {
        let better = at(*i).1 < lowest;
        lowest = lowest.min(at(*i).1);
        better
    });
    order
}

/// Returns the path of the front: the lowest value reached up to each size.
fn stairs(placed: &[Placed<'_>], front: &[usize]) -> String {
    let mut path = String::new();
    for i in front {
        let (x, y) = placed[*i].1;
        path += &if path.is_empty() { format!("M{x:.1} {y:.1}") } else { format!("H{x:.1}V{y:.1}") };
    }
    path
}

/// Labels the points `named`, beside all points and each other as far as possible.
fn labels(placed: &[Placed<'_>], named: &[usize]) -> Html {
    let r = RADIUS + 1.0;
    let mut taken: Vec<Area> = placed.iter().map(|(_, (x, y))| [x - r, y - r, x + r, y + r]).collect();
    let mut html = Html::default();
    for (point, at) in named.iter().filter_map(|i| placed.get(*i)) {
        let name = shortened(&point.label);
        let area = free_area(*at, width_of(&name), &taken);
        html.push(axis::text((area[0], area[3] - 4.0), "label", &name));
        taken.push(area);
    }
    html
}

/// Returns the label position with the least overlap, nearest positions first.
fn free_area((x, y): (f64, f64), width: f64, taken: &[Area]) -> Area {
    let height = LETTER.1;
    let sides = [
        (8.0, -height / 2.0),
        (-8.0 - width, -height / 2.0),
        (-width / 2.0, -8.0 - height),
        (-width / 2.0, 8.0),
    ];
    let places = [0.0, -15.0, 15.0, -30.0, 30.0].into_iter().flat_map(|shift| {
        sides.map(|(right, down)| {
            // Further left are the numbers of the axis.
            let left = (x + right).clamp(LEFT, (WIDTH - width).max(LEFT));
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn point(x: f64, y: f64, label: &str, group: usize) -> Point {
        Point { x, y, label: label.into(), group }
    }

    fn drawn(groups: &[&str], points: Vec<Point>) -> String {
        let (x, y) = (Axis::linear("bits"), Axis::log("KL"));
        let scatter = Scatter { title: "t", x, y, groups, styles: &[], named: Some(1), points };
        scatter.html().unwrap().as_str().to_owned()
    }

    #[test]
    fn only_the_front_is_labelled_and_every_point_has_its_text() {
        let points = vec![
            point(4.0, 0.01, "small", 0),
            point(4.0, 0.02, "worse", 0),
            point(4.5, 0.005, "<best>", 0),
            point(5.0, 0.006, "larger", 0),
        ];
        let html = drawn(&["rtn"], points);
        let labels: Vec<_> =
            html.split("class=\"label\"").skip(1).map(|rest| rest.split('<').next()).collect();
        assert_eq!(labels.len(), 2, "{html}");
        assert!(html.contains(">small</text>") && html.contains(">&lt;best&gt;</text>"), "{html}");
        assert_eq!(html.matches("<g class=\"point\" tabindex=\"0\" role=\"img\" aria-label=").count(), 4);
        assert!(html.contains("aria-label=\"worse: 4 bits, KL 0.02\""), "{html}");
        assert!(
            html.contains("Best at their size: small (4 bits, KL 0.01); &lt;best&gt; (4.5 bits, KL 0.005).")
        );
    }

    #[test]
    fn the_legend_lists_the_groups_that_have_points_with_their_shapes() {
        let groups = ["rtn", "absent", "gptq"];
        let html = drawn(&groups, vec![point(4.0, 0.01, "a", 0), point(4.0, 0.02, "b", 2)]);
        assert!(
            !html.contains("absent") && html.contains("rtn</span>") && html.contains("gptq</span>"),
            "{html}"
        );
        let one = drawn(&groups, vec![point(4.0, 0.01, "a", 0)]);
        assert!(!one.contains("class=\"legend\""), "a legend of one group says nothing: {one}");
    }

    #[test]
    fn points_of_the_named_group_are_labelled_off_the_front_too() {
        let points =
            vec![point(4.0, 0.01, "best", 0), point(4.5, 0.02, "chosen", 1), point(5.0, 0.03, "c", 0)];
        let html = drawn(&["fits", "chosen"], points);
        let labels: Vec<_> = html.split("class=\"label\"").skip(1).collect();
        assert!(labels.len() == 2 && html.contains(">chosen</text>"), "{html}");
    }

    #[test]
    fn a_style_sets_shape_and_colour() {
        let points = vec![point(4.0, 0.01, "a", 0), point(4.5, 0.02, "b", 1)];
        let (x, y) = (Axis::linear("bits"), Axis::log("KL"));
        let styles = &[Style { shape: 3, colour: 2 }];
        let scatter = Scatter { title: "t", x, y, groups: &["one", "two"], styles, named: None, points };
        let html = scatter.html().unwrap().as_str().to_owned();
        assert!(html.contains("mark s2") && html.contains("mark s1") && !html.contains("mark s0"), "{html}");
    }

    #[test]
    fn labels_do_not_cover_each_other() {
        let mut taken = Vec::new();
        for _ in 0..6 {
            let area = free_area((200.0, 100.0), 60.0, &taken);
            assert!(taken.iter().all(|other| overlap(&area, other) == 0.0), "{taken:?} {area:?}");
            taken.push(area);
        }
    }

    #[test]
    fn a_chart_without_points_is_left_out() {
        let points = vec![point(1.0, 0.0, "a", 3)];
        let (x, y) = (Axis::linear("x"), Axis::log("y"));
        let scatter = Scatter { title: "t", x, y, groups: &[], styles: &[], named: None, points };
        assert_eq!(scatter.html(), None);
    }
}
