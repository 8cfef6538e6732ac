//! Horizontal bars from zero, each with its name and its value.

use super::Html;
use super::axis::{LETTER, WIDTH, text, width_of};

/// Named value.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    /// Name.
    pub name: String,
    /// Value, which is the length; below zero or not finite, none is drawn.
    pub value: f64,
    /// The value as text.
    pub shown: String,
}

/// Height of a row, in drawing units.
const ROW: f64 = 16.0;
/// Largest share of the width for names.
const NAMES: f64 = 0.5;
/// Room at a side of a text.
const GAP: f64 = 6.0;

/// Draws `rows` from top to bottom under a title; `None` without rows.
pub fn bars(title: &str, rows: &[Bar]) -> Option<Html> {
    let largest = rows.iter().map(|bar| bar.value).filter(|value| value.is_finite()).fold(0.0, f64::max);
    let widest = |of: fn(&Bar) -> &str| rows.iter().map(|bar| width_of(of(bar))).reduce(f64::max);
    let (names, values) = (widest(|bar| &bar.name)?.min(NAMES * WIDTH), widest(|bar| &bar.shown)?);
    let (left, room) = (names + GAP, (WIDTH - names - values - 3.0 * GAP).max(1.0));
    let mut inner = Html::default();
    for (i, bar) in rows.iter().enumerate() {
        let top = ROW * i as f64;
        let baseline = top + LETTER.1 - 2.0;
        let share = if largest > 0.0 { (bar.value / largest).clamp(0.0, 1.0) } else { 0.0 };
        let length = if share.is_nan() { 0.0 } else { room * share };
        inner.push(text((names, baseline), "end", &shortened(&bar.name, names)));
        let [x, y, width, height] = [left, top + 2.0, length, ROW - 4.0].map(|value| format!("{value:.1}"));
        let attributes = [("class", "bar"), ("x", &x[..]), ("y", &y), ("width", &width), ("height", &height)];
        inner.push(Html::element("rect", &attributes, []));
        inner.push(text((left + length + GAP, baseline), "reading", &bar.shown));
    }
    let said: Vec<_> = rows.iter().map(|bar| format!("{}: {}", bar.name, bar.shown)).collect();
    let label = format!("{title}. {}.", said.join("; "));
    let view = format!("0 0 {WIDTH} {}", ROW * rows.len() as f64);
    let svg =
        Html::element("svg", &[("viewBox", &view[..]), ("role", "img"), ("aria-label", &label)], [inner]);
    let caption = Html::element("figcaption", &[], [Html::text(title)]);
    Some(Html::element("figure", &[("class", "bars")], [caption, svg]))
}

/// Cuts a name at its start, where names of layers are alike, to `width`.
fn shortened(name: &str, width: f64) -> String {
    if width_of(name) <= width {
        return name.to_owned();
    }
    let letters: Vec<char> = name.chars().collect();
    let fits = |from: &usize| width_of(&letters[*from..].iter().collect::<String>()) + LETTER.0 <= width;
    let from = (0..letters.len()).find(fits).unwrap_or(letters.len());
    std::iter::once('…').chain(letters[from..].iter().copied()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn bar(name: &str, value: f64) -> Bar {
        Bar { name: name.into(), value, shown: format!("{value}") }
    }

    #[test]
    fn lengths_are_in_proportion_and_names_and_values_stand_beside_them() {
        let html = bars("Bits", &[bar("<a>", 8.0), bar("b", 4.0), bar("c", f64::NAN)]).unwrap();
        let html = html.as_str();
        let widths: Vec<f64> = html
            .split("class=\"bar\"")
            .skip(1)
            .map(|rest| rest.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!((widths[0] - 2.0 * widths[1]).abs() < 0.2 && widths[2] == 0.0, "{widths:?}");
        assert!(html.contains("&lt;a&gt;: 8; b: 4") && html.contains(">4</text>"), "{html}");
    }

    #[test]
    fn long_names_keep_their_end_and_no_row_draws_nothing() {
        let name = "model.layers.31.self_attn.qkv_projection_of_a_long_name";
        let html = bars("KL", &[bar(name, 1.0)]).unwrap();
        assert!(html.as_str().contains("of_a_long_name</text>") && html.as_str().contains(">…"), "{html:?}");
        assert_eq!(bars("KL", &[]), None);
    }
}
