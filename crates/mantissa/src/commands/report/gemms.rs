//! Quality of the matmuls of a training run: SQNR of the results of fprop, dgrad and wgrad against f32, by layer, linear
//! layer and step.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use mantissa_jobs::json_lines;
use mantissa_train::GemmState;
use serde::Deserialize;

use super::health::STEP;
use super::map::{place, short};
use crate::output::{Align, Table};
use crate::report::{Axis, Cell, Heat, Html, LineChart, Page, Series, table};

/// Maximum number of steps of a curve; beyond that, every second one is dropped.
const MAX_STEPS: usize = 200;
/// Number of matmuls in the table of the worst.
const WORST: usize = 8;
/// Columns of the map over steps.
const STEPS: usize = 12;

/// Line of the telemetry.
#[derive(Deserialize)]
struct Line {
    step: u64,
    #[serde(default)]
    gemms: Vec<Gemm>,
}

#[derive(Clone, Deserialize)]
struct Gemm {
    linear: String,
    gemm: String,
    sqnr_db: Option<f64>,
    #[serde(default)]
    state: Option<GemmState>,
}

/// Matmuls of each observed step.
#[derive(Default)]
pub struct Gemms {
    steps: Vec<(u64, Vec<Gemm>)>,
}

impl Gemms {
    /// Reads the telemetry at `path`; empty if the run has none.
    ///
    /// # Errors
    /// As [`json_lines::read`].
    pub fn read(path: &Path) -> Result<Self> {
        let mut gemms = Gemms::default();
        if !path.is_file() {
            return Ok(gemms);
        }
        let (mut every, mut seen) = (1, 0usize);
        json_lines::read(path, |line: Line| {
            seen += 1;
            if line.gemms.is_empty() || !(seen - 1).is_multiple_of(every) {
                return Ok(());
            }
            gemms.steps.push((line.step, line.gemms));
            if gemms.steps.len() > MAX_STEPS {
                gemms.steps = std::mem::take(&mut gemms.steps).into_iter().step_by(2).collect();
                every *= 2;
            }
            Ok(())
        })?;
        Ok(gemms)
    }

    /// Appends the section to `page`.
    pub fn show(&self, page: &mut Page) {
        let Some((step, last)) = self.steps.last() else { return };
        page.push(Html::heading("Matmuls"));
        page.push(Html::paragraph(
            "Signal-to-quantization-noise ratio (SQNR, dB) of some rows of the results of fprop (y), dgrad (dx) and wgrad (dw) \
             against the same product in f32. Dark cells are the worst: at 0 dB the error is as large as the result; dead is one through \
             which nothing passes, because an operand is 0 throughout.",
        ));
        let label = format!("SQNR in dB by layer and matmul, step {step}");
        page.push(Html::subheading(&label));
        page.push(map(&label, last).unwrap_or_default());
        let label = "Lowest SQNR in dB of each kind of matmul over steps";
        page.push(Html::subheading(label));
        page.push(self.over_steps(label).unwrap_or_default());
        page.push(Html::grid(self.charts().iter().filter_map(LineChart::html)));
        let title = format!("Matmuls with the lowest SQNR, step {step}");
        page.push(Html::subheading(&title));
        page.push(table(&title, &worst(last)));
    }

