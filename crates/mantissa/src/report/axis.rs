//! Chart axes: ranges, ticks, and the mapping of values to coordinates.

use super::Html;
use crate::output::number;

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Linear.
    Linear,
    /// Logarithmic; values not above 0 are not shown.
    Log,
}

/// Axis of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    /// Label with unit.
    pub label: &'static str,
    /// Scale of the axis.
    pub scale: Scale,
    /// True if the range includes 0; for [`Scale::Linear`].
    pub from_zero: bool,
}

impl Axis {
    /// Linear axis over the range of the values.
    pub const fn linear(label: &'static str) -> Self {
        Axis { label, scale: Scale::Linear, from_zero: false }
    }

    /// Linear axis from 0.
    pub const fn from_zero(label: &'static str) -> Self {
        Axis { label, scale: Scale::Linear, from_zero: true }
    }

    /// Logarithmic axis.
    pub const fn log(label: &'static str) -> Self {
        Axis { label, scale: Scale::Log, from_zero: false }
    }

    /// True if `value` can be shown.
    pub(super) fn shows(&self, value: f64) -> bool {
        value.is_finite() && (self.scale == Scale::Linear || value > 0.0)
    }

    /// Returns the range with some margin: lowest and highest value.
    fn span(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| self.shows(*value)) {
            (low, high) = (low.min(value), high.max(value));
        }
        if low > high {
            (low, high) = (1.0, 1.0);
        }
        match self.scale {
            // A margin factor on both ends, and at least a factor of 2 in all.
            Scale::Log => {
                let room = (high / low).powf(0.04).max(1.5);
                ((low / room).max(f64::MIN_POSITIVE), (high * room).min(f64::MAX))
            }
            Scale::Linear => {
                if self.from_zero {
                    (low, high) = (low.min(0.0), high.max(0.0));
                }
                // Halved, so that the difference of the extremes stays finite.
                let width = high / 2.0 - low / 2.0;
                let room = if width > 0.0 { 0.08 * width } else { high.abs().max(1.0) / 2.0 };
                let bottom = if self.from_zero && low == 0.0 { low } else { low - room };
                (bottom.max(f64::MIN), (high + room).min(f64::MAX))
            }
        }
    }

    /// Returns three to about eight tick values between `low` and `high`.
    fn marks(&self, low: f64, high: f64) -> Vec<f64> {
        let marks = match self.scale {
            Scale::Linear => even_marks(low, high),
            Scale::Log => decade_marks(low, high),
        };
        if marks.len() >= 2 { marks } else { even_marks(low, high) }
    }
}

/// Returns ticks at multiples of 1, 2 or 5 times a power of ten.
fn even_marks(low: f64, high: f64) -> Vec<f64> {
    let rough = high / 5.0 - low / 5.0;
    if !(rough.is_finite() && rough > 0.0) {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|f| f * power).into_iter().find(|step| *step >= rough).unwrap_or(rough);
    let first = (low / step).ceil();
    (0..12).map(|i| (first + f64::from(i)) * step).take_while(|mark| *mark <= high).collect()
}

/// Returns ticks at powers of ten, with 2 and 5 times them if there are few, thinned if there are many.
fn decade_marks(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let every = ((last - first) / 7 + 1).max(1);
    let factors: &[f64] = if last - first <= 3 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let powers = (first..=last).filter(|power| power.rem_euclid(every) == 0);
    let marks = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    marks.filter(|mark| (low..=high).contains(mark)).collect()
}

/// Size of a drawing and its margins, in drawing units.
pub(super) const WIDTH: f64 = 480.0;
pub(super) const HEIGHT: f64 = 270.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;

/// Two axes with their ranges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    x: (Axis, f64, f64),
    y: (Axis, f64, f64),
}

impl Frame {
    /// Fits the frame to the points that both axes can show.
    pub(super) fn new(x: Axis, y: Axis, points: impl Iterator<Item = (f64, f64)> + Clone) -> Self {
        let shown = points.filter(move |point| x.shows(point.0) && y.shows(point.1));
        let (left, right) = x.span(shown.clone().map(|point| point.0));
        let (low, high) = y.span(shown.map(|point| point.1));
        Frame { x: (x, left, right), y: (y, low, high) }
    }

