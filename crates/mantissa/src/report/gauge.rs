//! Gauge of a KL divergence: where it lies among the thresholds and against the noise floor.

use mantissa_eval::verdict::Verdict;

use super::axis::{LETTER, WIDTH, text, width_of};
use super::{Html, figures};

/// Ends of the scale, nats/token.
const LOW: f64 = 1e-5;
const HIGH: f64 = 5.0;
/// Top and height of the bands, in drawing units.
const BAND: (f64, f64) = (15.0, 24.0);

/// Measured KL with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// Name; empty for the only one.
    pub name: String,
    /// Mean KL, nats/token.
    pub kl: f64,
    /// Verdict on it.
    pub verdict: Verdict,
}

/// Draws the bands of the verdicts on a log scale, a line for each reading and a dashed one for the noise floor.
pub fn gauge(readings: &[Reading], floor: f64) -> Html {
    let mut inner = bands();
    let rows = readings.len() + usize::from(floor > LOW);
    let names = readings.iter().map(|reading| (label(reading), reading.kl, "needle"));
    let floors = (floor > LOW).then(|| (format!("noise floor {}", figures(floor)), floor, "needle floor"));
    // Texts come after all needles, which may cross them.
    let mut texts = Html::default();
    for (i, (said, kl, class)) in names.chain(floors).enumerate() {
        let baseline = BAND.0 + BAND.1 + 5.0 + LETTER.1 * (i as f64 + 1.0);
        inner.push(needle(place(kl), baseline, class));
        texts.push(name(place(kl), baseline, &said));
    }
    inner.push(texts);
    let height = BAND.0 + BAND.1 + 10.0 + LETTER.1 * rows as f64;
    let view = format!("0 0 {WIDTH} {height}");
    let attributes = [("viewBox", &view[..]), ("role", "img"), ("aria-label", &said(readings, floor))];
    let svg = Html::element("svg", &attributes, [inner]);
    let caption = Html::element(
        "figcaption",
        &[],
        [Html::text("KL divergence from the source (nats/token, log scale)")],
    );
    Html::element("figure", &[("class", "gauge")], [caption, svg])
}

/// Returns the horizontal coordinate of a KL; beyond the scale, its end.
fn place(kl: f64) -> f64 {
    let kl = if kl.is_nan() { HIGH } else { kl.clamp(LOW, HIGH) };
    WIDTH * (kl / LOW).ln() / (HIGH / LOW).ln()
}

/// Draws the bands with their words, and the thresholds above.
fn bands() -> Html {
    let mut html = Html::default();
    let mut from = LOW;
    for (i, verdict) in Verdict::ALL.into_iter().enumerate() {
        let to = verdict.limit().unwrap_or(HIGH);
        let (left, right) = (place(from), place(to));
        let [x, y, width, height] = [left, BAND.0, right - left, BAND.1].map(|value| format!("{value:.1}"));
        let class = format!("band b{i}");
        let attributes =
            [("class", &class[..]), ("x", &x), ("y", &y), ("width", &width), ("height", &height)];
        html.push(Html::element("rect", &attributes, []));
        html.push(text(((left + right) / 2.0, BAND.0 + 16.0), "label middle", verdict.word()));
        if let Some(limit) = verdict.limit() {
            html.push(text((right, BAND.0 - 4.0), "middle", &figures(limit)));
        }
        from = to;
    }
    html
}

/// Draws a line from the bands down to the text of a reading.
fn needle(x: f64, baseline: f64, class: &str) -> Html {
    let (at, top) = (format!("{x:.1}"), format!("{:.1}", BAND.0 + BAND.1 - 4.0));
    let bottom = format!("{:.1}", baseline + 2.0);
    let attributes = [("class", class), ("x1", &at), ("x2", &at), ("y1", &top), ("y2", &bottom)];
    Html::element("line", &attributes, [])
}

/// Draws the text of a reading at the side of its needle that has room.
fn name(x: f64, baseline: f64, name: &str) -> Html {
    let after = x + 5.0 + width_of(name) <= WIDTH;
    let (x, class) = if after { (x + 5.0, "reading") } else { (x - 5.0, "reading end") };
    text((x, baseline), class, name)
}

fn label(reading: &Reading) -> String {
    format!("{} {}", reading.name, figures(reading.kl)).trim_start().to_owned()
}

fn said(readings: &[Reading], floor: f64) -> String {
    let each = readings.iter().map(|reading| format!("{}: {}", label(reading), reading.verdict.word()));
    let limits = Verdict::ALL
        .into_iter()
        .filter_map(|verdict| Some(format!("{} up to {}", verdict.word(), figures(verdict.limit()?))));
    format!(
        "KL in nats/token. {}. Noise floor {}. Thresholds: {}.",
        each.collect::<Vec<_>>().join("; "),
        figures(floor),
        limits.collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(name: &str, kl: f64) -> Reading {
        Reading { name: name.to_owned(), kl, verdict: Verdict::new((kl, 0.0), (0.0, 0.0)) }
    }

    #[test]
    fn the_gauge_says_what_it_shows() {
        let html = gauge(&[reading("", 0.0632)], 2e-4);
        let html = html.as_str();
        assert!(html.contains("0.0632: visible. Noise floor 0.0002."), "{html}");
        assert!(
            html.contains("Thresholds: indistinguishable up to 0.002, small up to 0.05, visible up to 0.5.")
        );
        assert!(html.contains("needle floor") && html.contains(">noise floor 0.0002<"), "{html}");
        assert!(!gauge(&[reading("", 0.1)], 0.0).as_str().contains("needle floor"));
    }

    #[test]
    fn needles_stay_on_the_scale() {
        for kl in [0.0, 1e-12, 1e-5, 0.3, 5.0, 1e9, f64::INFINITY, f64::NAN] {
            assert!((0.0..=WIDTH).contains(&place(kl)), "{kl}");
            assert!(!gauge(&[reading("a", kl)], kl).as_str().contains("=\"NaN"), "{kl}");
        }
    }
}