    /// Map of kinds of matmuls (linear layer and product, the worst of all layers) over steps.
    fn over_steps(&self, label: &str) -> Option<Html> {
        let every = self.steps.len().div_ceil(STEPS).max(1);
        // Counted from the last step, which is always shown.
        let mut shown: Vec<_> = self.steps.iter().rev().step_by(every).collect();
        shown.reverse();
        let mut kinds = Vec::new();
        let mut cells: BTreeMap<(usize, usize), Cell> = BTreeMap::new();
        for (column, (step, gemms)) in shown.iter().enumerate() {
            for gemm in gemms {
                let kind = (place(&gemm.linear).1, gemm.gemm.clone());
                let row = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
                    kinds.push(kind);
                    kinds.len() - 1
                });
                let cell = cell(gemm, &format!("step {step}: "));
                worse(cells.entry((row, column)).or_insert_with(|| cell.clone()), cell);
            }
        }
        let columns = shown.iter().map(|(step, _)| (step.to_string(), format!("step {step}"))).collect();
        let rows = kinds.iter().enumerate().map(|(row, (module, gemm))| {
            let of_row = (0..shown.len()).map(|column| cells.get(&(row, column)).cloned());
            (format!("{module} {gemm}"), of_row.collect())
        });
        Heat { label, corner: "matmul", columns, rows: rows.collect(), framed: false }.html()
    }

    /// Charts the lowest and the median SQNR of each product.
    fn charts(&self) -> Vec<LineChart<'static>> {
        let products =
            [("fprop y", "SQNR of fprop"), ("dgrad dx", "SQNR of dgrad"), ("wgrad dw", "SQNR of wgrad")];
        let chart = |(product, title): (&str, &'static str)| {
            let (mut low, mut middle) = (Vec::new(), Vec::new());
            for (step, gemms) in &self.steps {
                let all = gemms.iter().filter(|gemm| gemm.gemm == product).filter_map(|gemm| gemm.sqnr_db);
                let mut all: Vec<f64> = all.collect();
                all.sort_by(f64::total_cmp);
                let (Some(first), Some(half)) = (all.first(), all.get(all.len() / 2)) else { continue };
                low.push((*step as f64, *first));
                middle.push((*step as f64, *half));
            }
            let series = vec![Series::new("median", middle), Series::new("lowest", low)];
            LineChart { title, x: STEP, y: Axis::linear("dB"), series }
        };
        products
            .map(chart)
            .into_iter()
            .filter(|chart| chart.series.iter().any(|line| !line.points.is_empty()))
            .collect()
    }
}

/// Cell of a matmul: dark where the SQNR is low, darkest where nothing passes.
fn cell(gemm: &Gemm, before: &str) -> Cell {
    let (value, text, says) = match (gemm.sqnr_db, gemm.state) {
        (_, Some(GemmState::Dead)) => {
            (f64::INFINITY, "dead".to_owned(), "dead: an operand is 0 throughout".to_owned())
        }
        (Some(sqnr), _) => (-sqnr, format!("{sqnr:.0}"), format!("{sqnr:.1} dB")),
        (None, Some(GemmState::NotFinite)) => {
            (f64::INFINITY, "inf".to_owned(), "the result is not finite".to_owned())
        }
        (None, Some(GemmState::Exact)) => (f64::NEG_INFINITY, "=".to_owned(), "exact".to_owned()),
        (None, _) => (f64::NEG_INFINITY, "–".to_owned(), "no figure: the compared rows are 0".to_owned()),
    };
    Cell { value, text, title: format!("{before}{} {}: {says}", gemm.linear, gemm.gemm) }
}

fn worse(held: &mut Cell, other: Cell) {
    if other.value > held.value {
        *held = other;
    }
}