    /// Returns the coordinates of a point, if both axes show it.
    pub(super) fn place(&self, (x, y): (f64, f64)) -> Option<(f64, f64)> {
        let share = |(axis, low, high): (Axis, f64, f64), value: f64| match axis.scale {
            Scale::Linear => (value / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0),
            Scale::Log => (value.ln() - low.ln()) / (high.ln() - low.ln()),
        };
        (self.x.0.shows(x) && self.y.0.shows(y)).then(|| {
            let (right, up) = (share(self.x, x).clamp(0.0, 1.0), share(self.y, y).clamp(0.0, 1.0));
            (LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM))
        })
    }

    /// Draws grid, ticks and labels.
    pub(super) fn draw(&self) -> Html {
        let mut html = Html::default();
        let (base, end) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for mark in self.x.0.marks(self.x.1, self.x.2) {
            let Some((x, _)) = self.place((mark, self.y.1)) else { continue };
            html.push(line((x, TOP), (x, base)));
            html.push(text((x, base + 16.0), "middle", &number(Some(mark), 4)));
        }
        for mark in self.y.0.marks(self.y.1, self.y.2) {
            let Some((_, y)) = self.place((self.x.1, mark)) else { continue };
            html.push(line((LEFT, y), (end, y)));
            html.push(text((LEFT - 6.0, y + 4.0), "end", &number(Some(mark), 4)));
        }
        html.push(text(((LEFT + end) / 2.0, HEIGHT - 8.0), "middle", self.x.0.label));
        let turned = format!("rotate(-90 12 {:.1})", (TOP + base) / 2.0);
        let at = [("x", "12".to_owned()), ("y", format!("{:.1}", (TOP + base) / 2.0))];
        let attributes = [("class", "middle"), ("x", &at[0].1), ("y", &at[1].1), ("transform", &turned)];
        html.push(Html::element("text", &attributes, [Html::text(self.y.0.label)]));
        html
    }

    /// Wraps the drawing in a figure, with a legend if `names` has more than one entry.
    pub(super) fn figure(&self, title: &str, names: &[&str], inner: Html) -> Html {
        let view = format!("0 0 {WIDTH} {HEIGHT}");
        let attributes = [("viewBox", &view[..]), ("role", "img"), ("aria-label", title)];
        let svg = Html::element("svg", &attributes, [self.draw(), inner]);
        let mut content = vec![Html::element("figcaption", &[], [Html::text(title)]), svg];
        if names.len() > 1 {
            let entry = |(i, name): (usize, &&str)| {
                let mark = Html::element("i", &[("class", &colour(i))], []);
                Html::element("span", &[], [mark, Html::text(name), Html::text(" ")])
            };
            content.push(Html::element("div", &[("class", "legend")], names.iter().enumerate().map(entry)));
        }
        Html::element("figure", &[], content)
    }
}

/// Returns the CSS class of series `i`.
pub(super) fn colour(i: usize) -> String {
    format!("s{}", i % 8)
}

/// Draws a text at a coordinate.
pub(super) fn text((x, y): (f64, f64), class: &str, text: &str) -> Html {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    Html::element("text", &[("class", class), ("x", &x), ("y", &y)], [Html::text(text)])
}

fn line(from: (f64, f64), to: (f64, f64)) -> Html {
    let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(|v| format!("{v:.1}"));
    Html::element("line", &[("class", "gridline"), ("x1", &x1), ("y1", &y1), ("x2", &x2), ("y2", &y2)], [])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_round_numbers() {
        assert_eq!(Axis::linear("").marks(0.0, 103.0), [0.0, 50.0, 100.0]);
        let close = |found: &[f64], expected: &[f64]| {
            let same = found.iter().zip(expected).all(|(a, b)| (a / b - 1.0).abs() < 1e-12);
            assert!(found.len() == expected.len() && same, "{found:?}");
        };
        close(&Axis::log("").marks(0.04, 3.0), &[0.05, 0.1, 0.2, 0.5, 1.0, 2.0]);
        close(&Axis::log("").marks(1e-7, 2.0), &[1e-6, 1e-4, 1e-2, 1.0]);
        close(&Axis::log("").marks(2.1, 2.9), &[2.2, 2.4, 2.6, 2.8]);
    }

    #[test]
    fn any_numbers_have_a_frame() {
        let odd =
            [0.0, -0.0, 1.0, -1.0, f64::MAX, f64::MIN, f64::MIN_POSITIVE, 5e-324, f64::NAN, f64::INFINITY];
        for axis in [Axis::linear("a"), Axis::from_zero("b"), Axis::log("c")] {
            for a in odd {
                for b in odd {
                    let points = [(a, b), (b, a)];
                    let frame = Frame::new(axis, axis, points.into_iter());
                    for (x, y) in points.into_iter().filter_map(|point| frame.place(point)) {
                        assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{axis:?} {a:e} {b:e}: {x}");
                        assert!((TOP..=HEIGHT - BOTTOM).contains(&y), "{axis:?} {a:e} {b:e}: {y}");
                    }
                    assert!(!frame.draw().as_str().contains("NaN"), "{axis:?} {a:e} {b:e}");
                }
            }
        }
    }
}
