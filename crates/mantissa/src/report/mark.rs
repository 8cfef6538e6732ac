//! Shapes of points and dashes of lines, so that no series is known by its color alone.

use super::Html;

/// Number of shapes.
const SHAPES: usize = 8;

/// Returns the outline of shape `i` around the point, as data of an SVG path.
pub(super) fn shape(i: usize, (x, y): (f64, f64), r: f64) -> String {
    let polygon = |corners: &[(f64, f64)]| {
        let points = corners.iter().enumerate().map(|(i, (right, down))| {
            format!("{}{:.1} {:.1}", if i == 0 { "M" } else { "L" }, x + right * r, y + down * r)
        });
        points.collect::<String>() + "Z"
    };
    match i % SHAPES {
        0 => format!("M{:.1} {y:.1}a{r} {r} 0 1 0 {:.1} 0a{r} {r} 0 1 0 {:.1} 0Z", x - r, 2.0 * r, -2.0 * r),
        1 => polygon(&[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
        2 => polygon(&[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)]),
        3 => polygon(&[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)]),
        4 => polygon(&[(-1.1, -0.9), (1.1, -0.9), (0.0, 1.2)]),
        5 => polygon(&[(-0.4, -1.2), (0.4, -1.2), (0.4, 1.2), (-0.4, 1.2)]),
        6 => polygon(&[(-1.2, -0.4), (1.2, -0.4), (1.2, 0.4), (-1.2, 0.4)]),
        _ => polygon(&[(-0.6, -1.2), (0.6, -1.2), (1.2, 0.0), (0.6, 1.2), (-0.6, 1.2), (-1.2, 0.0)]),
    }
}

/// Draws shape `i` in the color of the class `colour`.
pub(super) fn mark(i: usize, colour: &str, at: (f64, f64), r: f64) -> Html {
    Html::element("path", &[("class", &format!("mark {colour}")), ("d", &shape(i, at, r))], [])
}

/// Returns the CSS class of the dashes of line `i`: solid, dashed, dotted, dash-dotted.
pub(super) fn dashes(i: usize) -> String {
    format!("d{}", i % 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn shapes_differ_and_stay_near_their_point() {
        let shapes: BTreeSet<_> = (0..SHAPES).map(|i| shape(i, (10.0, 10.0), 4.0)).collect();
        assert_eq!(shapes.len(), SHAPES);
        assert!(shapes.iter().all(|d| d.starts_with('M') && d.ends_with('Z')), "{shapes:?}");
    }
}
