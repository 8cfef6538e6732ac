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
    /// Label with unit; empty if the title says it.
    pub label: &'static str,
    /// Scale of the axis.
    pub scale: Scale,
    /// True if the range includes 0; for [`Scale::Linear`].
    pub from_zero: bool,
    /// True if ticks are written in full, `20000` rather than `20 K`.
    pub in_full: bool,
}

impl Axis {
    /// Linear axis over the range of the values.
    pub const fn linear(label: &'static str) -> Self {
        Axis { label, scale: Scale::Linear, from_zero: false, in_full: false }
    }

    /// Linear axis from 0.
    pub const fn from_zero(label: &'static str) -> Self {
        Axis { label, scale: Scale::Linear, from_zero: true, in_full: false }
    }

    /// Logarithmic axis.
    pub const fn log(label: &'static str) -> Self {
        Axis { label, scale: Scale::Log, from_zero: false, in_full: false }
    }

    /// Writes ticks in full, for a count of steps.
    pub const fn in_full(self) -> Self {
        Axis { in_full: true, ..self }
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

    /// Returns candidates for ticks between `low` and `high`, coarse ones first: each set is finer than the one before.
    fn candidates(&self, low: f64, high: f64) -> Vec<Vec<f64>> {
        let sets = match self.scale {
            Scale::Linear => Vec::new(),
            Scale::Log => vec![decade_marks(low, high, &[1.0]), decade_marks(low, high, &[1.0, 2.0, 5.0])],
        };
        let several: Vec<_> = sets.into_iter().filter(|set| set.len() >= 2).collect();
        if several.is_empty() { vec![even_marks(low, high)] } else { several }
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

/// Returns ticks at `factors` times powers of ten, thinned if there are many decades.
fn decade_marks(low: f64, high: f64, factors: &[f64]) -> Vec<f64> {
    let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
    let every = ((last - first) / 7 + 1).max(1);
    let powers = (first..=last).filter(|power| power.rem_euclid(every) == 0);
    let marks = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    marks.filter(|mark| (low..=high).contains(mark)).collect()
}

/// Longest tick in characters: it fits to the left of the plot.
const TICK: usize = 6;

/// Formats the ticks of an axis alike: all plain, with K, M or B from 1000 on unless `in_full`; or, if one would be too
/// long, all with exponents.
fn ticks(values: &[f64], in_full: bool) -> Vec<String> {
    let plain: Option<Vec<_>> = values.iter().map(|value| plain(*value, in_full)).collect();
    plain.unwrap_or_else(|| values.iter().map(|value| exponential(*value)).collect())
}

/// Formats a tick without exponent; `None` if it is too long.
fn plain(value: f64, in_full: bool) -> Option<String> {
    const UNITS: [&str; 5] = ["", " K", " M", " B", " T"];
    let power = if in_full || value == 0.0 { 0 } else { (value.abs().log10().floor() as i32).max(0) / 3 };
    let unit = UNITS.get(power as usize)?;
    let text = number(Some(value / 1000f64.powi(power)), 4);
    let text = if value == 0.0 { "0".to_owned() } else { text + unit };
    (text.chars().count() <= TICK && !text.contains('e')).then_some(text)
}

fn exponential(value: f64) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let text = format!("{value:.3e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let digits =
        if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
    if exponent == "0" { digits.to_owned() } else { format!("{digits}e{exponent}") }
}

/// Size of a drawing and its margins, in drawing units. One unit is about one pixel on a phone.
pub(super) const WIDTH: f64 = 360.0;
pub(super) const HEIGHT: f64 = 230.0;
pub(super) const LEFT: f64 = 52.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 40.0;

/// Average width and height of a letter at the largest text size of a drawing.
pub(super) const LETTER: (f64, f64) = (7.4, 14.0);

/// Returns the width of a text in drawing units.
pub(super) fn width_of(text: &str) -> f64 {
    text.chars().count() as f64 * LETTER.0
}

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

    /// Returns the horizontal ticks: coordinate and label, clear of each other.
    fn ticks_x(&self) -> Vec<(f64, String)> {
        let place = |mark| self.place((mark, self.y.1)).map(|at| at.0);
        clear(self.x.0, self.x.0.candidates(self.x.1, self.x.2), place, |label| width_of(label) + 8.0)
    }

    /// Returns the vertical ticks.
    fn ticks_y(&self) -> Vec<(f64, String)> {
        let place = |mark| self.place((self.x.1, mark)).map(|at| at.1);
        clear(self.y.0, self.y.0.candidates(self.y.1, self.y.2), place, |_| LETTER.1 + 2.0)
    }

    /// Draws grid, ticks and labels.
    pub(super) fn draw(&self) -> Html {
        let mut html = Html::default();
        let (base, end) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for (x, label) in self.ticks_x() {
            html.push(line((x, TOP), (x, base)));
            // The labels at both ends stay inside the drawing.
            let half = width_of(&label) / 2.0;
            let centre = x.clamp(half.min(WIDTH / 2.0), (WIDTH - half).max(WIDTH / 2.0));
            html.push(text((centre, base + 15.0), "middle", &label));
        }
        for (y, label) in self.ticks_y() {
            html.push(line((LEFT, y), (end, y)));
            html.push(text((LEFT - 5.0, y + 4.0), "end", &label));
        }
        html.push(text(((LEFT + end) / 2.0, HEIGHT - 7.0), "middle", self.x.0.label));
        html.push(text((2.0, 13.0), "", self.y.0.label));
        html
    }
}

/// Chooses the finest set of candidates whose labels keep clear of each other; of the coarsest, drops labels
/// that would overlap.
fn clear(
    axis: Axis,
    sets: Vec<Vec<f64>>,
    place: impl Fn(f64) -> Option<f64>,
    extent: impl Fn(&str) -> f64,
) -> Vec<(f64, String)> {
    let mut best = Vec::new();
    for (i, marks) in sets.into_iter().enumerate() {
        let (places, marks): (Vec<_>, Vec<_>) =
            marks.into_iter().filter_map(|mark| Some((place(mark)?, mark))).unzip();
        let all: Vec<_> = places.into_iter().zip(ticks(&marks, axis.in_full)).collect();
        let mut kept: Vec<(f64, String)> = Vec::new();
        for (at, label) in &all {
            let free =
                |(other, name): &(f64, String)| (at - other).abs() >= (extent(label) + extent(name)) / 2.0;
            if kept.iter().all(free) {
                kept.push((*at, label.clone()));
            }
        }
        if i > 0 && kept.len() < all.len() {
            break;
        }
        best = kept;
    }
    best
}

/// Entry of a legend: a drawn sample and its name.
pub(super) struct Key {
    pub(super) sample: Html,
    pub(super) name: String,
}

impl Key {
    /// Makes an entry from the content of a sample drawing of 24 × 12 units.
    pub(super) fn new(inner: Html, name: &str) -> Self {
        let attributes = [("class", "key"), ("viewBox", "0 0 24 12"), ("aria-hidden", "true")];
        Key { sample: Html::element("svg", &attributes, [inner]), name: name.to_owned() }
    }
}

/// Wraps a drawing in a figure; `label` says its content to those who cannot see it. `role` is `img`, or
/// `group` if parts of the drawing have labels of their own.
pub(super) fn figure(
    title: &str,
    role: &'static str,
    label: &str,
    keys: Vec<Key>,
    inner: impl IntoIterator<Item = Html>,
) -> Html {
    let view = format!("0 0 {WIDTH} {HEIGHT}");
    let attributes = [("viewBox", &view[..]), ("role", role), ("aria-label", label)];
    let svg = Html::element("svg", &attributes, inner);
    let mut content = vec![Html::element("figcaption", &[], [Html::text(title)]), svg];
    if keys.len() > 1 {
        let entry = |key: Key| Html::element("span", &[], [key.sample, Html::text(&key.name)]);
        content.push(Html::element("div", &[("class", "legend")], keys.into_iter().map(entry)));
    }
    Html::element("figure", &[], content)
}

/// Returns the CSS class of series `i`.
pub(super) fn colour(i: usize) -> String {
    format!("s{}", i % 8)
}

/// Draws a text at a coordinate.
pub(super) fn text((x, y): (f64, f64), class: &str, text: &str) -> Html {
    let (x, y) = (format!("{x:.1}"), format!("{y:.1}"));
    let mut attributes = vec![("x", &x[..]), ("y", &y)];
    if !class.is_empty() {
        attributes.insert(0, ("class", class));
    }
    Html::element("text", &attributes, [Html::text(text)])
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
        let finest = |axis: Axis, low, high| axis.candidates(low, high).pop().unwrap_or_default();
        assert_eq!(finest(Axis::linear(""), 0.0, 103.0), [0.0, 50.0, 100.0]);
        let close = |found: &[f64], expected: &[f64]| {
            let same = found.iter().zip(expected).all(|(a, b)| (a / b - 1.0).abs() < 1e-12);
            assert!(found.len() == expected.len() && same, "{found:?}");
        };
        close(&finest(Axis::log(""), 0.04, 3.0), &[0.05, 0.1, 0.2, 0.5, 1.0, 2.0]);
        close(&Axis::log("").candidates(1e-7, 2.0)[0], &[1e-6, 1e-4, 1e-2, 1.0]);
        close(&finest(Axis::log(""), 2.1, 2.9), &[2.2, 2.4, 2.6, 2.8]);
    }

    #[test]
    fn ticks_of_an_axis_are_written_alike() {
        for (values, expected) in [
            (&[0.0, 0.0005, 0.001][..], &["0", "0.0005", "0.001"][..]),
            (&[-0.0, 0.002, 0.004], &["0", "0.002", "0.004"]),
            (&[0.0, 0.00005, 0.0001, 0.00015], &["0", "5e-5", "1e-4", "1.5e-4"]),
            (&[0.0, 20000.0, 80000.0], &["0", "20 K", "80 K"]),
            (&[500.0, 1500.0, 2.5e9], &["500", "1.5 K", "2.5 B"]),
            (&[1e-5, 1.0, 1e5], &["1e-5", "1", "1e5"]),
            (&[-2e7, 0.0], &["-20 M", "0"]),
        ] {
            assert_eq!(ticks(values, false), expected);
        }
        assert_eq!(ticks(&[0.0, 2000.0, 40000.0], true), ["0", "2000", "40000"]);
    }

    #[test]
    fn tick_labels_keep_clear_of_each_other() {
        for (low, high) in [(0.04, 0.4), (2.5e-4, 0.5), (1e-6, 3.0), (1e-9, 1e9), (100_000.0, 900_000.0)] {
            for axis in [Axis::log("a"), Axis::linear("b"), Axis::from_zero("c")] {
                let frame = Frame::new(axis, axis, [(low, low), (high, high)].into_iter());
                let (x, y) = (frame.ticks_x(), frame.ticks_y());
                assert!(x.len() >= 2 && y.len() >= 2, "{axis:?} {low} {high}: {x:?} {y:?}");
                let apart = |a: &(f64, String), b: &(f64, String)| {
                    (a.0 - b.0).abs() - (width_of(&a.1) + width_of(&b.1)) / 2.0
                };
                assert!(x.windows(2).all(|pair| apart(&pair[0], &pair[1]) >= 8.0), "{x:?}");
                assert!(y.windows(2).all(|pair| (pair[0].0 - pair[1].0).abs() >= LETTER.1), "{y:?}");
                // Vertical labels fit to the left of the plot.
                assert!(y.iter().all(|(_, label)| width_of(label) <= LEFT - 5.0), "{y:?}");
            }
        }
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
