//! Routing of a mixture of experts in training: tokens of each expert, by layer and step.

use std::path::Path;

use anyhow::Result;
use mantissa_jobs::json_lines;
use serde::Deserialize;

use super::health::STEP;
use crate::report::{Axis, Cell, Heat, Html, LineChart, Page, Series};

/// Experts of a layer that are shown in the map.
const MAX_EXPERTS: usize = 64;

/// Line of the telemetry.
#[derive(Deserialize)]
struct Line {
    step: u64,
    #[serde(default)]
    experts: Vec<Layer>,
}

#[derive(Clone, Deserialize)]
struct Layer {
    layer: usize,
    /// Tokens that chose each expert.
    tokens: Vec<u64>,
}

impl Layer {
    fn total(&self) -> f64 {
        self.tokens.iter().sum::<u64>() as f64
    }

    /// Tokens of the busiest expert over the mean of all.
    fn imbalance(&self) -> f64 {
        let most = self.tokens.iter().max().copied().unwrap_or(0) as f64;
        most * self.tokens.len() as f64 / self.total()
    }

    /// Share of the experts that no token chose.
    fn unused(&self) -> f64 {
        self.tokens.iter().filter(|tokens| **tokens == 0).count() as f64 / self.tokens.len().max(1) as f64
    }
}

/// Routing at each observed step.
#[derive(Default)]
pub struct Routing {
    /// Worst imbalance and share of unused experts of all layers, by step.
    curves: Vec<(f64, f64, f64)>,
    last: Option<(u64, Vec<Layer>)>,
}

impl Routing {
    /// Reads the telemetry at `path`; empty if the run has none or no experts.
    ///
    /// # Errors
    /// As [`json_lines::read`].
    pub fn read(path: &Path) -> Result<Self> {
        let mut routing = Routing::default();
        if path.is_file() {
            json_lines::read(path, |Line { step, experts }: Line| {
                if !experts.is_empty() {
                    let worst = |of: fn(&Layer) -> f64| experts.iter().map(of).fold(0.0, f64::max);
                    routing.curves.push((step as f64, worst(Layer::imbalance), worst(Layer::unused)));
                    routing.last = Some((step, experts));
                }
                Ok(())
            })?;
        }
        Ok(routing)
    }

    /// Appends the section to `page`.
    pub fn show(&self, page: &mut Page) {
        let Some((step, layers)) = &self.last else { return };
        page.push(Html::heading("Experts"));
        page.push(Html::paragraph(
            "Share of a layer's tokens that chose each expert, in percent. An expert without tokens does not learn.",
        ));
        let label = format!("Tokens of each expert in percent, by layer, step {step}");
        page.push(Html::subheading(&label));
        page.push(map(&label, layers).unwrap_or_default());
        let line = |name: &str, of: fn(&(f64, f64, f64)) -> f64| {
            Series::new(name, self.curves.iter().map(|point| (point.0, of(point))).collect())
        };
        let charts = [
            LineChart {
                title: "Busiest expert / mean",
                x: STEP,
                y: Axis::from_zero("ratio"),
                series: vec![line("worst layer", |point| point.1)],
            },
            LineChart {
                title: "Experts without tokens",
                x: STEP,
                y: Axis::from_zero("share"),
                series: vec![line("worst layer", |point| point.2)],
            },
        ];
        page.push(Html::grid(charts.iter().filter_map(LineChart::html)));
    }
}

fn map(label: &str, layers: &[Layer]) -> Option<Html> {
    let experts = layers.iter().map(|layer| layer.tokens.len()).max()?.min(MAX_EXPERTS);
    let row = |layer: &Layer| {
        let cell = |expert: usize| {
            let tokens = *layer.tokens.get(expert)?;
            let share = 100.0 * tokens as f64 / layer.total().max(1.0);
            let title = format!("layer {}, expert {expert}: {tokens} tokens", layer.layer);
            Some(Cell { value: share, text: format!("{share:.0}"), title })
        };
        (layer.layer.to_string(), (0..experts).map(cell).collect())
    };
    let column = |expert: usize| (expert.to_string(), format!("expert {expert}"));
    let rows = layers.iter().map(row).collect();
    Heat { label, corner: "layer", columns: (0..experts).map(column).collect(), rows, framed: true }.html()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn routing_is_mapped_by_layer() {
        let temp = tempfile::TempDir::new().unwrap();
        let path = temp.path().join("telemetry.jsonl");
        let line = |step: u64| {
            format!(
                "{{\"step\":{step},\"experts\":[{{\"layer\":1,\"tokens\":[60,20,20,0]}},{{\"layer\":2,\"tokens\":[25,25,25,25]}}]}}\n"
            )
        };
        std::fs::write(&path, line(1) + &line(5)).unwrap();
        let routing = Routing::read(&path).unwrap();
        assert_eq!(routing.curves, [(1.0, 2.4, 0.25), (5.0, 2.4, 0.25)]);
        let mut page = Page::new("t");
        routing.show(&mut page);
        let html = page.html();
        assert!(html.contains("h9 largest\" title=\"layer 1, expert 0: 60 tokens\">60</td>"), "{html}");
        let (mut page, before) = (Page::new("t"), Page::new("t").html());
        std::fs::write(&path, "{\"step\":1}\n").unwrap();
        Routing::read(&path).unwrap().show(&mut page);
        assert_eq!(page.html(), before, "a model without experts has no section");
    }
}