/// Map of layer × matmul at one step; of several experts the worst is shown.
fn map(label: &str, gemms: &[Gemm]) -> Option<Html> {
    let (mut columns, mut cells, mut outside) = (Vec::new(), BTreeMap::new(), Vec::new());
    for gemm in gemms {
        let cell = cell(gemm, "");
        let (layer, module) = place(&gemm.linear);
        let Some(layer) = layer else {
            outside.push(format!("{module} {} {}", gemm.gemm, cell.text));
            continue;
        };
        let column = (module, gemm.gemm.clone());
        if !columns.contains(&column) {
            columns.push(column.clone());
        }
        worse(cells.entry((layer, column)).or_insert_with(|| cell.clone()), cell);
    }
    let modules: Vec<String> = columns.iter().map(|(module, _)| module.clone()).collect();
    let mut once = modules.clone();
    once.dedup();
    let named: BTreeMap<_, _> = once.iter().cloned().zip(short(&once)).collect();
    let mut layers: Vec<usize> = cells.keys().map(|(layer, _)| *layer).collect();
    layers.dedup();
    let row = |layer: usize| {
        let of_row = columns.iter().map(|column| cells.get(&(layer, column.clone())).cloned());
        (layer.to_string(), of_row.collect())
    };
    let heading = |(module, gemm): &(String, String)| {
        let result = gemm.rsplit(' ').next().unwrap_or(gemm);
        (format!("{} {result}", named[module]), format!("{module}, {gemm}"))
    };
    let heat = Heat {
        label,
        corner: "layer",
        columns: columns.iter().map(heading).collect(),
        rows: layers.into_iter().map(row).collect(),
        framed: true,
    };
    let mut html = heat.html()?;
    if !outside.is_empty() {
        html.push(Html::paragraph(&format!("Outside the layers: {}.", outside.join(", "))));
    }
    Some(html)
}

fn worst(gemms: &[Gemm]) -> Table {
    let columns = [("linear layer", Align::Left), ("matmul", Align::Left), ("SQNR, dB", Align::Right)];
    let mut table = Table::new(columns);
    let figure = |gemm: &Gemm| match gemm.state {
        Some(GemmState::Dead) => Some((f64::NEG_INFINITY, "dead".to_owned())),
        _ => gemm.sqnr_db.map(|sqnr| (sqnr, format!("{sqnr:.1}"))),
    };
    let mut all: Vec<_> = gemms.iter().filter_map(|gemm| Some((gemm, figure(gemm)?))).collect();
    all.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
    for (gemm, (_, text)) in all.into_iter().take(WORST) {
        table.row([gemm.linear.clone(), gemm.gemm.clone(), text]);
    }
    table
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn matmuls_are_mapped_by_layer_and_over_steps() {
        let temp = tempfile::TempDir::new().unwrap();
        let path = temp.path().join("telemetry.jsonl");
        let line = |step: u64| {
            let of = |layer: u64, gemm: &str, sqnr: f64| {
                format!(
                    "{{\"linear\":\"model.layers.{layer}.mlp.up_proj\",\"gemm\":\"{gemm}\",\"rows\":16,\"sqnr_db\":{sqnr}}}"
                )
            };
            let head = "{\"linear\":\"lm_head\",\"gemm\":\"fprop y\",\"rows\":16,\"sqnr_db\":50.0}";
            let all =
                [of(0, "fprop y", 31.4), of(0, "dgrad dx", 12.3), of(1, "fprop y", 30.0), head.to_owned()];
            format!("{{\"step\":{step},\"weights\":[],\"operands\":[],\"gemms\":[{}]}}\n", all.join(","))
        };
        std::fs::write(&path, (1..=1000).map(line).collect::<String>()).unwrap();
        let gemms = Gemms::read(&path).unwrap();
        assert!((100..=MAX_STEPS).contains(&gemms.steps.len()), "{}", gemms.steps.len());
        let mut page = Page::new("t");
        gemms.show(&mut page);
        let html = page.html();
        assert!(html.contains("up y</th>") && html.contains("up dx</th>"), "{html}");
        assert!(
            html.contains("h9 largest\" title=\"model.layers.0.mlp.up_proj dgrad dx: 12.3 dB\">12</td>"),
            "{html}"
        );
        assert!(html.contains("Outside the layers: lm_head fprop y 50."), "{html}");
        assert!(html.contains("mlp.up_proj dgrad dx</th>"), "a row of the map over steps: {html}");
        // A run of an earlier version, or without telemetry, has no section.
        std::fs::write(&path, "{\"step\":1,\"weights\":[],\"operands\":[]}\n").unwrap();
        let (mut page, empty) = (Page::new("t"), Page::new("t").html());
        Gemms::read(&path).unwrap().show(&mut page);
        assert_eq!(page.html(), empty);
    }
}
